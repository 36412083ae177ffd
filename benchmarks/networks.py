"""Residual networks: seconds a round by engine, and the accuracy of methods.

    python benchmarks/networks.py speed --models resnet8,resnet8-bn --runs 1,8
    python benchmarks/networks.py accuracy --rounds 200 --seeds 42,43

Both write to one JSON file, part by part. Where the file of a dataset is missing, `speed` measures on random images.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedobp import Config, sweep
from fedobp.bench import bench, source
from fedobp.files import write_json
from fedobp.resolution import resolve

RESULTS = Path(__file__).parent / "results" / "networks.json"
RUNS = {"resnet8": ("fedavg", "fedobp", "fedper"), "resnet8-bn": ("fedbn",)}  # FedAvg-Last: FedAvg's `last`


def save(out: Path, part: str, name: str, found: Any) -> None:
    """Write one entry of a part of the results, beside what is there."""
    results = json.loads(out.read_text()) if out.exists() else {}
    results.setdefault(part, {})[name] = found
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, results)


def speed(given: argparse.Namespace) -> None:
    """Measure both engines on the same rounds, alone and with several runs side by side."""
    for model in given.models.split(","):
        asked = Config(dataset=given.dataset, data_dir=given.data_dir, model=model, precision=given.precision)
        dataset = source(asked)
        config, _ = resolve(asked, dataset)
        for runs in map(int, given.runs.split(",")):
            found = bench(config, runs=runs, seconds=given.seconds, dataset=dataset)
            save(given.out, "speed", f"{model}, {runs} at once, {found.precision}, {found.device}", asdict(found))
            rounds = {one.engine: one.seconds_per_round for one in found.engines}
            each = ", ".join(f"{engine} {seconds:.3f} s" for engine, seconds in rounds.items())
            ratio = rounds["serial"] / rounds["lanes"]
            print(f"{model}, {runs} at once: {each} a round and run, a ratio of {ratio:.1f}", flush=True)


def accuracy(given: argparse.Namespace) -> None:
    """Train methods on each network, all runs of a network side by side."""
    for model in given.models.split(","):
        started = time.perf_counter()
        configs = [
            Config(dataset=given.dataset, data_dir=given.data_dir, model=model, precision=given.precision,
                   method=method, seed=seed, partition_seed=42, rounds=given.rounds, save_models="none")
            for method in RUNS[model]
            for seed in map(int, given.seeds.split(","))
        ]  # fmt: skip
        for result in sweep(configs, keep_models=False):
            name = f"{model}, {result.config.method}, seed {result.config.seed}"
            save(given.out, "accuracy", name, {**result.to_json(), "config": asdict(result.config)})
            print(f"{name}: {result.accuracy.pooled:.2f}, own last models {result.last.pooled:.2f}", flush=True)
        print(f"{model}: {len(configs)} runs in {time.perf_counter() - started:.1f} s", flush=True)


def main() -> None:
    """Run a section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=["speed", "accuracy"])
    parser.add_argument("--models", default=",".join(RUNS), help="separated by commas")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--precision", default=None, help="as in `fedobp run`: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--rounds", type=int, default=200, help="of a run whose accuracy is measured")
    parser.add_argument("--seeds", default="42,43", help="of these runs, separated by commas")
    parser.add_argument("--runs", default="1,8", help="side by side where speed is measured, separated by commas")
    parser.add_argument("--seconds", type=float, default=60, help="for each measurement of speed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    print(f"torch {torch.__version__}")
    {"speed": speed, "accuracy": accuracy}[given.section](given)


if __name__ == "__main__":
    main()
