"""A partition in numbers: label counts and label skew of clients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedobp.config import Config
from fedobp.data import ClientChange, Dataset, Shard
from fedobp.data.shifts import Concept, Feature
from fedobp.plugins import label

STRENGTHS = ("noise", "blur", "contrast", "colour")  # of a `ClientChange`
_MOST_GROUPS = 10  # at most this many are described in words


def label_counts(dataset: Dataset, shards: Sequence[Shard]) -> NDArray[np.int64]:
    """Return [clients, labels]: the samples of each label on each client, all parts together."""
    return np.stack([np.bincount(dataset.y[shard.samples].ravel(), minlength=dataset.classes) for shard in shards])


class LabelSkew(NamedTuple):
    """How much the label distributions of clients differ."""

    entropy: NDArray[np.float64]  # of each client's label distribution, in bits; 0: one label
    entropy_of_all: float  # of the label distribution of all clients together
    # Each client's distance to the label distribution of all clients, as Zhao et al. (2018) define it: the sum of the
    # absolute differences; 0: the same, 2: nothing in common.
    emd: NDArray[np.float64]


def label_skew(counts: NDArray[np.int64]) -> LabelSkew:
    """Return the label entropy of clients, and their earth mover's distance to the distribution of all."""
    overall = counts.sum(axis=0) / counts.sum()
    shares = counts / counts.sum(axis=1, keepdims=True)
    return LabelSkew(_entropy(shares), float(_entropy(overall[None])[0]), np.abs(shares - overall).sum(axis=1))


def _entropy(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    bits: NDArray[np.float64] = -(shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    return np.abs(bits)  # not -0.0


def partition_summary(dataset: Dataset, shards: Sequence[Shard]) -> dict[str, Any]:
    """Return a partition as plain values: what `fedobp partition --json` prints, except for the hash."""
    counts = label_counts(dataset, shards)
    found = label_skew(counts)
    clients = []
    for client, shard in enumerate(shards):
        row = {
            "id": client,
            "train": len(shard.train),
            "val": len(shard.val),
            "test": len(shard.test),
            "labels": {str(dataset.labels[k]): int(n) for k, n in enumerate(counts[client]) if n},
            "entropy": float(found.entropy[client]),
            "emd": float(found.emd[client]),
            "held_out": shard.held_out,
            "group": shard.group,
            "turns": shard.change.turns,
            **{name: getattr(shard.change, name) for name in STRENGTHS},
        }
        if shard.change.labels:
            new = [dataset.labels[label] for label in shard.change.labels]
            row["new_labels"] = {str(dataset.labels[k]): label for k, label in enumerate(new)}
        if dataset.clients is not None and len(whose := np.unique(dataset.clients[shard.samples])) == 1:
            row["name"] = dataset.client_names[int(whose[0])]
        clients.append(row)
    means = {"entropy": float(found.entropy.mean()), "emd": float(found.emd.mean())}
    return {"clients": clients, **means, "entropy_of_all": found.entropy_of_all}


def changes_in_words(shards: Sequence[Shard]) -> list[str]:
    """Return what a partition changes in clients' samples, a line for each group of clients; none if nothing."""
    groups: dict[int, list[ClientChange]] = {}
    for shard in sorted(shards, key=lambda shard: shard.group):
        groups.setdefault(shard.group, []).append(shard.change)
    lines = [f"Group {group}, {_clients(members)}: {_words(members)}." for group, members in groups.items()]
    if len(groups) == 1:
        words = _words([shard.change for shard in shards])
        return [] if words == "unchanged" else [f"Clients' samples are changed: {words}."]
    more = f"... and {len(lines) - _MOST_GROUPS} more groups: see all with --json"
    return [*lines[:_MOST_GROUPS], more] if len(lines) > _MOST_GROUPS else lines


def _clients(members: Sequence[ClientChange]) -> str:
    return "1 client" if len(members) == 1 else f"{len(members):,} clients"


def _words(changes: Sequence[ClientChange]) -> str:
    parts = []
    for name in ("turns", *STRENGTHS):
        values = [getattr(change, name) for change in changes]
        low, high, unit = min(values), max(values), 90 if name == "turns" else 1
        if high:
            span = f"{high * unit:.3g}" if low == high else f"{low * unit:.3g} to {high * unit:.3g}"
            parts.append(f"rotated by {span} degrees" if name == "turns" else f"{name} {span}")
    if relabelled := {change.labels for change in changes if change.labels}:
        new = next(iter(relabelled))
        moved = sum(label != at for at, label in enumerate(new))
        parts.append("labels changed" if len(relabelled) > 1 else f"{moved} of {len(new)} labels changed")
    return ", ".join(parts) or "unchanged"


def partition_title(config: Config) -> str:
    """Return one line with the dataset, the partition, the number of clients and the seed."""
    kind, options = label(config.partition), config.partition_options
    if kind.startswith("dirichlet"):
        kind += f"({config.alpha:g})"
    elif config.partition in (Feature.name, Concept.name):
        mixed = f" and dirichlet({config.alpha:g})" if options["labels"] == "dirichlet" else ""
        kind += f" ({options['change']}{mixed})"
    elif options:
        kind += " (" + ", ".join(f"{name} {value}" for name, value in options.items()) + ")"
    return f"{config.dataset}, {kind}, {config.clients:,} clients, seed {config.partition_seed}"
