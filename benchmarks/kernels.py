"""Measure the fused kernels on a CUDA GPU: whole runs, the time of a round by kernel, and the start-up time.

    python benchmarks/kernels.py run --runs 1,16                 # the paper's federation, FedOBP, 400 rounds
    python benchmarks/kernels.py run --runs 1 --dataset fmnist --precision tf32
    python benchmarks/kernels.py baselines                       # against the general path and the serial engine
    python benchmarks/kernels.py profile                         # a round, kernel by kernel
    python benchmarks/kernels.py start                           # from the first CUDA call to the first step
    python benchmarks/kernels.py compile                         # what compiling for 9.0 takes; needs no card
    python benchmarks/kernels.py first-use                       # the shipped table against what a first use finds

With $FEDOBP_DATA the images are real; without it they are noise of the same shape and number, and accuracies are
meaningless. The time of a run includes all rounds and evaluations, and the capture of its graphs; loading the data and
compiling kernels, which a process does once, are shown separately.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rounds import job, open_federation, start

from fedobp import Config, sweep
from fedobp.bench import clock, evaluate, noise, stand_in, steps_by_round, train
from fedobp.data import data_dir
from fedobp.engine import Budget, ClientJob
from fedobp.engine.kernels import dispatch, tuning
from fedobp.engine.kernels.cards import card_of
from fedobp.engine.kernels.diagnosis import compilable
from fedobp.engine.kernels.launches import Launch
from fedobp.engine.kernels.shapes import Shapes
from fedobp.engine.kernels.step import StepConfig
from fedobp.engine.kernels.tiles import EXACT, shipped_table
from fedobp.grouping import engine_for
from fedobp.options import Precision
from fedobp.sampling import cohorts

DEVICE = torch.device("cuda")


def paper(dataset: str, precision: str, rounds: int, folder: str, **given: Any) -> Config:
    """Return the paper's setting; if the data is missing, write noise to `folder` and use that."""
    base: dict[str, Any] = {"dataset": dataset, "clients": 100, "alpha": 0.1, "partition_seed": 42, "rounds": rounds,
                            "precision": precision, "device": "cuda", "eval_every": 100, "save_models": "none",
                            "data_dir": str(data_dir()), **given}  # fmt: skip
    replaced = stand_in(Config(**base))
    if replaced is None:
        return Config(**base)
    file = Path(folder, f"{dataset}.npz")
    if not file.exists():
        np.savez(file, x=replaced.x, y=replaced.y)
    return Config(**{**base, "data_dir": folder})


def whole(config: Config, runs: int) -> None:
    """Time whole runs side by side, after two warm-up rounds that compile everything."""
    configs = [replace(config, seed=42 + run) for run in range(runs)]
    begun = time.perf_counter()
    sweep([replace(one, rounds=2) for one in configs], keep_models=False)
    clock(DEVICE)
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    results = sweep(configs, keep_models=False)
    clock(DEVICE)
    took = time.perf_counter() - begun
    seconds = sum(result.seconds for result in results)
    accuracies = [result.accuracy.pooled for result in results]
    print(f"{config.method} {config.dataset} {config.precision}: {runs} x {config.rounds} rounds in {seconds:.2f} s, "
          f"{seconds / runs:.2f} s a run; {took:.2f} s with loading, two rounds before it {first:.2f} s; "
          f"accuracy {statistics.fmean(accuracies):.2f} ({min(accuracies):.2f} to {max(accuracies):.2f})")  # fmt: skip
    for name in ("last", "finetuned"):
        if getattr(results[0], name):
            print(f"  {name}: {statistics.fmean(getattr(result, name).pooled for result in results):.2f}", flush=True)


