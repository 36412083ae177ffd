"""Sweeps in folders: planned once, continued to the same bytes, cut into shards, and collected."""

import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from resolved import resolved

from fedobp import Config, Dataset, FedobpError
from fedobp.algorithms import METHODS
from fedobp.algorithms.fedavg import FedAvg
from fedobp.data import load, partition, save_partition
from fedobp.files import lock
from fedobp.sweep_file import MOST_RUNS
from fedobp.sweep_folder import collect, estimate, resume_sweep
from fedobp.sweep_plan import Shard, Sweep, plan_folder, read_plan

SMALL = {"clients": 6, "rounds": 3, "epochs": 1, "participation": 0.5, "model": "mlp", "eval_every": 1}


def grid(seeds=(1, 2), methods=("fedobp", "fedavg"), **settings):
    return {
        f"{method}-seed{seed}": Config(**{**SMALL, **settings}, method=method, seed=seed)
        for seed in seeds
        for method in methods
    }


def contents(folder: Path) -> dict[str, bytes]:
    """The files that must be the same whenever a run is trained."""
    names = ("config.toml", "metrics.jsonl", "clients.csv", "models/global.safetensors", "models/clients.safetensors")
    return {f"{run.name}/{name}": (run / name).read_bytes() for run in folder.glob("*-seed*") for name in names}


def launches(folder: Path) -> list[list[str]]:
    return tomllib.loads((folder / "sweep.toml").read_text())["launches"]


class Stop(Exception):
    """What a test ends a sweep with."""


def test_a_sweep_trains_all_runs_once(tmp_path, monkeypatch):
    outcome = resume_sweep(tmp_path / "a", grid())
    assert list(outcome.runs) == list(grid())
    assert (outcome.failed, outcome.missing) == ({}, [])
    assert launches(tmp_path / "a") == [list(grid())]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*") if path.is_file()}
    monkeypatch.setattr("fedobp.sweep_folder.sweep", None)  # nothing is trained again
    again = resume_sweep(tmp_path / "a", grid())
    assert {name: run.result for name, run in again.runs.items()} == {n: run.result for n, run in outcome.runs.items()}
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_an_interrupted_sweep_goes_on_to_the_same_bytes(tmp_path):
    """Of two launches the first one is kept, and the second one is trained again, whole."""
    resume_sweep(tmp_path / "whole", grid(), most=2)
    seen = []

    def stop(at):
        seen.append(at)
        if len(seen) == 2 * 3 + 3:  # in the second launch
            raise Stop

    with pytest.raises(Stop):
        resume_sweep(tmp_path / "a", grid(), most=2, progress=stop)
    assert launches(tmp_path / "a") == [list(grid())[:2], list(grid())[2:]]
    kept = (tmp_path / "a" / "fedobp-seed1" / "result.json").read_bytes()
    assert not (tmp_path / "a" / "fedobp-seed2" / "result.json").exists()
    seen = []
    outcome = resume_sweep(tmp_path / "a", grid(), progress=lambda at: seen.append(at))
    assert len(seen) == 2 * 3
    assert list(outcome.runs) == list(grid())
    assert (tmp_path / "a" / "fedobp-seed1" / "result.json").read_bytes() == kept
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")


def test_a_finished_run_of_an_unfinished_launch_is_kept(tmp_path):
    resume_sweep(tmp_path / "a", grid())
    whole = contents(tmp_path / "a")
    for file in ("result.json", "clients.csv"):
        (tmp_path / "a" / "fedavg-seed1" / file).unlink()
    kept = (tmp_path / "a" / "fedobp-seed1" / "result.json").read_bytes()
    resume_sweep(tmp_path / "a", grid())
    assert contents(tmp_path / "a") == whole
    assert (tmp_path / "a" / "fedobp-seed1" / "result.json").read_bytes() == kept


def test_runs_that_are_added_get_launches_of_their_own(tmp_path):
    resume_sweep(tmp_path, grid(seeds=(1,)))
    before = contents(tmp_path)
    outcome = resume_sweep(tmp_path, grid(seeds=(1, 2, 3)))
    assert list(outcome.runs) == list(grid(seeds=(1, 2, 3)))
    assert launches(tmp_path) == [list(grid(seeds=(1,))), list(grid(seeds=(2, 3)))]
    assert before.items() <= contents(tmp_path).items()
    fewer = resume_sweep(tmp_path, grid(seeds=(2,)))
    assert list(fewer.runs) == list(grid(seeds=(2,)))
    assert len(launches(tmp_path)) == 2


