"""Processes that are killed at any moment: their runs go on to the same bytes."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from children import children
from test_checkpoint import contents

FLAGS = ("--clients", 6, "--rounds", 40, "--epochs", 2, "--participation", 0.5, "--eval-every", 4)


@pytest.mark.parametrize(("method", "every"), [("fedobp", 1), ("fedala", 3)])
def test_a_killed_run_is_resumed_to_the_same_bytes(method, every, tmp_path):
    """Killed twice at random moments; rounds before the newest checkpoint are not trained again."""
    flags = ("-m", "fedobp", "run", *FLAGS, "--method", method)
    draw = random.Random(f"{method}{every}")
    with children() as start:
        whole = start(*flags, "--out", "whole", cwd=tmp_path)
        assert whole.communicate(timeout=300)[1] == ""
        process = start(*flags, "--out", "cut", "--checkpoint-every", every, cwd=tmp_path)
        for kill in range(2):
            done = 3 + 12 * kill + draw.randrange(8)
            _wait_for(process, tmp_path / "cut", done)
            time.sleep(draw.random() * 0.1)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            rounds = [int(path.stem.partition("-")[2]) for path in (tmp_path / "cut" / "checkpoint").glob("server-*")]
            before = (tmp_path / "cut" / "timings.jsonl").read_bytes().splitlines()[: max(rounds)]
            assert max(rounds) >= done - 2 * every  # the newest one may not have been written yet
            process = start("-m", "fedobp", "run", "--resume", "cut", "--checkpoint-every", every, cwd=tmp_path)
        said = process.communicate(timeout=300)
    assert (process.returncode, said[1]) == (0, "")
    assert (tmp_path / "cut" / "timings.jsonl").read_bytes().splitlines()[: len(before)] == before
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_hundred_kills(tmp_path):
    """Runs, a comparison and a sweep of several methods on both engines, killed at random moments."""
    sequential = ("--methods", "fedobp,seqfededt")
    commands = [
        ("run", "--method", "fedobp"),
        ("run", "--method", "pfedfda", "--engine", "serial"),
        ("run", "--method", "floco", "--checkpoint-every", 3),
        ("compare", "--methods", "fedobp,fedper,local,apfl", "--save-models", "all"),
        ("sweep", *sequential, "--grid", "lr=0.01,0.02", "--engine", "serial", "--save-models", "all"),
    ]
    draw, kills = random.Random(1), 0
    with children() as start:
        for at, (name, *flags) in enumerate(commands):
            given = ("-m", "fedobp", name, *FLAGS, *flags)
            whole, cut = tmp_path / f"whole{at}", tmp_path / f"cut{at}"
            assert start(*given, "--out", whole).wait(600) == 0
            longest = _seconds(start, given, tmp_path / f"timed{at}")
            while kills < 20 * (at + 1):
                again = ("-m", "fedobp", "run", "--resume", cut) if name == "run" and cut.exists() else given
                out = () if again is not given else ("--out", cut)
                every = () if "--checkpoint-every" in again else ("--checkpoint-every", 1)
                process = start(*again, *out, *every)
                time.sleep(draw.uniform(0.3, 0.9) * longest)
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait(60)
                    kills += 1
                else:
                    # 2: the process before was killed after it had written the result.
                    assert process.returncode in (0, 2), process.communicate()
                    _check_and_remove(cut, whole)
            if cut.exists():
                last = ("-m", "fedobp", "run", "--resume", cut) if name == "run" else (*given, "--out", cut)
                process = start(*last)
                said = process.communicate(timeout=600)
                assert process.returncode in (0, 2), said  # 2: the run had finished before it was killed
                _check_and_remove(cut, whole)
    assert kills == 100


def _seconds(start, command, folder: Path) -> float:
    began = time.monotonic()
    assert start(*command, "--out", folder).wait(600) == 0
    return time.monotonic() - began


def _check_and_remove(cut: Path, whole: Path) -> None:
    """Compare all files that must be the same, of one run or of several."""
    folders = [path.parent for path in sorted(whole.rglob("config.toml"))]
    assert contents(*(cut / one.relative_to(whole) for one in folders)) == contents(*folders)
    shutil.rmtree(cut)


def _wait_for(process, folder: Path, rounds: int) -> None:
    """Wait until a run has logged so many rounds."""
    log = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.read_bytes().count(b"\n") >= rounds:
            return
        time.sleep(0.01)
    raise AssertionError(f"it ended, or is too slow: {process.poll()}")
