"""Accuracies: counted client by client, where the client's data is, and merged where the result is wanted.

Other metrics of the same predictions (`scoring.py`) are counted and merged along with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedobp.evaluation.scoring import (
    Answers,
    Metrics,
    merge_scores,
    score,
    scores_from_json,
    scores_to_json,
)
from fedobp.options import MetricName


@dataclass(frozen=True)
class Accuracy:
    """Accuracies in per cent, over all clients that have test samples."""

    pooled: float  # all clients' predictions together: large clients count more
    client_mean: float  # every client counts once
    client_std: float  # population standard deviation over clients
    worst_decile: float  # mean of the lowest tenth of clients, at least one
    balanced: float  # mean recall over the classes that occur, pooled
    majority_class: float  # always answering the client's most frequent training label, pooled
    metrics: Metrics = field(default_factory=dict, hash=False)  # others that were asked for, of the same predictions
    per_client: tuple[float | None, ...] = field(default=(), repr=False)  # None: a client without test samples

    def to_json(self) -> dict[str, float]:
        """Return the accuracies of all clients as plain values, without the other metrics."""
        left_out = ("metrics", "per_client")
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name not in left_out}


class ClientCounts(NamedTuple):
    """The counts of one client's predictions: a node sends these numbers, and no sample."""

    correct: Tensor  # [classes]: test samples of each label that were predicted right
    tested: Tensor  # [classes]: test samples of each label
    majority: int  # test samples with the client's most frequent training label
    metrics: Mapping[MetricName, Any] = {}  # sums that other metrics come from


def count(
    predicted: Tensor,
    targets: Tensor,
    label_counts: Tensor,
    metrics: Sequence[MetricName] = (),
    logits: Tensor | None = None,
) -> ClientCounts:
    """Compare one client's predictions with its targets; `label_counts` are its labels' frequencies in training.

    Labels are one a sample, or one for each position of a sample. `logits` have one more axis; they are for metrics
    that need more than labels.
    """
    predicted, targets, label_counts = predicted.cpu().flatten(), targets.cpu().flatten(), label_counts.cpu()
    classes = len(label_counts)
    # Ties for the most frequent label go to the lowest one (argmax's own choice is not defined).
    majority = int((label_counts == label_counts.max()).nonzero()[0])
    correct = targets[predicted == targets].bincount(minlength=classes)
    rows = None if logits is None else logits.cpu().flatten(end_dim=-2)
    scores = score(metrics, Answers(predicted, targets, classes, rows)) if metrics else {}
    return ClientCounts(correct, targets.bincount(minlength=classes), int((targets == majority).sum()), scores)


def counts_to_json(counts: ClientCounts) -> dict[str, Any]:
    """Return counts as plain values."""
    metrics = {name: scores_to_json(counted) for name, counted in counts.metrics.items()}
    whole = {"correct": counts.correct.tolist(), "tested": counts.tested.tolist(), "majority": counts.majority}
    return {**whole, "metrics": metrics}


def counts_from_json(values: Mapping[str, Any], classes: int) -> ClientCounts:
    """Return counts from their plain values; those that cannot be counts raise a ValueError."""
    correct, tested = (torch.tensor(values[name], dtype=torch.int64) for name in ("correct", "tested"))
    majority = int(values["majority"])
    if correct.shape != (classes,) or tested.shape != (classes,):
        raise ValueError(f"counts are not of {classes} labels")
    if not ((correct >= 0) & (correct <= tested)).all() or not 0 <= majority <= int(tested.sum()):
        raise ValueError("more answers are right than were given")
    metrics = {name: scores_from_json(name, counted, classes) for name, counted in values["metrics"].items()}
    return ClientCounts(correct, tested, majority, metrics)


def merge(counts: Sequence[ClientCounts]) -> Accuracy:
    """Return the accuracies of clients' counts, wherever they were made."""
    has_any = [bool(one.tested.any()) for one in counts]
    tested = [one for one, has_samples in zip(counts, has_any, strict=True) if has_samples]
    correct = torch.stack([one.correct for one in tested]).double()
    samples = torch.stack([one.tested for one in tested]).double()
    per_client = correct.sum(dim=1) / samples.sum(dim=1)
    shares = iter((100 * per_client).tolist())
    by_class = samples.sum(dim=0)
    recalls = (correct.sum(dim=0) / by_class)[by_class > 0]
    lowest = per_client.sort().values[: max(1, len(tested) // 10)]
    majority = torch.tensor(sum(one.majority for one in tested)).double()
    sizes = [int(one.tested.sum()) for one in counts] if counts[0].metrics else []
    return Accuracy(
        pooled=_percent(correct.sum() / samples.sum()),
        client_mean=_percent(per_client.mean()),
        client_std=_percent(per_client.std(correction=0)),
        worst_decile=_percent(lowest.mean()),
        balanced=_percent(recalls.mean()),
        majority_class=_percent(majority / samples.sum()),
        metrics=merge_scores([one.metrics for one in counts], sizes) if sizes else {},
        per_client=tuple(next(shares) if has_samples else None for has_samples in has_any),
    )


def accuracy(predicted: Sequence[Tensor], targets: Sequence[Tensor], label_counts: Sequence[Tensor]) -> Accuracy:
    """Return the accuracies of clients' predictions."""
    return merge([count(*one) for one in zip(predicted, targets, label_counts, strict=True)])


def _percent(share: Tensor) -> float:
    return 100 * float(share)