def test_a_run_with_other_settings_is_refused_and_nothing_changes(tmp_path):
    resume_sweep(tmp_path, grid(seeds=(1,)))
    plan = (tmp_path / "sweep.toml").read_bytes()
    with pytest.raises(FedobpError, match=r"has the run fedobp-seed1 with rounds = 3, not 4: choose another --out"):
        resume_sweep(tmp_path, grid(seeds=(1, 2), rounds=4))
    asked = grid(seeds=(1,))
    asked["fedobp-seed1"] = replace(asked["fedobp-seed1"], options={"q": 0.5})
    with pytest.raises(FedobpError, match=r"with q = .*, not 0\.5"):
        resume_sweep(tmp_path, asked)
    assert (tmp_path / "sweep.toml").read_bytes() == plan


def test_options_as_texts_and_a_partition_by_another_path_are_the_same_run(tmp_path, monkeypatch):
    """As flags give them."""
    monkeypatch.chdir(tmp_path)
    digits = load("digits", tmp_path)
    save_partition(tmp_path / "six", digits, partition(digits.y, 6), resolved(clients=6).partition_settings)
    settings = {"options": {"q": "0.90"}, "partition_file": "six.json"}
    runs = grid(seeds=(1,), methods=("fedobp",), **settings)
    resume_sweep(tmp_path / "a", runs, minutes=0)
    assert list(resume_sweep(tmp_path / "a", runs).runs) == list(runs)
    with pytest.raises(FedobpError, match=r"with q = 0\.9, not 0\.8: choose"):
        resume_sweep(tmp_path / "a", grid(seeds=(1,), methods=("fedobp",), options={"q": "0.8"}))


def test_functions_that_cannot_be_imported_are_given_again(tmp_path):
    def halves(task):
        return [np.arange(client, len(task.y), task.clients) for client in range(task.clients)]

    def turned(task):
        return halves(task)[::-1]

    runs = {f"{made.__name__}-seed1": Config(**SMALL, seed=1, partition=made) for made in (halves, turned)}
    resume_sweep(tmp_path / "whole", runs)
    resume_sweep(tmp_path / "a", runs, minutes=0)
    assert list(resume_sweep(tmp_path / "a", runs).runs) == list(runs)
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")
    launch = json.loads((tmp_path / "a" / "halves-seed1" / "result.json").read_text())["launch"]
    assert launch[1]["partition"].endswith("turned")
    more = {**runs, "more-seed2": Config(**SMALL, seed=2, partition=halves)}
    assert list(resume_sweep(tmp_path / "a", more).runs) == list(more)


