"""The speed of the lanes engine on the CPU, as ratios to a baseline in the same process: `make bench`.

    python benchmarks/lanes.py              # all sections
    python benchmarks/lanes.py cpu score    # some of them

`kernels.py` measures CUDA. Values are medians over rounds; the engines alternate, so that other load on the machine
affects both. With $FEDOBP_DATA the images are real.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rounds import job, open_federation, start
from torch import nn

from fedobp import Config, Federation
from fedobp.bench import EngineName, noise, peak, step_flops, steps_by_round, train
from fedobp.engine import Budget, Counters, memory_of
from fedobp.grouping import engine_for
from fedobp.models import register
from fedobp.sampling import cohorts

CPU = torch.device("cpu")
ENGINES: tuple[EngineName, ...] = ("serial", "lanes")
IMAGES = 20  # of a client in `growth`
PAPER = {"dataset": "fmnist", "clients": 100, "alpha": 0.1, "participation": 0.1, "model": "cnn"}


def on_cpu(**given: Any) -> tuple[Federation, str]:
    """Return a federation on the CPU, and the kind of its images."""
    federation, real = open_federation(Config(device="cpu", **given))
    return federation, "real" if real else "random"


def quarter() -> Budget:
    """Return a quarter of the machine's memory, for client state."""
    return Budget(memory_of(CPU) / 4)


class Comparison(NamedTuple):
    """Both engines on the same rounds, alternately."""

    seconds: dict[EngineName, float]  # of a round, the median
    steps_per_second: dict[EngineName, float]
    samples_per_second: dict[EngineName, float]
    occupancy: float  # of the lanes
    ratio: float  # the median over rounds


def compare(federation: Federation, rounds: int, method: str | None = None) -> Comparison:
    """Run rounds on both engines alternately, after a warm-up of one epoch."""
    config, runs = federation.config, {}
    for name in ENGINES:
        engine = engine_for(replace(config, engine=name), federation.model)
        runs[name] = engine, start(federation, engine, quarter(), method=method)
    found: dict[EngineName, list[tuple[float, Counters]]] = {name: [] for name in ENGINES}
    for at, cohort in zip(range(rounds + 1), cohorts(config), strict=False):
        for name, (engine, simulation) in runs.items():
            before = engine.counters
            took = train(engine, [simulation], [[job(simulation, at + 1, cohort, config.epochs if at else 1)]])
            if at:
                found[name].append((took, engine.counters - before))

    def median(value: Callable[[float, Counters], float]) -> dict[EngineName, float]:
        return {name: statistics.median(value(*one) for one in found[name]) for name in ENGINES}

    return Comparison(
        seconds=median(lambda took, done: took),
        steps_per_second=median(lambda took, done: done.steps / took),
        samples_per_second=median(lambda took, done: done.samples / took),
        occupancy=runs["lanes"][0].counters.occupancy,
        ratio=statistics.median(s[0] / n[0] for s, n in zip(found["serial"], found["lanes"], strict=True)),
    )


def cpu() -> None:
    """Compare rounds of the paper's CNN, and both with the best matrix product."""
    federation, images = on_cpu(**PAPER)
    best, step = peak(CPU, "fp32", 3.0), step_flops(federation.config, federation.model)
    print(f"cpu: the paper's CNN, {images} fmnist, Dir(0.1), 10 of 100 clients; matrix product {best / 1e9:.1f} "
          f"GFLOP/s; {step / 1e6:.1f} MFLOP a step")  # fmt: skip
    for method in ("fedobp", "fedavg"):
        found = compare(federation, 3, method)
        flops = {name: rate / federation.config.batch_size * step for name, rate in found.samples_per_second.items()}
        shares = ", ".join(f"{name} {flops[name] / 1e9:.1f} GFLOP/s ({flops[name] / best:.0%})" for name in ENGINES)
        print(f"  {method}: serial {found.seconds['serial']:.2f} s a round, lanes {found.seconds['lanes']:.2f} s: "
              f"{found.ratio:.2f} times as fast; {shares}; occupancy {found.occupancy:.1%}")  # fmt: skip


def digits(model: str) -> None:
    """Compare small models on the 8x8 digits, 20 clients at once."""
    for partition in ("dirichlet", "iid"):
        federation, _ = on_cpu(dataset="digits", model=model, clients=20, participation=1.0, partition=partition)
        found = compare(federation, 15)
        rates = [found.steps_per_second[engine] for engine in ENGINES]
        print(f"{model} of {federation.model.layout.size:,} on the digits, 20 lanes, {partition}: serial "
              f"{rates[0]:,.0f} steps/s, lanes {rates[1]:,.0f}: {found.ratio:.2f} times as fast; occupancy "
              f"{found.occupancy:.1%}")  # fmt: skip


