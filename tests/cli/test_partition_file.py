"""Partitions of whole runs: options and files on the command line, shared samples, pictures and measures."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedobp import Config, Federation, FedobpError, sweep
from fedobp.data import PARTITIONERS, data_dir, load, partition
from fedobp.federation import assign
from fedobp.report.partition import label_skew, partition_title

TINY = {"clients": 6, "rounds": 2, "participation": 0.5, "epochs": 1, "model": "mlp", "device": "cpu"}
RUN = ("run", "--rounds", 2, "--epochs", 1, "--model", "mlp")


@pytest.fixture
def wards(tmp_path, monkeypatch):
    """A table of 70 rows that come from seven wards."""
    x = np.random.default_rng(0).random((70, 3)).astype(np.float32)
    wards = np.array([f"ward {n}" for n in range(7)])
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "wards.npz", x=x, y=np.arange(70) % 2, client=wards[np.arange(70) % 7])
    monkeypatch.setenv("FEDOBP_DATA", str(tmp_path / "data"))


# Settings.


def test_every_kind_runs(wards):
    for kind in PARTITIONERS:
        given = {"clients": 3, "rounds": 1, "alpha": 5.0, "epochs": 1, "partition": kind, "dataset": "wards"}
        options = {"change": "noise"} if kind == "feature" else {}
        federation = Federation(Config(**given, partition_options=options))
        assert federation.run("fedavg").accuracy.pooled > 0
        assert federation.data.clients == 3


def test_options_are_resolved_with_their_defaults():
    assert Config(partition="classes").partition_options == {"k": 2}
    assert Config(partition="feature", partition_options={"noise": "0.5"}).partition_options == {
        "change": "rotation", "noise": 0.5,
    }  # fmt: skip
    assert Config().partition_options == {}


def test_a_natural_partition_has_as_many_clients_as_the_data(wards):
    assert Config(dataset="wards", partition="natural").clients == 7
    assert Config(dataset="wards", partition="natural", clients=4).clients == 4
    assert Config(dataset="wards").clients == 2
    _, shards = assign(Config(dataset="wards", partition="natural"))
    assert [len(shard.samples) for shard in shards] == [10] * 7


def test_data_that_names_nobody_has_no_natural_partition():
    with pytest.raises(FedobpError, match="--partition natural needs the client of each sample"):
        Federation(Config(partition="natural"))


# Samples that a partition changes.


def test_runs_with_other_features_do_not_share_samples():
    configs = [Config(**TINY, partition="feature", partition_seed=seed, seed=1, precision="fp64") for seed in (1, 2, 1)]
    together = sweep(configs)
    for config, result in zip(configs, together, strict=True):
        alone = Federation(config).run()
        assert (result.accuracy, result.partition) == (alone.accuracy, alone.partition)
    assert together[0].accuracy == together[2].accuracy
    first, second = (Federation(config) for config in configs[:2])
    beside = Federation(configs[1], beside=first)
    assert torch.equal(beside.data.x, second.data.x)
    assert not torch.equal(first.data.x, second.data.x)
    assert Federation(configs[2], beside=first).data is first.data
    scaled = Federation(
        Config(**TINY, partition="feature", partition_seed=1, precision="fp64", normalize="none"), beside=first
    )
    assert torch.equal(scaled.data.x, first.data.x)


def test_a_plain_federation_beside_a_changed_one_has_plain_samples():
    changed = Federation(Config(**TINY, partition="feature"))
    plain = Federation(Config(**TINY, partition="iid"), beside=changed)
    assert torch.equal(plain.data.x[:, 0], torch.as_tensor(load("digits", data_dir()).x))


def test_training_sees_turned_images():
    federation = Federation(Config(**TINY, partition="feature", normalize="none"))
    digits, shards = load("digits", data_dir()), partition(load("digits", data_dir()).y, 6, kind="feature")
    for client, shard in enumerate(shards):
        upright = np.rot90(federation.data.inputs(client, "train")[:, 0].numpy(), -shard.change.cohorts, axes=(1, 2))
        np.testing.assert_allclose(upright * 255, digits.x[shard.train], rtol=1e-5)


# Files.


def saved(command, *more):
    said = command("partition", "--clients", 6, "--alpha", 0.5, "--partition-seed", 3, *more, "--save", "six", "--json")
    assert (said.code, said.err) == (0, "")
    return said.json["hash"]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--partition", "dirichlet-equal", "--holdout-clients", 2, "--val-ratio", 0.2),
        ("--partition", "classes", "--partition-set", "k=3"),
        ("--partition", "feature"),
    ],
)
def test_a_run_with_the_file_is_the_run_with_the_arguments(command, more):
    found = saved(command, *more)
    asked = ("--clients", 6, "--alpha", 0.5, "--partition-seed", 3, *more)
    assert command(*RUN, *asked, "--out", "asked").code == 0
    assert command(*RUN, "--partition-file", "six", "--out", "given").code == 0
    for name in ("metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
        assert Path("asked", name).read_bytes() == Path("given", name).read_bytes()
    asked, given = (tomllib.loads(Path(name, "config.toml").read_text()) for name in ("asked", "given"))
    assert given.pop("partition_file") == str(Path("six").absolute())
    assert asked == given
    for name in ("asked", "given"):
        assert json.loads(Path(name, "result.json").read_text())["partition"] == found
        assert f"# Partition {found}" in Path(name, "config.toml").read_text().splitlines()
    assert command("run", "--config", "given/config.toml", "--out", "again").code == 0
    assert Path("again/metrics.jsonl").read_bytes() == Path("given/metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--clients", 7), r"--clients 7 is not what the partition .*six was made with \(6\): leave it out"),
        (("--alpha", 0.2), r"--alpha 0.2 is not .* \(0.5\)"),
        (("--partition", "iid"), r"--partition iid is not .* \(dirichlet\)"),
        (("--partition-seed", 4), r"--partition-seed 4 is not .* \(3\)"),
        (("--holdout-clients", 1), r"--holdout-clients 1 is not .* \(0\)"),
        (("--val-ratio", 0.5), r"--val-ratio 0.5 is not .* \(0.0\)"),
        (("--partition-set", "k=2"), r"--partition-set k=2 is not .* \(no options\)"),
        (("--dataset", "wards"), "is a partition of 'digits' .* and 'wards' .* has other labels"),
    ],
)
def test_what_contradicts_the_file_is_refused(command, wards, more, sentence):
    saved(command)
    said = command(*RUN, "--partition-file", "six", *more)
    assert (said.code, said.out) == (2, "")
    assert re.search(sentence, said.err)


@pytest.mark.parametrize(
    "usual", [("--partition", "dirichlet"), ("--alpha", "0.1"), ("--holdout-clients", "0"), ("--val-ratio", "0.0")]
)
def test_what_is_usual_contradicts_the_file_too_where_it_is_asked_for(command, usual):
    saved(command, "--partition", "dirichlet-equal", "--holdout-clients", 2, "--val-ratio", 0.2)
    said = command(*RUN, "--partition-file", "six", *usual)
    assert said.code == 2
    assert f"{' '.join(usual)} is not what the partition" in said.err


def test_what_the_file_says_too_is_no_contradiction(command):
    saved(command)
    assert command(*RUN, "--partition-file", "six.npz", "--clients", 6, "--alpha", 0.5, "--seed", 9).code == 0


def test_seeds_of_a_comparison_share_the_files_partition(command):
    found = saved(command)
    said = command("compare", *RUN[1:], "--methods", "fedavg", "--seeds", 2, "--partition-file", "six", "--json")
    assert [run["partition"] for run in said.json["runs"]] == [found, found]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"clients": "six"}, "--clients must be a whole number, not 'six'"),
        ({"partition_options": {"k": 2}}, "partition 'dirichlet' has no options, so 'k' cannot be set"),
        ({"alpha": None}, "does not say its alpha"),
        ({"partition_options": 3}, "does not say its partition_options"),
        ({"clients": 7}, "does not have the content that its json file names"),
        ({"partition": "dirichle"}, "did you mean 'dirichlet'"),
    ],
)
def test_settings_of_a_file_are_checked_like_any_others(command, change, sentence):
    saved(command)
    about = json.loads(Path("six.json").read_text())
    about["settings"] = {k: v for k, v in {**about["settings"], **change}.items() if v is not None}
    Path("six.json").write_text(json.dumps(about))
    said = command(*RUN, "--partition-file", "six")
    assert said.code == 2
    assert sentence in said.err


def test_a_file_that_is_not_there_is_refused(command):
    said = command(*RUN, "--partition-file", "nothing")
    assert said.code == 2
    assert "cannot read the partition" in said.err


# The command line.


def test_a_partition_option_is_refused_with_the_nearest_or_with_its_form(command):
    classes = ("partition", "--partition", "classes")
    assert "such as --partition-set k=3" in command(*classes, "--partition-set", "k").err
    assert (
        "option 'k' of classes must be a whole number, not 'many'" in command(*classes, "--partition-set", "k=many").err
    )
    assert "has no options" in command("partition", "--partition-set", "k=2").err


def test_another_partition_than_the_files_starts_with_its_own_options(command):
    assert command(*RUN, "--partition", "classes", "--partition-set", "k=5", "--out", "five").code == 0
    again = ("run", "--config", "five/config.toml")
    assert command(*again, "--out", "kept").code == 0
    assert command(*again, "--partition", "shards", "--out", "shards").code == 0
    kept, shards = (tomllib.loads(Path(name, "config.toml").read_text()) for name in ("kept", "shards"))
    assert kept["partition_options"] == {"k": 5}
    assert shards["partition_options"] == {"per_client": 2}


def test_partition_json_has_exactly_the_documented_shape(command, wards):
    found = command("partition", "--dataset", "wards", "--partition", "natural", "--holdout-clients", 1, "--json").json
    assert set(found) == {"clients", "entropy", "entropy_of_all", "emd", "hash"}
    assert [set(client) for client in found["clients"]] == [
        {"id", "train", "val", "test", "labels", "entropy", "emd", "held_out", "turns", "noise", "name"}
    ] * 7
    assert sorted(client["name"] for client in found["clients"]) == [f"ward {n}" for n in range(7)]
    assert [client["held_out"] for client in found["clients"]] == [False] * 6 + [True]
    first = command("partition", "--partition", "feature", "--json").json["clients"][0]
    assert "name" not in first


def test_the_help_and_the_docs_know_every_kind_and_option(command):
    said = " ".join(command("partition", "--help").out.replace("│", " ").split())
    docs = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    for name, kind in PARTITIONERS.items():
        assert re.search(rf"[ ,]{name}[ ,]", said), name
        [row] = [line for line in docs.splitlines() if line.startswith(f"| `{name}` |")]
        for option in kind.options():
            assert re.search(rf"[ ,]{option.name}( and \w+)? of {name}[ ,.]|{option.name} of {name}", said), option.name
            assert re.search(rf"`{option.name}[`=]", row), option.name


def test_saving_twice_is_refused_and_says_so(command):
    saved(command)
    said = command("partition", "--clients", 6, "--save", "six")
    assert said.code == 2
    assert "exists already" in said.err


def test_what_to_do_with_a_saved_partition_is_said(command):
    said = command("partition", "--clients", 6, "--save", "six")
    assert "fedobp run --dataset digits --partition-file six" in said.out
    said = command("partition", "--clients", 6, "--save", "again", "--data-dir", "here")
    assert "fedobp run --dataset digits --data-dir here --partition-file again" in said.out


# Looking at it.


def test_label_skew_by_hand():
    # Of eight samples, labels are 4, 2, 2: shares 1/2, 1/4, 1/4, an entropy of 1.5 bits.
    found = label_skew(np.array([[2, 0, 0], [0, 2, 0], [1, 0, 1], [1, 0, 1]]))
    assert found.entropy_of_all == pytest.approx(1.5)
    assert found.entropy == pytest.approx([0, 0, 1, 1])
    # |1 - 1/2| + 1/4 + 1/4; 1/2 + 3/4 + 1/4; 0 + 1/4 + 1/4.
    assert found.emd == pytest.approx([1.0, 1.5, 0.5, 0.5])
    assert not np.signbit(found.entropy).any()


def test_clients_like_all_are_at_distance_0_and_those_unlike_all_near_2():
    assert label_skew(np.array([[3, 6], [1, 2]])).emd == pytest.approx([0, 0])
    assert label_skew(np.array([[1, 0], [0, 999]])).emd == pytest.approx([1.998, 0.002])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"alpha": 0.5}, "digits, dirichlet(0.5), 20 clients, seed 42"),
        ({"partition": "dirichlet-equal"}, "digits, dirichlet-equal(0.1), 20 clients, seed 42"),
        ({"partition": "iid", "clients": 1000, "seed": 7}, "digits, iid, 1,000 clients, seed 7"),
        ({"partition": "classes"}, "digits, classes (k 2), 20 clients, seed 42"),
    ],
)
def test_a_title_says_what_it_is(given, words):
    assert partition_title(Config(**given)) == words


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig

    def keep(self, *args, **kwargs):
        drawn.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def test_few_clients_are_circles_whose_area_counts_samples(command, figures):
    counts = np.zeros((10, 10))
    for client in command("partition", "--clients", 10, "--plot", "few.png", "--json").json["clients"]:
        for label, samples in client["labels"].items():
            counts[client["id"], int(label)] = samples
    circles = figures[0].axes[0].collections[0]
    assert not figures[0].axes[0].images
    areas = {tuple(map(int, at)): area for at, area in zip(circles.get_offsets(), circles.get_sizes(), strict=True)}
    assert set(areas) == set(zip(*counts.nonzero(), strict=True))
    for at, area in areas.items():
        assert area == pytest.approx(300 * counts[at] / counts.max())


def test_dollars_in_names_are_no_formulas(command, figures):
    Path("here").mkdir()
    labels = np.array(["$$", "$0-$50k", "$x^2_{$"] * 20)
    np.savez("here/a$_$.npz", x=np.arange(60, dtype=np.float32)[:, None], y=labels)
    asked = ("--dataset", "a$_$", "--data-dir", "here", "--partition", "iid", "--clients", 2)
    said = command("partition", *asked, "--plot", "names.png")
    assert (said.code, said.err) == (0, "")
    assert [text.get_text() for text in figures[0].axes[0].get_yticklabels()] == ["$$", "$0-$50k", "$x^2_{$"]


def test_many_clients_are_a_heat_map_in_the_order_of_their_labels(command, figures):
    arguments = ("--clients", 200, "--partition", "dirichlet-equal", "--holdout-clients", 50)
    said = command("partition", *arguments, "--plot", "many.svg")
    assert "... and 100 more clients" in said.out
    assert "* 50 clients are held out" in said.out
    [image] = figures[0].axes[0].images
    cells = image.get_array().filled(0)
    assert cells.shape == (10, 200)
    assert cells.sum() == 1797
    for part in (cells[:, :150], cells[:, 150:]):
        most = part.argmax(axis=0)
        assert most.tolist() == sorted(most)
    assert Path("many.svg").read_text().startswith("<?xml")


def test_a_thousand_clients_and_one_are_drawn_too(command):
    assert command("partition", "--clients", 898, "--partition", "iid", "--plot", "many.png").code == 0
    assert command("partition", "--clients", 1, "--partition", "iid", "--plot", "one.pdf").code == 0


def test_the_terminal_marks_who_is_held_out(command):
    said = command("partition", "--clients", 8, "--holdout-clients", 3, "--partition", "iid")
    marked = [line.split()[0] for line in said.out.splitlines() if line[:6].strip().isdigit() and line[21:22] == "*"]
    assert marked == ["5", "6", "7"]
