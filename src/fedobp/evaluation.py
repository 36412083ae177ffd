"""Evaluation is a protocol: which model, which clients, which average, which round. It is printed with every result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from fedobp.algorithms import Method, Moment, Record, Sparse, Tensors, Train
from fedobp.data import Split
from fedobp.engine import Engine, Population, Store, Task, diverged
from fedobp.errors import FedobpError
from fedobp.models import Model

_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 28}  # entries: how much of all clients' models is held at once


@dataclass(frozen=True)
class Accuracy:
    """Accuracies in per cent, over all clients that have test samples."""

    pooled: float  # all clients' predictions together: large clients count more
    client_mean: float  # every client counts once
    client_std: float  # population standard deviation over clients
    worst_decile: float  # mean of the lowest tenth of clients, at least one
    balanced: float  # mean recall over the classes that occur, pooled
    majority_class: float  # always answering the client's most frequent training label, pooled


def accuracy(predicted: Sequence[Tensor], targets: Sequence[Tensor], counts: Sequence[Tensor]) -> Accuracy:
    """Compare each client's predictions with its targets; `counts` are its labels' frequencies in training."""
    # On the CPU, where the order of additions is the same whichever device made the predictions.
    predicted, targets, counts = ([one.cpu() for one in many] for many in (predicted, targets, counts))
    tested = [i for i, target in enumerate(targets) if len(target)]
    right = [(predicted[i] == targets[i]).double() for i in tested]
    # Ties for the most frequent label go to the lowest one (argmax's own choice is not defined).
    majority = [int((counts[i] == counts[i].max()).nonzero()[0]) for i in tested]
    guessed = [(targets[i] == label).double() for i, label in zip(tested, majority, strict=True)]
    per_client = torch.stack([r.mean() for r in right])
    pooled_right, pooled_targets = torch.cat(right), torch.cat([targets[i] for i in tested])
    recalls = torch.stack([pooled_right[pooled_targets == label].mean() for label in pooled_targets.unique()])
    lowest = per_client.sort().values[: max(1, len(tested) // 10)]
    return Accuracy(
        pooled=_percent(pooled_right.mean()),
        client_mean=_percent(per_client.mean()),
        client_std=_percent(per_client.std(correction=0)),
        worst_decile=_percent(lowest.mean()),
        balanced=_percent(recalls.mean()),
        majority_class=_percent(torch.cat(guessed).mean()),
    )


def _percent(share: Tensor) -> float:
    return 100 * float(share)


@dataclass(frozen=True)
class Protocol:
    """Which rounds are reported and how one of them is chosen; always all clients, on their test parts."""

    name: str
    average: str
    rounds: tuple[int, ...]
    pick: str  # "last", or "best" by pooled accuracy
    model: str = "as served, before local training"
    clients: str = "all"
    split: str = "test"

    def to_json(self) -> dict[str, object]:
        """Return the protocol as plain values."""
        return {**asdict(self), "rounds": list(self.rounds)}

    def choose(self, reported: Sequence[Accuracy]) -> Accuracy | None:
        """Return the accuracy to report out of those at `rounds`, the first of equals; None if there are none."""
        if not reported:
            return None
        return reported[-1] if self.pick == "last" else max(reported, key=lambda column: column.pooled)


PAPER_ROUNDS = (100, 200, 300, 400)


def protocol(name: str, rounds: int) -> Protocol:
    """Return the protocol `default` (the last round) or `paper` (the best of rounds 100, 200, 300 and 400)."""
    if name == "default":
        return Protocol("default", "pooled and client mean", (rounds,), "last")
    reached = tuple(r for r in PAPER_ROUNDS if r <= rounds)
    if not reached:
        raise FedobpError(
            f"--protocol paper reports the best of rounds 100, 200, 300 and 400, and --rounds {rounds} reaches none of "
            "them: use at least 100 rounds, or --protocol default"
        )
    return Protocol("paper", "pooled", reached, "best")


@dataclass(frozen=True)
class Personal:
    """Entries of the served models that are the clients' own."""

    mean: float
    min: int
    max: int
    share: float  # the mean as a share of the model


@dataclass(frozen=True)
class Cold:
    """How clients fare that never trained."""

    served: Accuracy  # as somebody new
    visited: Accuracy  # served again, after one visit whose upload nobody else gets
    last: Accuracy  # with the model that they trained in that visit


@dataclass(frozen=True)
class Report:
    """One evaluation of all clients. `last`, `finetuned` and `cold` are None where they were not asked for."""

    round: int
    served: Accuracy
    validation: Accuracy | None
    last: Accuracy | None
    finetuned: Accuracy | None
    personal: Personal
    personal_by_tensor: dict[str, float]  # mean over clients
    passes: float  # that clients made over their training data before they were served
    cold: Cold | None = None

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "accuracy": asdict(self.served),
            **{
                name: asdict(column)
                for name in ("validation", "last", "finetuned")
                if (column := getattr(self, name)) is not None
            },
            **({"cold": asdict(self.cold)} if self.cold else {}),
            "personal": asdict(self.personal),
            "personal_by_tensor": self.personal_by_tensor,
        }


