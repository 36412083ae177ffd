"""Accuracies: counted client by client, where the client's data is, and merged where the result is wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Accuracy:
    """Accuracies in per cent, over all clients that have test samples."""

    pooled: float  # all clients' predictions together: large clients count more
    client_mean: float  # every client counts once
    client_std: float  # population standard deviation over clients
    worst_decile: float  # mean of the lowest tenth of clients, at least one
    balanced: float  # mean recall over the classes that occur, pooled
    majority_class: float  # always answering the client's most frequent training label, pooled


class ClientCounts(NamedTuple):
    """What one client's predictions come to, as whole numbers: a node sends these, and no sample."""

    correct: Tensor  # [classes]: test samples of each label that were predicted right
    tested: Tensor  # [classes]: test samples of each label
    majority: int  # test samples with the client's most frequent training label


def count(predicted: Tensor, targets: Tensor, label_counts: Tensor) -> ClientCounts:
    """Compare one client's predictions with its targets; `label_counts` are its labels' frequencies in training."""
    predicted, targets, label_counts = predicted.cpu().flatten(), targets.cpu().flatten(), label_counts.cpu()
    classes = len(label_counts)
    # Ties for the most frequent label go to the lowest one (argmax's own choice is not defined).
    majority = int((label_counts == label_counts.max()).nonzero()[0])
    correct = targets[predicted == targets].bincount(minlength=classes)
    return ClientCounts(correct, targets.bincount(minlength=classes), int((targets == majority).sum()))


def merge(counts: Sequence[ClientCounts]) -> Accuracy:
    """Return the accuracies of clients' counts, wherever they were made."""
    tested = [one for one in counts if one.tested.any()]
    correct = torch.stack([one.correct for one in tested]).double()
    samples = torch.stack([one.tested for one in tested]).double()
    per_client = correct.sum(dim=1) / samples.sum(dim=1)
    by_class = samples.sum(dim=0)
    recalls = (correct.sum(dim=0) / by_class)[by_class > 0]
    lowest = per_client.sort().values[: max(1, len(tested) // 10)]
    majority = torch.tensor(sum(one.majority for one in tested)).double()
    return Accuracy(
        pooled=_percent(correct.sum() / samples.sum()),
        client_mean=_percent(per_client.mean()),
        client_std=_percent(per_client.std(correction=0)),
        worst_decile=_percent(lowest.mean()),
        balanced=_percent(recalls.mean()),
        majority_class=_percent(majority / samples.sum()),
    )


def accuracy(predicted: Sequence[Tensor], targets: Sequence[Tensor], label_counts: Sequence[Tensor]) -> Accuracy:
    """Return the accuracies of clients' predictions."""
    return merge([count(*one) for one in zip(predicted, targets, label_counts, strict=True)])


def _percent(share: Tensor) -> float:
    return 100 * float(share)
