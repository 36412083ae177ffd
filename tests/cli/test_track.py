"""`--track` of `fedobp run` and `fedobp compare`: where a tracker writes, and what is refused."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cli.cases import TINY


def rounds(folder):
    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("loss")]


@pytest.mark.essential
def test_a_run_is_tracked_in_its_folder_and_is_the_same_run(command):
    said = command("run", *TINY, "--out", "run", "--track", "tensorboard", "--json")
    assert (said.code, said.err) == (0, "")
    assert rounds("run/tensorboard/fedobp-seed42") == [1, 2]
    assert command("run", *TINY, "--out", "plain").code == 0
    for name in ("metrics.jsonl", "config.toml", "models/clients.safetensors"):
        assert Path("run", name).read_bytes() == Path("plain", name).read_bytes()


def test_a_comparison_is_tracked_in_one_place_also_when_it_is_repeated(command):
    methods = ("--methods", "fedavg,local", "--seeds", 2)
    assert command("compare", *TINY, *methods, "--out", "here", "--track", "tensorboard").code == 0
    repeat = ("compare", "--config", "here/compare.toml", "--out", "again", "--track", "tensorboard")
    assert command(*repeat).code == 0
    for folder in ("here", "again"):
        found = {path.name: rounds(path) for path in Path(folder, "tensorboard").iterdir()}
        assert found == {f"{name}-seed{seed}": [1, 2] for name in ("fedavg", "local") for seed in (42, 43)}


@pytest.mark.parametrize("words", [("run",), ("compare", "--methods", "local")])
def test_what_cannot_be_tracked_is_refused_before_anything_is_written(command, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    said = command(*words, *TINY, "--track", "tensorboard,mlflow")
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert "pip install 'fedobp[mlflow]'" in said.err
    said = command(*words, *TINY, "--track", "tensorbord")
    assert (said.code, "unknown tracker 'tensorbord': did you mean 'tensorboard'" in said.err) == (2, True)
    assert not list(Path().iterdir())


def test_a_folder_that_holds_a_run_is_not_tracked_in(command):
    assert command("run", *TINY, "--out", "run").code == 0
    said = command("run", *TINY, "--out", "run", "--track", "tensorboard")
    assert (said.code, "already holds a run" in said.err) == (2, True)
    assert not Path("run/tensorboard").exists()
