"""Single figures of saved runs."""

import pytest
from matplotlib.figure import Figure
from saved import clients_of, write_run

from fedobp.errors import FedobpError
from fedobp.report.curves import plot_curves
from fedobp.report.figures import COLUMN, look
from fedobp.report.plots import FIGURES, plot_runs, save_plot
from fedobp.saved_runs import find_runs


@pytest.fixture
def runs(tmp_path):
    for method, served in (("fedobp", lambda i: 90.0 - i), ("fedavg", lambda i: 50.0), ("local", lambda i: None)):
        write_run(tmp_path, method, clients=clients_of(4, served))
    return find_runs([tmp_path])


def test_a_saved_run_is_drawn_like_a_result(runs):
    [axes] = plot_curves(runs).axes
    curves = {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines}
    assert curves == dict.fromkeys(("fedavg", "fedobp", "local"), ([2, 4], [40.0, 80.0]))


def test_the_accuracy_is_one_panel_a_setting_with_one_legend(runs, tmp_path):
    more = find_runs([write_run(tmp_path / "more", alpha=0.5)])
    figure = plot_runs([*runs, *more])
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "digits, Dirichlet(0.1), 4 clients", "digits, Dirichlet(0.5), 4 clients",
    ]  # fmt: skip
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedavg", "fedobp", "local"]
    assert figure.get_size_inches()[0] == 2 * COLUMN


def test_clients_are_sorted_by_the_methods_accuracy(runs):
    [axes] = plot_runs(runs, "clients").axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert drawn["fedobp"] == [87.0, 88.0, 89.0, 90.0]
    assert drawn["fedavg"] == [50.0] * 4
    assert len({(line.get_marker(), line.get_color()) for line in axes.lines}) == 3


def test_layers_are_stacked_and_mapped(runs):
    stack, *_, cells = plot_runs([run for run in runs if run.config.method == "fedobp"], "layers").axes
    # conv keeps nothing; classifier has weight and bias: 1 in round 2, then 3.
    [area] = stack.collections
    assert max(y for _, y in area.get_paths()[0].vertices) == 3
    assert [text.get_text() for text in stack.get_legend().get_texts()] == ["classifier"]
    assert cells.images[0].get_array().filled(0).tolist() == [[0, 0, 0, 0], [3, 4, 5, 6]]
    assert [text.get_text() for text in cells.get_legend().get_texts()] == ["5 to 6", "2 to 4", "1", "0"]


def test_bars_are_bytes_and_a_runs_share_of_the_time(runs):
    [axes] = plot_runs(runs, "bytes").axes
    assert [bar.get_width() for bar in axes.patches] == [1000.0, 500.0] * 3
    assert [text.get_text() for text in axes.texts][:2] == ["down 1.0 kB", "up 500 B"]
    [axes] = plot_runs(runs, "time").axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.2, 0.3] * 3)  # 0.4 and 1 s for two runs
    assert axes.texts[0].get_text() == "500 ms"


def test_what_is_not_recorded_is_named(tmp_path):
    runs = find_runs([write_run(tmp_path, timings=False)])
    for figure, why in (("clients", "none of these runs has a clients.csv"), ("time", "has a timings.jsonl")):
        with pytest.raises(FedobpError, match=why):
            plot_runs(runs, figure)
    with pytest.raises(FedobpError, match="did you mean 'accuracy'"):
        plot_runs(runs, "acuracy")


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_the_same_figure_gives_the_same_bytes(suffix, runs, tmp_path):
    found = []
    for _ in range(2):
        save_plot(plot_runs(runs), tmp_path / f"one.{suffix}")
        found.append((tmp_path / f"one.{suffix}").read_bytes())
    assert found[0] == found[1]
    assert b"fedobp plot" in found[0]


def test_every_figure_is_drawn_with_names_in_any_script(tmp_path):
    folder = write_run(tmp_path, "fedper", dataset="$数据$", clients=clients_of(2, float, lambda i: (i, 0, 0)))
    for figure in FIGURES:
        drawn = plot_runs(find_runs([folder]), figure)
        assert isinstance(drawn, Figure)
        save_plot(drawn, tmp_path / "one.png")


def test_many_groups_look_different():
    assert len({look(index) for index in range(28)}) == 28
    assert len({(look(index).colour, look(index).line) for index in range(28)}) == 28


def test_long_titles_are_wrapped_and_leave_the_panels_their_width(tmp_path):
    for alpha in (0.1, 0.5):
        write_run(tmp_path, name=str(alpha), dataset="x" * 100, alpha=alpha)
    figure = plot_runs(find_runs([tmp_path]), "accuracy")
    figure.draw_without_rendering()
    assert len(figure.axes) == 2
    for ax in figure.axes:
        assert ax.get_position().width > 0.35
        assert ax.get_title(loc="left").replace("\n", "").startswith("x" * 100)
