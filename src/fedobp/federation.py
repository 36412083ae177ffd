"""A federation of clients, and the round loop that trains a method on it."""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedobp.algorithms import Moment, Option, method_class
from fedobp.config import Config
from fedobp.data import (
    Dataset,
    FederatedData,
    Shard,
    changed,
    data_dir,
    digest,
    load,
    load_partition,
    partition,
)
from fedobp.engine import (
    Budget,
    Engine,
    Lanes,
    Population,
    Serial,
    Store,
    Task,
    Trained,
    diverged,
    dtype_of,
    memory_of,
    pooled_gradient,
)
from fedobp.errors import FedobpError
from fedobp.evaluation import Accuracy, Cold, Evaluator, Report, protocol
from fedobp.keys import NOBODY, Purpose, fold, permutation
from fedobp.models import Model
from fedobp.result import Compute, Result, Traffic
from fedobp.runs import Models, RunFolder, claim
from fedobp.transfer import Arriving
from fedobp.wire import Payload


@dataclass(frozen=True)
class Progress:
    """Where a run is: passed to the caller after every round."""

    method: str
    round: int
    rounds: int
    accuracy: float | None  # pooled, of the newest evaluation
    run: int = 0  # which of several runs


def cohorts(config: Config) -> Iterator[Tensor]:
    """Yield each round's clients, in the order in which they are visited."""
    size = config.cohort_size
    if config.sampling == "published":
        # The authors' stream: Python's generator, one sample a round, drawn in order.
        stream = random.Random(config.seed)
        for _ in range(config.rounds):
            yield torch.tensor(stream.sample(list(range(config.trainers)), size))
    else:
        for round in range(1, config.rounds + 1):
            yield permutation(fold(config.seed, round, NOBODY, Purpose.COHORT), config.trainers)[:size]


def deal(config: Config, dataset: Dataset | None = None) -> tuple[Dataset, list[Shard]]:
    """Load a dataset, unless it is given, and deal it out to clients: as a saved partition says, or anew.

    Where the partition changes clients' inputs, the dataset that comes back has the changed ones.
    """
    dataset = dataset or load(config.dataset, data_dir(config.data_dir))
    if config.partition_file:
        shards = load_partition(Path(config.partition_file), dataset)
    else:
        shards = partition(
            dataset.y,
            config.clients,
            kind=config.partition,
            options=config.partition_options,
            alpha=config.alpha,
            seed=config.partition_seed,
            val_ratio=config.val_ratio,
            holdout=config.holdout_clients,
            natural=dataset.clients,
        )
    return changed(dataset, shards), shards


class Federation:
    """Clients with their data, and the model they train: built once, to run any number of methods on.

    Made `beside` another one of the same dataset, it shares that one's samples instead of loading them again.
    """

    _dataset: Dataset
    data: FederatedData
    partition: str  # its hash

    def __init__(self, config: Config | None = None, *, beside: "Federation | None" = None) -> None:
        self.config = config = config or Config()
        device, dtype = torch.device(config.device), dtype_of(config.precision)
        if beside and _samples(beside.config) == _samples(config):
            self._dataset, self.data, self.partition = beside._dataset, beside.data, beside.partition
            if _partition(beside.config) != _partition(config):
                _, shards = deal(config, self._dataset)
                self.data = beside.data.dealt_again(self._dataset, shards, config.normalize)
                self.partition = digest(self._dataset, shards)
        else:
            self._dataset, shards = deal(config)
            self.data = FederatedData(self._dataset, shards, device, dtype, config.normalize)
            self.partition = digest(self._dataset, shards)
        self.model = Model(config.model, self.data.shape, self.data.classes)

    def run(
        self,
        method: str | None = None,
        *,
        out: str | Path | None = None,
        progress: Callable[[Progress], None] | None = None,
        **options: Option,
    ) -> Result:
        """Train a method (the configuration's, unless another is named) and return what it gave.

        `options` are the method's own, such as `q=0.999`. With `out`, the run is written to that folder.
        """
        config, method = self.config, method or self.config.method
        kept = config.options if method == config.method else {}
        config = replace(config, method=method, options={**kept, **options})
        [result] = _launch([(self, config, Path(out) if out else None)], progress or (lambda _: None))
        if isinstance(result, FedobpError):
            raise result
        return result


