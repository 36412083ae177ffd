"""`compare.toml`: a comparison is repeated with the same runs, the same launches and the same bytes."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from resolved import resolved

from fedobp import Config
from fedobp.comparison import read_comparison, to_toml

TINY = ("--clients", 6, "--rounds", 2, "--epochs", 1, "--participation", 0.5, "--eval-every", 1, "--save-models", "all")
# The fast path, a custom loss with sweeps, and sequential clients.
METHODS = ("fedavg", "fedpac", "seqfededt", "fedobp")
RUNS = [f"{method}-seed{seed}" for seed in (42, 43) for method in METHODS]


def bytes_of(folder):
    """The files that must be the same when a comparison is repeated."""
    names = ("config.toml", "metrics.jsonl", "models/global.safetensors", "models/clients.safetensors")
    return {f"{run.name}/{name}": (run / name).read_bytes() for run in Path(folder).glob("*-seed*") for name in names}


def test_it_is_repeated_to_the_same_bytes(command):
    """With at most three runs per launch, and stacks of few lanes."""
    memory = ("--store-memory", 3.5 * 3 * 4 * 53_002 * 6 / 2**30, "--lane-memory", 0.01)
    command("compare", *TINY, *memory, "--methods", ",".join(METHODS), "--seeds", 2, "--set", "q=0.9", "--out", "first")
    written = tomllib.loads(Path("first/compare.toml").read_text())
    assert written["launches"] == [RUNS[:3], RUNS[3:6], RUNS[6:]]
    assert [options.get("q") for options in written["methods"].values()] == [None, None, 0.9, 0.9]
    said = command("compare", "--config", "first/compare.toml", "--out", "second", "--json")
    assert said.code == 0
    assert [f"{run['method']}-seed{run['seed']}" for run in said.json["runs"]] == RUNS
    first, second = bytes_of("first"), bytes_of("second")
    assert len(first) == 4 * len(RUNS)
    assert first == second
    assert Path("first/compare.toml").read_bytes() == Path("second/compare.toml").read_bytes()
    beside = "# Trained side by side, in this order: fedavg-seed42, fedpac-seed42, seqfededt-seed42"
    assert beside in Path("first/fedpac-seed42/config.toml").read_text().splitlines()
    launch = json.loads(Path("first/fedobp-seed42/result.json").read_text())["launch"]
    assert launch[:2] == [{}, {"method": "fedavg", "options": {}, "seed": 43, "partition_seed": 43}]


GIVEN = """version = 1
launches = [["fedavg-seed1", "local-seed1"]]
[settings]
clients = 5
rounds = 1
model = "mlp"
[methods.fedavg]
[methods.local]
"""


@pytest.mark.filterwarnings("default")
def test_one_of_its_runs_runs_alone_and_says_how_to_repeat_it(command):
    Path("compare.toml").write_text(GIVEN)
    command("compare", "--config", "compare.toml", "--out", "it's here")
    said = command("run", "--config", "it's here/fedavg-seed1/config.toml", "--out", "alone")
    assert said.code == 0
    repeat = shlex.join(["fedobp", "compare", "--config", str(Path("it's here/compare.toml").absolute())])
    assert f"{repeat} repeats it\n" in said.err
    assert len(said.err.splitlines()) == 1
    assert "side by side" not in Path("alone/config.toml").read_text()


def test_the_launches_of_the_file_are_binding(command):
    """Two runs in a launch, where memory is for one, and in the file's order."""
    text = GIVEN.replace('["fedavg-seed1", "local-seed1"]', '["local-seed1", "fedavg-seed1"], ["local-seed2"]')
    Path("compare.toml").write_text(text.replace("clients = 5", "clients = 5\nstore_memory = 1e-9"))
    found = command("compare", "--config", "compare.toml", "--out", "here", "--json").json
    assert [(run["method"], run["seed"]) for run in found["runs"]] == [("local", 1), ("fedavg", 1), ("local", 2)]
    launches = tomllib.loads(Path("here/compare.toml").read_text())["launches"]
    assert launches == [["local-seed1", "fedavg-seed1"], ["local-seed2"]]
    assert len(json.loads(Path("here/fedavg-seed1/result.json").read_text())["launch"]) == 2


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("version = 1", "", "it has no `version`"),
        ("version = 1", "version = '1'", "it has no `version`"),
        ("version = 1", "version = true", "it has no `version`"),
        ("version = 1", "version = 2", "is of version 2, and fedobp .* reads version 1: use a newer fedobp"),
        ("version = 1", "version = 1\nrounds = 3", "unknown key in .* 'rounds'"),
        ("version", "version =", "is not valid TOML"),
        ("clients = 5", "client = 5", "unknown setting in .* 'client': did you mean 'clients'"),
        ("clients = 5", "seed = 5", "unknown setting in .* 'seed'"),
        ("clients = 5", "clients = 'five'", "--clients must be a whole number"),
        ("clients = 5", "partition_options = 5", "must be a table of options"),
        ("[settings]", "[setting]", "unknown key in .* 'setting': did you mean 'settings'"),
        ("[methods.local]", "", "names 'local-seed1', which is no run of its methods"),
        ("[methods.local]", "[methods.locale]", "unknown method in .* 'locale': did you mean 'local'"),
        ("[methods.local]", "[methods]\nlocal = 3", "a table of options for each method"),
        ("[methods.local]", "[methods.local]\nq = 1", "method 'local' has no options"),
        ("[methods.local]", "[methods.local]\n[methods.fedper]", "no launch in .* has a run of 'fedper'"),
        ("local-seed1", "fedavg-seed1", "names fedavg-seed1 twice"),
        ("local-seed1", "local-seed01", "names 'local-seed01', which is no run"),
        ("local-seed1", "local-seed", "names 'local-seed', which is no run"),
        ("local-seed1", "local-seed" + "1" * 5000, "which is no run"),
        ("local-seed1", "local-seed4294967296", "--seed must be at most"),
        ('"local-seed1"', "3", "names '3', which is no run"),
        ('["fedavg-seed1", "local-seed1"]', '"fedavg-seed1"', "must be a list of launches"),
        ('["fedavg-seed1", "local-seed1"]', "", "must be a list of launches"),
        ('["fedavg-seed1", "local-seed1"]', "[]", "must be a list of launches"),
        ('[["fedavg-seed1", "local-seed1"]]', "3", "must be a list of launches"),
        ('launches = [["fedavg-seed1", "local-seed1"]]', "", "must be a list of launches"),
        ("clients = 5", 'clients = 5\npartition = "feature"', None),
        ("local-seed1", "local-seed2", None),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(command, old, new, complaint):
    assert old in GIVEN
    Path("compare.toml").write_text(GIVEN.replace(old, new, 1))
    said = command("compare", "--config", "compare.toml", "--out", "here", "--json")
    if complaint is None:
        assert (said.code, len(said.json["runs"])) == (0, 2)
        return
    assert said.code == 2
    [line] = said.err.splitlines()
    assert re.search(complaint, line), line
    # An error of one method does not stop the others.
    assert Path("here").exists() == ("fedavg" in said.out)


