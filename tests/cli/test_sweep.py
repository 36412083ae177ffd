"""`fedobp sweep` and `fedobp collect`: grids, their folders, repeating, and errors."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from cli.cases import TINY, write_npz
from fedobp import Config
from fedobp.report.tidy import read_tidy

# The fast path, a custom loss with sweeps, and sequential clients.
METHODS = ("fedavg", "fedpac", "seqfededt", "fedobp")
RUNS = [f"{method}-seed{seed}" for seed in (42, 43) for method in METHODS]


def bytes_of(folder):
    """The files that must be the same when a sweep is repeated."""
    names = ("config.toml", "metrics.jsonl", "clients.csv", "models/global.safetensors", "models/clients.safetensors")
    return {f"{run.name}/{name}": (run / name).read_bytes() for run in Path(folder).glob("*-seed*") for name in names}


def test_a_grid_from_flags(command):
    flags = (
        "--grid",
        "q=0.5,0.9",
        "--grid",
        "alpha=0.5,1",
        "--methods",
        "fedobp,fedavg",
        "--seeds",
        2,
        "--out",
        "here",
    )
    said = command("sweep", *TINY, *flags, "--json")
    assert said.code == 0
    names = {path.parent.name for path in Path("here").glob("*/result.json")}
    assert len(names) == 2 * 2 * 3
    assert {"fedobp-q0.5-alpha1-seed43", "fedavg-alpha0.5-seed42"} < names
    assert {path.name for path in Path("here").iterdir()} - names == {
        "sweep.toml", "sweep.json", "results.csv", "history.csv", "report.html",
    }  # fmt: skip
    assert len(said.json["runs"]) == 12
    assert [one["chosen"] for one in said.json["chosen"]] == [None] * 2  # of fedobp, for each alpha
    assert json.loads(Path("here/sweep.json").read_text()) == said.json
    again = command("sweep", "here", "--json")
    assert (again.code, again.json) == (0, said.json)


def test_values_are_chosen_on_the_validation_parts(command):
    said = command("sweep", *TINY, "--grid", "lr=0.0001,0.1", "--val-ratio", 0.3, "--rounds", 5, "--json").json
    [choice] = said["chosen"]
    runs = {run["history"][-1][1]: run["validation"]["pooled"] for run in said["runs"]}
    assert choice["validation"] == max(runs.values())
    assert choice["chosen"] == "fedobp, lr=0.1"
    shown = command("sweep", *TINY, "--grid", "lr=0.0001,0.1", "--val-ratio", 0.3, "--rounds", 5).out
    assert "Best of 2 by validation accuracy: fedobp, lr=0.1 (" in shown
    without = command("sweep", *TINY, "--grid", "lr=0.0001,0.1").out
    assert "No value is chosen: that needs validation parts (--val-ratio 0.2)" in without


def test_it_is_repeated_to_the_same_bytes(command):
    """With at most three runs per launch, and stacks of few lanes; also by `compare --config`."""
    tiny = ("--clients", 6, "--rounds", 2, "--epochs", 1, "--participation", 0.5, "--eval-every", 1)
    memory = ("--store-memory", 3.5 * 3 * 4 * 53_002 * 6 / 2**30, "--lane-memory", 0.01, "--save-models", "all")
    command("compare", *tiny, *memory, "--methods", ",".join(METHODS), "--seeds", 2, "--set", "q=0.9", "--out", "first")
    written = tomllib.loads(Path("first/compare.toml").read_text())
    plain = ["fedavg-seed42", "fedobp-seed42", "fedavg-seed43", "fedobp-seed43"]
    others = [[f"{method}-seed{seed}" for seed in (42, 43)] for method in ("fedpac", "seqfededt")]
    assert written["launches"] == [plain[:3], plain[3:], *others]
    qs = [run.get("options", {}).get("q", written["settings"].get("options", {}).get("q")) for run in written["runs"]]
    assert qs == [None, None, 0.9, 0.9] * 2
    said = command("compare", "--config", "first/compare.toml", "--out", "second", "--json")
    assert said.code == 0
    assert [f"{run['method']}-seed{run['seed']}" for run in said.json["runs"]] == RUNS
    command("sweep", "first/compare.toml", "--out", "third")
    first = bytes_of("first")
    assert len(first) == 5 * len(RUNS)
    assert first == bytes_of("second") == bytes_of("third")
    assert Path("first/compare.toml").read_bytes() == Path("second/compare.toml").read_bytes()
    beside = "# Trained side by side, in this order: fedpac-seed42, fedpac-seed43"
    assert beside in Path("first/fedpac-seed42/config.toml").read_text().splitlines()
    launch = json.loads(Path("first/fedobp-seed42/result.json").read_text())["launch"]
    assert launch[:2] == [{"method": "fedavg", "options": {}}, {}]


GIVEN = """
launches = [["fedavg-seed1", "local-seed1"]]
[settings]
clients = 5
rounds = 1
model = "mlp"
seed = [1]
[methods.fedavg]
[methods.local]
"""


@pytest.mark.filterwarnings("default")
def test_one_of_its_runs_runs_alone_and_says_how_to_repeat_it(command):
    Path("grid.toml").write_text(GIVEN)
    command("sweep", "grid.toml", "--out", "it's here")
    said = command("run", "--config", "it's here/fedavg-seed1/config.toml", "--out", "alone")
    assert said.code == 0
    repeat = shlex.join(["fedobp", "sweep", str(Path("it's here/sweep.toml").absolute())])
    assert f"{repeat} repeats it\n" in said.err
    assert len(said.err.splitlines()) == 1
    assert "side by side" not in Path("alone/config.toml").read_text()


def test_the_launches_of_the_file_are_binding(command):
    """Two runs in a launch, where memory is for one, and in the file's order."""
    text = GIVEN.replace('["fedavg-seed1", "local-seed1"]', '["local-seed1", "fedavg-seed1"]')
    Path("grid.toml").write_text(text.replace("clients = 5", "clients = 5\nstore_memory = 1e-9"))
    assert command("sweep", "grid.toml", "--out", "here", "--json").code == 0
    assert tomllib.loads(Path("here/sweep.toml").read_text())["launches"] == [["local-seed1", "fedavg-seed1"]]
    assert len(json.loads(Path("here/fedavg-seed1/result.json").read_text())["launch"]) == 2


