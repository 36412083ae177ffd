"""Tests clients of a federation, a few at a time, without changing any state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedobp.data import Split
from fedobp.engine import ClientPool, Engine, PersonalModels, PoolJob, diverged
from fedobp.errors import FedobpError
from fedobp.evaluation.metrics import Accuracy, ClientCounts, counts_from_json, counts_to_json, merge
from fedobp.evaluation.new_clients import NewClients, evaluate_new_clients
from fedobp.evaluation.scoring import Metrics, metric_from_json, metrics_to_json
from fedobp.evaluation.tester import ClientTester
from fedobp.evaluation.view import ServerView
from fedobp.method import Method, RoundContext, Train
from fedobp.models import Layout, Model
from fedobp.options import MetricName
from fedobp.records import Record, Tensors

Keep = Callable[[int, Tensor, Tensor], None]  # gets a client, its served model, and which entries are its own

_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 28}  # entries: how much of all clients' models is held at once


@dataclass(frozen=True)
class Personal:
    """Entries of the served models that are the clients' own."""

    mean: float
    min: int
    max: int
    share: float  # the mean as a share of the model


@dataclass(frozen=True)
class Report:
    """One evaluation. `last`, `finetuned` and `new_clients` are None where they were not asked for."""

    round: int
    served: Accuracy
    validation: Accuracy | None
    last: Accuracy | None
    finetuned: Accuracy | None
    personal: Personal
    personal_by_tensor: dict[str, float]  # mean over clients
    passes: float  # that clients made over their training data before they were served
    new_clients: NewClients | None = None
    personal_per_client: tuple[tuple[int, ...], ...] = ()  # by client and tensor

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values; of metrics, those of all clients."""
        columns = {"validation": self.validation, "last": self.last, "finetuned": self.finetuned}
        metrics = metrics_to_json(metrics_of({"served": self.served, **columns}, self.new_clients), per_client=False)
        return {
            "accuracy": self.served.to_json(),
            **{name: column.to_json() for name, column in columns.items() if column},
            **({"new_clients": self.new_clients.to_json()} if self.new_clients else {}),
            **({"metrics": metrics} if metrics else {}),
            "personal": asdict(self.personal),
            "personal_by_tensor": self.personal_by_tensor,
        }


def report_from_json(values: Mapping[str, Any]) -> Report:
    """Return a report from what `dataclasses.asdict` makes of it, after a way through JSON."""
    names, new = ("served", "validation", "last", "finetuned"), values["new_clients"]
    columns = {name: None if values[name] is None else _accuracy(values[name]) for name in names}
    return Report(
        **{
            **values,
            **columns,
            "personal": Personal(**values["personal"]),
            "new_clients": NewClients(**{name: _accuracy(column) for name, column in new.items() if column})
            if new
            else None,
            "personal_per_client": tuple(map(tuple, values["personal_per_client"])),
        }
    )


def _accuracy(values: Mapping[str, Any]) -> Accuracy:
    metrics = {name: metric_from_json(name, metric) for name, metric in values["metrics"].items()}
    return Accuracy(**{**values, "metrics": metrics, "per_client": tuple(values["per_client"])})


def metrics_of(columns: Mapping[str, Accuracy | None], new_clients: NewClients | None) -> dict[str, Metrics]:
    """Return the metrics beyond accuracy of all columns that have some."""
    new = {f"new_clients_{name}": column for name, column in vars(new_clients).items()} if new_clients else {}
    return {name: column.metrics for name, column in {**columns, **new}.items() if column and column.metrics}


@dataclass(frozen=True)
class Counts:
    """What an evaluation counts on some clients; counts that were made apart are added."""

    columns: Mapping[str, Sequence[ClientCounts]]  # served, validation, last, finetuned: one entry a client
    personal: Tensor  # [clients, tensors]: personal entries
    processed: int  # samples that went through models before they were served
    samples: int  # of training

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values: what a node sends of an evaluation."""
        columns = {name: [counts_to_json(one) for one in counts] for name, counts in self.columns.items()}
        numbers = {"processed": self.processed, "samples": self.samples}
        return {"columns": columns, "personal": self.personal.tolist(), **numbers}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], classes: int) -> "Counts":
        """Return counts from their plain values; what is no count raises a ValueError."""
        columns = {
            name: [counts_from_json(one, classes) for one in values["columns"][name]]
            for name in ("served", "validation", "last", "finetuned")
        }
        return cls(columns, torch.tensor(values["personal"]), int(values["processed"]), int(values["samples"]))

    def __add__(self, other: "Counts") -> "Counts":
        columns = {name: [*values, *other.columns[name]] for name, values in self.columns.items()}
        personal = torch.cat([self.personal, other.personal])
        return Counts(columns, personal, self.processed + other.processed, self.samples + other.samples)


