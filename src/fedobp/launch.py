"""Launches: runs that train side by side, and the scheduler that advances their rounds."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from traceback import clear_frames
from typing import NamedTuple, TypeVar

from fedobp import interrupts, plugins
from fedobp.algorithms import attributing_errors
from fedobp.callbacks import Callback, report_end
from fedobp.checkpoint import NEVER, Checkpoints, Interval, PastRun, common_round, note_failure, remove
from fedobp.config import Config
from fedobp.data import FederatedData
from fedobp.engine import (
    Budget,
    ClientJob,
    ClientPool,
    Engine,
    LostClients,
    PoolJob,
    Prepared,
    caught,
    global_gradient,
)
from fedobp.errors import Stopped, TryAgain, out_of_memory
from fedobp.evaluation import Evaluator
from fedobp.grouping import batch_size_for, engine_for, memory_for
from fedobp.method import CohortUpdate, Method
from fedobp.models import Model
from fedobp.result import Result
from fedobp.run import Run
from fedobp.sampling import evaluated_clients
from fedobp.wrapped import inner_of

T = TypeVar("T")
Round = Generator[ClientJob, CohortUpdate | LostClients, None]
Update = CohortUpdate | BaseException
Planned = list[ClientJob] | BaseException  # the jobs of a run's round, or why they could not be planned


@dataclass(frozen=True)
class Progress:
    """Where a run is: passed to the caller after every round."""

    method: str
    round: int
    rounds: int
    accuracy: float | None  # pooled, of the newest evaluation
    run: int = 0  # which of several runs


class StopTraining(Exception):
    """Raised by a function that is told the progress: training stops after this round, with a checkpoint."""


class RunPlan(NamedTuple):
    """A run that is to be trained: resolved settings, the method with its options, and the federation's clients."""

    config: Config
    method: Method
    model: Model
    data: FederatedData
    partition: str  # its hash
    out: Path | None = None  # the run's folder
    notes: tuple[str, ...] = ()  # what the run's folder does not hold
    name: str = ""  # among the runs of its launch
    data_hash: Callable[[], str] | None = None  # of the dataset's inputs and labels: it may take seconds


class Simulation(NamedTuple):
    """A run on this machine: the server's side, and the clients."""

    run: Run
    clients: ClientPool


def simulate(
    plan: RunPlan,
    engine: Engine,
    budget: Budget,
    keep_models: bool = True,
    launch: Sequence[tuple[str, Config]] = (),
    callbacks: Sequence[Callback] = (),
    continued_at: int | None = None,
) -> Simulation:
    """Return a run with its clients, before round 1; or as it goes on after a round, before its state is restored."""
    config, method, model, data, partition, out, notes, *_ = plan
    theta = model.initial(config.seed).to(data.x.device, data.dtype)
    initial = method.init(model, theta, config.seed)
    keeps = method.keeps_last_model
    clients = ClientPool(data, initial.state, theta, config.seed, budget, keeps_last_model=keeps)
    sample = evaluated_clients(config)
    evaluator = Evaluator(method, model, clients, engine, config.finetune_epochs, config.metric_names, sample)
    evaluator.require_samples()
    run = Run(
        config,
        method,
        model,
        initial,
        evaluator,
        budget,
        provenance=engine.provenance(data.x.device),
        global_gradient=partial(global_gradient, model, data, config.precision),
        groups=data.groups,
        out=out,
        partition=partition,
        metadata={"method": config.method, "model": plugins.label(config.model), **data.metadata()},
        keep_models=keep_models,
        launch=launch,
        notes=notes,
        clients=data.describe_clients(evaluator.evaluated),
        continued_at=continued_at,
        callbacks=callbacks,
    )
    return Simulation(run, clients)