def test_runs_that_cannot_share_a_launch_are_refused(command):
    """A partition by features changes the samples, differently for each seed."""
    text = GIVEN.replace("clients = 5", 'clients = 5\npartition = "feature"').replace("local-seed1", "local-seed2")
    Path("compare.toml").write_text(text)
    said = command("compare", "--config", "compare.toml", "--out", "here")
    assert said.code == 2
    assert "fedavg, seed 1, and local, seed 2, cannot share a launch" in said.err
    assert not Path("here").exists()


@pytest.mark.parametrize("flags", [("--clients", 1000), ("--model", "cnn"), ("--partition", "natural")])
def test_a_comparison_in_which_no_run_starts_releases_its_folder(command, flags):
    assert command("compare", *flags, "--rounds", 1, "--out", "here").code == 2
    assert command("compare", *flags, "--rounds", 1).code == 2
    assert not Path("here").exists()
    assert not list(Path("runs").iterdir())


@pytest.mark.parametrize(
    "flags",
    [("--rounds", 3), ("--methods", "fedavg"), ("--seeds", 1), ("--set", "q=1"), ("--q", 1), ("--save-models", "none")],
)
def test_other_flags_are_refused_beside_it(command, flags):
    Path("compare.toml").write_text(GIVEN)
    said = command("compare", "--config", "compare.toml", *flags)
    assert (said.code, said.err) == (
        2,
        f"error: --config repeats a comparison as it was: leave out {flags[0]}\n",
    )


def test_a_file_that_is_not_there_or_another_one_is_refused(command):
    assert "cannot read" in command("compare", "--config", "none.toml").err
    Path("config.toml").write_text(Config(clients=5).to_toml())
    assert "is no compare.toml" in command("compare", "--config", "config.toml").err


def test_what_is_written_is_read_back(tmp_path):
    given = {"clients": 5, "rounds": 2, "partition": "classes", "partition_options": {"k": 3}, "partition_seed": 9}
    configs = [resolved(**given, method=method, seed=seed) for seed in (3, 1) for method in ("fedobp", "apfl")]
    (tmp_path / "compare.toml").write_text(to_toml(configs, [[0, 2], [1], [3]]))
    asked, launches = read_comparison(tmp_path / "compare.toml")
    again = [Config(**one) for one in asked]
    assert [[again[run] for run in launch] for launch in launches] == [
        [configs[0], configs[2]],
        [configs[1]],
        [configs[3]],
    ]
