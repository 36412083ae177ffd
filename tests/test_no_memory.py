"""Sweeps and runs for which memory is not enough: nothing is lost, and they go on when they are called again."""

from pathlib import Path

import pytest
import torch
from test_checkpoint import SMALL, begin, contents, go_on

from fedobp import Config, Federation, resume_sweep
from fedobp.checkpoint import note_failure
from fedobp.errors import NoMemory, out_of_memory
from fedobp.launch import Launch
from fedobp.on_ray import train_launch
from fedobp.sweep_plan import plan_folder

NO_MEMORY = "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 GB"
RUNS = {"one": Config(**SMALL), "beside": Config(**SMALL, seed=7), "other": Config(**SMALL, batch_size=7)}


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (NoMemory("the images need more memory than there is"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError(NO_MEMORY), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("unable to mmap 351 bytes from file <x>: Cannot allocate memory (12)"), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_what_means_that_memory_is_not_enough(error, is_one):
    assert out_of_memory(error) is is_one


def in_training(monkeypatch):
    """A GPU that is full in round 4 of the first launch."""
    train = Launch.train

    def failing(launch, jobs, prepared=None):
        if len(launch.active) == 2 and launch.round == 3:
            return dict.fromkeys(jobs, RuntimeError(NO_MEMORY))
        return train(launch, jobs, prepared)

    monkeypatch.setattr(Launch, "train", failing)


def when_built(monkeypatch):
    """The data of the second run of the first launch."""
    resolved = Federation.resolved

    def failing(dataset, config, *given):
        if config.seed == 7:
            raise MemoryError
        return resolved(dataset, config, *given)

    monkeypatch.setattr(Federation, "resolved", failing)


@pytest.mark.parametrize(("place", "trained"), [(in_training, [4, 5, 6]), (when_built, [1, 2, 3, 4, 5, 6])])
def test_a_sweep_trains_its_other_launches_and_goes_on_when_it_is_called_again(place, trained, tmp_path, monkeypatch):
    resume_sweep(tmp_path / "whole", RUNS)
    with monkeypatch.context() as patch:
        place(patch)
        outcome = resume_sweep(tmp_path / "cut", RUNS, checkpoint_every=1)
    assert list(outcome.runs) == ["other"]
    assert outcome.bug is None
    assert list(outcome.failed) == ["one", "beside"]
    [error] = {one.error for one in outcome.failed.values()}
    assert error == (
        f"there is not enough memory for 2 runs side by side: free some and call `fedobp sweep {tmp_path / 'cut'}`, or "
        "make a new sweep with a smaller --store-memory"
    )
    assert not list(tmp_path.rglob("failed.json"))
    seen = []
    assert resume_sweep(tmp_path / "cut", RUNS, progress=lambda at: seen.append(at.round)).failed == {}
    assert sorted(set(seen)) == trained
    assert contents(*(tmp_path / "cut" / name for name in RUNS)) == contents(
        *(tmp_path / "whole" / name for name in RUNS)
    )


def test_a_run_that_has_finished_before_is_not_named(tmp_path, monkeypatch):
    """A launch of which one run has ended trains again as a whole."""
    runs = {"short": Config(**{**SMALL, "rounds": 2}), "long": Config(**SMALL)}
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "train", lambda launch, jobs, prepared=None: dict.fromkeys(jobs, MemoryError()))
        assert list(resume_sweep(tmp_path, runs).failed) == ["short", "long"]
    train = Launch.train

    def failing(launch, jobs, prepared=None):
        return dict.fromkeys(jobs, MemoryError()) if launch.round == 3 else train(launch, jobs, prepared)

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "train", failing)
        outcome = resume_sweep(tmp_path, runs, checkpoint_every=1)
    assert (list(outcome.runs), list(outcome.failed)) == (["short"], ["long"])


def test_data_that_cannot_be_read_is_no_bug(tmp_path, monkeypatch):
    def read(config):
        raise MemoryError

    monkeypatch.setattr("fedobp.sweeps.read", read)
    outcome = resume_sweep(tmp_path, RUNS)
    assert outcome.bug is None
    assert {one.error for one in outcome.failed.values()} == {
        "there is not enough memory: free some, or use a smaller --participation, --batch-size or --model"
    }
    assert not list(tmp_path.rglob("failed.json"))


def test_checkpoints_that_cannot_be_read_for_want_of_memory_are_kept(tmp_path, monkeypatch):
    config = Config(**SMALL)
    Federation(config).run(out=tmp_path / "whole")
    begin(config, tmp_path / "cut")
    kept = {path.name for path in (tmp_path / "cut" / "checkpoint").iterdir()}

    def opened(*given, **more):
        raise RuntimeError(NO_MEMORY)

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.safe_open", opened)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            go_on(config, tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr("fedobp.checkpoint.Checkpoints._restore", opened)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            go_on(config, tmp_path / "cut")
    assert {path.name for path in (tmp_path / "cut" / "checkpoint").iterdir()} == kept
    assert go_on(config, tmp_path / "cut")[-1] == 6
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_ray_worker_gives_no_files_of_runs_that_have_not_ended(tmp_path, monkeypatch):
    """They would replace checkpoints of this machine, which a later call goes on from."""
    plan, _, _ = plan_folder(tmp_path / "sweep.toml", {name: RUNS[name] for name in ("one", "beside")})
    in_training(monkeypatch)
    files, errors = train_launch(plan.to_toml(), "sweep.toml", ["one", "beside"], torch.get_num_threads())
    assert files == {}
    assert list(errors) == ["one", "beside"]


def test_a_run_is_not_noted_as_one_that_failed(tmp_path, monkeypatch):
    noted: list[Path] = []
    monkeypatch.setattr("fedobp.launch.note_failure", lambda *given: noted.append(note_failure(*given)))
    monkeypatch.setattr(Launch, "train", lambda launch, jobs, prepared=None: dict.fromkeys(jobs, MemoryError()))
    with pytest.raises(MemoryError):
        Federation(RUNS["one"]).run(out=tmp_path / "run", checkpoint_every=1)
    assert noted == []
