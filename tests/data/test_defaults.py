"""Imported data without settings: default clients and alpha, the printed command, and invalid names."""

import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
from importer_cases import picture
from resolved import resolved

from fedobp import Config, Federation
from fedobp.data import data_dir, default_clients_and_alpha, partition

SIZES = {
    "three classes": [100] * 3,
    "two small classes": [25, 25],
    "hardly enough for two clients": [10, 10],
    "two samples a class": [2] * 200,
    "three samples a class": [3] * 100,
    "one sample a class": [1] * 60,
    "one sample a class, and one large class": [1] * 60 + [300],
    "very unbalanced": [990, 10],
    "one class and a stray sample": [1999, 1],
    "long tail": [2000 // (rank + 1) for rank in range(50)],
    "large and balanced": [6000] * 10,
    "one client's worth": [6, 6],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_published_recipe_terminates_with_the_defaults_for_every_seed(sizes):
    clients, alpha = default_clients_and_alpha(sizes)
    y = np.repeat(np.arange(len(sizes)), sizes)
    for seed in range(5):
        shards = partition(y, clients, alpha=alpha, seed=seed)
        assert min(len(shard.samples) for shard in shards) >= 10


def test_a_dataset_like_the_papers_gets_the_papers_numbers():
    assert default_clients_and_alpha([6000] * 10) == (100, 0.1)


def test_clients_have_50_samples_on_average_and_one_is_the_least():
    expected = {6: [100] * 3, 100: [2500] * 10, 2: [25, 25], 1: [6, 6]}
    assert [default_clients_and_alpha(sizes)[0] for sizes in (*expected.values(), [1, 1])] == [*expected, 1]


def test_the_documentation_has_the_default_numbers():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    rows = {
        "300 samples in 3 equal classes": [100] * 3,
        "50 samples in 2 equal classes": [25] * 2,
        "400 samples in 200 equal classes": [2] * 200,
        "1,000 samples, of which 10 are in the second class": [990, 10],
        "60,000 samples in 10 equal classes": [6000] * 10,
    }
    for text, sizes in rows.items():
        clients, alpha = default_clients_and_alpha(sizes)
        assert f"| {text} | {clients} | {alpha:g} |" in page


def test_given_values_are_kept():
    clients, alpha = default_clients_and_alpha([100] * 3, clients=10)
    assert clients == 10
    assert alpha > default_clients_and_alpha([100] * 3)[1]
    assert default_clients_and_alpha([100] * 3, alpha=0.1) == (5, 0.1)
    assert default_clients_and_alpha([100] * 3, clients=25, alpha=0.3) == (25, 0.3)
    assert default_clients_and_alpha([100] * 3, clients=290) == (290, 0.1)  # a user error of the partitioner


def table(path, samples, labels=2, **more):
    y = np.arange(samples) % labels
    x = np.random.default_rng(0).normal(size=(samples, 3)).astype(np.float32) + y[:, None]
    np.savez(path, x=x, y=y, **more)
    return path


def test_a_registered_dataset_has_fixed_defaults(folder, monkeypatch):
    monkeypatch.setenv("FEDOBP_DATA", str(folder))
    folder.mkdir()
    for name, shape in (("mnist", (28, 28)), ("svhn", (32, 32, 3))):
        np.savez(folder / f"{name}.npz", x=np.zeros((300, *shape), np.uint8), y=np.arange(300) % 10)
    for name, clients in (("digits", 20), ("mnist", 100), ("svhn", 100)):
        config = resolved(dataset=name)
        assert (config.clients, config.alpha) == (clients, 0.1)


def test_python_and_every_command_use_the_same_rule(command):
    Path("data").mkdir()
    table("data/mine.npz", 300, 3)
    federation = Federation(Config(dataset="mine"))
    assert (federation.config.clients, federation.config.alpha, federation.data.clients) == (6, 0.2, 6)
    fast = ("--rounds", 1, "--epochs", 1)
    note = "note: 'mine' has no published settings: --clients 6 --alpha 0.2 was chosen by its size\n"
    said = command("run", "--dataset", "mine", *fast, "--out", "one")
    assert (said.code, said.err) == (0, note)
    config = tomllib.loads(Path("one/config.toml").read_text())
    assert (config["clients"], config["alpha"]) == (6, 0.2)
    assert command("run", "--config", "one/config.toml", "--out", "again").err == ""
    assert Path("one/metrics.jsonl").read_bytes() == Path("again/metrics.jsonl").read_bytes()
    said = command("compare", "--dataset", "mine", "--methods", "fedavg,local", "--seeds", 2, *fast, "--json")
    assert (said.code, said.err) == (0, note)
    said = command("partition", "--dataset", "mine", "--json")
    assert (len(said.json["clients"]), said.err) == (6, note)
    said = command("bench", "--dataset", "mine", "--seconds", 1, *fast, "--json")
    assert (said.json["clients"], said.json["alpha"], said.err) == (6, 0.2, note)


def test_only_chosen_values_that_matter_are_printed(command):
    Path("data").mkdir()
    table("data/mine.npz", 300, 3, client=np.arange(300) % 5)
    show = ("partition", "--dataset", "mine", "--json")
    assert "--alpha 0.5 was" in command(*show, "--clients", 10).err
    assert "--clients 5 was" in command(*show, "--alpha", 0.1).err
    assert "--clients 6 was" in command(*show, "--partition", "iid").err
    assert command(*show, "--clients", 4, "--alpha", 0.1).err == ""
    said = command(*show, "--partition", "natural")
    assert (len(said.json["clients"]), said.err) == (5, "")


def follow(command, said):
    """Run the printed command for one round."""
    assert said.code == 0
    words = shlex.split(said.out.split("Next: ")[1])
    assert words[:2] == ["fedobp", "run"]
    return words, command(*words[1:], "--rounds", 1, "--epochs", 1)


def csv(path, samples, client=None):
    rows = [
        f"{row % 7},{row * 0.5},{'ab'[row % 2]}{'' if client is None else f',{client(row)}'}" for row in range(samples)
    ]
    Path(path).write_text("\n".join([f"p,q,label{'' if client is None else ',who'}", *rows]))
    return path


@pytest.mark.parametrize(
    ("samples", "labels"), [(300, 3), (12, 2), (50, 2), (400, 200), (60, 59), (9, 3), (4, 2)], ids=str
)
def test_the_printed_command_runs_on_data_of_any_size(command, samples, labels):
    said = command("data", "import", "mine", table("source.npz", samples, labels))
    assert follow(command, said)[1].code == 0


def test_the_printed_command_runs_on_images_in_a_folder_with_spaces_and_quotes(command):
    for label in ("rose", "dai sy"):
        for at in range(20):
            picture(Path(f"my 'own' flowers/{label}/{at}.png"), np.full((8, 8), at * (3 + len(label))))
    place = 'the "data" of o\'hara $HOME'
    said = command("data", "import", "flowers", "my 'own' flowers", "--data-dir", place)
    words, ran = follow(command, said)
    assert (words[words.index("--data-dir") + 1], ran.code) == (place, 0)
    said = command("partition", "--dataset", "flowers", "--data-dir", place, "--save", "a 'part'")
    words, ran = follow(command, said)
    assert (words[-1], ran.code) == ("a 'part'", 0)
    assert ran.err == ""


@pytest.mark.parametrize("side", [1, 3, 4, 15, 16])
def test_images_of_any_size_have_a_default_model(folder, side):
    folder.mkdir()
    np.savez(folder / "mine.npz", x=np.zeros((20, side, side, 3), np.uint8), y=np.arange(20) % 2)
    config = resolved(dataset="mine", data_dir=str(folder))
    assert config.model == ("mlp" if side < 4 else "cnn-small" if side < 16 else "cnn")
    Federation(config)


def test_the_printed_command_keeps_natural_clients(command):
    said = command("data", "import", "wards", csv("wards.csv", 40, lambda row: f"w {row % 4}"), "--client", "who")
    words, ran = follow(command, said)
    assert words[-2:] == ["--partition", "natural"]
    assert ran.code == 0
    # An npz file holds the clients.
    said = command("data", "import", "other", table("source.npz", 40, client=np.arange(40) % 4))
    assert follow(command, said)[0][-2:] == ["--partition", "natural"]


def test_clients_with_too_few_samples_to_test_with_are_not_proposed(command):
    said = command("data", "import", "mine", csv("mine.csv", 50, lambda row: row), "--client", "who")
    words, ran = follow(command, said)
    assert "natural" not in words
    assert ran.code == 0


def test_a_small_part_of_a_registered_dataset_runs_with_other_flags(command):
    np.savez("source.npz", x=np.zeros((60, 28, 28), np.uint8), y=np.arange(60) % 10)
    words, ran = follow(command, command("data", "import", "mnist", "source.npz"))
    assert "--clients" in words
    assert ran.code == 0


def test_too_few_samples_are_reported(command):
    said = command("data", "import", "mine", table("source.npz", 3))
    assert said.code == 0
    assert "Next" not in said.out
    assert "3 samples are too few to train and test with" in said.out
    said = command("run", "--dataset", "mine")
    assert said.code == 2
    assert "3 samples are fewer than 10 for each of 1 clients: choose another --partition" in said.err


def test_one_class_is_refused_at_import(command):
    said = command("data", "import", "mine", table("source.npz", 30, 1))
    assert said.code == 2
    assert "only the label 0" in said.err


def test_help_names_the_rule(command):
    said = " ".join(command("run", "--help").out.replace("│", " ").split())
    assert said.count("your own data: by its size") == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "--data-dir", ""), "--data-dir must not be empty"),
        (("run", "--partition-file", ""), "--partition-file must not be empty"),
        (("run", "--dataset", ""), "--dataset must not be empty"),
        (("data", "list", "--data-dir", ""), "--data-dir must not be empty"),
        (("data", "fetch", "mnist", "--data-dir", ""), "--data-dir must not be empty"),
        (("data", "show", "digits", "--data-dir", ""), "--data-dir must not be empty"),
        (("data", "import", "mine", "mine.npz", "--data-dir", ""), "--data-dir must not be empty"),
        (("data", "import", "mine", ""), "an argument must not be empty"),
        (("data", "import", "", "mine.npz"), "an argument must not be empty"),
        (("partition", "--save", ""), "--save must not be empty"),
        (("partition", "--save", "."), "'.' names no partition"),
        (("partition", "--save", ".."), "'..' names no partition"),
        (("partition", "--plot", ""), "--plot must not be empty"),
    ],
)
def test_empty_values_are_refused(command, arguments, sentence):
    before = set(Path().iterdir())
    said = command(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {sentence}")
    assert set(Path().iterdir()) == before


def test_an_empty_variable_counts_as_not_set(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDOBP_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_dir() == tmp_path / "fedobp" / "data"


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--dataset", LONG),
        ("run", "--data-dir", LONG, "--dataset", "mine"),
        ("run", "--partition-file", LONG),
        ("partition", "--save", LONG),
        ("partition", "--plot", f"{LONG}.png"),
        ("data", "import", LONG, "mine.npz"),
        ("data", "import", "mine", LONG),
        ("data", "import", "mine", f"{LONG}.csv"),
        ("data", "import", "mine", "mine.npz", "--data-dir", LONG),
        ("data", "fetch", LONG),
        ("data", "fetch", "mnist", "--data-dir", LONG),
        ("data", "show", LONG),
        ("data", "show", "mine", "--data-dir", LONG),
        ("data", "list", "--data-dir", f"{LONG}/{LONG}"),
        ("data", "show", "../mine"),
        ("run", "--dataset", "a/b"),
        ("data", "import", "../mine", "mine.npz"),
        ("run", "--data-dir", "~nobody-at-all/x"),
        ("run", "--partition-file", "~nobody-at-all/x"),
        ("data", "list", "--data-dir", "new\nline"),
    ],
    ids=lambda words: " ".join(words).replace(LONG, "LONG").replace("\n", " "),
)
def test_invalid_names_are_refused_in_one_short_sentence(command, arguments):
    table("mine.npz", 20)
    before = set(Path().iterdir())
    said = command(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert len(said.err) < 700
    assert set(Path().iterdir()) == before
