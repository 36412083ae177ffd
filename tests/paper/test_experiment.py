"""Settings of experiments, their runs, and what is kept between calls."""

from itertools import combinations

import pytest

from fedobp.paper.experiment import Case, Work, describe_setting, setting_for
from fedobp.paper.figures import drawing
from fedobp.paper.published import TABLE1, TABLE2
from fedobp.paper.registry import EXPERIMENTS
from paper.cases import row, setting


def test_full_scale_is_the_papers_setting():
    full = setting_for(EXPERIMENTS["table1"])
    assert (full.rounds, full.seeds, full.alphas, full.mode) == (400, (42, 43, 44), (0.1, 0.5), "both")
    assert full.datasets == ("cifar10", "cifar100", "emnist", "svhn")
    config = full.config("cifar10", 0.1, 43, "fedavg")
    assert (config.clients, config.participation, config.protocol, config.sampling) == (100, 0.1, "paper", "published")
    assert (config.partition_seed, config.seed, config.momentum, config.save_models) == (42, 43, 0.0, "none")
    assert all(at % config.eval_every == 0 for at in (100, 200, 300, 400))


def test_other_scales():
    short = setting_for(EXPERIMENTS["quantiles"], scale="short")
    assert (short.rounds, short.seeds, len(short.grid)) == (100, (42,), 12)
    assert short.config("cifar10", 0.1, 42, "fedobp").protocol == "paper"
    few = setting_for(EXPERIMENTS["quantiles"], scale="short", rounds=99, long_grid=True, seeds=2, alphas=[0.3])
    assert (few.rounds, few.seeds, few.alphas, len(few.grid)) == (99, (42, 43), (0.3,), 32)
    assert few.config("cifar10", 0.3, 42, "fedobp").protocol == "default"
    smoke = setting_for(EXPERIMENTS["table2"], scale="smoke")
    assert (smoke.datasets, smoke.config("digits", 0.1, 42, "fedobp").protocol) == (("digits",), "default")
    assert smoke.config("digits", 0.1, 42, "fedobp").clients is None  # the dataset's default
    assert few.config("digits", 0.3, 42, "fedobp").clients is None  # as at every scale
    assert setting_for(EXPERIMENTS["table2"], scale="smoke", datasets=["mnist"]).datasets == ("mnist",)


def test_a_run_is_named_by_its_settings():
    one = setting().config("cifar10", 0.1, 42, "fedobp", options={"q": 0.9})
    assert Case(one).name.startswith("cifar10-dir0.1-fedobp-0.9-seed42-")
    same = setting().config("cifar10", 0.1, 42, "fedobp", options={"q": 0.9})
    other = setting(rounds=100).config("cifar10", 0.1, 42, "fedobp", options={"q": 0.9})
    assert Case(one).name == Case(same, {"more": 1}).name != Case(other).name


def test_the_first_seed_of_all_datasets_comes_first(monkeypatch):
    monkeypatch.setattr("fedobp.paper.experiment.Setting.available", ("cifar10", "mnist"))
    found = setting(datasets=("cifar10", "svhn", "mnist"), seeds=(42, 43))
    assert list(found.points()) == [("cifar10", 0.1, 42), ("mnist", 0.1, 42), ("cifar10", 0.1, 43), ("mnist", 0.1, 43)]
    assert found.missing == ["SVHN is not installed, so its cells are empty: fedobp data fetch svhn"]


def test_what_was_measured_once_is_kept(tmp_path):
    work, calls = Work(tmp_path), []

    def compute():
        calls.append(1)
        return {"results": [{"a": 1.5, "b": "x"}], "drift": [{"step": 1}]}

    first = work.once("theory", "digits-dir0.1-smoke", compute)
    assert work.once("theory", "digits-dir0.1-smoke", compute) == first
    assert len(calls) == 1
    over = Work(tmp_path, until=0.0)
    assert over.once("theory", "digits-dir0.1-smoke", compute) == first
    assert over.once("theory", "digits-dir0.5-smoke", compute) == {}
    assert over.notes == ["digits-dir0.5-smoke is not measured: the time is over, call the same command again"]
    assert len(calls) == 1


def test_a_setting_in_words():
    assert describe_setting(setting(), EXPERIMENTS["theory"]) == (
        "Scale full; CIFAR10; Dirichlet(0.1); 400 rounds; seed 42, partition seed 42."
    )
    smoke = describe_setting(setting(scale="smoke", seeds=(42, 43)), EXPERIMENTS["quantiles"])
    assert "seeds 42 to 43" in smoke
    assert smoke.endswith("this shows that everything runs, and says nothing about the methods.")


