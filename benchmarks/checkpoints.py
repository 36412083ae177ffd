"""What checkpoints cost: the share of a run's time, and the bytes of each.

    python benchmarks/checkpoints.py                            # the demo's size, three checkpoints: four minutes
    python benchmarks/checkpoints.py --dataset fmnist --seconds 60 --minutes 5

The run is stopped after `--minutes`; time in checkpoints is compared with all of its time. Data: $FEDOBP_DATA.
"""

import argparse
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fedobp import Config, Federation
from fedobp.checkpoint import Checkpoints, Interval
from fedobp.launch import Progress, StopTraining, train_side_by_side


def main() -> None:
    """Measure a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--method", default="fedobp")
    parser.add_argument("--seconds", type=float, default=60.0, help="between checkpoints")
    parser.add_argument("--minutes", type=float, default=3.6)
    given = parser.parse_args()
    spent: list[float] = []
    sizes: list[int] = []
    save = Checkpoints.save

    def timed(self: Checkpoints, number: int) -> None:
        started = time.perf_counter()
        save(self, number)
        spent.append(time.perf_counter() - started)
        sizes.append(sum(path.stat().st_size for path in self._folder.glob(f"*-{number}.safetensors")))
        print(f"round {number}: {spent[-1]:.2f} s, {sizes[-1] / 1e6:.1f} MB", flush=True)

    Checkpoints.save = timed  # type: ignore[method-assign]
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
    regular = spent[:-1]  # the last one is that of the stop
    print(f"{len(regular)} checkpoints: {sum(regular):.2f} s of {total:.1f} s, {sum(regular) / total:.2%}")


if __name__ == "__main__":
    main()
