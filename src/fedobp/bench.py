"""How fast this machine trains: both engines on the same cohorts, beside the best matrix product that it can do.

Rounds of a ragged federation differ, but which clients take part in which round, and how many steps each of them
takes, is known before anything is trained. So a few typical rounds are measured, and a whole run is estimated from all.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedobp.config import Config
from fedobp.data import REGISTRY, Dataset, FederatedData, data_dir, describe, load
from fedobp.engine import Budget, ClientJob, Counters, Engine, dtype_of, vectorises
from fedobp.engine.batch_order import batches_of
from fedobp.engine.cost import cost
from fedobp.engine.precision import deterministic
from fedobp.engine.stack import Grouped, stacked
from fedobp.errors import FedobpError
from fedobp.evaluation import Evaluator
from fedobp.federation import assign
from fedobp.grouping import batch_size_for, engine_for, memory_for
from fedobp.launch import RunPlan, Simulation, simulate
from fedobp.models import Model
from fedobp.options import Precision
from fedobp.plugins import label
from fedobp.resolution import check_names, model_for, resolve
from fedobp.sampling import cohorts

EngineName = Literal["serial", "lanes"]
# Where in the time budget each part of the measurement ends.
_ENDS = {"lanes": 0.45, "lanes evaluation": 0.55, "serial": 0.9, "serial evaluation": 1.0}
_PEAK = 0.03  # the share of it for matrix products, before each engine
_LONGEST = 3600.0  # seconds
_MOST_RUNS = 1000
_SAMPLE = 400  # rounds whose cohorts are looked at
_NEVER = 10**6
_AT_ONCE = 10  # rounds without waiting for a device
_SIDES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192)}  # of the matrices that are multiplied


@dataclass(frozen=True)
class Speed:
    """What one engine reached. Of several runs side by side, times are one run's share."""

    engine: str
    rounds: float  # measured; a part of a round where a whole one would have taken too long
    steps_per_second: float  # clients' steps, of all runs together
    occupancy: float  # the share of computed batch slots that held a sample
    flops_per_second: float  # for real samples: padding is no work
    share_of_peak: float
    seconds_per_round: float  # of an average round, without evaluation
    speedup: float  # against the serial engine
    seconds_per_evaluation: float
    seconds_per_run: float  # all rounds, and their evaluations


@dataclass(frozen=True)
class Bench:
    """What was measured, on what, and how a run is estimated from it."""

    device: str
    threads: int  # of the CPU
    precision: str
    dataset: str
    random_data: bool  # the dataset's file is not there: noise of its shape and size
    samples: int
    model: str
    parameters: int
    clients: int
    cohort: int
    partition: str
    alpha: float
    batch_size: int
    epochs: int
    runs: int
    rounds: int
    evaluations: int
    steps_per_round: float  # of one run, the mean over all its rounds
    flops_per_step: float  # of a full batch
    peak_flops_per_second: float
    engines: tuple[Speed, ...]
    seconds: float  # what the measurement took


@dataclass(frozen=True)
class _Measured:
    """A stretch of training."""

    rounds: float
    done: Counters
    seconds: float

    def __add__(self, other: "_Measured") -> "_Measured":
        return _Measured(self.rounds + other.rounds, self.done + other.done, self.seconds + other.seconds)

    @property
    def steps_per_second(self) -> float:
        return self.done.steps / self.seconds

    @property
    def samples_per_second(self) -> float:
        return self.done.samples / self.seconds


def evaluate(engine: Engine, plan: RunPlan) -> float:
    """Test all clients' models as served before round 1, and return how long it took."""
    run, clients = simulate(plan, engine, Budget())
    evaluator = Evaluator(plan.method, plan.model, clients, engine, 0)
    begun = clock(plan.data.x.device)
    evaluator(run.view(1), everything=False)
    return clock(plan.data.x.device) - begun