@pytest.mark.parametrize(
    ("name", "words"),
    [("datasets", "; CIFAR10; Dirichlet(0.1); partition seed 42"), ("overhead", "; CIFAR10"), ("claims", "")],
)
def test_where_nothing_is_trained_the_setting_names_neither_rounds_nor_seeds(name, words):
    assert describe_setting(setting(), EXPERIMENTS[name]) == f"Scale full{words}."


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_and_figures_are_made_without_any_result(name):
    """A dataset that is missing leaves cells empty, and nothing fails."""
    experiment = EXPERIMENTS[name]
    files = {stem: [] for stem in ("results", "history", "layers", "clients", "entries", "drift", "classes")}
    found = setting_for(experiment)
    assert all(table.markdown() and table.latex() for table in experiment.tables(found, files))
    with drawing():
        for figure in experiment.figures(found, files).values():
            assert crowded(figure) == []


@pytest.mark.parametrize("name", ["table1", "convergence", "medmnist", "participation", "quantiles"])
def test_figures_of_more_datasets_than_the_papers_have_room(name):
    found = setting_for(EXPERIMENTS[name], datasets=[*TABLE1, TABLE2[0]], alphas=[0.1])
    with drawing():
        [figure] = EXPERIMENTS[name].figures(found, {"results": [], "history": []}).values()
        assert crowded(figure) == []


def test_figures_of_one_dataset_have_room_for_their_legends():
    rates = [
        row("decoupled", participation=rate, score=score)
        for rate in (0.1, 0.5)
        for score in ("OBP, q = 0.99998", "gradient, q = 0.99998", "Fisher, q = 0.99998", "gradient, q = 0.1")
    ]
    scaled = [row(dataset="organamnist", normalize=scaling) for scaling in ("dataset", "as-published")]
    with drawing():
        for name, rows in (("participation", rates), ("medmnist", scaled)):
            found = setting_for(EXPERIMENTS[name], datasets=[rows[0]["dataset"]], alphas=[0.1])
            [figure] = EXPERIMENTS[name].figures(found, {"results": rows}).values()
            assert len(figure.legends[0].get_texts()) == 4
            assert crowded(figure) == []


def crowded(figure):
    """Return the titles and labels that overlap others, or that the figure cuts off."""
    figure.draw_without_rendering()
    texts = [text for ax in figure.axes for text in (ax.title, ax.xaxis.label) if text.get_text()]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    boxes = {text: text.get_window_extent() for text in texts}
    cut = [text for text, box in boxes.items() if box.x0 < 0 or box.x1 > figure.bbox.x1 + 1]
    return cut + [a for a, b in combinations(texts, 2) if boxes[a].overlaps(boxes[b])]


def test_the_ablation_has_a_panel_for_each_alpha():
    """Two alphas are never one curve."""
    rows = [
        {"run": "", "dataset": "cifar10", "alpha": alpha, "seed": 42, "round": 400, "pooled": pooled,
         "score": "squared", "variant": "none"}
        for alpha, pooled in ((0.1, 87.0), (0.5, 70.0))
    ]  # fmt: skip
    found = setting_for(EXPERIMENTS["ablation"], datasets=["cifar10"], alphas=[0.1, 0.5])
    figure = EXPERIMENTS["ablation"].figures(found, {"history": rows})["figure"]
    drawn = {ax.get_title(): [list(line.get_ydata()) for line in ax.lines] for ax in figure.axes if ax.lines}
    assert drawn == {
        "CIFAR10, Dir(0.1), score: squared (eq. 19)": [[87.0]],
        "CIFAR10, Dir(0.5), score: squared (eq. 19)": [[70.0]],
    }


def test_what_does_not_end_in_time_is_given_up_and_measured_again(tmp_path):
    work = Work(tmp_path)

    def compute():
        work.until = 0.0  # the time ends in the middle of it
        work.advance("round 1", 0.5)
        raise AssertionError("it went on")

    assert work.once("theory", "digits", compute) == {}
    assert work.notes == ["digits is not measured: the time is over, call the same command again"]
    assert Work(tmp_path).once("theory", "digits", lambda: {"results": [{"a": 1}]}) == {"results": [{"a": 1}]}


def test_what_is_kept_has_texts_that_look_like_numbers(tmp_path):
    found = {"results": [{"dataset": "1e5", "torch": "2.10", "seed": 42}]}
    work = Work(tmp_path)
    assert work.once("theory", "1e5", lambda: found) == work.once("theory", "1e5", dict) == found