def sweep(
    configs: Iterable[Config],
    *,
    out: Sequence[str | Path] | None = None,
    progress: Callable[[Progress], None] | None = None,
    keep_models: bool = True,
) -> list[Result]:
    """Run many configurations, as many as possible at once, and return their results in the same order.

    Runs that share dataset, model, batch size and machine settings share a launch: their clients train side by side,
    whatever their seeds, partitions, methods and numbers. With `out`, each run is written to a folder of its own.
    Without `keep_models`, results hold the global model only, and not every client's.
    """
    configs = list(configs)
    if out is not None:
        out = _folders(out, len(configs))
    results: dict[int, Result] = {}
    failures: list[FedobpError] = []
    for alike in _alike(configs):
        federation = Federation(configs[alike[0]])
        most = _room(federation, [configs[run] for run in alike])
        for at in range(0, len(alike), most):
            together = alike[at : at + most]
            plans = []
            for run in together:
                federation = Federation(configs[run], beside=federation)
                plans.append((federation, configs[run], Path(out[run]) if out else None))

            def report(at: Progress, together: list[int] = together) -> None:
                if progress:
                    progress(replace(at, run=together[at.run]))

            for run, result in zip(together, _launch(plans, report, keep_models), strict=True):
                if isinstance(result, FedobpError):
                    failures.append(_named(configs[run], result))
                else:
                    # Whole personal models of every run would fill the memory.
                    results[run] = result if keep_models else replace(result, models=result.models.without_clients())
    if failures:
        raise failures[0]  # when all others have finished and are written down
    return [results[run] for run in range(len(configs))]


def _named(config: Config, failure: FedobpError) -> FedobpError:
    return FedobpError(f"{config.method}, seed {config.seed}: {failure}")


def _folders(out: Sequence[str | Path], runs: int) -> list[Path]:
    """Return the folders of a sweep's runs, each of its own and free, or say what is wrong with them."""
    if isinstance(out, str | Path) or len(out) != runs:
        raise FedobpError(f"`out` must name a folder for each of the {runs} runs")
    folders = [Path(one) for one in out]
    if len(set(folders)) < runs:
        raise FedobpError("`out` names a folder twice: give each run one of its own")
    return [claim(folder) for folder in folders]


def _samples(config: Config) -> tuple[object, ...]:
    """Return what the samples in memory depend on; a partition by features makes samples of its own."""
    own = str((config.dealt, config.partition_file)) if config.partition == "feature" else None
    return config.dataset, config.data_dir, config.device, dtype_of(config.precision), own


def _partition(config: Config) -> tuple[object, ...]:
    return config.dealt, config.partition_file, config.normalize


def _alike(configs: Sequence[Config]) -> list[list[int]]:
    """Group the runs that can share a launch."""
    groups: dict[object, list[int]] = {}
    for run, config in enumerate(configs):
        machine = (config.engine, config.precision, config.lane_memory, config.store_memory)
        groups.setdefault((_samples(config), config.model, config.batch_size, machine), []).append(run)
    return list(groups.values())


def _room(federation: Federation, configs: Sequence[Config]) -> int:
    """Return how many runs find room for their clients' state at once.

    That is up to three vectors a client: its record on the server, its own, and its last model.
    """
    vector = federation.model.layout.size * federation.data.dtype.itemsize
    most = max(config.clients for config in configs)
    return max(1, int(memory_for(federation.config, "store") / (3 * vector * most)))


