"""Runs that train side by side: which of them share a launch, and the loop that takes them through their rounds."""

import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Literal, NamedTuple, TypeVar

import torch

from fedobp.algorithms import attributing_errors
from fedobp.config import Config
from fedobp.data import Dataset, FederatedData
from fedobp.engine import (
    Budget,
    ClientJob,
    ClientPool,
    Engine,
    Lanes,
    PoolJob,
    Serial,
    caught,
    dtype_of,
    global_gradient,
    memory_of,
)
from fedobp.errors import FedobpError
from fedobp.evaluation import Evaluator
from fedobp.method import CohortUpdate, Method
from fedobp.models import Model
from fedobp.result import Result
from fedobp.run import Run

T = TypeVar("T")
Round = Generator[ClientJob, CohortUpdate, None]


@dataclass(frozen=True)
class Progress:
    """Where a run is: passed to the caller after every round."""

    method: str
    round: int
    rounds: int
    accuracy: float | None  # pooled, of the newest evaluation
    run: int = 0  # which of several runs


class RunPlan(NamedTuple):
    """A run that is to be trained: resolved settings, the method with its options, and the federation's clients."""

    config: Config
    method: Method
    model: Model
    data: FederatedData
    partition: str  # its hash
    out: Path | None = None  # the run's folder


class Simulation(NamedTuple):
    """A run on this machine: the server's side, and the clients."""

    run: Run
    clients: ClientPool


def memory_for(config: Config, what: Literal["lane", "store"]) -> float:
    """Return a budget in bytes: the stated one, or a share of the machine's memory."""
    stated = config.lane_memory if what == "lane" else config.store_memory
    return stated * 2**30 or memory_of(torch.device(config.device)) / (2 if what == "lane" else 4)


def batch_size_for(config: Config, data: Iterable[FederatedData]) -> int:
    """Return the most samples that a batch can hold: the batch size, or all training samples of the largest client."""
    most = max(one.size(client, "train") for one in data for client in range(one.clients))
    if most >= config.batch_size:
        return config.batch_size
    warnings.warn(
        f"--batch-size {config.batch_size} is more than any client's training samples: they are one batch",
        stacklevel=2,
    )
    return max(2, most)


def engine_for(config: Config, model: Model, batch: int | None = None) -> Engine:
    """Return the engine that a configuration names; `batch` is the most samples that a batch can hold."""
    batch = config.batch_size if batch is None else batch
    if config.engine == "serial":
        return Serial(model, batch, config.precision)
    return Lanes(model, batch, config.precision, memory_for(config, "lane"))


def samples_key(config: Config) -> tuple[object, ...]:
    """Return what the samples in memory depend on; a partition by features makes samples of its own."""
    own = str((config.partition_settings, config.partition_file)) if config.partition == "feature" else None
    return config.dataset, config.data_dir, config.device, dtype_of(config.precision), own


def _launch_key(config: Config) -> tuple[object, ...]:
    """Return what runs of one launch must have in common."""
    machine = (config.engine, config.precision, config.lane_memory, config.store_memory)
    return samples_key(config), config.model, config.batch_size, machine


def group_launches(configs: Sequence[Config], dataset: Callable[[Config], Dataset]) -> list[list[int]]:
    """Return which runs share a launch: all that can, as many at once as have memory for their clients' state."""
    groups: dict[object, list[int]] = {}
    for run, config in enumerate(configs):
        groups.setdefault(_launch_key(config), []).append(run)
    launches = []
    for group in groups.values():
        most = caught(partial(_runs_at_once, [configs[run] for run in group], dataset(configs[group[0]])))
        size = 1 if isinstance(most, BaseException) else most  # then each of these runs fails with that error
        launches += [group[at : at + size] for at in range(0, len(group), size)]
    return launches


def check_launches(launches: Sequence[Sequence[int]], configs: Sequence[Config]) -> list[list[int]]:
    """Return launches that name every run once, and together only runs that can train side by side."""
    if sorted(run for launch in launches for run in launch) != list(range(len(configs))):
        raise FedobpError(f"`launches` must name each of the {len(configs)} runs once")
    for launch in launches:
        for run in launch[1:]:
            if _launch_key(configs[run]) != _launch_key(configs[launch[0]]):
                first, other = configs[launch[0]], configs[run]
                raise FedobpError(
                    f"{first.method}, seed {first.seed}, and {other.method}, seed {other.seed}, cannot share a launch: "
                    "their samples, model, batch size or machine settings differ"
                )
    return [list(launch) for launch in launches]


def _runs_at_once(configs: Sequence[Config], dataset: Dataset) -> int:
    """Return how many runs have memory for their clients' state at once.

    That is up to three vectors a client: its record on the server, its state, and its last model.
    """
    config = configs[0]
    vector = Model(config.model, dataset.input_shape, dataset.classes).layout.size * dtype_of(config.precision).itemsize
    most = max(one.clients for one in configs)
    return max(1, int(memory_for(config, "store") / (3 * vector * most)))


