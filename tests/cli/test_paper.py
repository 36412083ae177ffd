"""`fedobp paper`: two experiments at the smallest scale, going on after an interruption, and user errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from paper.cases import row

from fedobp.csv_rows import read_rows
from fedobp.paper.experiment import Case, train_cases
from fedobp.paper.registry import EXPERIMENTS
from fedobp.paper.tables import Table

FILES = {"results.csv", "history.csv", "table.md", "table.tex", "figure.pdf", "figure.png"}


def test_list_names_every_experiment(command):
    said = command("paper", "list")
    assert said.code == 0
    found = command("paper", "list", "--json").json["experiments"]
    assert [one["name"] for one in found] == [
        "table1", "table2", "quantiles", "convergence", "scores", "ablation", "layers", "communication", "medmnist",
        "datasets", "overhead", "participation", "theory", "claims",
        "explained", "law",
    ]  # fmt: skip
    assert all(one["name"] in said.out for one in found)
    assert [one["name"] for one in found if one["beyond_the_paper"]] == ["explained", "law"]
    assert said.out.index("claims") < said.out.index("beyond the paper") < said.out.index("explained")


def test_quantiles_at_smoke_scale_with_a_dataset_that_is_missing(command):
    said = command(
        "paper", "quantiles", "--scale", "smoke", "--rounds", 2, "--dataset", "digits,mnist", "--alpha", 0.1, "--json"
    )
    assert said.code == 0
    assert "note: MNIST is not installed, so its cells are empty: fedobp data fetch mnist" in said.err
    assert set(said.json["files"]) == FILES
    folder = Path("runs/paper-smoke/quantiles")
    assert {path.name for path in folder.iterdir()} == FILES
    rows = read_rows(folder / "results.csv")
    assert {(one["dataset"], one["model"]) for one in rows} == {("digits", "served"), ("digits", "last")}
    assert len(rows) == 2 * 5  # quantiles
    assert {one["protocol"] for one in rows} == {"default"}
    table = (folder / "table.md").read_text()
    assert "| MNIST | 0.1 | 582,026 | 0.9998 | 117 | 117 |  |  (99.34) |  |  |  |" in table
    assert "fedobp data fetch mnist" in table
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_layers_at_smoke_scale_shares_the_runs_of_a_folder_and_goes_on(command):
    given = ("--scale", "smoke", "--rounds", 2, "--out", "here")
    said = command("paper", "layers", *given, "--max-minutes", 0)
    assert said.code == 0
    assert "note: 2 of 2 runs are not done: call the same command again" in said.err
    assert command("paper", "layers", *given).err == ""
    trained = {path.parent.name: path.stat().st_mtime_ns for path in Path("here/runs").glob("*/result.json")}
    assert len(trained) == 2
    rows = read_rows(Path("here/layers/layers.csv"))
    assert {one["layer"] for one in rows} == {"conv1", "conv2", "fc1", "classifier"}
    for name in trained:
        for number in (1, 2):
            shares = [one["share"] for one in rows if one["run"] == name and one["round"] == number]
            assert sum(shares) == pytest.approx(1)
    before = Path("here/layers/table.md").read_bytes()
    assert command("paper", "layers", *given).code == 0
    assert Path("here/layers/table.md").read_bytes() == before
    command("paper", "quantiles", *given, "--alpha", 0.1)
    again = {path.parent.name: path.stat().st_mtime_ns for path in Path("here/runs").glob("*/result.json")}
    assert {name: again[name] for name in trained} == trained
    assert len(again) == 2 + 5 - 1  # one of them was there


def test_theory_goes_over_seeds_and_measures_each_once(command):
    given = ("--scale", "smoke", "--rounds", 2, "--alpha", 0.1, "--out", "here", "--json")
    assert command("paper", "theory", *given).json["notes"] == []
    parts = Path("here/theory/parts")
    first = {(path.name, path.stat().st_mtime_ns) for path in parts.iterdir()}
    assert command("paper", "theory", *given, "--seeds", 2).code == 0
    both = {(path.name, path.stat().st_mtime_ns) for path in parts.iterdir()}
    assert first < both
    assert len(both) == 2 * len(first)
    assert {one["seed"] for one in read_rows(Path("here/theory/results.csv"))} == {42, 43}
    assert "seeds 42 to 43" in Path("here/theory/table.md").read_text()


def test_flags_that_change_nothing_in_claims_are_named_and_its_setting_has_none_of_them(command):
    Path("found").mkdir()
    said = command("paper", "claims", "found", "--dataset", "digits", "--alpha", 0.3, "--json")
    assert {note for note in said.json["notes"] if "changes nothing" in note} == {
        "claims judges what result files have: --dataset changes nothing",
        "claims partitions no data: --alpha changes nothing",
    }
    assert "Dirichlet(0.3)" not in (Path(said.json["folder"]) / "table.md").read_text()


def test_a_flag_that_changes_nothing_is_named(command):
    said = command("paper", "datasets", "--scale", "smoke", "--seeds", 3, "--rounds", 9, "--mode", "both", "--json")
    assert said.code == 0
    assert said.json["notes"] == [
        "datasets has no seeds: --seeds changes nothing",
        "datasets trains nothing: --rounds changes nothing",
        "datasets has no method with several modes: --mode changes nothing",
    ]


def test_claims_are_judged_by_the_files_of_a_folder(command):
    folder = Path("found/table1")
    folder.mkdir(parents=True)
    header = list(row())
    lines = [row("fedobp", pooled=80.0), row("flute", pooled=87.0, mode="faithful")]
    text = "\n".join([",".join(header), *(",".join(str(one[name] or "") for name in header) for one in lines)])
    (folder / "results.csv").write_text(text + "\n")
    said = command("paper", "claims", "found", "--json")
    assert said.code == 0
    judged = {one["id"]: one["verdict"] for one in read_rows(Path(said.json["folder"]) / "results.csv")}
    assert judged["perf.d01.gaps"] == "does not hold"
    assert judged["comm"] == "not measured"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("tabel1",), "did you mean 'table1'?"),
        (("table1", "results"), "only `claims` and `law` take folders"),
        (("list", "results"), "results cannot be used: only `claims` and `law` take folders"),
        (("table1", "--scale", "tiny"), "unknown value of --scale 'tiny'"),
        (("table1", "--mode", "authors"), "unknown value of --mode 'authors'"),
        (("table1", "--dataset", "mnits"), "did you mean 'mnist'?"),
        (("table1", "--alpha", "0.1,x"), "--alpha must be numbers separated by commas, not 'x'"),
        (("table1", "--methods", "fedop"), "did you mean 'fedobp'?"),
        (("layers", "--methods", "fedobp"), "layers has methods of its own: leave out --methods"),
        (("table1", "--paper-grid"), "table1 does not sweep over quantiles: leave out --paper-grid"),
        (("table1", "--seeds", 0), "--seeds must be at least 1, not 0"),
        (("quantiles", "--seeds", 1001), "--seeds must be at most 1,000, not 1001: it is the number of seeds"),
        (("table1", "--rounds", 0), "--rounds must be at least 1, not 0"),
        (("table1", "--max-minutes", -1), "--max-minutes must be at least 0, not -1.0"),
        (("claims", "absent"), "there is no folder absent"),
    ],
)
def test_user_errors_are_one_sentence(command, given, told):
    said = command("paper", *given)
    assert said.code == 2
    assert told in said.err
    assert said.err.count("\n") == 1
    assert not Path("runs").exists() or given[0] == "claims"


def test_a_run_that_fails_ends_the_command_with_an_error_after_all_files_are_written(command, monkeypatch):
    def cases(setting):
        for lr in (0.01, 1e9):
            yield Case(setting.config("digits", 0.1, 42, "fedavg", lr=lr))

    table = replace(EXPERIMENTS["layers"], measure=train_cases(cases), tables=lambda *_: [Table("A table", ["row"])])
    monkeypatch.setitem(EXPERIMENTS, "layers", replace(table, figures=lambda *_: {}))
    said = command("paper", "layers", "--scale", "smoke", "--rounds", 1)
    assert said.code == 2
    assert said.err.startswith("error: digits-dir0.1-fedavg-seed42-")
    assert "failed: " in said.err
    assert said.err.count("\n") == 1
    folder = Path("runs/paper-smoke/layers")
    assert {one["pooled"] for one in read_rows(folder / "results.csv")}
    assert "failed: " in (folder / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_writes_its_files_at_smoke_scale(command, name):
    found = command("paper", name, "--scale", "smoke", "--json").json
    assert found["notes"] == []
    wanted = {"results.csv", "table.md", "table.tex", *(() if name == "claims" else ("figure.pdf", "figure.png"))}
    assert wanted <= set(found["files"])
    assert json.dumps(found)
    table = (Path(found["folder"]) / "table.tex").read_text()
    for part in table.split("\\begin{tabular}")[1:]:
        columns = len(part.partition("}")[0]) - 1
        body = part.partition("\\midrule\n")[2].partition("\n\\bottomrule")[0]
        assert {line.count(" & ") + 1 for line in body.splitlines()} == {columns}