def memory_for(config: Config, what: Literal["lane", "store"]) -> float:
    """Return a budget in bytes: the stated one, or a share of the machine's memory."""
    stated = config.lane_memory if what == "lane" else config.store_memory
    return stated * 2**30 or memory_of(torch.device(config.device)) / (2 if what == "lane" else 4)


def engine_for(config: Config, model: Model) -> Engine:
    """Return the engine that a configuration names."""
    if config.engine == "serial":
        return Serial(model, config.batch_size, config.precision)
    return Lanes(model, config.batch_size, config.precision, memory_for(config, "lane"))


def _launch(
    plans: Sequence[tuple[Federation, Config, Path | None]],
    progress: Callable[[Progress], None],
    keep_models: bool = True,
) -> list[Result | FedobpError]:
    """Train runs side by side, round by round; one that fails leaves the others alone."""
    last = time.perf_counter()
    first, config, _ = plans[0]
    engine = engine_for(config, first.model)
    budget = Budget(memory_for(config, "store"))
    runs = [_Run(federation, config, out, engine, budget, keep_models) for federation, config, out in plans]
    failures: dict[int, FedobpError] = {}
    for round in range(1, max(run.config.rounds for run in runs) + 1):
        clock, before = time.perf_counter(), engine.counters
        going = {at: run for at, run in enumerate(runs) if round <= run.config.rounds and at not in failures}
        if not going:
            break
        for run in going.values():
            run.begin_round(round)
        while turning := [run for run in going.values() if run.turns]:
            tasks = [run.begin_turn() for run in turning]
            for run, answer in zip(turning, engine.train(tasks), strict=True):
                run.end_turn(answer)
        engine.prepare([run.next_task(round + 1) for run in going.values() if round < run.config.rounds])
        trained, done = time.perf_counter() - clock, engine.counters - before
        for at, run in going.items():
            try:
                run.evaluate_and_log()
            except FedobpError as error:
                failures[at] = error
            progress(Progress(run.config.method, round, run.config.rounds, run.accuracy, at))
        now = time.perf_counter()
        times = {"round": round, "train": trained, "all": now - clock, "runs": len(going)}
        for run in going.values():
            run.log_times({**times, "occupancy": done.occupancy})
            run.seconds += (now - last) / len(going)  # side by side, each has an equal share
        last = now
    return [failures[at] if at in failures else run.finish() for at, run in enumerate(runs)]


class Course:
    """One run's state, and what its rounds send and receive; no books and no folder."""

    def __init__(self, config: Config, model: Model, data: FederatedData, budget: Budget) -> None:
        self.config, self.model, self.data = config, model, data
        self.method = method_class(config.method).configure(config.options)
        theta = model.initial(config.seed).to(data.x.device, data.dtype)
        state = self.method.begin(model, theta, config.seed)
        self.server, self.rows = state.server, Store(state.row, data.clients, budget)
        self.people = Population(data, state.own, theta, config.seed, budget)

    def moment(self, round: int, cohort: Tensor, epochs: int | None = None) -> Moment:
        """Return a round with its clients and their local epochs."""
        config = self.config
        epochs = config.epochs if epochs is None else epochs
        pooled = partial(pooled_gradient, self.model, self.data, config.precision)
        held_out = config.holdout_clients
        return Moment(round, config.rounds, config.clients, epochs, cohort, config.seed, pooled, held_out)

    def numbers(self, lr: float) -> dict[str, float]:
        """Return what clients get as `hp`."""
        rates = {"lr": lr, "momentum": self.config.momentum, "weight_decay": self.config.weight_decay}
        return {**rates, **self.method.floats()}

    def task(self, now: Moment) -> Task:
        """Return what a cohort will be asked to do, but for what it will be sent."""
        hp = self.numbers(self.config.lr_at(now.round))
        return Task(self.people, now, self.method.local(self.model, now), {}, hp)

    def send(self, now: Moment) -> Task:
        """Return what a cohort is asked to do, with what it is sent."""
        rows = self.rows.gather(now.cohort.tolist())
        down, self._sent = self.method.send(self.model, now, self.server, rows)
        return replace(self.task(now), down=down)

    def receive(self, now: Moment, answer: Trained) -> None:
        """Take in a cohort's uploads. Nobody waits here for a device to finish.

        A cohort without a single training sample has learned nothing, and there is no mean over no samples.
        """
        if not any(self.data.size(client, "train") for client in now.cohort.tolist()):
            return
        received = self.method.receive(self.model, now, self.server, self._sent, answer.up, answer.n)
        self.server, rows = received
        self.rows.scatter(now.cohort.tolist(), rows)


