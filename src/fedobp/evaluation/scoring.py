"""Metrics beyond accuracy: counted client by client, where the client's data is, and merged where they are wanted.

All but the AUC are functions of sums, so what was counted apart is added. The AUC of all clients together needs their
scores in one place. scikit-learn is imported here, where a metric needs it, and by no other part of an evaluation.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedobp.options import MetricName

BINS = 15  # of the expected calibration error: equal widths, each with its upper end
_AT_ONCE = 1 << 22  # logits that are converted to float64 at once

Matrix = list[list[int]]  # rows are true labels, columns predicted ones
Counted = Any  # the counts of one client: a sum, or a `Ranking`


@dataclass(frozen=True)
class Metric:
    """One metric of all clients. What is undefined or not finite is None, and left out of mean and deviation."""

    pooled: float | None  # all clients' samples together
    client_mean: float | None  # every client counts once
    client_std: float | None  # population standard deviation over clients
    per_client: tuple[float | None, ...] = field(repr=False)  # by client; None also for a client without samples


@dataclass(frozen=True)
class Confusion:
    """The confusion matrices of all clients; None for a client without samples."""

    pooled: Matrix
    per_client: tuple[Matrix | None, ...]

    def __repr__(self) -> str:
        return f"Confusion({len(self.pooled)} classes, {len(self.per_client)} clients)"


Metrics = Mapping[MetricName, Metric | Confusion]


class Answers(NamedTuple):
    """One client's answers, a row for each label that was asked for. Logits are None where no metric needs them."""

    predicted: Tensor
    targets: Tensor
    classes: int
    logits: Tensor | None = None  # [rows, classes]

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield logits in float64, predicted labels and targets, some rows at a time."""
        assert self.logits is not None
        rows = max(1, _AT_ONCE // self.classes)
        for start in range(0, len(self.targets), rows):
            part = slice(start, start + rows)
            yield self.logits[part].double(), self.predicted[part], self.targets[part]


class Ranking(NamedTuple):
    """One client's AUC and, in a simulation, the scores that the AUC of all clients needs; a node sends no scores."""

    auc: float | None
    probabilities: Tensor | None = None
    targets: Tensor | None = None


def score(names: Sequence[MetricName], answers: Answers) -> dict[MetricName, Counted]:
    """Return the counts of one client's answers for each metric."""
    made = {count: count(answers) for count in dict.fromkeys(_METRICS[name].count for name in names)}  # some share one
    return {name: made[_METRICS[name].count] for name in names}


def merge_scores(counted: Sequence[Mapping[MetricName, Counted]], samples: Sequence[int]) -> Metrics:
    """Return the metrics of clients' counts; `samples` are the clients' numbers of labels."""
    tested, total = [one for one, n in zip(counted, samples, strict=True) if n], sum(samples)
    found: dict[MetricName, Metric | Confusion] = {}
    for name in counted[0]:
        value = _METRICS[name].value
        per_client = tuple(value([one[name]], n) if n else None for one, n in zip(counted, samples, strict=True))
        pooled = value([one[name] for one in tested], total)
        found[name] = Confusion(pooled, per_client) if name == "confusion" else _spread(pooled, per_client)
    return found


def needs_logits(names: Sequence[MetricName]) -> bool:
    """Say whether any of these metrics needs more than labels."""
    return any(_METRICS[name].logits for name in names)


def metrics_to_json(columns: Mapping[str, Metrics], *, per_client: bool) -> dict[str, dict[MetricName, Any]]:
    """Return metrics by column as plain values; without `per_client` only numbers of all clients."""
    found: dict[str, dict[MetricName, Any]] = {}
    for column, metrics in columns.items():
        for name, metric in metrics.items():
            if per_client:
                found.setdefault(column, {})[name] = {**vars(metric), "per_client": [*metric.per_client]}
            elif isinstance(metric, Metric):
                numbers = {"pooled": metric.pooled, "client_mean": metric.client_mean, "client_std": metric.client_std}
                found.setdefault(column, {})[name] = numbers
    return found


def metric_from_json(name: str, values: Mapping[str, Any]) -> Metric | Confusion:
    """Return a metric from its values as JSON has them."""
    kind = Confusion if name == "confusion" else Metric
    return kind(**{**values, "per_client": tuple(values["per_client"])})


def scores_to_json(counted: Counted) -> Any:
    """Return one client's counts of a metric as plain values; scores of samples are left out."""
    if isinstance(counted, Ranking):
        return counted.auc
    if isinstance(counted, Tensor) and counted.is_sparse:
        return [*counted.indices().tolist(), counted.values().tolist()]
    return counted.tolist() if isinstance(counted, Tensor) else counted


