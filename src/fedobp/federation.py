"""A federation of clients, and the round loop that trains a method on it."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedobp.algorithms import Moment, Option, Tensors, method_class
from fedobp.config import Config
from fedobp.data import Dataset, FederatedData, Shard, data_dir, load, partition
from fedobp.engine import Engine, Serial, Store
from fedobp.evaluation import Accuracy, Evaluator, Personal, Protocol, Report, protocol
from fedobp.keys import NOBODY, Purpose, fold, permutation
from fedobp.models import Model
from fedobp.runs import Models, RunFolder
from fedobp.wire import payload_bytes


@dataclass(frozen=True)
class Progress:
    """Where a run is: passed to the caller after every round."""

    method: str
    round: int
    rounds: int
    accuracy: float | None  # pooled, of the newest evaluation


@dataclass(frozen=True)
class Traffic:
    """Payload bytes of the whole cohort's messages; evaluation is not in it."""

    down_per_round: float
    up_per_round: float
    down_total: int
    up_total: int


@dataclass(frozen=True)
class Result:
    """What a run gave. Accuracies are per cent, chosen by `protocol`."""

    config: Config
    protocol: Protocol
    accuracy: Accuracy  # of the served models
    last: Accuracy  # of each client's own last local model
    finetuned: Accuracy | None  # of the served models after `finetune_epochs` of local training
    validation: Accuracy | None  # of the served models on the validation parts
    history: list[tuple[int, float, float]]  # (round, pooled, client mean)
    personal: Personal
    bytes: Traffic
    seconds: float
    models: Models
    out: Path | None

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return a client's final model, or the global one, as an ordinary state dict."""
        return self.models.state_dict(client)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values: what `fedobp run --json` prints."""
        config = self.config
        head = {"method": config.method, "dataset": config.dataset, "seed": config.seed, "rounds": config.rounds}
        columns = {
            name: asdict(column) if (column := getattr(self, name)) else None
            for name in ("accuracy", "last", "finetuned")
        }
        if self.validation:
            columns["validation"] = asdict(self.validation)
        return {
            **head,
            "protocol": self.protocol.to_json(),
            **columns,
            "history": [list(point) for point in self.history],
            "personal": asdict(self.personal),
            "bytes": asdict(self.bytes),
            "seconds": self.seconds,
            "out": str(self.out) if self.out else None,
        }


def cohorts(config: Config) -> Iterator[Tensor]:
    """Yield each round's clients, in the order in which they are visited."""
    size = config.cohort_size
    if config.sampling == "published":
        # The authors' stream: Python's generator, one sample a round, drawn in order.
        stream = random.Random(config.seed)
        for _ in range(config.rounds):
            yield torch.tensor(stream.sample(list(range(config.clients)), size))
    else:
        for round in range(1, config.rounds + 1):
            yield permutation(fold(config.seed, round, NOBODY, Purpose.COHORT), config.clients)[:size]


def deal(config: Config) -> tuple[Dataset, list[Shard]]:
    """Load a dataset and deal it out to clients."""
    dataset = load(config.dataset, data_dir(config.data_dir))
    return dataset, partition(
        dataset.y,
        config.clients,
        kind=config.partition,
        alpha=config.alpha,
        seed=config.partition_seed,
        val_ratio=config.val_ratio,
    )


