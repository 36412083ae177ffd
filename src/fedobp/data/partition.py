"""Partition of a dataset over clients: assignment of samples, splits, held-out clients, and changed samples."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from fedobp.data.client_changes import UNCHANGED, ClientChange, InputRange, changed_inputs
from fedobp.data.dataset import Dataset
from fedobp.data.partitioner_registry import GivenPartitioner, assigned, changes, partitioner
from fedobp.data.partitioners import Indices, PartitionTask
from fedobp.errors import FedobpError
from fedobp.options import Option

TEST_SHARE = 0.25


@dataclass(frozen=True)
class Shard:
    """One client's samples, as indices into the dataset."""

    train: Indices
    val: Indices
    test: Indices
    change: ClientChange = UNCHANGED
    held_out: bool = False  # a held-out client never trains

    @property
    def samples(self) -> Indices:
        """All samples: train, val and test."""
        return np.concatenate([self.train, self.val, self.test])

    @property
    def group(self) -> int:
        """The group of clients that it belongs to: the given one, or that of its rotation."""
        return self.change.turns if self.change.group is None else self.change.group


def partition(
    y: Indices,
    clients: int,
    *,
    kind: GivenPartitioner = "dirichlet",
    options: Mapping[str, Option] | None = None,
    alpha: float = 0.1,
    seed: int = 42,
    val_ratio: float = 0.0,
    holdout: int = 0,
    natural: Indices | None = None,
    test: NDArray[np.bool_] | None = None,
) -> list[Shard]:
    """Return each client's shard: a quarter of its samples for test, the rest for training.

    Validation samples are taken from the training split, so the test split is the same at every `val_ratio`. Held-out
    clients are drawn by the seed and come last; the assignment of samples does not depend on their number. Natural
    clients keep the `test` samples that the data gives them.
    """
    made = partitioner(kind).configure(options or {})
    task = PartitionTask(_read_only(y), clients, alpha, seed, None if natural is None else _read_only(natural))
    if made.by_label and y.ndim > 1:
        raise FedobpError(
            f"--partition {made.name} needs one label a sample, and these predict every next token: use --partition "
            "natural, iid or quantity"
        )
    given = test if made.name == "natural" else None
    if test is not None and given is None:
        warnings.warn(
            f"the data says which samples are for test, and --partition {made.name} does not keep that: natural does",
            stacklevel=2,
        )
    shards = [
        replace(split_parts(indices, val_ratio, given), change=change)
        for indices, change in zip(assigned(made, task), changes(made, task), strict=True)
    ]
    shards = _held_out(shards, holdout, seed)
    if not any(len(shard.train) for shard in shards if not shard.held_out):
        raise FedobpError("no client has a sample to train on: use fewer --clients or --holdout-clients, or more data")
    return shards


def _read_only(values: Indices) -> Indices:
    """Return a view that code of the user cannot write to."""
    view = values.view()
    view.flags.writeable = False
    return view


def split_parts(indices: Indices, val_ratio: float, given: NDArray[np.bool_] | None = None) -> Shard:
    """Split a client's samples; those for test are `given`, or the first quarter."""
    if given is None:
        n_test = int(TEST_SHARE * len(indices))
        test, rest = indices[:n_test], indices[n_test:]
    else:
        test, rest = indices[given[indices]], indices[~given[indices]]
    n_val = int(val_ratio * len(rest))
    return Shard(train=rest[n_val:], val=rest[:n_val], test=test)


def _held_out(shards: Sequence[Shard], count: int, seed: int) -> list[Shard]:
    """Draw the held-out clients and move them behind all others, which keep their order."""
    # A random stream separate from the partition's. A smaller count holds out a subset of the same clients.
    order = default_rng([seed, 1]).permutation(len(shards)).tolist()
    return [
        *(shards[client] for client in sorted(order[count:])),
        *(replace(shards[client], held_out=True) for client in order[:count]),
    ]


def with_client_changes(dataset: Dataset, shards: Sequence[Shard]) -> Dataset:
    """Return the dataset with each client's change applied; what no client changes is shared, the rest copied."""
    inputs = [shard for shard in shards if replace(shard.change, labels=(), group=None) != UNCHANGED]
    relabelled = [shard for shard in shards if shard.change.labels]
    x, y = dataset.x, dataset.y
    if inputs:
        if dataset.vocabulary:
            raise FedobpError(f"'{dataset.name}' has tokens, which cannot be changed: choose another --partition")
        for shard in inputs:
            if problem := shard.change.problem(x.shape[1:]):
                raise FedobpError(f"'{dataset.name}' has inputs of shape {x.shape[1:]}, which {problem}")
        x, within = np.array(x), InputRange.of(x)
        for shard in inputs:
            x[shard.samples] = changed_inputs(x[shard.samples], shard.change, within)
    if relabelled:
        y = np.array(y)
        for shard in relabelled:
            y[shard.samples] = np.array(shard.change.labels)[y[shard.samples]]
    return replace(dataset, x=x, y=y) if inputs or relabelled else dataset