def score() -> None:
    """Compare the work of FedOBP in a round (score, top-k, merge) with the round."""
    federation, _ = on_cpu(**PAPER)
    config, model = federation.config, federation.model
    steps = steps_by_round(config, federation.data)
    typical = min(range(len(steps)), key=lambda at: abs(steps[at] - statistics.fmean(steps)))
    cohort = list(cohorts(config))[typical]
    for q in (0.995, 0.99998):
        engine = engine_for(config, model)
        simulation = start(federation, engine, quarter(), q=q)
        run, clients = simulation
        train(engine, [simulation], [[job(simulation, 1, cohort, 1)]])
        second = job(simulation, 2, cohort)
        whole = train(engine, [simulation], [[second]])
        scores, merges = [], []
        for _ in range(7):
            begun = time.perf_counter()
            download, _ = run.method.download(second.ctx, run.server, run.records.gather(cohort.tolist()))
            scored = time.perf_counter()
            program = tuple(run.method.personalize(second.ctx))
            engine.personalize(clients.assign(replace(second, download=download, program=program)))
            scores.append(scored - begun)
            merges.append(time.perf_counter() - scored)
        scoring, merging = statistics.median(scores), statistics.median(merges)
        share = (scoring + merging) / whole
        print(f"score: 10 x {model.layout.size:,}, q={q}: score and top-k {scoring * 1e3:.1f} ms, merge "
              f"{merging * 1e3:.1f} ms, of a lanes round of {whole:.2f} s: {share:.2%}")  # fmt: skip


def growth() -> None:
    """Vary clients, cohort and model, each in its own process; and let the client store spill to its file."""
    print(f"growth: FedOBP, mlp, IID, {IMAGES} random 28x28 images a client; rounds 2 to 6, without evaluation")
    small: dict[str, Any] = {"clients": 1000, "cohort": 10, "hidden": 128}
    rows = [small | {"clients": clients} for clients in (100, 1_000, 10_000)]
    rows += [small | {"cohort": cohort} for cohort in (50, 100, 500)]
    rows += [small | {"clients": 100, "hidden": hidden} for hidden in (64, 630, 3_150, 12_600)]
    rows += [small | {"cohort": 100, "hidden": 630, "store": store} for store in (None, 0.01)]
    for spec in rows:
        child = [sys.executable, __file__, "row", "--spec", json.dumps(spec)]
        print("  " + subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout.strip(), flush=True)


def row(clients: int, cohort: int, hidden: int, store: float | None = None) -> None:
    """Measure one row of `growth`; `store` is the memory for client state in GiB."""

    @register("wide")
    def wide(shape: Sequence[int], classes: int) -> nn.Module:
        layers = OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(prod(shape), hidden), relu=nn.ReLU())
        return nn.Sequential(layers | OrderedDict(classifier=nn.Linear(hidden, classes)))

    config = Config(dataset="fmnist", clients=clients, participation=cohort / clients, partition="iid", model="wide",
                    device="cpu", rounds=6)  # fmt: skip
    federation, _ = open_federation(config, noise("fmnist", (28, 28), IMAGES * clients, 10))
    config, model, before = federation.config, federation.model, _memory()
    engine = engine_for(config, model)
    budget = Budget(memory_of(CPU) / 4 if store is None else store * 2**30)
    simulation = start(federation, engine, budget)
    jobs = [job(simulation, at, sampled) for at, sampled in enumerate(cohorts(config), start=1)]
    seconds = statistics.median([train(engine, [simulation], [[one]]) for one in jobs][1:])
    spilled = "" if store is None else f", {store} GiB for the client store"
    print(f"{clients:,} clients, {cohort} a round, {model.layout.size:,} parameters{spilled}: {seconds:.3f} s a round, "
          f"{_memory() / 1e6:,.0f} MB at most ({before / 1e6:,.0f} MB before training)")  # fmt: skip


def _memory() -> int:
    """Return this process's largest resident set in bytes (Linux)."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print the machine, and run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["cpu", "mlp", "small", "score", "growth"])
    parser.add_argument("--spec", default="{}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sections: dict[str, Callable[[], None]] = {
        "cpu": cpu, "mlp": partial(digits, "mlp"), "small": partial(digits, "cnn-small"), "score": score,
        "growth": growth, "row": lambda: row(**json.loads(given.spec)),
    }  # fmt: skip
    if unknown := set(given.sections) - set(sections):
        parser.error(f"unknown section {min(unknown)}: choose from cpu, mlp, small, score and growth")
    if given.sections != ["row"]:
        about = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        name = next((line.split(": ")[1] for line in about if line.startswith("model name")), platform.processor())
        print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {date.today():%d %B %Y}")
    for section in given.sections:
        sections[section]()


if __name__ == "__main__":
    main()