def test_a_dataset_in_memory_is_given_again(tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    dataset = Dataset.from_data(x, (x[:, 0] > 0).astype(int))
    runs = grid(methods=("fedavg",))
    resume_sweep(tmp_path, runs, dataset=dataset, minutes=0)
    assert list(resume_sweep(tmp_path, runs, dataset=dataset).runs) == list(runs)
    other = Dataset.from_data(np.roll(x, 1, axis=0), (x[:, 0] > 0).astype(int))
    with pytest.raises(FedobpError, match="fedavg-seed1 was trained with other data than what is given"):
        resume_sweep(tmp_path, {**runs, **grid(seeds=(3,), methods=("fedavg",))}, dataset=other)


def test_a_launch_with_a_run_that_cannot_start_any_more_waits_for_it(tmp_path, monkeypatch):
    """Without it the bytes of the others would not be those of the plan."""

    class Plugin(FedAvg):
        name = "plugin"

    runs = grid(seeds=(1,), methods=("fedavg",))
    with monkeypatch.context() as installed:
        installed.setitem(METHODS, "plugin", Plugin)
        runs |= grid(seeds=(1,), methods=("plugin",))
        resume_sweep(tmp_path / "whole", runs)
        resume_sweep(tmp_path / "a", runs, minutes=0)
    outcome = resume_sweep(tmp_path / "a", runs)
    assert "unknown method 'plugin'" in outcome.failed["plugin-seed1"].error
    assert outcome.missing == ["fedavg-seed1"]
    monkeypatch.setitem(METHODS, "plugin", Plugin)
    assert list(resume_sweep(tmp_path / "a", runs).runs) == list(runs)
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text("precious")
    with pytest.raises(FedobpError, match="already holds a run"):
        resume_sweep(tmp_path, grid(seeds=(1,)))
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_name_that_is_no_folder_of_its_own_is_refused(tmp_path):
    (tmp_path / "result.json").write_text("precious")
    with pytest.raises(FedobpError, match=r"'\.\.' in the list of runs is no name of a run"):
        resume_sweep(tmp_path / "a", {"..": Config(**SMALL)})
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_folder_may_be_a_text(tmp_path):
    assert resume_sweep(str(tmp_path / "a"), grid(), minutes=0).missing == list(grid())


def test_a_failed_run_is_recorded_and_not_tried_again(tmp_path):
    runs = grid(seeds=(1,))
    runs["wild"] = Config(**SMALL, method="fedavg", seed=1, lr=1e9)
    outcome = resume_sweep(tmp_path, runs)
    assert list(outcome.runs) == list(grid(seeds=(1,)))
    assert "no longer finite" in outcome.failed["wild"].error
    assert json.loads((tmp_path / "wild" / "failed.json").read_text())["method"] == "fedavg"
    seen = []
    again = resume_sweep(tmp_path, runs, progress=seen.append)
    assert seen == []
    assert again.failed["wild"].error == outcome.failed["wild"].error


def test_a_sweep_in_which_no_run_starts_releases_its_folder(tmp_path):
    outcome = resume_sweep(tmp_path / "a", grid(clients=1000))
    assert set(outcome.failed) == set(grid())
    assert not (tmp_path / "a").exists()
    missing = resume_sweep(tmp_path / "a", grid(dataset="nothing"))
    assert "unknown dataset 'nothing'" in missing.failed["fedobp-seed1"].error
    assert not (tmp_path / "a").exists()


def test_a_bug_is_passed_on(tmp_path, monkeypatch):
    def broken(self, *given):
        raise ZeroDivisionError

    monkeypatch.setattr("fedobp.algorithms.local.LocalOnly.download", broken)
    outcome = resume_sweep(tmp_path, grid(seeds=(1,), methods=("local", "fedavg")))
    assert list(outcome.runs) == ["fedavg-seed1"]
    assert isinstance(outcome.bug, ZeroDivisionError)
    assert (
        "local.py" in outcome.failed["local-seed1"].error or "test_sweep_folder" in outcome.failed["local-seed1"].error
    )


def test_time_that_is_out_leaves_the_rest_for_the_next_call(tmp_path):
    outcome = resume_sweep(tmp_path / "a", grid(), minutes=0)
    assert outcome.missing == list(grid())
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"sweep.toml"}
    slow = resume_sweep(tmp_path / "b", grid(rounds=100_000), minutes=0.02)
    assert slow.missing == list(grid())
    assert all(list((tmp_path / "b" / name / "checkpoint").glob("server-*")) for name in grid())
    assert resume_sweep(tmp_path / "a", grid(), minutes=60).missing == []