def test_runs_that_cannot_share_a_launch_are_refused(command):
    """A partition by features changes the samples, differently for each seed."""
    text = GIVEN.replace("clients = 5", 'clients = 5\npartition = "feature"').replace("seed = [1]", "seed = [1, 2]")
    text = text.replace(
        '"fedavg-seed1", "local-seed1"', '"fedavg-seed1", "local-seed2"], ["fedavg-seed2", "local-seed1"'
    )
    Path("grid.toml").write_text(text)
    said = command("sweep", "grid.toml", "--out", "here")
    assert said.code == 2
    assert "fedavg, seed 1, and local, seed 2, cannot share a launch" in said.err
    assert not Path("here").exists()


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(command):
    Path("grid.toml").write_text(GIVEN.replace("seed = [1]", "seed = [1, 2]").replace(GIVEN.split("\n")[1], ""))
    said = command("sweep", "grid.toml", "--out", "here", "--dry-run")
    assert said.code == 0
    assert "4 runs to train, about" in said.out
    assert [path.name for path in Path().iterdir()] == ["grid.toml"]
    command("sweep", "grid.toml", "--out", "here", "--max-minutes", 0)
    found = command("sweep", "here", "--dry-run", "--json").json
    assert [launch["runs"] for launch in found["launches"]] == [
        ["fedavg-seed1", "local-seed1", "fedavg-seed2", "local-seed2"]
    ]
    assert found["launches"][0]["seconds"] > 0
    assert (found["finished"], found["memory_gib"] > 0) == (0, True)


def test_a_dry_run_measures_launches_that_differ_in_seeds_only_once(command, monkeypatch):
    measured = []
    monkeypatch.setattr("fedobp.sweep_folder._measure", lambda configs: measured.append(configs) or 1.0)
    said = command("sweep", *TINY, "--seeds", 3, "--store-memory", 1e-9, "--dry-run", "--json").json
    assert [launch["seconds"] for launch in said["launches"]] == [1.0] * 3
    assert len(measured) == 1


