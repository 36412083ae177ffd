"""What checkpoints cost: the shares of a run's time, and the bytes of each.

    python benchmarks/checkpoints.py                            # the demo's size, three checkpoints: four minutes
    python benchmarks/checkpoints.py --dataset fmnist --seconds 60 --minutes 5

The run is stopped after `--minutes`. Training waits only while a checkpoint is taken; a thread writes it, which on the
CPU takes time from training too: the cost is between the two shares. Data: $FEDOBP_DATA.
"""

import argparse
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fedobp import Config, Federation
from fedobp.checkpoint import Checkpoints, Interval, Snapshot
from fedobp.launch import Progress, StopTraining, train_side_by_side


def main() -> None:
    """Measure a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--method", default="fedobp")
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
    deadline = time.perf_counter() + 60 * given.minutes

    def progress(at: Progress) -> None:
        if time.perf_counter() > deadline:
            raise StopTraining

    with tempfile.TemporaryDirectory() as place:
        plan = federation.plan(federation.config, federation.method, Path(place) / "run")
        started = time.perf_counter()
        with suppress(StopTraining):
            train_side_by_side([plan], progress, interval=Interval(seconds=given.seconds))
        total = time.perf_counter() - started
    stalls, writes = sum(held[:-1]), sum(busy[:-1])  # the last one is that of the stop
    print(
        f"{len(held) - 1} checkpoints in {total:.1f} s: training waited {stalls:.2f} s ({stalls / total:.2%}), "
        f"a thread wrote for {writes:.2f} s ({writes / total:.2%})"
    )


if __name__ == "__main__":
    main()