def test_a_launch_whose_last_round_ends_late_is_kept(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedobp.sweep_folder.time", SimpleNamespace(monotonic=lambda: now[0]))

    def late(at):
        now[0] = 100.0 * (at.round == 3)

    assert resume_sweep(tmp_path, grid(), minutes=1, progress=late).missing == []


def test_shards_are_disjoint_and_together_are_all(tmp_path):
    runs = grid(seeds=(1, 2, 3))
    resume_sweep(tmp_path / "whole", runs, most=2)
    parts = [resume_sweep(tmp_path / "shared", runs, most=2, shard=Shard(index, 2)) for index in (1, 2)]
    assert [len(part.runs) for part in parts] == [4, 6]  # the second one sees the first one's, too
    assert parts[0].missing == ["fedobp-seed2", "fedavg-seed2"]
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")
    for index in (1, 2):
        resume_sweep(tmp_path / f"part{index}", runs, most=2, shard=Shard(index, 2))
    plan = collect(tmp_path / "all", [tmp_path / "part1", tmp_path / "part2"])
    assert list(plan.outcome(list(runs), {}).runs) == list(runs)
    assert contents(tmp_path / "all") == contents(tmp_path / "whole")
    again = collect(tmp_path / "part1", [tmp_path / "part1", tmp_path / "part2"])
    assert list(again.outcome(list(runs), {}).runs) == list(runs)


def test_parts_of_different_sweeps_are_not_collected(tmp_path):
    resume_sweep(tmp_path / "a", grid(seeds=(1,)))
    resume_sweep(tmp_path / "b", grid(seeds=(1,), rounds=2))
    with pytest.raises(FedobpError, match="are not of one sweep: their plans differ"):
        collect(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(FedobpError, match="holds no sweep"):
        collect(tmp_path / "all", [tmp_path])
    assert not (tmp_path / "all").exists()


def test_parts_are_collected_into_a_folder_that_has_more_runs_since(tmp_path):
    resume_sweep(tmp_path / "part", grid(seeds=(1,)))
    collect(tmp_path / "all", [tmp_path / "part"])
    resume_sweep(tmp_path / "all", grid(seeds=(1, 2)))
    assert list(collect(tmp_path / "all", [tmp_path / "part"]).configs) == list(grid(seeds=(1, 2)))
    resume_sweep(tmp_path / "other", grid(seeds=(1,), rounds=2), minutes=0)
    with pytest.raises(FedobpError, match="other holds another sweep, whose plan differs: choose another folder"):
        collect(tmp_path / "other", [tmp_path / "part"])


def test_a_damaged_run_is_not_collected(tmp_path):
    resume_sweep(tmp_path / "part", grid(seeds=(1,)))
    (tmp_path / "part" / "fedavg-seed1" / "result.json").write_text("{")
    with pytest.raises(
        FedobpError, match=r"part/fedavg-seed1/result\.json is damaged .*: remove the folder of the run"
    ):
        collect(tmp_path / "all", [tmp_path / "part"])
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"sweep.toml", "fedobp-seed1"}


def test_a_launch_that_is_being_trained_is_not_collected(tmp_path):
    """Its folders would be taken from under the process that trains there."""
    resume_sweep(tmp_path / "part", grid(), most=2)
    first, second = launches(tmp_path / "part")
    resume_sweep(tmp_path / "all", grid(), most=2, minutes=0)
    with (
        lock(read_plan(tmp_path / "all" / "sweep.toml").lock_file(second)),
        pytest.raises(FedobpError, match=rf"process {os.getpid()} trains \S+all/{second[0]}: wait until it ends"),
    ):
        collect(tmp_path / "all", [tmp_path / "part"])
    assert {path.parent.name for path in (tmp_path / "all").glob("*/result.json")} == set(first)
    collect(tmp_path / "all", [tmp_path / "part"])
    assert contents(tmp_path / "all") == contents(tmp_path / "part")


def test_a_run_with_other_settings_than_the_plan_says_is_refused(tmp_path):
    runs = grid(seeds=(1,))
    resume_sweep(tmp_path, runs)
    one, other, aside = (tmp_path / name for name in (*runs, "aside"))
    for source, target in ((one, aside), (other, one), (aside, other)):
        source.rename(target)
    with pytest.raises(FedobpError, match=r"fedobp-seed1 has other settings than sweep\.toml says: put back the run"):
        resume_sweep(tmp_path, runs)
    one.rename(aside)
    other.rename(one)
    resume_sweep(tmp_path, {"fedobp-seed1": runs["fedobp-seed1"]})
    plan = tmp_path / "sweep.toml"
    plan.write_text(plan.read_text().replace("rounds = 3", "rounds = 4"))
    with pytest.raises(FedobpError, match="has other settings than"):
        resume_sweep(tmp_path, {"fedobp-seed1": replace(runs["fedobp-seed1"], rounds=4)})


def test_a_sweep_of_too_many_runs_is_refused_before_it_is_planned(tmp_path, monkeypatch):
    """Its plan could not be read again."""
    monkeypatch.setattr("fedobp.sweep_file.MOST_RUNS", 3)
    with pytest.raises(FedobpError, match=r"the sweep in .* has more than 3 runs: use several sweeps"):
        resume_sweep(tmp_path / "a", grid())
    assert not (tmp_path / "a").exists()
    resume_sweep(tmp_path / "a", grid(seeds=(1,)))
    before = (tmp_path / "a" / "sweep.toml").read_bytes()
    with pytest.raises(FedobpError, match="has more than 3 runs"):
        resume_sweep(tmp_path / "a", grid(seeds=(2,)))
    assert (tmp_path / "a" / "sweep.toml").read_bytes() == before


def test_the_plan_of_the_most_runs_is_read_back(tmp_path):
    config = resolved(**SMALL)
    runs = {f"{'long' * 30}-seed{seed}": replace(config, seed=seed, partition_seed=seed) for seed in range(MOST_RUNS)}
    Sweep(tmp_path / "a" / "sweep.toml", runs, [list(runs)], 1.0).record()
    assert len(read_plan(tmp_path / "a" / "sweep.toml").configs) == MOST_RUNS


def test_launches_that_differ_in_seeds_only_are_measured_once(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr("fedobp.sweep_folder._measure", lambda configs: measured.append(configs) or 1.0)
    plan, _, _ = plan_folder(tmp_path / "sweep.toml", grid(), most=2)
    assert list(estimate(plan, plan.launches)) == [1.0, 1.0]
    assert len(measured) == 1


def test_methods_of_different_kinds_have_launches_of_their_own(tmp_path):
    """Also in the modes of one method: FedALA as published passes a model from client to client."""
    methods = ("fedavg", "seqfededt", "local", "fedpac", "pfedme", "fedprox")
    runs = grid(seeds=(1,), methods=methods)
    runs["ala"] = Config(**SMALL, method="fedala")
    runs["ala-published"] = Config(**SMALL, method="fedala", options={"mode": "as-published"})
    plan, _, _ = plan_folder(tmp_path / "sweep.toml", runs)
    assert plan.launches == [
        ["fedavg-seed1", "local-seed1", "fedprox-seed1"],
        ["seqfededt-seed1", "ala-published"],
        ["fedpac-seed1", "pfedme-seed1", "ala"],
    ]
    assert not (tmp_path / "sweep.toml").exists()


def test_the_recorded_memory_plans_what_is_added(tmp_path):
    """The machine that adds runs may be another one."""
    resume_sweep(tmp_path, grid(seeds=(1,)))
    file = tmp_path / "sweep.toml"
    lines = ["memory = 1e-9" if line.startswith("memory") else line for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines))
    plan, _, _ = plan_folder(file, grid(seeds=(1, 2)))
    assert plan.launches == [list(grid(seeds=(1,))), ["fedobp-seed2"], ["fedavg-seed2"]]


def test_the_time_of_a_launch_is_estimated(tmp_path):
    plan, _, _ = plan_folder(tmp_path / "sweep.toml", grid(seeds=(1,), rounds=30))
    longer, _, _ = plan_folder(tmp_path / "sweep.toml", grid(seeds=(1,), rounds=30_000, eval_every=1000))
    [seconds] = estimate(plan, plan.launches)
    [more] = estimate(longer, longer.launches)
    assert 0 < seconds < more
    assert not list(tmp_path.iterdir())


def _hold(path, held, go_on):
    with lock(path) as mine:
        assert mine
        held.set()
        go_on.wait(60)


def test_a_launch_that_another_process_trains_is_left_to_it(tmp_path):
    resume_sweep(tmp_path, grid(seeds=(1,)), minutes=0)
    context = multiprocessing.get_context("spawn")
    held, go_on = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / ".fedobp-seed1.lock", held, go_on))
    other.start()
    try:
        assert held.wait(60)
        assert resume_sweep(tmp_path, grid(seeds=(1,))).missing == list(grid(seeds=(1,)))
    finally:
        go_on.set()
        other.join(60)
    assert other.exitcode == 0
    assert resume_sweep(tmp_path, grid(seeds=(1,))).missing == []
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("step", ["flock", "write"])
def test_a_lock_that_cannot_be_taken_or_written_is_one_sentence(step, tmp_path, monkeypatch):
    """A file system without locks; a full disk, for which a limit of file sizes stands here."""
    path = tmp_path / ".lock"
    if step == "flock":
        monkeypatch.setattr(fcntl, "flock", lambda *_: os.open(tmp_path / "none", os.O_RDONLY))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if step == "write" else soft, hard))
    try:
        with pytest.raises(FedobpError, match=r"cannot write .*\.lock \((File too large|No such file).*\): choose"):
            lock(path).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.undo()
    with lock(path) as mine:
        assert mine


def test_a_damaged_failure_or_plan_is_a_user_error(tmp_path):
    runs = {"wild": Config(**SMALL, method="fedavg", seed=1, lr=1e9), **grid(seeds=(1,))}
    resume_sweep(tmp_path, runs)
    for content in ("{", "[]", "[" * 100_000):
        (tmp_path / "wild" / "failed.json").write_text(content)
        with pytest.raises(FedobpError, match=r"failed\.json is damaged: remove it"):
            resume_sweep(tmp_path, runs)
    shutil.copy(tmp_path / "fedobp-seed1" / "config.toml", tmp_path / "sweep.toml")
    with pytest.raises(FedobpError, match="unknown key"):
        resume_sweep(tmp_path, runs)
    (tmp_path / "sweep.toml").write_text("[settings]\nrounds = 3\n")
    with pytest.raises(FedobpError, match="is no plan of a sweep, it has no `launches`"):
        resume_sweep(tmp_path, runs)