def test_the_memory_of_the_file_plans_the_launches(command):
    text = GIVEN.replace(GIVEN.split("\n")[1], "memory = 1e-9")
    Path("grid.toml").write_text(text)
    found = command("sweep", "grid.toml", "--dry-run", "--json").json
    assert [launch["runs"] for launch in found["launches"]] == [["fedavg-seed1"], ["local-seed1"]]
    command("sweep", "grid.toml", "--out", "here", "--max-minutes", 0)
    command("sweep", "here/sweep.toml", "--out", "again", "--max-minutes", 0)
    for folder in ("here", "again"):
        plan = tomllib.loads(Path(folder, "sweep.toml").read_text())
        assert (plan["memory"], len(plan["launches"])) == (1e-9, 2)


def test_the_tables_have_all_runs_of_the_folder(command):
    command("sweep", *TINY, "--seeds", 2, "--out", "here")
    said = command("sweep", *TINY, "--out", "here", "--json").json
    assert [run["seed"] for run in said["runs"]] == [42]
    rows = read_tidy(Path("here/results.csv"))
    assert [(row["seed"], row["model"]) for row in rows] == [(s, m) for s in (42, 43) for m in ("served", "last")]


def test_without_a_result_json_is_an_object_too(command):
    said = command("sweep", *TINY, "--max-minutes", 0, "--out", "my folder", "--json")
    assert (said.code, said.json) == (0, {"runs": [], "table": [], "missing": ["fedobp-seed42"]})
    assert said.err == "note: Not trained yet: 1 run. `fedobp sweep 'my folder'` continues.\n"


def test_a_setting_of_a_grid_may_be_spelled_as_its_flag(command):
    said = command("sweep", *TINY, "--grid", "batch-size=8,16", "--out", "here", "--json")
    assert (said.code, len(said.json["runs"])) == (0, 2)
    assert {path.parent.name for path in Path("here").glob("*/result.json")} == {
        "fedobp-batch_size8-seed42", "fedobp-batch_size16-seed42"
    }  # fmt: skip


def test_a_run_of_a_sweep_is_resumed_by_the_sweep(command):
    """Alone it would train beside no other, and have other bytes."""
    command("sweep", *TINY, "--seeds", 2, "--max-minutes", 0, "--out", "here")
    Path("here/fedobp-seed42").mkdir()
    Path("here/fedobp-seed42/config.toml").write_text(Config().to_toml())
    said = command("run", "--resume", "here/fedobp-seed42")
    assert (said.code, said.out) == (2, "")
    assert said.err == ("error: the run in here/fedobp-seed42 is one of a sweep: `fedobp sweep here` goes on with it\n")
    assert not list(Path("here").rglob("metrics.jsonl"))


def test_options_from_flags_are_recognised_when_it_goes_on(command):
    flags = ("sweep", *TINY, "--set", "q=0.90", "--partition", "classes", "--partition-set", "k=2", "--out", "here")
    assert command(*flags).code == 0
    assert command(*flags).code == 0


def test_values_that_look_like_numbers_may_be_names(command):
    write_npz("images.npz")
    command("data", "import", "2024", "images.npz")
    said = command("sweep", *TINY, "--grid", "dataset=2024,digits", "--out", "here", "--json")
    assert [run["dataset"] for run in said.json["runs"]] == ["2024", "digits"]


def test_saved_partitions_are_a_grid_too(command):
    """Each has its own number of clients."""
    for clients in (5, 6):
        command("partition", "--clients", clients, "--save", f"of{clients}")
    flags = ("--rounds", 1, "--epochs", 1, "--model", "mlp", "--grid", "partition_file=of5.json,of6.json")
    said = command("sweep", *flags, "--out", "here", "--json")
    assert (said.code, len(said.json["runs"])) == (0, 2)


@pytest.mark.parametrize("seed", ["1979-05-27", "nan", "[2]", "true"])
def test_a_value_that_json_has_not_is_a_user_error(command, seed):
    Path("grid.toml").write_text(GIVEN.replace("seed = [1]", f"seed = [1, {seed}]").replace(GIVEN.split("\n")[1], ""))
    said = command("sweep", "grid.toml", "--out", "here", "--json")
    assert (said.code, len(said.json["runs"]), len(said.json["failed"])) == (2, 2, 2)
    assert all("--seed must be a whole number" in line for line in said.err.splitlines())


