"""What compressed messages save and cost: bytes of a round, and accuracy beside the run without compression.

    python benchmarks/compression.py --rounds 100                     # FedOBP and FedAvg on Fashion-MNIST
    python benchmarks/compression.py --dataset digits --model cnn-small --clients 20 --rounds 60

All runs draw the same clients and batches. Each round is a line of `--out`, and the table is of all that are there:
`--table FILE` prints that of runs which were stopped. Numbers are means over the last half of the rounds: one round's
model depends much on the clients that were drawn, and first messages to clients are shorter. Data: $FEDOBP_DATA.
On a machine that others use, set OMP_NUM_THREADS=1: threads that wait for each other take time.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedobp import Callback, Config, sweep

LEVELS = "none/none,8bit/8bit,4bit/4bit,4bit/sparse,sparse/sparse"


class Log(Callback):
    """Writes each round of each run as a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_round(self, config: Config, line: Mapping[str, Any]) -> None:
        """Write what the table needs."""
        about = {"method": config.method, "down": config.compress_down, "up": config.compress_up, "seed": config.seed}
        kept = {name: line[name] for name in ("round", "bytes_down", "bytes_up")}
        accuracy = {
            name: line[key]["pooled"] for name, key in (("served", "accuracy"), ("last", "last")) if key in line
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**about, **kept, **accuracy}) + "\n")


def table(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print bytes per round with their ratio to no compression, and accuracy with the difference from it."""
    runs: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        runs.setdefault((line["method"], line["down"], line["up"]), []).append(line)
    rounds = min(max(line["round"] for line in run) for run in runs.values())
    print(f"{rounds} rounds, seeds {sorted({line['seed'] for line in lines})}\n")
    print("| method | down | up | MB down | less | MB up | less | accuracy | difference |")
    print("|---|---|---|---|---|---|---|---|---|")

    def mean(run: Sequence[Mapping[str, Any]], name: str) -> float:
        return fmean(line[name] for line in run if rounds // 2 <= line["round"] <= rounds and name in line)

    for (method, down, up), run in runs.items():
        plain = runs[method, "none", "none"]
        sizes = []
        for name in ("bytes_down", "bytes_up"):
            sizes += [f"{mean(run, name) / 1e6:.2f}", f"{mean(plain, name) / mean(run, name):.1f}x"]
        accuracies = [mean(one, "served") for one in (run, plain)]
        differs = "" if run is plain else f"{accuracies[0] - accuracies[1]:+.2f}"
        print(f"| {method} | {down} | {up} | {' | '.join(sizes)} | {accuracies[0]:.2f} | {differs} |")


def main() -> None:
    """Train all runs side by side, or print the table of earlier ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fmnist")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--every", type=int, default=5, help="rounds between evaluations")
    parser.add_argument("--methods", default="fedobp,fedavg")
    parser.add_argument("--levels", default=LEVELS, help="pairs down/up")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--out", type=Path, default=Path("compression.jsonl"))
    parser.add_argument("--table", type=Path, help="print the table of this file, and train nothing")
    given = parser.parse_args()
    if not given.table:
        configs = [
            Config(
                method=method, dataset=given.dataset, model=given.model, clients=given.clients, alpha=given.alpha,
                rounds=given.rounds, epochs=given.epochs, eval_every=given.every, seed=int(seed), compress_down=down,
                compress_up=up,
            )
            for seed in given.seeds.split(",")
            for down, up in (pair.split("/") for pair in given.levels.split(","))
            for method in given.methods.split(",")
        ]  # fmt: skip
        sweep(configs, callbacks=[Log(given.out)])
    lines = (given.table or given.out).read_text(encoding="utf-8").splitlines()
    table([json.loads(line) for line in lines])


if __name__ == "__main__":
    main()
