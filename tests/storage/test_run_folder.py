"""Run folders: their files, which folders are refused, and that equal runs are byte-equal."""

import errno
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from fedobp import Config, Federation, FedobpError, resume_sweep, sweep
from fedobp.config import read_config
from fedobp.engine import Lanes
from fedobp.files import read_checked_json, write
from fedobp.models import Model
from fedobp.storage import RunFolder, claim, new_run_folder

TINY = {"dataset": "digits", "clients": 5, "rounds": 2, "epochs": 1, "model": "mlp"}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One tiny run: its folder and its result."""
    folder = tmp_path_factory.mktemp("once") / "deep" / "run"
    return folder, Federation(Config(**TINY, participation=0.6)).run(out=folder)


# The files of a run.


def test_a_run_writes_these_files_and_no_others(run):
    folder, result = run
    names = {"config.toml", "metrics.jsonl", "timings.jsonl", "clients.csv", "result.json"}
    assert set(files(folder)) == names | {"models/global.safetensors", "models/clients.safetensors"}
    assert result.out == folder


def test_the_configuration_reads_back_as_it_was(run):
    folder, result = run
    assert Config(**read_config(folder / "config.toml")) == result.config


def test_the_configuration_names_versions_and_threads(run):
    head = (run[0] / "config.toml").read_text().split("\n")[:2]
    assert head[0] == "# Run again with: fedobp run --config config.toml"
    assert f"torch {torch.__version__}" in head[1]
    assert f"{torch.get_num_threads()} threads" in head[1]


def test_the_configuration_names_the_kernels_tile_table(tmp_path, monkeypatch):
    """The engine is asked before the folder is made: kernels that are asked for and cannot be used leave none."""
    table = SimpleNamespace(table_hash="0123456789ab")
    monkeypatch.setattr("fedobp.engine.lanes.engine.fused_for", lambda *given: table)
    assert Lanes(Model("mlp", (1, 8, 8), 10), 32).provenance(torch.device("cpu")) == "tile table 0123456789ab"
    monkeypatch.undo()
    monkeypatch.setattr(Lanes, "provenance", lambda self, device: "tile table 0123456789ab")
    Federation(Config(**TINY)).run(out=tmp_path / "run")
    [line] = [one for one in (tmp_path / "run/config.toml").read_text().splitlines() if one.startswith("# Made by")]
    assert line.endswith(" threads, tile table 0123456789ab")
    monkeypatch.undo()
    with pytest.raises(FedobpError, match="--kernels on needs a CUDA device"):
        Federation(Config(**TINY, kernels="on", device="cpu")).run(out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_metrics_have_one_line_a_round_and_no_times(run):
    folder, result = run
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    for line in lines:
        assert len(set(line["cohort"])) == 3
        assert line["loss"] > 0
        assert not {"seconds", "time", "train", "all"} & set(line)
    assert sum(line["bytes_up"] for line in lines) == result.bytes.up_total == 2 * 3 * 4 * 9610
    assert lines[1]["accuracy"]["pooled"] == result.accuracy.pooled
    timings = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    assert [line["round"] for line in timings] == [1, 2]


def test_the_result_is_what_the_caller_got(run):
    folder, result = run
    found = read_checked_json(folder / "result.json")
    assert found.pop("files").keys() == {"config.toml", "metrics.jsonl", "clients.csv"}
    assert found == json.loads(json.dumps(result.to_json()))


@pytest.mark.essential
def test_two_runs_of_one_configuration_are_equal_byte_for_byte(tmp_path):
    config = Config(**TINY, participation=0.6, finetune_epochs=1)
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        random.seed(seed)
        Federation(config).run(out=tmp_path / name)
    first, second = files(tmp_path / "first"), files(tmp_path / "second")
    assert set(first) == set(second)
    for name in ("config.toml", "metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
        assert first[name] == second[name], name


def test_a_second_run_on_one_federation_is_equal_too(tmp_path):
    federation = Federation(Config(**TINY))
    for name in ("first", "between", "second"):
        federation.run("fedper" if name == "between" else "fedobp", out=tmp_path / name)
    first, second = files(tmp_path / "first"), files(tmp_path / "second")
    for name in ("config.toml", "metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
        assert first[name] == second[name], name


@pytest.mark.parametrize(
    ("save", "expected"),
    [("none", set()), ("global", {"models/global.safetensors"})],
)
def test_only_the_models_asked_for_are_written(tmp_path, save, expected):
    Federation(Config(**TINY, save_models=save)).run("fedavg", out=tmp_path)
    assert {name for name in files(tmp_path) if name.startswith("models")} == expected


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Federation(Config(**TINY)).run().out is None
    assert files(tmp_path) == {}


# Lines and files.


def test_lines_are_appended_one_by_one(tmp_path):
    folder = RunFolder(tmp_path / "run", "seed = 1\n")
    folder.log("metrics", {"round": 1})
    folder.log("metrics", {"round": 2, "loss": None})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"round": 1}\n{"round": 2, "loss": null}\n'
    assert (tmp_path / "run" / "config.toml").read_text().endswith("threads\nseed = 1\n")


def test_lines_are_strict_json(tmp_path):
    folder = RunFolder(tmp_path, "")
    with pytest.raises(ValueError, match="JSON"):
        folder.log("metrics", {"loss": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        folder.finish({"loss": float("inf")}, [])


def test_write_replaces_a_whole_file_and_leaves_nothing_beside_it(tmp_path):
    write(tmp_path / "a.txt", b"a longer text")
    write(tmp_path / "a.txt", b"short")
    assert files(tmp_path) == {"a.txt": b"short"}


def test_a_write_that_fails_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(FedobpError, match=r"cannot write .*a\.txt"):
        write(tmp_path / "a.txt", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


# Claiming a folder.


@pytest.mark.parametrize(
    "name",
    ["config.toml", "metrics.jsonl", "timings.jsonl", "clients.csv", "result.json", "compare.json", "compare.toml"],
)
def test_a_folder_that_holds_any_file_of_a_run_is_refused(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(FedobpError, match=rf"already holds a run \({name}\): choose another --out, nothing was over"):
        RunFolder(tmp_path, "seed = 1\n")
    assert files(tmp_path) == {name: b"precious"}


def test_a_folder_that_holds_models_is_refused(tmp_path):
    (tmp_path / "models").mkdir()
    with pytest.raises(FedobpError, match=r"already holds a run \(models\)"):
        RunFolder(tmp_path, "seed = 1\n")
    assert files(tmp_path) == {}


def test_a_run_into_the_folder_of_a_run_overwrites_nothing(run):
    folder, _ = run
    before = files(folder)
    with pytest.raises(FedobpError, match="already holds a run"):
        Federation(Config(**TINY, seed=7)).run(out=folder)
    assert files(folder) == before


def test_a_folder_with_other_files_is_accepted_and_they_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path, "seed = 1\n")
    assert set(files(tmp_path)) == {"notes.txt", "config.toml"}
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("names", [["config.toml"] * 8, ["compare.toml"] * 8])
def test_of_many_that_claim_a_folder_at_once_one_succeeds(tmp_path, monkeypatch, names, links):
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        won = claimed_at_once(folder, names)
        assert len(won) == 1
        assert files(folder) == {names[0]: won[0].encode()}


def test_a_run_and_a_comparison_never_share_a_folder(tmp_path):
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        won = claimed_at_once(folder, ["config.toml", "compare.toml"] * 4)
        assert len(won) <= 1  # both may find the other's file, and give up
        assert set(files(folder).values()) == {one.encode() for one in won}


def refuse_links(*_):
    raise PermissionError(errno.EPERM, "no hard links here")


def claimed_at_once(folder, names):
    """Let threads claim a folder at the same time; return what the successful ones wrote. The others are refused."""
    start = Barrier(len(names))

    def attempt(number):
        start.wait()
        try:
            claim(folder, names[number], f"{number}")
        except FedobpError as error:
            return str(error)
        return f"{number}"

    with ThreadPoolExecutor(len(names)) as pool:
        said = list(pool.map(attempt, range(len(names))))
    return [one for one in said if "already holds a run" not in one]


def test_a_folder_that_was_only_checked_is_free(tmp_path):
    claim(tmp_path)
    claim(tmp_path)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000, "zero\0byte"], ids=["long", "deep", "zero"])
def test_a_folder_that_cannot_have_its_name_is_refused_in_one_short_line(tmp_path, name):
    with pytest.raises(FedobpError, match="cannot write") as caught:
        claim(tmp_path / name)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("out", ["", "  "])
def test_an_empty_folder_name_is_refused(out):
    with pytest.raises(FedobpError, match="`out` is empty"):
        Federation(Config(**TINY)).run(out=out)
    with pytest.raises(FedobpError, match="`out` is empty"):
        sweep([Config(**TINY)], out=[out])


def test_what_is_no_path_is_refused():
    with pytest.raises(FedobpError, match=r"`out` must be the path of a folder, .*, not 3$"):
        Federation(Config(**TINY)).run(out=3)
    with pytest.raises(FedobpError, match=r"`out` must be the path of a folder, .*, not 3$"):
        sweep([Config(**TINY)], out=[3])
    with pytest.raises(FedobpError, match=r"`folder` must be the path of a folder, .*, not None$"):
        resume_sweep(None, {"one": Config(**TINY)})


def test_folders_are_created_with_their_parents(tmp_path):
    assert claim(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("inside", ["", "/deeper"])
def test_a_file_in_the_way_is_refused(tmp_path, inside):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FedobpError, match=r"cannot write .*: choose another place"):
        claim(Path(f"{tmp_path}/file{inside}"))
    assert files(tmp_path) == {"file": b"mine"}


def test_a_folder_of_an_interrupted_comparison_is_refused(tmp_path):
    (tmp_path / "fedavg-seed42").mkdir()
    (tmp_path / "fedavg-seed42" / "config.toml").write_text("")
    with pytest.raises(FedobpError, match="already holds a run"):
        claim(tmp_path)


def test_new_run_folder_refuses_a_runs_that_leads_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to("nowhere/at/all")
    with pytest.raises(FedobpError, match="cannot write runs"):
        new_run_folder("digits")


def test_new_run_folders_never_share_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [new_run_folder("digits-fedobp") for _ in range(5)]
    assert len({folder.resolve() for folder in folders}) == 5
    for folder in folders:
        assert folder.parent == Path("runs")
        assert "-digits-fedobp" in folder.name
        datetime.strptime(folder.name[:15], "%Y%m%d-%H%M%S")
        assert list(folder.iterdir()) == []
    RunFolder(folders[0], "seed = 1\n")  # a new folder is free for a run


def test_new_run_folder_says_what_to_do_where_runs_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("mine")
    with pytest.raises(FedobpError, match=r"cannot write runs .*: choose another place"):
        new_run_folder("digits")