def test_shards_and_what_is_left(command):
    flags = ("--methods", "fedavg,seqfededt", *TINY)
    said = command("sweep", *flags, "--shard", "2/2", "--out", "two", "--json")
    assert (said.code, said.json["missing"]) == (0, ["fedavg-seed42"])
    assert said.err == "note: Not trained yet: 1 run. `fedobp sweep two` continues.\n"
    command("sweep", *flags, "--shard", "1/2", "--out", "one")
    found = command("collect", "all", "one", "two", "--json")
    assert [run["method"] for run in found.json["runs"]] == ["fedavg", "seqfededt"]
    assert "missing" not in found.json
    assert Path("all/results.csv").exists()


def test_compare_goes_on_in_its_folder(command):
    flags = ("compare", *TINY, "--methods", "fedavg,local", "--out", "here", "--json")
    first = command(*flags).json
    Path("here/local-seed42/result.json").unlink()
    again = command(*flags).json
    for one in (first, again):
        for run in one["runs"]:
            run.pop("seconds")
    assert again == first
    said = command("compare", *TINY, "--methods", "fedavg,local", "--lr", 0.5, "--out", "here")
    assert (said.code, said.out) == (2, "")
    assert said.err == "error: here has the run fedavg-seed42 with lr = 0.01, not 0.5: choose another --out\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--grid", "q"), "--grid q must be written NAME=V1,V2"),
        (("--grid", "q=1,,2"), "must be written NAME=V1,V2"),
        (("--grid", "q=1,1"), "lists a value or a name twice"),
        (("--grid", "q=0.1", "--grid", "q=0.2"), "lists a value or a name twice"),
        (("--grid", "seed=1,2"), "use --seeds instead"),
        (("--grid", "qq=1,2"), "unknown setting or option of these methods 'qq': did you mean 'q'"),
        (("--grid", "batchsize=1,2"), "did you mean 'batch_size'"),
        (("--q", 0.5, "--grid", "q=0.9,0.99"), "q is given by --grid and by a flag of its own: leave out one"),
        (("--rounds", 4, "--grid", "rounds=2,3"), "rounds is given by --grid and by a flag of its own"),
        (("--max-minutes", "nan"), "--max-minutes must be at least 0, not nan"),
        (("--max-minutes", 1, "--checkpoint-every", 0), "--checkpoint-every 0 takes none: leave out one"),
        (("--grid", "alpha=a,b"), "--alpha must be a number, not 'a'"),
        (("--grid", f"q={','.join(map(str, range(2, 1003)))}"), "more than the 1,000 runs"),
        (("--shard", "0/2"), "must be written I/N"),
        (("--shard", "two"), "must be written I/N"),
        (("--shard", "\u0661/\u0662"), "must be written I/N"),
        (("none.toml",), "cannot read"),
        (("grid.toml", "--rounds", 3), "the file says what is trained: leave out --rounds"),
        (("folder",), "folder holds no sweep"),
        (("folder", "--out", "x"), "--out is not used when a sweep is continued"),
    ],
)
def test_a_user_error_is_one_sentence(command, flags, sentence):
    Path("folder").mkdir()
    Path("grid.toml").write_text(GIVEN)
    said = command("sweep", *flags)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert sentence in said.err
    assert {path.name for path in Path().iterdir()} == {"folder", "grid.toml"}


@pytest.mark.parametrize("flags", [("--rounds", 3), ("--methods", "fedavg"), ("--seeds", 1), ("--q", 1)])
def test_other_flags_are_refused_beside_the_file_of_a_comparison(command, flags):
    Path("compare.toml").write_text(GIVEN)
    said = command("compare", "--config", "compare.toml", *flags)
    assert (said.code, said.err) == (2, f"error: --config repeats a comparison as it was: leave out {flags[0]}\n")


@pytest.mark.parametrize("flags", [("--clients", 1000), ("--model", "cnn"), ("--partition", "natural")])
def test_a_comparison_in_which_no_run_starts_releases_its_folder(command, flags):
    assert command("compare", *flags, "--rounds", 1, "--out", "here").code == 2
    assert command("compare", *flags, "--rounds", 1).code == 2
    assert not Path("here").exists()
    assert not list(Path("runs").iterdir())


def test_another_file_is_refused(command):
    Path("config.toml").write_text(Config(clients=5).to_toml())
    assert "unknown key in config.toml" in command("compare", "--config", "config.toml").err