class _Run(Course):
    """One method's training on a federation, with its books."""

    def __init__(
        self,
        federation: Federation,
        config: Config,
        out: Path | None,
        engine: Engine,
        budget: Budget,
        keep_models: bool = True,
    ) -> None:
        super().__init__(config, federation.model, federation.data, budget)
        self.evaluate = Evaluator(self.method, self.model, self.people, engine, config.finetune_epochs)
        self.protocol = protocol(config.protocol, config.rounds)
        self.models = Models(self.model.layout, self.server["theta"])
        self.keep_models = keep_models or (out is not None and config.save_models == "all")
        self.folder = RunFolder(out, f"# Partition {federation.partition}\n{config.to_toml()}") if out else None
        self.partition = federation.partition
        self.about = {"method": config.method, "model": config.model, **self.data.about()}
        self.cohorts = cohorts(config)
        self.now = self.coming = self.moment(0, torch.tensor([]))
        self.turns: list[Moment] = []
        self.costs: list[_Cost] = []  # of this round's turns
        self.pending: list[list[_Cost]] = []  # of rounds that are not written down yet
        self.bytes = {"bytes_down": 0, "bytes_up": 0}
        self.seen = self.samples = 0  # that went through models, and that there were
        self.reports: list[Report] = []
        self.seconds = 0.0

    def next_task(self, round: int) -> Task:
        """Return what the next round will ask of its cohort, but for what it will send."""
        if round != self.coming.round:
            cohort = next(self.cohorts)
            everyone = self.method.everyone(round, self.config.rounds)
            self.coming = self.moment(round, torch.arange(self.config.trainers) if everyone else cohort)
        return self.task(self.turns_of(self.coming)[0])

    def turns_of(self, now: Moment) -> list[Moment]:
        """Return the cohorts that train one after the other in a round: one, or as many as there are clients."""
        return [now] if self.method.together else [replace(now, cohort=one) for one in now.cohort.split(1)]

    def begin_round(self, round: int) -> None:
        """Walk through one round (the paper's Algorithm 1, and every other method's): sample, ..."""
        self.next_task(round)
        self.now, self.costs = self.coming, []
        self.turns = self.turns_of(self.now)

    def begin_turn(self) -> Task:
        """... send ..."""
        task = self.send(self.turns[0])
        self.down = task.down
        return task

    def end_turn(self, answer: Trained) -> None:
        """... and, after the cohort has trained, receive."""
        now = self.turns.pop(0)
        self.receive(now, answer)
        seen = Arriving(answer.loss), Arriving(answer.finite)
        self.costs.append(_Cost(now, self.config.lr_at(now.round), *seen, Payload(self.down), Payload(answer.up)))
        self.seen += answer.seen
        self.samples += sum(self.data.size(client, "train") for client in now.cohort.tolist())

    def evaluate_and_log(self) -> None:
        """Evaluate if it is due, and write down what is known.

        CUDA may still be busy with this round: then its costs are asked for when the next one is under way.
        """
        due = self._due(self.now.round)
        while self.pending:
            self._log(_settled(self.pending.pop(0)))
        if self.data.x.is_cuda and not due:
            self.pending = [self.costs]
            return
        line = _settled(self.costs)
        try:
            if due:
                self.reports.append(self._evaluate(self.now.round))
                line |= self.reports[-1].to_json()
        finally:  # what a round cost is kept even if fine-tuning diverges
            self._log(line)

    def _log(self, line: dict[str, Any]) -> None:
        for way in self.bytes:
            self.bytes[way] += line[way]
        if self.folder:
            self.folder.log("metrics", line)

    @property
    def accuracy(self) -> float | None:
        """The newest pooled accuracy."""
        return self.reports[-1].served.pooled if self.reports else None

    def log_times(self, times: Mapping[str, float]) -> None:
        """Keep how long a round took, apart from what it gave."""
        if self.folder:
            self.folder.log("timings", times)

    def _due(self, round: int) -> bool:
        """Say whether a round is evaluated."""
        return round % self.config.eval_every == 0 or round == self.config.rounds or round in self.protocol.rounds

    def _evaluate(self, round: int) -> Report:
        """Test everyone; the last round's served models are kept as the run's.

        Fine-tuning takes the full learning rate: a schedule's last rounds would leave it nothing to do.
        """
        if round == self.config.rounds:
            self.models = Models(self.model.layout, self.server["theta"])
        return self.evaluate(
            lambda clients: self.moment(round, clients),
            self.server,
            self.rows,
            self.numbers(self.config.lr),
            everything=round in self.protocol.rounds,
            keep=self.models.add if round == self.config.rounds and self.keep_models else None,
        )

    def finish(self) -> Result:
        """Choose what the protocol reports, and write models and result."""
        config, folder, reports = self.config, self.folder, self.reports
        down, up = self.bytes["bytes_down"], self.bytes["bytes_up"]

        reported = [report for report in reports if report.round in self.protocol.rounds]
        cold = [report.cold for report in reported if report.cold]

        def chosen(columns: Iterable[Accuracy | None]) -> Any:
            return self.protocol.choose([column for column in columns if column is not None])

        result = Result(
            config=config,
            protocol=self.protocol,
            accuracy=chosen(report.served for report in reported),
            last=chosen(report.last for report in reported),
            finetuned=chosen(report.finetuned for report in reported),
            validation=chosen(report.validation for report in reported),
            cold=Cold(
                served=chosen(one.served for one in cold),
                visited=chosen(one.visited for one in cold),
                last=chosen(one.last for one in cold),
            )
            if cold
            else None,
            history=[(report.round, report.served.pooled, report.served.client_mean) for report in reports],
            personal=reports[-1].personal,
            bytes=Traffic(down / config.rounds, up / config.rounds, down, up),
            compute=Compute(self.seen / max(1, self.samples), reports[-1].passes),
            seconds=self.seconds,
            models=self.models,
            partition=self.partition,
            out=folder.path if folder else None,
        )
        if folder:
            if config.save_models != "none":
                self.models.save(folder.path / "models", clients=config.save_models == "all", about=self.about)
            folder.finish(result.to_json())
        return result


@dataclass(frozen=True)
class _Cost:
    """What a turn cost, as tensors that a device may still be computing."""

    now: Moment
    lr: float
    loss: Arriving
    finite: Arriving
    down: Payload
    up: Payload


def _settled(turns: Sequence[_Cost]) -> dict[str, Any]:
    """Wait for a round's numbers, and return them as a line of the log."""
    for turn in turns:
        finite = turn.finite.value()
        if not finite.all():
            raise diverged(turn.now, finite, turn.lr)
    losses = [loss for turn in turns for loss in turn.loss.value().tolist() if not math.isnan(loss)]
    return {
        "round": turns[0].now.round,
        "cohort": [client for turn in turns for client in turn.now.cohort.tolist()],
        "loss": sum(losses) / len(losses) if losses else None,
        "bytes_down": sum(turn.down.bytes() for turn in turns),
        "bytes_up": sum(turn.up.bytes() for turn in turns),
    }
