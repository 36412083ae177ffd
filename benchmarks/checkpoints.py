"""What checkpoints cost: the shares of a run's time, and the bytes of each.

    python benchmarks/checkpoints.py                            # the demo's size, three checkpoints: four minutes
    python benchmarks/checkpoints.py --dataset fmnist --seconds 60 --minutes 5
    python benchmarks/checkpoints.py --dataset cifar10 --runs 16 --seconds 30 --minutes 4.2       # on a GPU

The runs are stopped after `--minutes`. Where a checkpoint takes w seconds to write, the next one is taken after 10 w
seconds at the earliest, if `--seconds` is less. Training waits only while a checkpoint is taken; a thread writes it,
which on the CPU takes time from training too: the cost is between the two shares. The last line compares the rounds a
second before the first checkpoint (without the first five seconds) and after it. Data: $FEDOBP_DATA.
"""

import argparse
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fedobp import Config, Federation
from fedobp.checkpoint import Checkpoints, Interval, Snapshot
from fedobp.launch import Progress, StopTraining, train_side_by_side


def main() -> None:
    """Measure a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--method", default="fedobp")
    parser.add_argument("--runs", type=int, default=1, help="side by side, with seeds from 42")
    parser.add_argument("--seconds", type=float, default=60.0, help="between checkpoints")
    parser.add_argument("--minutes", type=float, default=3.6)
    given = parser.parse_args()
    held: list[float] = []  # seconds in which training waited
    busy: list[float] = []  # seconds of the thread that writes
    save, write = Checkpoints.save, Checkpoints._write

    def timed_save(self: Checkpoints, number: int) -> None:
        started = time.perf_counter()
        save(self, number)
        held.append(time.perf_counter() - started)

    def timed_write(self: Checkpoints, snapshot: Snapshot) -> None:
        started = time.perf_counter()
        write(self, snapshot)
        busy.append(time.perf_counter() - started)
        size = sum(path.stat().st_size for path in self._folder.glob(f"*-{snapshot.round}.safetensors"))
        print(f"round {snapshot.round}: written in {busy[-1]:.2f} s, {size / 1e6:.1f} MB", flush=True)

    Checkpoints.save, Checkpoints._write = timed_save, timed_write  # type: ignore[method-assign]
    config = Config(dataset=given.dataset, method=given.method, rounds=1_000_000, eval_every=1_000_000)
    federation = Federation(config)
    started = time.perf_counter()
    deadline = started + 60 * given.minutes
    times: list[tuple[float, int, bool]] = []  # of each round: when, its number, and whether a checkpoint was before it

    def progress(at: Progress) -> None:
        times.append((time.perf_counter(), at.round, bool(held)))
        if time.perf_counter() > deadline:
            raise StopTraining

    with tempfile.TemporaryDirectory() as place:
        plans = [
            federation.plan(replace(federation.config, seed=42 + run), federation.method, Path(place) / f"run{run}")
            for run in range(given.runs)
        ]
        with suppress(StopTraining):
            train_side_by_side(plans, progress, interval=Interval(seconds=given.seconds))
        total = time.perf_counter() - started
    stalls, writes = sum(held[: -given.runs]), sum(busy[: -given.runs])  # the last ones are those of the stop
    print(
        f"{len(held) // given.runs - 1} checkpoints of {given.runs} runs in {total:.1f} s: training waited "
        f"{stalls:.2f} s ({stalls / total:.2%}), a thread wrote for {writes:.2f} s ({writes / total:.2%})"
    )
    before = [(at, number) for at, number, saved in times if not saved and at > started + 5]
    after = [(at, number) for at, number, saved in times if saved]
    speeds = [(last[1] - first[1]) / (last[0] - first[0]) for first, *_, last in (before, after)]
    print(f"rounds a second: {speeds[0]:.3f} before the first checkpoint, {speeds[1]:.3f} after it")


if __name__ == "__main__":
    main()
