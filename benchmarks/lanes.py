"""What the lanes engine gains, each as a ratio to a baseline in the same run: `make bench`.

    python benchmarks/lanes.py              # all of it
    python benchmarks/lanes.py cpu score    # some of it

All of this is a CPU's; `kernels.py` measures CUDA.

Medians over rounds; the baselines take turns, so that a busy machine hurts both. With $FEDOBP_DATA the images are real.
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
from contexts import with_model
from torch import nn

from fedobp import Config
from fedobp.bench import EngineName, Trial, noise, peak, stand_in, step_flops, steps_by_round, train
from fedobp.data import FederatedData
from fedobp.engine import Budget, Counters, memory_of
from fedobp.federation import assign
from fedobp.launch import engine_for
from fedobp.models import Model, register
from fedobp.sampling import cohorts

CPU = torch.device("cpu")
ENGINES: tuple[EngineName, ...] = ("serial", "lanes")
IMAGES = 20  # a client's in `growth`
PAPER = {"dataset": "fmnist", "clients": 100, "alpha": 0.1, "participation": 0.1, "model": "cnn"}


class Setting(NamedTuple):
    """Clients with their data, and the model that they train."""

    config: Config
    data: FederatedData
    model: Model
    kind: str  # of the images

    def trial(self, **changes: Any) -> Trial:
        """Return a run that starts from the beginning."""
        config = Config(**{**vars(self.config), "options": {}, **changes})
        return Trial(config, self.model, self.data, Budget(memory_of(CPU) / 4))


def setting(**given: Any) -> Setting:
    """Deal a dataset, or noise of its shape and size, out to clients on the CPU."""
    config = Config(device="cpu", **given)
    replaced = stand_in(config)
    dataset, shards = assign(config, replaced)
    data = FederatedData(dataset, shards, CPU, torch.float32)
    return Setting(config, data, Model(config.model, data.shape, data.classes), "random" if replaced else "real")


class Race(NamedTuple):
    """Both engines on the same rounds, in turn."""

    seconds: dict[EngineName, float]  # a round, the median
    steps_per_second: dict[EngineName, float]
    samples_per_second: dict[EngineName, float]
    occupancy: float  # of the lanes
    ratio: float  # the median over rounds


def race(place: Setting, rounds: int, **changes: Any) -> Race:
    """Let the engines take turns, round by round, after one epoch of warming up."""
    runs = {
        name: (engine_for(replace(place.config, engine=name), place.model), place.trial(**changes)) for name in ENGINES
    }
    found: dict[EngineName, list[tuple[float, Counters]]] = {name: [] for name in ENGINES}
    for at, cohort in zip(range(rounds + 1), cohorts(place.config), strict=False):
        for name, (engine, trial) in runs.items():
            before = engine.counters
            took = train(engine, [trial], [[trial.moment(at + 1, cohort, place.config.epochs if at else 1)]])
            if at:
                found[name].append((took, engine.counters - before))

    def median(value: Callable[[float, Counters], float]) -> dict[EngineName, float]:
        return {name: statistics.median(value(*one) for one in found[name]) for name in ENGINES}

    return Race(
        seconds=median(lambda took, done: took),
        steps_per_second=median(lambda took, done: done.steps / took),
        samples_per_second=median(lambda took, done: done.samples / took),
        occupancy=runs["lanes"][0].counters.occupancy,
        ratio=statistics.median(s[0] / n[0] for s, n in zip(found["serial"], found["lanes"], strict=True)),
    )


def cpu() -> None:
    """Compare rounds of the paper's CNN, and both with the best matrix product."""
    place = setting(**PAPER)
    best, step = peak(CPU, "fp32", 3.0), step_flops(place.config, place.model)
    print(f"cpu: the paper's CNN, {place.kind} fmnist, Dir(0.1), 10 of 100 clients; matrix product {best / 1e9:.1f} "
          f"GFLOP/s; {step / 1e6:.1f} MFLOP a step")  # fmt: skip
    for method in ("fedobp", "fedavg"):
        found = race(place, 3, method=method)
        flops = {name: rate / place.config.batch_size * step for name, rate in found.samples_per_second.items()}
        shares = ", ".join(f"{name} {flops[name] / 1e9:.1f} GFLOP/s ({flops[name] / best:.0%})" for name in ENGINES)
        print(f"  {method}: serial {found.seconds['serial']:.2f} s a round, lanes {found.seconds['lanes']:.2f} s: "
              f"{found.ratio:.2f} times as fast; {shares}; occupancy {found.occupancy:.1%}")  # fmt: skip


