"""One run: its state, what its rounds send and receive, and its books."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from fedobp.algorithms import Method, Moment, Turn, method_class
from fedobp.config import Config, side_by_side
from fedobp.data import FederatedData
from fedobp.engine import Budget, Engine, Population, Store, Task, Trained, diverged, pooled_gradient
from fedobp.errors import FedobpError
from fedobp.evaluation import Accuracy, Cold, Evaluator, Report, protocol
from fedobp.keys import NO_CLIENT, Purpose, fold, permutation
from fedobp.models import Model
from fedobp.result import Compute, Result, Traffic
from fedobp.runs import Models, RunFolder
from fedobp.transfer import Arriving
from fedobp.wire import Payload


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
            yield permutation(fold(config.seed, round, NO_CLIENT, Purpose.COHORT), config.trainers)[:size]


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
        return Task(self.people, now, tuple(self.method.local(self.model, now)), {}, hp)

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


class Run(Course):
    """One method's training on a federation, with its books."""

    def __init__(
        self,
        config: Config,
        model: Model,
        data: FederatedData,
        budget: Budget,
        engine: Engine,
        partition: str,
        out: Path | None = None,
        keep_models: bool = True,
        launch: Sequence[Config] = (),
    ) -> None:
        super().__init__(config, model, data, budget)
        self.launch = launch  # all runs that train side by side, in order
        self.evaluate = Evaluator(self.method, self.model, self.people, engine, config.finetune_epochs)
        self.protocol = protocol(config.protocol, config.rounds)
        self.models = Models(self.model.layout, self.server["theta"])
        self.keep_models = keep_models or (out is not None and config.save_models == "all")
        head = f"# Partition {partition}\n{side_by_side(launch)}"
        self.folder = RunFolder(out, head + config.to_toml()) if out else None
        self.partition = partition  # its hash
        self.about = {"method": config.method, "model": config.model, **self.data.about()}
        self.cohorts = cohorts(config)
        self.coming = [self.moment(0, torch.tensor([]))]
        self.turns: list[Moment] = []
        self.costs: list[_Cost] = []  # of this round's turns
        self.pending: list[list[_Cost]] = []  # of rounds that are not written down yet
        self.bytes = {"bytes_down": 0, "bytes_up": 0}
        self.seen = self.samples = 0  # that went through models, and that there were
        self.reports: list[Report] = []
        self.seconds = 0.0

    def next_task(self, round: int) -> Task:
        """Return what the next round will ask of its cohort, but for what it will send."""
        if round != self.coming[0].round:
            self.coming = self.turns_of(self.moment(round, next(self.cohorts)))
        return self.task(self.coming[0])

    def turns_of(self, now: Moment) -> list[Moment]:
        """Return the cohorts that train one after the other in a round; each client is one if they are not together."""
        asked = self.method.turns(now.round, now.rounds)
        if not asked or set(asked) - set(get_args(Turn)):
            raise FedobpError(f"`turns` of {self.method.name} must return 'cohort', 'everyone' or both, not {asked!r}")
        all_clients = replace(now, cohort=torch.arange(self.config.trainers), everyone=True)
        turns = [all_clients if turn == "everyone" else now for turn in asked]
        if self.method.together:
            return turns
        return [replace(turn, cohort=one) for turn in turns for one in turn.cohort.split(1)]

    def begin_round(self, round: int) -> None:
        """Walk through one round (the paper's Algorithm 1, and every other method's): sample, ..."""
        self.next_task(round)
        self.turns, self.costs = list(self.coming), []

    def begin_turn(self) -> Task:
        """... send ..."""
        task = self.send(self.turns[0])
        self.down = task.down
        return task

    def end_turn(self, answer: Trained | BaseException) -> None:
        """... and, after the cohort has trained, receive."""
        if isinstance(answer, BaseException):
            raise answer
        now = self.turns.pop(0)
        self.receive(now, answer)
        seen = Arriving(answer.loss), Arriving(answer.finite)
        hp = self.numbers(self.config.lr_at(now.round))
        self.costs.append(_Cost(now, hp, *seen, Payload(self.down), Payload(answer.up)))
        self.seen += answer.seen
        self.samples += sum(self.data.size(client, "train") for client in now.cohort.tolist())

    def evaluate_and_log(self) -> None:
        """Evaluate if it is due, and write down what is known.

        CUDA may still be busy with this round: then its costs are asked for when the next one is under way.
        """
        round = self.costs[0].now.round
        due = self._due(round)
        while self.pending:
            self._log(_settled(self.pending.pop(0), self.method))
        if self.data.x.is_cuda and not due:
            self.pending = [self.costs]
            return
        line = _settled(self.costs, self.method)
        try:
            if due:
                self.reports.append(self._evaluate(round))
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
            launch=tuple(self.launch),
        )
        if folder:
            if config.save_models != "none":
                self.models.save(folder.path / "models", clients=config.save_models == "all", about=self.about)
            beside = {"launch": [config.changed(other) for other in self.launch]} if len(self.launch) > 1 else {}
            folder.finish({**result.to_json(), **beside})
        return result


@dataclass(frozen=True)
class _Cost:
    """What a turn cost, as tensors that a device may still be computing."""

    now: Moment
    hp: Mapping[str, float]
    loss: Arriving
    finite: Arriving
    down: Payload
    up: Payload


def _settled(turns: Sequence[_Cost], method: Method) -> dict[str, Any]:
    """Wait for a round's numbers, and return them as a line of the log."""
    for turn in turns:
        finite = turn.finite.value()
        if not finite.all():
            raise diverged(turn.now, finite, turn.hp, method)
    losses = [loss for turn in turns for loss in turn.loss.value().tolist() if not math.isnan(loss)]
    return {
        "round": turns[0].now.round,
        "cohort": [client for turn in turns for client in turn.now.cohort.tolist()],
        "loss": sum(losses) / len(losses) if losses else None,
        "bytes_down": sum(turn.down.bytes() for turn in turns),
        "bytes_up": sum(turn.up.bytes() for turn in turns),
    }