def simulate(
    plan: RunPlan, engine: Engine, budget: Budget, keep_models: bool = True, launch: Sequence[Config] = ()
) -> Simulation:
    """Return a run with its clients, before round 1."""
    config, method, model, data, partition, out = plan
    theta = model.initial(config.seed).to(data.x.device, data.dtype)
    initial = method.init(model, theta, config.seed)
    keeps = method.keeps_last_model
    clients = ClientPool(data, initial.state, theta, config.seed, budget, keeps_last_model=keeps)
    evaluator = Evaluator(method, model, clients, engine, config.finetune_epochs)
    run = Run(
        config,
        method,
        model,
        initial,
        evaluator,
        budget,
        global_gradient=partial(global_gradient, model, data, config.precision),
        out=out,
        partition=partition,
        metadata={"method": config.method, "model": config.model, **data.metadata()},
        keep_models=keep_models,
        launch=launch,
    )
    return Simulation(run, clients)


class _Launch:
    """Runs of one launch by position; a run that fails leaves the others alone."""

    def __init__(self, plans: Sequence[RunPlan]) -> None:
        self._plans = plans
        self.going: dict[int, Simulation] = {}
        self.ended: dict[int, Result | BaseException] = {}

    def attempt(self, at: int, step: Callable[[], T]) -> T | None:
        """Take a step of a run; what it raises ends this run alone."""

        def attributed() -> T:
            with attributing_errors(type(self._plans[at].method)):
                return step()

        done = caught(attributed)
        if not isinstance(done, BaseException):
            return done
        self.going.pop(at, None)
        self.ended[at] = done
        if len(self._plans) > 1:  # the others need the memory that its frames hold
            for error in (done, done.__cause__):
                clear_frames(error.__traceback__ if error else None)
        return None

    def jobs(
        self, rounds: dict[int, Round], updates: dict[int, CohortUpdate | BaseException] | None
    ) -> dict[int, PoolJob]:
        """Advance rounds by their cohorts' updates (None: start them); return the jobs that they ask for next."""
        found = {}
        for at, round in rounds.items():
            if updates is None or at in updates:
                step = partial(next, round, None) if updates is None else partial(_advance, round, updates[at])
                if job := self.attempt(at, step):
                    found[at] = self.going[at].clients.assign(job)
        return found


def _advance(round: Round, update: CohortUpdate | BaseException) -> ClientJob | None:
    """Return what a round asks for after a cohort's update; None: it is over."""
    try:
        return round.throw(update) if isinstance(update, BaseException) else round.send(update)
    except StopIteration:
        return None


def train_side_by_side(
    plans: Sequence[RunPlan], progress: Callable[[Progress], None], keep_models: bool = True
) -> list[Result | BaseException]:
    """Take runs through their rounds: the jobs of all of them are trained in one engine call."""
    if not plans:
        return []
    last = time.perf_counter()
    first, configs = plans[0], [plan.config for plan in plans]
    batch = batch_size_for(first.config, [plan.data for plan in plans])
    engine = engine_for(first.config, first.model, batch)
    budget, launch = Budget(memory_for(first.config, "store")), _Launch(plans)
    for at, plan in enumerate(plans):
        if one := launch.attempt(at, partial(simulate, plan, engine, budget, keep_models, configs)):
            launch.going[at] = one

    def planned(number: int) -> dict[int, list[ClientJob]]:
        going = [(at, one.run) for at, one in launch.going.items() if number <= one.run.config.rounds]
        return {at: jobs for at, run in going if (jobs := launch.attempt(at, partial(run.plan, number)))}

    coming, prepared = planned(1), None
    for number in range(1, max(config.rounds for config in configs) + 1):
        if not coming:
            break
        clock, before, training = time.perf_counter(), engine.counters, 0.0
        rounds = {at: launch.going[at].run.round(jobs) for at, jobs in coming.items()}
        jobs, coming = launch.jobs(rounds, None), {}
        waves = 0
        while jobs:
            begun = time.perf_counter()
            updates = dict(zip(jobs, engine.try_train(list(jobs.values()), prepared), strict=True))
            if not waves:  # while a device is busy: the orders of the next round's samples
                coming = planned(number + 1)
                prepared = engine.prepare([launch.going[at].clients.assign(one[0]) for at, one in coming.items()])
            training, waves = training + time.perf_counter() - begun, waves + 1
            jobs = launch.jobs(rounds, updates)
        coming = {at: one for at, one in coming.items() if at in launch.going}
        now, done = time.perf_counter(), engine.counters - before
        going = [at for at in rounds if at in launch.going]
        times = {"round": number, "train": training, "all": now - clock, "runs": len(going)}
        for at in going:
            run = launch.going[at].run
            share = (now - last) / len(going)  # side by side, each has an equal share
            launch.attempt(at, partial(run.log_times, {**times, "occupancy": done.occupancy}, share))
            progress(Progress(run.config.method, number, run.config.rounds, run.accuracy, at))
        last = now
    for at, one in list(launch.going.items()):
        if result := launch.attempt(at, one.run.result):
            launch.ended[at] = result
    return [launch.ended[at] for at in range(len(plans))]