def digits(model: str) -> None:
    """Compare small models on the 8x8 digits, 20 clients at once."""
    for partition in ("dirichlet", "iid"):
        place = setting(dataset="digits", model=model, clients=20, participation=1.0, partition=partition)
        found = race(place, 15)
        rates = [found.steps_per_second[engine] for engine in ENGINES]
        print(f"{model} of {place.model.layout.size:,} on the digits, 20 lanes, {partition}: serial "
              f"{rates[0]:,.0f} steps/s, lanes {rates[1]:,.0f}: {found.ratio:.2f} times as fast; occupancy "
              f"{found.occupancy:.1%}")  # fmt: skip


def score() -> None:
    """Compare FedOBP's own work in a round (score, top-k, merge) with the round."""
    place = setting(**PAPER)
    steps = steps_by_round(place.config, place.data)
    typical = min(range(len(steps)), key=lambda at: abs(steps[at] - statistics.fmean(steps)))
    cohort = list(cohorts(place.config))[typical]
    for q in (0.995, 0.99998):
        trial, engine = place.trial(options={"q": q}), engine_for(place.config, place.model)
        train(engine, [trial], [[trial.moment(1, cohort, 1)]])
        now = trial.moment(2, cohort, place.config.epochs)
        whole = train(engine, [trial], [[now]])
        sends, merges = [], []
        for _ in range(7):
            begun = time.perf_counter()
            task = trial.download(now)
            sent = time.perf_counter()
            engine.personalize(replace(task, program=trial.method.personalize(with_model(place.model, now))))
            sends.append(sent - begun)
            merges.append(time.perf_counter() - sent)
        send, merge = statistics.median(sends), statistics.median(merges)
        print(f"score: 10 x {place.model.layout.size:,}, q={q}: score and top-k {send * 1e3:.1f} ms, merge "
              f"{merge * 1e3:.1f} ms, of a lanes round of {whole:.2f} s: {(send + merge) / whole:.2%}")  # fmt: skip


def growth() -> None:
    """Grow clients, cohort and model, each in a process of its own; and let the client store spill to its file."""
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
    """Measure one row of `growth`; `store` is GiB for clients' state."""

    @register("wide")
    def wide(shape: Sequence[int], classes: int) -> nn.Module:
        layers = OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(prod(shape), hidden), relu=nn.ReLU())
        return nn.Sequential(layers | OrderedDict(classifier=nn.Linear(hidden, classes)))

    config = Config(dataset="fmnist", clients=clients, participation=cohort / clients, partition="iid", model="wide",
                    device="cpu", rounds=6)  # fmt: skip
    dataset, shards = assign(config, noise("fmnist", (28, 28), IMAGES * clients, 10))
    data = FederatedData(dataset, shards, CPU, torch.float32)
    model = Model("wide", data.shape, data.classes)
    before = _memory()
    trial = Trial(config, model, data, Budget(memory_of(CPU) / 4 if store is None else store * 2**30))
    engine = engine_for(config, model)
    nows = [trial.moment(at, who, config.epochs) for at, who in enumerate(cohorts(config), start=1)]
    seconds = statistics.median([train(engine, [trial], [[now]]) for now in nows][1:])
    spilled = "" if store is None else f", {store} GiB for the client store"
    print(f"{clients:,} clients, {cohort} a round, {model.layout.size:,} parameters{spilled}: {seconds:.3f} s a round, "
          f"{_memory() / 1e6:,.0f} MB at most ({before / 1e6:,.0f} MB before training)")  # fmt: skip


def _memory() -> int:
    """Return this process's largest resident set in bytes (Linux)."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print what machine this is, and run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["cpu", "mlp", "small", "score", "growth"])
    parser.add_argument("--spec", default="{}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sections: dict[str, Callable[[], None]] = {
        "cpu": cpu, "mlp": partial(digits, "mlp"), "small": partial(digits, "cnn-small"), "score": score,
        "growth": growth, "row": lambda: row(**json.loads(given.spec)),
    }  # fmt: skip
    if unknown := set(given.sections) - set(sections):
        parser.error(f"unknown section {min(unknown)}: known are cpu, mlp, small, score and growth")
    if given.sections != ["row"]:
        about = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        name = next((line.split(": ")[1] for line in about if line.startswith("model name")), platform.processor())
        print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {date.today():%d %B %Y}")
    for section in given.sections:
        sections[section]()


if __name__ == "__main__":
    main()