def train(engine: Engine, simulations: Sequence[Simulation], rounds: Sequence[Sequence[ClientJob]]) -> float:
    """Take several runs side by side through rounds of theirs, and return how long it took.

    `rounds` has one job a run. As in a real run, no round waits for a device to finish.
    """
    device = simulations[0].clients.data.x.device
    begun, prepared = clock(device), None
    for at, plan in enumerate(rounds):
        active = [simulation.run.round([job]) for simulation, job in zip(simulations, plan, strict=True)]
        jobs = [simulation.clients.assign(next(round)) for simulation, round in zip(simulations, active, strict=True)]
        updates = engine.train(jobs, prepared)
        for following in rounds[at + 1 : at + 2]:
            pairs = zip(simulations, following, strict=True)
            prepared = engine.prepare([simulation.clients.assign(job) for simulation, job in pairs])
        for round, update in zip(active, updates, strict=True):
            with suppress(StopIteration):
                round.send(update)
    return clock(device) - begun


def clock(device: torch.device) -> float:
    """Return the time in seconds once a device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def noise(name: str, shape: Sequence[int], samples: int, classes: int) -> Dataset:
    """Return random images with balanced labels."""
    x = np.random.default_rng(0).integers(0, 256, (samples, *shape), dtype=np.uint8)
    return Dataset(name, x, np.arange(samples, dtype=np.int64) % classes, tuple(range(classes)), n_train=0)


def stand_in(config: Config) -> Dataset | None:
    """Return random images in the shape and number of a known dataset whose file is not there."""
    info = describe(config.dataset, data_dir(config.data_dir))
    return None if info.available else noise(info.name, info.shape, REGISTRY[info.name].samples, info.classes)


def source(config: Config) -> Dataset:
    """Read the dataset that settings name; random images replace a file that is not there."""
    check_names(config)
    return stand_in(config) or load(config.dataset, data_dir(config.data_dir))


def steps_by_round(config: Config, data: FederatedData, who: Iterable[Tensor] | None = None) -> list[int]:
    """Return how many steps each round's cohort takes: those of all rounds, or of the cohorts `who`."""
    by_client = [
        config.epochs * batches_of(data.size(client, "train"), config.batch_size) for client in range(data.clients)
    ]
    return [sum(by_client[client] for client in cohort.tolist()) for cohort in who or cohorts(config)]


def step_flops(config: Config, model: Model) -> float:
    """Return the operations of one client's step on a full batch."""
    return cost(model, stacked(model, Grouped), config.batch_size, dtype_of(config.precision)).flops


def peak(device: torch.device, precision: Precision, seconds: float) -> float:
    """Return the best rate of a product of large matrices, in operations a second."""
    dtype = torch.bfloat16 if precision == "bf16" else dtype_of(precision)
    generator = torch.Generator(device).manual_seed(0)
    until, best = time.perf_counter() + seconds, 0.0
    with deterministic(precision):
        for left, side in zip((3, 2, 1), _SIDES[device.type], strict=True):
            matrix = torch.rand(side, side, generator=generator, device=device).to(dtype)
            product = matrix @ matrix
            stop = time.perf_counter() + max(0.0, until - time.perf_counter()) / left
            while True:
                begun = clock(device)
                torch.mm(matrix, matrix, out=product)
                now = clock(device)
                best = max(best, 2 * side**3 / (now - begun))
                if now > stop:
                    break
            if now > until:
                break
    return best


def bench(
    config: Config,
    *,
    runs: int = 1,
    seconds: float = 30.0,
    progress: Callable[[str, float], None] | None = None,
    dataset: Dataset | None = None,
) -> Bench:
    """Measure both engines in about as many seconds; `dataset` is the `source` of the settings, if it is read.

    `progress` is called with the name of the current part, and the share of the time that has passed. Runs differ in
    their seeds and share a partition.
    """
    if not 1 <= seconds <= _LONGEST:
        raise FedobpError(f"--seconds must be between 1 and {_LONGEST:.0f}, not {seconds:g}")
    if not 1 <= runs <= _MOST_RUNS:
        raise FedobpError(f"--runs must be between 1 and {_MOST_RUNS}, not {runs}")
    return _Session(config, runs, seconds, progress or (lambda what, share: None), dataset).measure()