class Launch:
    """Runs that train side by side, by position; a run that fails leaves the others alone."""

    def __init__(
        self,
        plans: Sequence[RunPlan],
        keep_models: bool,
        callbacks: Sequence[Callback] = (),
        interval: Interval = NEVER,
        resume: bool = False,
    ) -> None:
        first, runs = plans[0], [(plan.name, plan.config) for plan in plans]
        batch = batch_size_for(first.config, [plan.data for plan in plans])
        self._plans, self._callbacks, self._resume = plans, callbacks, resume
        self.engine = engine_for(first.config, first.model, batch)
        self._outcomes: dict[int, Result | BaseException] = {}
        self.active: dict[int, Simulation] = {}
        self._interval, self._checkpoints, self._saved_at = interval, dict[int, Checkpoints](), time.monotonic()
        self._writer = ThreadPoolExecutor(max_workers=1)  # one: a round's checkpoints are written before the next's
        names = [plan.name for plan in plans]
        past = [
            PastRun(plan.out, plan.config, plan.partition, names, plan.data_hash) if resume and plan.out else None
            for plan in plans
        ]
        self.round = common_round(past)  # the newest that is complete: the runs go on after it
        budget = Budget(memory_for(first.config, "store"))
        for at, plan in enumerate(plans):
            known = past[at]
            if known and known.is_over(self.round):
                self._outcomes[at] = known.outcome()
                continue
            if known and known.is_finished:
                plan = plan._replace(out=None)  # it trains beside the others again, and is not written again
                if not self.round:
                    remove(known.folder)  # its checkpoints are of rounds that it trains again
            after = self.round if known else None
            start = partial(simulate, plan, self.engine, budget, keep_models, runs, callbacks, after)
            if one := self.attempt(at, start):
                self.active[at] = one
                folder = plans[at].out
                if folder and (self.round or interval != NEVER):
                    self._checkpoints[at] = Checkpoints(
                        folder, one.run, one.clients.stores, names, self._writer, plan.data_hash
                    )
                    if self.round:
                        self.attempt(at, partial(self._checkpoints[at].restore, self.round))

    def save(self, number: int, *, now: bool = False) -> None:
        """Take checkpoints of all active runs if they are due after a round, or `now`: then they are also written."""
        elapsed = time.monotonic() - self._saved_at
        writing = sum(self._checkpoints[at].writing_time for at in self.active if at in self._checkpoints)
        if self._interval == NEVER or not (now or self._interval.is_due(number, elapsed, writing)):
            return
        for at in [at for at in self.active if at in self._checkpoints]:
            self.attempt(at, partial(self._checkpoints[at].save, number))
        for at in [at for at in self.active if at in self._checkpoints and now]:
            self.attempt(at, self._checkpoints[at].wait)
        self._saved_at = time.monotonic()

    def attempt(self, at: int, step: Callable[[], T]) -> T | None:
        """Take a step of a run; what it raises ends this run alone, unless it is not its own and the runs resume."""
        method, model = type(inner_of(self._plans[at].method)), self._plans[at].model

        def attributed() -> T:
            with (
                attributing_errors(method),
                plugins.attributing_errors("model", model.name, model.build, inside=True),
            ):
                return step()

        done = caught(attributed)
        if not isinstance(done, BaseException):
            return done
        lasting = not isinstance(done, TryAgain) and not out_of_memory(done)
        if not lasting and self._resume:  # the next call goes on with all runs, so none ends alone
            self.end_all(done)
            raise done
        folder = self._plans[at].out
        if folder and at in self._checkpoints:
            caught(self._checkpoints[at].wait)
            if lasting and len(self._plans) > 1:
                note_failure(folder, self.round + 1, done)
        self._end(at, done)
        if len(self._plans) > 1:  # the others need the memory that its frames hold
            for error in (done, done.__cause__):
                clear_frames(error.__traceback__ if error else None)
        return None

    def _end(self, at: int, outcome: Result | BaseException) -> None:
        """End a run; callbacks hear of one that has started."""
        if at in self._checkpoints:
            caught(self._checkpoints[at].wait)  # it has ended, whether or not this one could be written
        if ended := self.active.pop(at, None):
            ended.run.close()
            outcome = report_end(self._callbacks, self._plans[at].config, outcome)
        self._outcomes[at] = outcome

    def end_all(self, error: BaseException) -> None:
        """End all runs that are active, with what stops them: an interrupt, for example."""
        for at in list(self.active):
            self._end(at, error)
        self._writer.shutdown()

    def plan(self, number: int) -> dict[int, Planned]:
        """Return the jobs of each run's round, or why there are none."""
        active = {at: one.run for at, one in self.active.items() if number <= one.run.config.rounds}
        return {at: caught(partial(run.plan, number)) for at, run in active.items()}

    def start(self, plan: Mapping[int, Planned]) -> dict[int, Round]:
        """Return the rounds of a plan; a run whose planning failed ends here."""
        return {
            at: round
            for at, jobs in plan.items()
            if at in self.active and (round := self.attempt(at, partial(_start, self.active[at].run, jobs)))
        }

    def prepare(self, plan: Mapping[int, Planned]) -> Prepared | None:
        """Compute in advance what the first jobs of a round need; None: that failed, and training will compute it."""
        first = {at: jobs[0] for at, jobs in plan.items() if not isinstance(jobs, BaseException)}
        assigned = [self.active[at].clients.assign(job) for at, job in first.items()]
        prepared = caught(partial(self.engine.prepare, assigned))
        return None if isinstance(prepared, BaseException) else prepared

    def advance(self, rounds: Mapping[int, Round], updates: Mapping[int, Update | None]) -> dict[int, PoolJob]:
        """Send rounds their cohorts' updates (None: start them); return their next jobs."""
        found = {}
        for at, update in updates.items():
            if at in self.active and (job := self.attempt(at, partial(_advance, rounds[at], update))):
                found[at] = self.active[at].clients.assign(job)
        return found

    def train(self, jobs: Mapping[int, PoolJob], prepared: Prepared | None = None) -> dict[int, Update]:
        """Train the jobs of all runs in one engine call."""
        return dict(zip(jobs, self.engine.try_train(list(jobs.values()), prepared), strict=True))

    def finish(self) -> None:
        """End the runs that have trained all their rounds."""
        for at, one in list(self.active.items()):
            if one.run.config.rounds <= self.round and (result := self.attempt(at, one.run.result)):
                self._end(at, result)

    def results(self) -> list[Result | BaseException]:
        """Return each run's result, or what ended it; without failures, checkpoints are needed no more."""
        self._writer.shutdown()
        found = [self._outcomes[at] for at in range(len(self._plans))]
        if all(isinstance(one, Result) for one in found):
            for plan in self._plans:
                if plan.out:
                    remove(plan.out)
        return found


