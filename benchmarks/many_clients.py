"""Many clients on two cores: the time and the peak memory of runs with 10,000 and with 1,000,000 clients.

    python benchmarks/many_clients.py                           # 10,000 clients in arrays, all of them evaluated
    python benchmarks/many_clients.py --clients 1000000 --lazy --eval-clients 1000 --rounds 100

Each method runs in a process of its own: `mlp`, 20 samples of 64 features a client, three of ten labels each, 100
clients a round, with a run folder and a checkpoint every 10 rounds. With `--lazy`, a client is made when it is needed.
The budget is of the whole process, from the import to the last file; a run that needs more exits with 1.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

STARTED = time.perf_counter()
SAMPLES, FEATURES, CLASSES, COHORT = 20, 64, 10, 100
CENTRES = np.random.default_rng(0).standard_normal((CLASSES, FEATURES)).astype(np.float32)


def client(number: int) -> tuple[Any, Any]:
    """Return a client's samples: three labels, each around its centre."""
    random = np.random.default_rng([7, number])
    y = random.choice(random.choice(CLASSES, 3, replace=False), SAMPLES)
    return CENTRES[y] + 2 * random.standard_normal((SAMPLES, FEATURES), dtype=np.float32), y


def peak_mib() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Train one method, and return what it took."""
    from fedobp import Config, Federation

    found: dict[str, Any] = {"method": given.work, "import_s": time.perf_counter() - STARTED, "import_mib": peak_mib()}
    config = Config(
        rounds=given.rounds, participation=COHORT / given.clients, model="mlp", normalize="none",
        eval_clients=given.eval_clients, eval_every=max(1, given.rounds // 2), store_memory=given.store_memory,
    )  # fmt: skip
    begun = time.perf_counter()
    lazy = {"lazy": True, "classes": CLASSES} if given.lazy else {}
    federation = Federation.from_data(client, clients=given.clients, config=config, **lazy)
    found |= {"build_s": time.perf_counter() - begun, "build_mib": peak_mib()}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        ends: list[tuple[float, float]] = []  # of rounds: the time, and the process's own on all cores
        result = federation.run(
            given.work,
            out=folder,
            checkpoint_every=10,
            progress=lambda _: ends.append((time.perf_counter(), time.process_time())),
        )
        found["run_s"] = time.perf_counter() - begun
        found["folder_mb"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    # Rounds without an evaluation; a checkpoint is in every tenth of them.
    evaluated = {number for number, _, _ in result.history}
    steps = [np.subtract(after, before) for before, after in pairwise(ends)]
    rounds = np.stack([step for number, step in enumerate(steps, 2) if number not in evaluated])
    (found["round_s"], found["round_cpu_s"]), found["round_median_s"] = rounds.mean(axis=0), np.median(rounds[:, 0])
    found |= {"peak_mib": peak_mib(), "accuracy": result.accuracy.pooled, "evaluated": result.protocol.clients}
    return {**found, "all_s": time.perf_counter() - STARTED}


def main() -> None:
    """Measure each method in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--eval-clients", type=int)
    parser.add_argument("--lazy", action="store_true")
    parser.add_argument("--store-memory", type=float, default=0.0, help="GiB for clients' state, as of fedobp run")
    parser.add_argument("--methods", default="fedobp,fedavg")
    parser.add_argument("--minutes", type=float, default=2.0, help="the budget of time")
    parser.add_argument("--gib", type=float, default=2.0, help="the budget of memory")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="--batch-size")  # 15 samples are one batch
            print(json.dumps(run(given)))
        return
    within = True
    for method in given.methods.split(","):
        arguments = [*sys.argv, "--work", method]
        done = subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        words = (
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
        )
        print(", ".join(words), flush=True)
        within &= found["all_s"] <= 60 * given.minutes and found["peak_mib"] <= 1024 * given.gib
    print(f"{'within' if within else 'beyond'} the budget of {given.minutes:g} minutes and {given.gib:g} GiB each")
    sys.exit(not within)


if __name__ == "__main__":
    main()