def profile(config: Config, runs: int) -> None:
    """Show the device time of ten typical rounds by kernel, and how much of the time the device is busy."""
    federation, _ = open_federation(config)
    config, model = federation.config, federation.model
    engine, seeds = engine_for(config, model), range(42, 42 + runs)
    simulations = [start(federation, engine, Budget(), seed=seed) for seed in seeds]
    sampled = [list(cohorts(replace(config, seed=seed))) for seed in seeds]

    def jobs(rounds: Sequence[int]) -> list[list[ClientJob]]:
        pairs = list(zip(simulations, sampled, strict=True))
        return [[job(simulation, at + 1, cohort[at]) for simulation, cohort in pairs] for at in rounds]

    train(engine, simulations, jobs(range(10)))
    alone = train(engine, simulations, jobs(range(10)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        train(engine, simulations, jobs(range(10)))
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in seen.key_averages():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            spent[event.key][0] += event.self_device_time_total / 1e3
            spent[event.key][1] += event.count
    busy = sum(took for took, _ in spent.values())
    print(f"{runs} runs, {config.precision}, ten rounds: {alone * 1e3:.1f} ms, the device is busy {busy:.1f} ms")
    for name, (took, count) in sorted(spent.items(), key=lambda one: -one[1][0])[:40]:
        print(f"  {took:9.2f} ms {took / busy:6.1%} {int(count):7d}  {name[:110]}")
    begun = clock(DEVICE)
    for _ in range(3):
        evaluate(engine, federation.plan(config, federation.method))
    print(f"  an evaluation of all clients as served: {(clock(DEVICE) - begun) / 3 * 1e3:.1f} ms", flush=True)


def baselines(config: Config) -> None:
    """Time representative rounds with the kernels, without them, and with the serial engine.

    The time of a whole run is estimated from the time of a client-step and of an evaluation of all clients.
    """
    federation, _ = open_federation(config)
    config, model, data = federation.config, federation.model, federation.data
    sampled = list(cohorts(config))
    steps = steps_by_round(config, data, sampled)
    lanes, serial = replace(config, engine="lanes"), replace(config, engine="serial")
    ways = {"kernels": (lanes, 20), "general path": (replace(lanes, kernels="off"), 20), "serial engine": (serial, 4)}
    for name, (chosen, count) in ways.items():
        rounds = range(config.rounds // count // 2, config.rounds, config.rounds // count)
        engine = engine_for(chosen, model)
        simulation = start(federation, engine, Budget())
        jobs = [[job(simulation, at + 1, sampled[at])] for at in rounds]
        train(engine, [simulation], jobs[:1] if chosen is serial else jobs)  # warm-up: libraries, graphs
        took = train(engine, [simulation], jobs)
        evaluate(engine, federation.plan(config, federation.method))
        tested = evaluate(engine, federation.plan(config, federation.method))
        each = took / sum(steps[at] for at in rounds)
        estimated = each * sum(steps) + config.rounds / config.eval_every * tested
        print(f"{name}: {each * sum(steps) / config.rounds * 1e3:.1f} ms a round, {1 / each:,.0f} client-steps/s, an "
              f"evaluation {tested * 1e3:.0f} ms, {config.rounds} rounds {estimated:.1f} s", flush=True)  # fmt: skip


def start_up(precision: Precision) -> None:
    """Time a new process from its first CUDA call to the end of its first step: with empty caches, and with these."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": folder}
        for name in ("first", "second", "third"):
            done = subprocess.run(
                [sys.executable, __file__, "step", "--precision", precision],
                capture_output=True, text=True, env={**os.environ, **caches},
            )  # fmt: skip
            print(f"{name} start: {done.stdout.strip() or done.stderr[-500:]}", flush=True)


def compile_all(precision: Any) -> None:
    """Compile the kernels of the paper's run for 9.0 one after another, without a card; show what takes the time."""
    import triton

    table = shipped_table((9, 0), precision)
    assert table is not None
    training = StepConfig(Shapes(32, 3, 10, 32), precision, "all")
    evaluation = replace(training, shapes=Shapes(32, 3, 10, 64), part=None)
    found: dict[Any, Launch] = {}
    for config, entries in ((training, table.entries[:-1]), (evaluation, table.entries)):  # 10 lanes, and 100
        for entry in entries:
            for one in compilable(config, entry, entry.lanes > EXACT).values():
                found.setdefault(one.variant, one)
    stages: dict[str, float] = defaultdict(float)

    def listen(**given: Any) -> None:
        stages["source"] += given["times"].ir_initialization / 1e6
        for name, microseconds in given["times"].lowering_stages:
            stages["assembler" if name == "cubin" else "passes"] += microseconds / 1e6

    triton.knobs.compilation.listener = listen
    took = []
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", {"TRITON_CACHE_DIR": folder}):
        for one in found.values():
            begun = time.perf_counter()
            one.compiled_for((9, 0))
            took.append((time.perf_counter() - begun, one.kernel.__name__))
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items())
    slowest, name = max(took)
    total = sum(seconds for seconds, _ in took)
    print(f"Triton {triton.__version__}, {precision}: {len(took)} kernels in {total:.1f} s, the slowest {name} in "
          f"{slowest:.1f} s; {parts}")  # fmt: skip


def first_use(precision: Any) -> None:
    """Time a step with the shipped table, and with what a first use finds on a card that has none."""
    card = card_of(DEVICE)
    shipped = tuning.tune(card, precision, DEVICE, 0, dispatch.known_table(card, precision))
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict("os.environ", {"XDG_CACHE_HOME": folder}),
        patch.object(dispatch, "shipped_table", return_value=None),
        patch.object(tuning, "shipped_table", return_value=None),
    ):
        begun = time.perf_counter()
        table = dispatch.table_for(card, precision, DEVICE)
        took = time.perf_counter() - begun
        found = tuning.tune(card, precision, DEVICE, 0, table)
    print(f"{card.name}, {precision}: tuned in {took:.1f} s from the default table; {shipped.table.source} table for "
          "comparison")  # fmt: skip
    tuned = {one.lanes: one.step for one in found.timings}
    for one in shipped.timings:
        change = tuned[one.lanes] / one.step - 1
        print(f"  a step of {one.lanes} lanes: {one.step:.1f} us with the shipped table, {tuned[one.lanes]:.1f} us "
              f"with the tuned one ({change:+.1%})", flush=True)  # fmt: skip


def step(precision: Precision) -> None:
    """Take one step of ten lanes of CIFAR10's shape, and print the time since the first CUDA call."""
    config = Config(dataset="cifar10", device="cuda", precision=precision, clients=10, participation=1.0, epochs=1,
                    partition="iid", model="cnn", rounds=1)  # fmt: skip
    dataset = noise("cifar10", (32, 32, 3), 600, 10)
    begun = time.perf_counter()
    federation, _ = open_federation(config, dataset)
    clock(DEVICE)
    cuda_ready = time.perf_counter() - begun
    engine = engine_for(federation.config, federation.model)
    simulation = start(federation, engine, Budget())
    train(engine, [simulation], [[job(simulation, 1, torch.arange(10))]])
    print(
        f"{time.perf_counter() - begun:.2f} s to the end of the first steps, of which CUDA start-up {cuda_ready:.2f} s"
    )


def main() -> None:
    """Run one section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=["run", "baselines", "profile", "start", "step", "first-use", "compile"])
    parser.add_argument("--runs", default="1", help="how many runs side by side; several numbers: 1,16")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--method", default="fedobp")
    parser.add_argument("--options", default="{}", help="the method's, as JSON")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--finetune-epochs", type=int, default=0)
    given = parser.parse_args()
    alone = {"start": start_up, "step": step, "first-use": first_use, "compile": compile_all}
    if given.section in alone:
        alone[given.section](given.precision)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {date.today():%d %B %Y}")
    with tempfile.TemporaryDirectory() as folder:
        for runs in map(int, given.runs.split(",")):
            config = paper(given.dataset, given.precision, given.rounds, folder, method=given.method,
                           options=json.loads(given.options), finetune_epochs=given.finetune_epochs)  # fmt: skip
            if given.section == "baselines":
                baselines(config)
            else:
                (whole if given.section == "run" else profile)(config, runs)


if __name__ == "__main__":
    main()