class Evaluator:
    """Tests every client of a federation, a few at a time, without changing anybody's state.

    Those that are held out are tested by themselves, as somebody new.
    """

    def __init__(self, method: Method, model: Model, people: Population, engine: Engine, finetune_epochs: int) -> None:
        self._method, self._model, self._people, self._engine = method, model, people, engine
        self._finetune_epochs, data = finetune_epochs, people.data
        self._at_once = max(1, _CHUNK[data.x.device.type] // model.layout.size)
        everyone = torch.arange(data.clients)
        self._trainers, self._held_out = everyone[: data.trainers], everyone[data.trainers :]
        self._counts = [data.counts(client).cpu() for client in self._trainers.tolist()]
        self._targets: dict[Split, list[Tensor]] = {
            split: [data.targets(client, split).cpu() for client in self._trainers.tolist()]
            for split in ("val", "test")
        }
        self._validates = any(map(len, self._targets["val"]))
        if not any(map(len, self._targets["test"])):
            raise FedobpError("no client has a sample to evaluate on: use fewer --clients or more data")
        held_out = [data.size(client, "test") for client in self._held_out.tolist()]
        if held_out and not any(held_out):
            raise FedobpError("no client that is held out has a sample to evaluate on: use more --holdout-clients")

    def __call__(
        self,
        moment: Callable[[Tensor], Moment],
        server: Tensors,
        rows: Store,
        hp: Mapping[str, float],
        *,
        everything: bool,
        keep: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> Report:
        """Evaluate; with `everything`, also the last local and the fine-tuned models, and clients that are held out.

        `keep` gets each served model.
        """
        method, model, engine = self._method, self._model, self._engine
        found: dict[str, list[Tensor]] = {"served": [], "validation": [], "last": [], "finetuned": []}
        counts: list[Tensor] = []
        seen = 0
        for chunk in self._trainers.split(self._at_once):
            now = moment(chunk)
            down, _ = method.send(model, now, server, rows.gather(chunk.tolist()))
            task = Task(self._people, now, method.serve(model, now), down, hp, method.predict)
            before = engine.counters.samples
            served = self._serve(task)
            seen += engine.counters.samples - before
            found["served"] += engine.predict(task, served["theta"], "test", served)
            if self._validates:
                found["validation"] += engine.predict(task, served["theta"], "val", served)
            if everything:
                found["last"] += engine.predict(task, engine.last(task, server["theta"]), "test")
                if self._finetune_epochs:
                    tuned = self._serve(replace(task, program=[*task.program, Train(self._finetune_epochs)]))
                    found["finetuned"] += engine.predict(task, tuned["theta"], "test", tuned)
            per_tensor = [part.sum(dim=1) for part in served["mine"].split(list(model.layout.sizes), dim=1)]
            counts.append(torch.stack(per_tensor, dim=1).cpu())
            if keep:
                for client, theta, mine in zip(chunk.tolist(), served["theta"], served["mine"], strict=True):
                    keep(client, theta, mine)

        def column(name: str, split: Split = "test") -> Accuracy | None:
            return accuracy(found[name], self._targets[split], self._counts) if found[name] else None

        mine = torch.cat(counts)
        by_tensor = mine.double().mean(dim=0).tolist()
        total = mine.sum(dim=1)
        mean = float(total.double().mean())
        return Report(
            round=now.round,
            personal=Personal(mean, int(total.min()), int(total.max()), mean / model.layout.size),
            personal_by_tensor=dict(zip(model.layout.names, by_tensor, strict=True)),
            passes=seen / max(1, sum(int(one.sum()) for one in self._counts)),
            served=accuracy(found["served"], self._targets["test"], self._counts),
            validation=column("validation", "val"),
            last=column("last"),
            finetuned=column("finetuned"),
            cold=self._cold(moment, server, rows, hp) if everything and len(self._held_out) else None,
        )

    def _serve(self, task: Task) -> Tensors:
        served = self._engine.serve(task)
        finite = served["theta"].isfinite().all(dim=1)
        if not finite.all():
            raise diverged(task.now, finite, task.hp, self._method)
        return served

    def _cold(self, moment: Callable[[Tensor], Moment], server: Tensors, rows: Store, hp: Mapping[str, float]) -> Cold:
        """Test clients that are held out: as they are served at first, and again after each has trained once.

        The server keeps its record of a visitor, as after any visit, and nothing else of the upload.
        """
        method, model, engine, data = self._method, self._model, self._engine, self._people.data
        found: dict[str, list[Tensor]] = {"served": [], "visited": [], "last": []}

        def test(task: Task) -> list[Tensor]:
            served = self._serve(task)
            return engine.predict(task, served["theta"], "test", served)

        for chunk in self._held_out.split(self._at_once):
            now, guests, start = moment(chunk), self._people.guests(), rows.gather(chunk.tolist())
            down, sent = method.send(model, now, server, start)
            task = Task(guests, now, method.serve(model, now), down, hp, method.predict)
            found["served"] += test(task)
            [answer] = engine.train([replace(task, program=method.local(model, now))])
            if not answer.finite.all():
                raise diverged(now, answer.finite, hp, method)
            # Each by itself: a method may make records of a cohort's members from one another's uploads.
            alone = [
                method.receive(
                    model, replace(now, cohort=chunk[at]), server, _part(sent, at), _part(answer.up, at), answer.n[at]
                )[1]
                for at in (slice(at, at + 1) for at in range(len(chunk)))
            ]
            down, _ = method.send(model, now, server, {name: torch.cat([row[name] for row in alone]) for name in start})
            found["visited"] += test(replace(task, down=down))
            found["last"] += engine.predict(task, engine.last(task, server["theta"]), "test")
        targets = [data.targets(client, "test") for client in self._held_out.tolist()]
        counts = [data.counts(client) for client in self._held_out.tolist()]
        return Cold(**{name: accuracy(labels, targets, counts) for name, labels in found.items()})


R = TypeVar("R", Tensors, Record)


def _part(record: R, at: slice) -> R:
    """Return what belongs to some of a cohort's members."""
    return {
        name: Sparse(value.values[at], value.keep[at]) if isinstance(value, Sparse) else value[at]
        for name, value in record.items()
    }