class Federation:
    """Clients with their data, and the model they train: built once, to run any number of methods on."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config = config or Config()
        dataset, shards = deal(config)
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[config.precision]
        self.data = FederatedData(dataset, shards, torch.device(config.device), dtype)
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
        return _Run(self, config, Path(out) if out else None).train(progress or (lambda _: None))


class _Run:
    """One method's training on a federation."""

    def __init__(self, federation: Federation, config: Config, out: Path | None) -> None:
        self.config, self.model, data = config, federation.model, federation.data
        self.method = method_class(config.method).configure(config.options)
        theta = self.model.initial(config.seed).to(data.x.device, data.dtype)
        state = self.method.begin(self.model, theta)
        self.server, self.rows = state.server, Store(state.row)
        self.engine: Engine = Serial(self.model, data, state.own, theta, config.seed, config.batch_size)
        self.evaluate = Evaluator(self.method, self.model, data, self.engine, config.finetune_epochs)
        self.protocol = protocol(config.protocol, config.rounds)
        self.models = Models(self.model.layout, theta)
        self.folder = RunFolder(out, config.to_toml()) if out else None
        self.about = {"method": config.method, "model": config.model, **data.about()}

    def train(self, progress: Callable[[Progress], None]) -> Result:
        """Run all rounds, evaluate when it is due, and write it all down."""
        begun = time.perf_counter()
        costs: list[dict[str, Any]] = []
        reports: list[Report] = []
        for round, cohort in enumerate(cohorts(self.config), start=1):
            clock = time.perf_counter()
            costs.append(self._round(self._moment(round, cohort)))
            trained = time.perf_counter() - clock
            line = {"round": round, "cohort": cohort.tolist(), **costs[-1]}
            try:
                if self._due(round):
                    reports.append(self._evaluate(round))
                    line |= reports[-1].to_json()
            finally:  # what a round cost is kept even if fine-tuning diverges
                if self.folder:
                    self.folder.log("metrics", line)
            if self.folder:
                self.folder.log("timings", {"round": round, "train": trained, "all": time.perf_counter() - clock})
            pooled = reports[-1].served.pooled if reports else None
            progress(Progress(self.config.method, round, self.config.rounds, pooled))
        return self._finish(costs, reports, time.perf_counter() - begun)

    def _round(self, now: Moment) -> dict[str, Any]:
        """Walk through one round (the paper's Algorithm 1, and every other method's) and return what it cost."""
        method, model, cohort = self.method, self.model, now.cohort.tolist()
        down, rows = method.send(model, now, self.server, self.rows.gather(cohort))
        answer = self.engine.train(now, method.local(model, now), down, self._numbers(self.config.lr_at(now.round)))
        self.server, rows = method.receive(model, now, self.server, rows, answer.up, answer.n)
        self.rows.scatter(cohort, rows)
        losses = [loss for loss in answer.loss if loss is not None]
        mean_loss = sum(losses) / len(losses) if losses else None
        return {"loss": mean_loss, "bytes_down": payload_bytes(down), "bytes_up": payload_bytes(answer.up)}

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
            lambda clients: self._moment(round, clients),
            self.server,
            self.rows,
            self._numbers(self.config.lr),
            everything=round in self.protocol.rounds,
            keep=self.models.add if round == self.config.rounds else None,
        )

    def _moment(self, round: int, clients: Tensor) -> Moment:
        return Moment(round, self.config.rounds, self.config.clients, self.config.epochs, clients)

    def _numbers(self, lr: float) -> Tensors:
        """Return what clients get as `hp`, in the model's own precision."""
        config, like = self.config, self.server["theta"]
        rates = {"lr": lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
        return {name: like.new_tensor(value) for name, value in {**rates, **self.method.floats()}.items()}

    def _finish(self, costs: list[dict[str, Any]], reports: list[Report], seconds: float) -> Result:
        """Choose what the protocol reports, and write models and result."""
        config, folder = self.config, self.folder
        down, up = (sum(cost[way] for cost in costs) for way in ("bytes_down", "bytes_up"))

        def chosen(name: str) -> Any:
            reported = [getattr(report, name) for report in reports if report.round in self.protocol.rounds]
            return self.protocol.choose([column for column in reported if column is not None])

        result = Result(
            config=config,
            protocol=self.protocol,
            accuracy=chosen("served"),
            last=chosen("last"),
            finetuned=chosen("finetuned"),
            validation=chosen("validation"),
            history=[(report.round, report.served.pooled, report.served.client_mean) for report in reports],
            personal=reports[-1].personal,
            bytes=Traffic(down / config.rounds, up / config.rounds, down, up),
            seconds=seconds,
            models=self.models,
            out=folder.path if folder else None,
        )
        if folder:
            if config.save_models != "none":
                self.models.save(folder.path / "models", clients=config.save_models == "all", about=self.about)
            folder.finish(result.to_json())
        return result