def report(round: int, counts: Counts, layout: Layout, new_clients: NewClients | None = None) -> Report:
    """Return the report of all clients' counts."""
    columns = {name: merge(values) if values else None for name, values in counts.columns.items()}
    by_tensor, total = counts.personal.double().mean(dim=0).tolist(), counts.personal.sum(dim=1)
    mean, served = float(total.double().mean()), columns["served"]
    assert served is not None
    return Report(
        round=round,
        served=served,
        validation=columns["validation"],
        last=columns["last"],
        finetuned=columns["finetuned"],
        personal=Personal(mean, int(total.min()), int(total.max()), mean / layout.size),
        personal_by_tensor=dict(zip(layout.names, by_tensor, strict=True)),
        passes=counts.processed / max(1, counts.samples),
        new_clients=new_clients,
        personal_per_client=tuple(map(tuple, counts.personal.tolist())),
    )


class Evaluator:
    """Tests the clients of a pool: those that train together, and those that are held out as new clients."""

    def __init__(
        self,
        method: Method,
        model: Model,
        clients: ClientPool,
        engine: Engine,
        finetune_epochs: int,
        metrics: Sequence[MetricName] = (),
        evaluated: Tensor | None = None,
    ) -> None:
        """Test the `evaluated` ones of the clients that train (None: all of them), and all that are held out."""
        self._method, self._model, self._clients, self._engine = method, model, clients, engine
        self._finetune_epochs, data = finetune_epochs, clients.data
        self._at_once = max(1, _CHUNK[data.x.device.type] // model.layout.size)
        self.evaluated = torch.arange(data.trainers) if evaluated is None else evaluated  # of those that train
        self._held_out = torch.arange(data.trainers, data.clients)
        trainers, new = self.evaluated.tolist(), self._held_out.tolist()
        self._test = ClientTester(engine, data, metrics, [*trainers, *new])
        self._validates = any(data.size(client, "val") for client in trainers)
        held_out = [data.size(client, "test") for client in new]
        if held_out and not any(held_out):
            raise FedobpError("no client that is held out has a sample to evaluate on: use more --holdout-clients")

    def require_samples(self) -> None:
        """Refuse clients of which none has a sample to test."""
        if not any(self._clients.data.size(client, "test") for client in self.evaluated.tolist()):
            everyone = len(self.evaluated) == self._clients.data.trainers
            more = "fewer --clients or more data" if everyone else "more --eval-clients, or leave it out"
            raise FedobpError(f"no client has a sample to evaluate on: use {more}")

    def __call__(self, view: ServerView, *, everything: bool, keep: Keep | None = None) -> Report:
        """Evaluate; with `everything`, also the last local and the fine-tuned models, and clients that are held out.

        `keep` gets each served model.
        """
        chunks = self.evaluated.split(self._at_once)
        first, *more = (self.counts(view, chunk, everything, keep) for chunk in chunks)
        new_clients = None
        if everything and len(self._held_out):
            held_out = self._held_out.split(self._at_once)
            new_clients = evaluate_new_clients(
                self._method, self._clients, self._engine, self._test, self._personalize, held_out, view
            )
        return report(view.context(chunks[0]).round, sum(more, first), self._model.layout, new_clients)

    def counts(self, view: ServerView, cohort: Tensor, everything: bool, keep: Keep | None = None) -> Counts:
        """Return what an evaluation counts on some clients."""
        ctx = view.context(cohort)
        download, _ = self._method.download(ctx, view.server, view.records.gather(cohort.tolist()))
        return self.counts_of(ctx, download, view.hparams, view.server["theta"] if everything else None, keep)

    def counts_of(
        self,
        ctx: RoundContext,
        download: Record,
        hparams: Mapping[str, float],
        theta: Tensor | None,
        keep: Keep | None = None,
    ) -> Counts:
        """Return what is counted on some clients, given their download: all that a node knows of the server.

        With the global model `theta`, also last local models (of a client that has not trained, it is that one) and
        fine-tuned ones.
        """
        method, ids = self._method, ctx.cohort.tolist()
        found: dict[str, list[ClientCounts]] = {"served": [], "validation": [], "last": [], "finetuned": []}

        def add(name: str, theta: Tensor, scratch: Tensors | None = None, split: Split = "test") -> None:
            found[name] = self._test(job, theta, split, scratch)

        job = PoolJob(ctx, method.personalize(ctx), hparams, download, method.predict, clients=self._clients)
        served = self._personalize(job)
        add("served", served.theta, served.scratch)
        if self._validates:
            add("validation", served.theta, served.scratch, "val")
        if theta is not None:
            add("last", self._clients.last_models(ctx.cohort, theta))
            if self._finetune_epochs:
                tuned = self._personalize(replace(job, program=[*job.program, Train(self._finetune_epochs)]))
                add("finetuned", tuned.theta, tuned.scratch)
        by_tensor = [part.sum(dim=1) for part in served.mine.split(list(self._model.layout.sizes), dim=1)]
        if keep:
            for client, theta, mine in zip(ids, served.theta, served.mine, strict=True):
                keep(client, theta, mine)
        samples = sum(self._clients.data.size(client, "train") for client in ids)
        return Counts(found, torch.stack(by_tensor, dim=1).cpu(), served.processed, samples)

    def _personalize(self, job: PoolJob) -> PersonalModels:
        """Return the models that a cohort uses; one that is not finite raises a user error."""
        served = self._engine.personalize(job)
        finite = served.theta.isfinite().all(dim=1)
        if not finite.all():
            raise diverged(job.ctx, finite, job.hparams, self._method)
        return served