class _Session:
    """One measurement: the federation, and the time that it may take."""

    def __init__(
        self,
        config: Config,
        runs: int,
        seconds: float,
        progress: Callable[[str, float], None],
        dataset: Dataset | None,
    ) -> None:
        self._begun, self._seconds, self._progress = time.perf_counter(), seconds, progress
        progress("data", 0.0)
        dataset = dataset or source(config)
        self._random = not describe(config.dataset, data_dir(config.data_dir)).available
        config, self._method = resolve(config, dataset)
        self._model = model_for(config, dataset)
        if problem := vectorises(self._model):
            raise FedobpError(f"{problem}, and the benchmark compares both engines: choose another --model")
        self._dataset, self._shards = assign(config, dataset)
        self._device, dtype = torch.device(config.device), dtype_of(config.precision)
        self._data = FederatedData(self._dataset, self._shards, self._device, dtype, config.normalize)
        self._asked = config.batch_size
        self._config = config = replace(config, batch_size=batch_size_for(config, [self._data]))
        # Each run's cohorts are its own; the partition stays the first one's.
        self._configs = [replace(config, seed=config.seed + run) for run in range(runs)]
        self._cohorts = [list(islice(cohorts(one), _SAMPLE)) for one in self._configs]
        steps = [steps_by_round(one, self._data, who) for one, who in zip(self._configs, self._cohorts, strict=True)]
        self._steps = steps
        self._step_flops = step_flops(config, self._model)
        if not sum(self._steps[0]):
            raise FedobpError("no client has a batch to train on: use fewer --clients")

    def measure(self) -> Bench:
        """Measure both engines."""
        config = self._config
        best = 0.0
        found: dict[EngineName, tuple[_Measured, float]] = {}
        names: tuple[EngineName, ...] = ("lanes", "serial")
        for name in names:
            # Measured before each engine: on a shared machine the best rate may come later.
            self._tell("matrix product")
            best = max(best, peak(self._device, config.precision, max(0.2, _PEAK * self._seconds)))
            engine = engine_for(replace(config, engine=name), self._model)
            trained = self._trained(name, engine)
            found[name] = trained, self._evaluated(name, engine, trained)
        steps_per_round = sum(map(sum, self._steps)) / sum(map(len, self._steps))
        evaluations = math.ceil(config.rounds / config.eval_every)

        def speed(name: EngineName) -> Speed:
            trained, evaluated = found[name]
            rate = trained.steps_per_second
            flops = trained.samples_per_second / config.batch_size * self._step_flops
            return Speed(
                engine=name,
                rounds=trained.rounds,
                steps_per_second=rate,
                occupancy=trained.done.occupancy,
                flops_per_second=flops,
                share_of_peak=flops / best,
                seconds_per_round=steps_per_round / rate,
                speedup=rate / found["serial"][0].steps_per_second,
                seconds_per_evaluation=evaluated,
                seconds_per_run=config.rounds * steps_per_round / rate + evaluations * evaluated,
            )

        return Bench(
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            threads=torch.get_num_threads(),
            precision=config.precision,
            dataset=config.dataset,
            random_data=self._random,
            samples=len(self._dataset.y),
            model=label(config.model),
            parameters=self._model.layout.size,
            clients=config.clients,
            cohort=config.cohort_size,
            partition=label(config.partition),
            alpha=config.alpha,
            batch_size=self._asked,
            epochs=config.epochs,
            runs=len(self._configs),
            rounds=config.rounds,
            evaluations=evaluations,
            steps_per_round=steps_per_round,
            flops_per_step=self._step_flops,
            peak_flops_per_second=best,
            engines=(speed("serial"), speed("lanes")),
            seconds=time.perf_counter() - self._begun,
        )

    def _left(self, part: str) -> float:
        """Return the seconds until a part of the measurement should end."""
        return self._begun + _ENDS[part] * self._seconds - time.perf_counter()

    def _tell(self, what: str) -> None:
        self._progress(what, min(1.0, (time.perf_counter() - self._begun) / self._seconds))

    def _typical(self) -> Iterator[int]:
        """Yield rounds for ever, those first whose number of steps is nearest to the average."""
        together = [sum(steps) for steps in zip(*self._steps, strict=True)]
        mean = sum(together) / len(together)
        busy = [round for round, steps in enumerate(self._steps[0]) if steps]
        return cycle(sorted(busy, key=lambda round: abs(together[round] - mean)))

    def _trained(self, name: EngineName, engine: Engine) -> _Measured:
        """Measure rounds until the time is over: at least one epoch of one round.

        Where a whole round would take too long, its clients train for fewer epochs, and the serial engine, which
        takes one run after the other anyway, trains the first run alone.
        """
        budget = Budget(memory_for(self._config, "store"))
        # No round is evaluated here: that is measured by itself.
        silent = [replace(one, rounds=_NEVER, eval_every=_NEVER, protocol="default") for one in self._configs]
        plans = [RunPlan(one, self._method, self._model, self._data, "") for one in silent]
        trials = [simulate(plan, engine, budget) for plan in plans]
        order = self._typical()

        def job(trial: Simulation, round: int, cohort: Tensor, epochs: int) -> ClientJob:
            return trial.run.job(replace(trial.run.context(round, cohort), epochs=epochs))

        def measured(rounds: Sequence[int], runs: int, epochs: int) -> _Measured:
            self._tell(name)
            some = list(zip(trials, self._cohorts, strict=True))[:runs]
            jobs = [[job(trial, round + 1, cohort[round], epochs) for trial, cohort in some] for round in rounds]
            before = engine.counters
            took = train(engine, trials[:runs], jobs)
            done = engine.counters - before
            whole = sum(steps[round] for steps in self._steps for round in rounds)
            return _Measured(len(rounds) * done.steps / whole, done, took)

        sizes = [self._data.size(client, "train") for client in range(self._data.clients)]
        smallest = torch.tensor(sizes).argsort(stable=True)[:2]
        train(engine, trials[:1], [[job(trials[0], 1, smallest, 1)]])  # a warm-up
        first = [next(order)]
        few = 1 if name == "serial" else len(trials)
        pilot = measured(first, few, 1)
        if self._device.type == "cuda":  # that was the making of graphs
            pilot = measured(first, few, 1)
        by_run = pilot.seconds / few
        runs = len(trials) if by_run * len(trials) * self._config.epochs <= self._left(name) else few
        epochs = min(self._config.epochs, int(self._left(name) / (by_run * runs)))
        if epochs < 1:
            return pilot
        if self._device.type == "cuda":  # graphs again, for more steps
            measured(first, runs, epochs)
        found = measured(first, runs, epochs)
        once = found.seconds
        while once <= self._left(name):
            at_once = 1 if self._device.type == "cpu" else max(1, min(_AT_ONCE, int(self._left(name) / once)))
            more = measured(list(islice(order, at_once)), runs, epochs)
            found, once = found + more, more.seconds / at_once
        return found

    def _evaluated(self, name: EngineName, engine: Engine, trained: _Measured) -> float:
        """Return how long it takes to test everyone; where that is long, it is estimated from the first clients."""
        self._tell(f"{name}, evaluation")
        end = f"{name} evaluation"
        affordable = 3 * trained.samples_per_second * max(0.0, self._left(end))  # forward is a third of a step
        tested, some = 0, 0
        for shard in self._shards:
            if tested and tested + len(shard.test) > affordable:
                break
            tested, some = tested + len(shard.test), some + 1
        data = self._data
        if some < len(self._shards):
            data = data.repartitioned(self._dataset, self._shards[:some], self._config.normalize)
        plan = RunPlan(self._config, self._method, self._model, data, "")
        took = evaluate(engine, plan)
        if self._device.type == "cuda" or took < self._left(end):  # the first time is slower than all others
            took = evaluate(engine, plan)
        return took * sum(len(shard.test) for shard in self._shards) / max(1, tested)