def scores_from_json(name: MetricName, values: Any, classes: int) -> Counted:
    """Return one client's counts of a metric from their plain values."""
    if name == "auc":
        return Ranking(values)
    if _METRICS[name].count is _cells:
        *where, ones = torch.tensor(values, dtype=torch.int64).reshape(3, -1)
        shape = (classes, classes)
        return torch.sparse_coo_tensor(torch.stack(where), ones, shape, check_invariants=True).coalesce()
    return torch.tensor(values, dtype=torch.float64).reshape(BINS) if name == "ece" else float(values)


def _spread(pooled: float | None, per_client: Sequence[float | None]) -> Metric:
    defined = [value for one in per_client if (value := _finite(one)) is not None]
    values = torch.tensor(defined, dtype=torch.float64)
    mean, std = (float(values.mean()), float(values.std(correction=0))) if defined else (None, None)
    return Metric(_finite(pooled), _finite(mean), _finite(std), tuple(map(_finite, per_client)))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# What is counted of one client.


def _loss_sum(answers: Answers) -> float:
    parts = answers.parts()
    return sum(float(functional.cross_entropy(logits, y, reduction="sum")) for logits, _, y in parts)


def _cells(answers: Answers) -> Tensor:
    """Return the confusion matrix as a sparse one: a client has few of the pairs that many classes make."""
    where = torch.stack([answers.targets, answers.predicted])
    ones = torch.ones_like(answers.targets)
    return torch.sparse_coo_tensor(where, ones, (answers.classes, answers.classes), check_invariants=True).coalesce()


def _gaps(answers: Answers) -> Tensor:
    """Return for each bin of the top probability: right answers less the sum of top probabilities."""
    gaps = torch.zeros(BINS, dtype=torch.float64)
    for logits, predicted, targets in answers.parts():
        top = logits.softmax(dim=1).amax(dim=1)
        bins = (top * BINS).ceil().long() - 1
        gaps.index_add_(0, bins.clamp(0, BINS - 1), (predicted == targets).double() - top)
    return gaps


def _ranking(answers: Answers) -> Ranking:
    assert answers.logits is not None
    probabilities = answers.logits.double().softmax(dim=1)
    return Ranking(_area(probabilities, answers.targets), probabilities, answers.targets)


# The value of a metric, from the counts of one or more clients.


def _loss(counted: Sequence[float], samples: int) -> float:
    return sum(counted) / samples


def _perplexity(counted: Sequence[float], samples: int) -> float:
    try:
        return math.exp(_loss(counted, samples))
    except OverflowError:
        return math.inf


def _macro_f1(counted: Sequence[Tensor], samples: int) -> float:
    from sklearn.metrics import f1_score

    cells = _total(counted)
    true, predicted = cells.indices().numpy()
    return float(f1_score(true, predicted, average="macro", sample_weight=cells.values().numpy(), zero_division=0.0))


def _confusion(counted: Sequence[Tensor], samples: int) -> Matrix:
    matrix: Matrix = _total(counted).to_dense().tolist()
    return matrix


def _total(cells: Sequence[Tensor]) -> Tensor:
    return sum(cells[1:], cells[0]).coalesce()


def _calibration_error(counted: Sequence[Tensor], samples: int) -> float:
    return float(torch.stack([*counted]).sum(dim=0).abs().sum()) / samples


def _auc(counted: Sequence[Ranking], samples: int) -> float | None:
    if len(counted) == 1:
        return counted[0].auc
    scores = [(p, y) for _, p, y in counted if p is not None and y is not None]
    if len(scores) < len(counted):
        return None
    probabilities, targets = (torch.cat(parts) for parts in zip(*scores, strict=True))
    return _area(probabilities, targets)


def _area(probabilities: Tensor, targets: Tensor) -> float | None:
    """Return the mean over the labels that occur of the area under "this label or another"; None if one label does."""
    labels = targets.unique().tolist()
    if len(labels) < 2 or not probabilities.isfinite().all():
        return None
    from sklearn.metrics import roc_auc_score

    return fmean(roc_auc_score((targets == y).numpy(), probabilities[:, y].numpy()) for y in labels)


class _Definition(NamedTuple):
    count: Callable[[Answers], Counted]
    value: Callable[[Sequence[Any], int], Any]
    logits: bool  # whether `count` reads them


_METRICS: dict[MetricName, _Definition] = {
    "loss": _Definition(_loss_sum, _loss, True),
    "f1": _Definition(_cells, _macro_f1, False),
    "auc": _Definition(_ranking, _auc, True),
    "ece": _Definition(_gaps, _calibration_error, True),
    "confusion": _Definition(_cells, _confusion, False),
    "perplexity": _Definition(_loss_sum, _perplexity, True),
}