def _start(run: Run, planned: Planned) -> Round:
    if isinstance(planned, BaseException):
        raise planned
    return run.round(planned)


def _advance(round: Round, update: Update | None) -> ClientJob | None:
    """Return a round's next job; None: the round is finished."""
    try:
        if isinstance(update, BaseException):
            return round.throw(update)
        return next(round) if update is None else round.send(update)
    except StopIteration:
        return None


def train_side_by_side(
    plans: Sequence[RunPlan],
    progress: Callable[[Progress], None],
    keep_models: bool = True,
    callbacks: Sequence[Callback] = (),
    interval: Interval = NEVER,
    resume: bool = False,
) -> list[Result | BaseException]:
    """Take runs through their rounds; return each run's result, or what ended it.

    Runs with a folder take checkpoints at an `interval`. With `resume`, they go on from those that their folders hold.
    """
    if not plans:
        return []
    started = time.perf_counter()
    launch = Launch(plans, keep_models, callbacks, interval, resume)
    try:
        with interrupts.deferred() if interval != NEVER else nullcontext():
            _train(launch, progress, started)
            results = launch.results()
        return results
    except BaseException as error:  # an interrupt
        launch.end_all(error)
        raise


def _train(launch: Launch, progress: Callable[[Progress], None], last: float) -> None:
    """Run all rounds: the jobs of all runs are trained in one engine call."""
    stop: StopTraining | None = None
    plan, prepared = launch.plan(launch.round + 1), None
    for number in count(launch.round + 1):
        if not plan:
            return
        started, before = time.perf_counter(), launch.engine.counters
        rounds = launch.start(plan)
        jobs = launch.advance(rounds, dict.fromkeys(rounds))
        clock = time.perf_counter()
        updates = launch.train(jobs, prepared)
        plan = launch.plan(number + 1)
        prepared = launch.prepare(plan)  # while a device is busy with this round
        training = time.perf_counter() - clock
        while jobs := launch.advance(rounds, updates):
            clock = time.perf_counter()
            updates = launch.train(jobs)
            training += time.perf_counter() - clock
        launch.round = number
        now, occupancy = time.perf_counter(), (launch.engine.counters - before).occupancy
        active = [at for at in rounds if at in launch.active]
        times = {"round": number, "train": training, "all": now - started, "runs": len(active), "occupancy": occupancy}
        for at in active:
            run = launch.active[at].run
            launch.attempt(at, partial(run.log_times, times, (now - last) / len(active)))  # each has an equal share
            try:
                progress(Progress(run.config.method, number, run.config.rounds, run.accuracy, at))
            except StopTraining as error:
                stop = error
        launch.finish()
        signal = interrupts.received()
        launch.save(number, now=stop is not None or signal is not None)
        if not launch.active:
            return
        if stop is not None:
            raise stop
        if signal is not None:
            raise Stopped(signal)
        last = now
