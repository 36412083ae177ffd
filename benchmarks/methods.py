"""The paper's runs of every method: 400 rounds each, a file for each result, so that it can stop and go on.

    python benchmarks/methods.py run --dataset cifar10 --seeds 42,43          # what is not there yet
    python benchmarks/methods.py run --dataset mnist --methods fedobp,fedper  # some of it
    python benchmarks/methods.py table --dataset cifar10                      # as a table

Dirichlet(0.1), partition seed 42, the authors' own sampling; the best of rounds 100, 200, 300 and 400 is reported,
beside it each client's last local model and the served model after 5 local epochs. Methods that differ from what ran
behind the paper's tables run in both modes. Data: $FEDOBP_DATA.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedobp import Config, FedobpError, sweep
from fedobp.algorithms import METHODS, Moment, Sweep, Train
from fedobp.data import data_dir
from fedobp.models import Model

RESULTS = Path(__file__).parent / "results"


def variants(names: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return methods with their options: once, or once in each mode."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        modes = [spec.metadata["choices"] for spec in METHODS[name].options() if spec.name == "mode"]
        found += [(name, {"mode": mode}) for mode in modes[0]] if modes else [(name, {})]
    return found


def file_of(folder: Path, config: Config) -> Path:
    """Return where a run's result is kept."""
    mode = config.options.get("mode", "faithful")
    name = config.method if mode == "faithful" else f"{config.method}-{mode}"
    return folder / config.dataset / f"{name}-seed{config.seed}.json"


def plain(config: Config) -> bool:
    """Say whether a method trains by the fast path alone: such runs share a launch."""
    method, model = METHODS[config.method].configure(config.options), Model("mlp", (4,), 2)
    now = Moment(1, config.rounds, 2, config.epochs, torch.arange(2))
    items = [*method.local(model, now), *method.serve(model, now)]
    own = any(isinstance(item, Sweep) or (isinstance(item, Train) and item.loss is not None) for item in items)
    return method.together and not own


def run(given: argparse.Namespace) -> None:
    """Run what is not there yet: all methods of the fast path in one launch, the others one after the other."""
    names = list(METHODS) if given.methods == "all" else given.methods.split(",")
    configs = [
        Config(dataset=given.dataset, method=name, options=options, seed=seed, partition_seed=42, rounds=given.rounds,
               clients=100, alpha=0.1, protocol="paper", sampling="published", eval_every=100, finetune_epochs=5,
               save_models="none", precision=given.precision, device=given.device, data_dir=str(data_dir()))
        for name, options in variants(names)
        for seed in map(int, given.seeds.split(","))
    ]  # fmt: skip
    missing = [config for config in configs if not file_of(given.out, config).exists()]
    grouped: dict[object, list[Config]] = {}
    for config in missing:
        grouped.setdefault("plain" if plain(config) else (config.method, str(config.options)), []).append(config)
    begun = time.perf_counter()
    groups = list(grouped.values())
    while groups:
        group = groups.pop(0)
        if time.perf_counter() - begun > 60 * given.minutes:
            print(f"out of time: {len(missing)} runs were missing, start again", flush=True)
            return
        started = time.perf_counter()
        try:
            results = sweep(group, keep_models=False)
        except FedobpError as error:
            print(f"{', '.join(sorted({config.method for config in group}))}: {error}", flush=True)
            if len(group) > 1:  # the others are none the worse for one that diverges
                groups += [[config] for config in group]
            continue
        for config, result in zip(group, results, strict=True):
            file = file_of(given.out, config)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**result.to_json(), "options": config.options}, indent=1) + "\n")
            print(f"{file.stem}: {result.accuracy.pooled:.2f}, last {result.last.pooled:.2f}", flush=True)
        print(f"  {len(group)} runs in {time.perf_counter() - started:.1f} s", flush=True)


def table(given: argparse.Namespace) -> None:
    """Print what is there as a table in Markdown: means over seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((given.out / given.dataset).glob("*.json")):
        found.setdefault(file.stem.rpartition("-seed")[0], []).append(json.loads(file.read_text()))
    print("| method | as served | own last model | after 5 epochs | passes in a visit, before use | seeds |")
    print("|---|---|---|---|---|---|")
    for name, runs in found.items():
        columns = [
            f"{statistics.fmean(run[column]['pooled'] for run in runs):.2f}"
            for column in ("accuracy", "last", "finetuned")
        ]
        compute = f"{runs[0]['compute']['visit']:.1f}, {runs[0]['compute']['use']:.1f}"
        print(f"| {name} | {' | '.join(columns)} | {compute} | {', '.join(str(run['seed']) for run in runs)} |")


def main() -> None:
    """Run a section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=["run", "table"])
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--methods", default="all", help="separated by commas")
    parser.add_argument("--seeds", default="42,43")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing after so many")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    (run if given.section == "run" else table)(given)


if __name__ == "__main__":
    main()
