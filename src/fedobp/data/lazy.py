"""Data that a function makes when it is needed: only the samples of clients that are in use are in memory."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import default_rng
from numpy.typing import NDArray
from torch import Tensor

from fedobp.data.dataset import Dataset
from fedobp.data.federated import FederatedData, Split
from fedobp.data.partition import TEST_SHARE, Shard
from fedobp.errors import FedobpError
from fedobp.keys import Purpose, fold, permutation

_CACHE = 2**28  # bytes of clients' samples that are kept for the next time
_AT_ONCE = 256  # clients that are described at once


class Made(NamedTuple):
    """The samples of one client; those for test, if it says which, come last."""

    x: NDArray[Any]
    y: NDArray[np.int64]
    test: int | None  # how many are for test; None: a share of all


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class LazyDataset(Dataset):
    """Clients whose samples a function makes when they are needed; `x` and `y` are those of client 0 alone."""

    function: Callable[[int], Made]
    sizes: NDArray[np.int64]  # of each client: all samples
    test_sizes: NDArray[np.int64] | None  # and those for test; None: a share of all
    made_by: str  # the function's name

    @property
    def natural_clients(self) -> int:
        """Number of clients that the function is asked for."""
        return len(self.sizes)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.x.shape[1:]))
        return f"Dataset({self.name}: {len(self.sizes):,} clients, made lazily, of shape {shape})"

    def make(self, client: int) -> Made:
        """Return the samples of a client; it must have what was said of it."""
        made = self.function(client)
        if made.x.shape[1:] != self.x.shape[1:] or made.x.dtype != self.x.dtype:
            raise FedobpError(
                f"client {client} has inputs of shape {made.x.shape[1:]} and type {made.x.dtype}, and client 0 "
                f"{self.x.shape[1:]} and {self.x.dtype}: return the same for all clients"
            )
        test = None if self.test_sizes is None else int(self.test_sizes[client])
        if (len(made.y), made.test) != (self.sizes[client], test):
            raise FedobpError(
                f"client {client} has {_size(len(made.y), made.test)}, and not {_size(int(self.sizes[client]), test)}: "
                "give `samples`, the size of each client"
            )
        return made


def _size(samples: int, test: int | None) -> str:
    return f"{samples} samples" if test is None else f"{samples - test} samples and {test} for test"


class LazyFederatedData(FederatedData):
    """Clients whose samples are made when they are needed. It holds none: `of` returns those of some clients.

    A client's samples are divided into train, val and test in an order that is keyed by the seed and the client.
    """

    def __init__(
        self, dataset: LazyDataset, clients: int, dtype: torch.dtype, *, seed: int, val_ratio: float, holdout: int
    ) -> None:
        if clients > dataset.natural_clients:
            raise FedobpError(
                f"the data comes from {dataset.natural_clients} clients, not {clients}: use fewer --clients"
            )
        first = np.arange(len(dataset.y))
        super().__init__(dataset, [Shard(first, first[:0], first[:0])], torch.device("cpu"), dtype, "none")
        # Shapes, types and constants are those of client 0; no sample stays.
        self.x, self.y = self.x[:0], self.y[:0]
        del self._index, self.label_counts
        self.clients, self.trainers = clients, clients - holdout
        self.groups = self.groups.expand(clients)
        self._dataset, self._seed = dataset, seed
        # Which clients there are, and which are held out: drawn as for natural clients in memory.
        chosen = np.sort(default_rng(seed).permutation(dataset.natural_clients)[:clients])
        order = default_rng([seed, 1]).permutation(clients)
        self._numbers = chosen[np.concatenate([np.sort(order[holdout:]), order[:holdout]])]
        all_sizes = dataset.sizes[self._numbers]
        test = (
            (TEST_SHARE * all_sizes).astype(np.int64)
            if dataset.test_sizes is None
            else dataset.test_sizes[self._numbers]
        )
        val = (val_ratio * (all_sizes - test)).astype(np.int64)
        sizes: dict[Split, Any] = {"train": all_sizes - test - val, "val": val, "test": test}
        self._sizes = {split: values.astype(np.int32) for split, values in sizes.items()}
        if not self._sizes["train"][: self.trainers].any():
            raise FedobpError("no client has a sample to train on: return more samples for each client")
        self._cache: OrderedDict[int, tuple[NDArray[Any], NDArray[np.int64]]] = OrderedDict()
        self._cached = 0  # bytes
        self._held: tuple[list[int], FederatedData] | None = None

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"FederatedData({self.clients:,} clients, made lazily, samples of {size}, {self.classes} classes)"

    @property
    def partition_hash(self) -> str:
        """The SHA-256 hash of what is known of the clients without making them: their sizes, and client 0."""
        words = [self.classes, self._seed, self._dataset.content_hash]
        made = hashlib.sha256(json.dumps(words).encode())
        for values in (self._numbers, *self._sizes.values()):
            made.update(values.astype("<i8").tobytes())
        return made.hexdigest()

    def size(self, client: int, split: Split) -> int:
        """Return the number of samples of a client."""
        return int(self._sizes[split][client])

    def largest(self, split: Split) -> int:
        """Return the most samples that a client has."""
        return int(self._sizes[split].max())

    def of(self, clients: Tensor) -> FederatedData:
        """Return data that holds the samples of some clients, by the same ids."""
        ids = clients.tolist()
        if self._held is None or self._held[0] != ids:  # runs side by side often ask for the same cohort
            self._held = ids, self._joined(ids)
        return self._held[1]

    def _joined(self, clients: list[int]) -> FederatedData:
        samples = [self._samples(client) for client in clients]
        shards, start = [], 0
        for client in clients:
            sizes = [self.size(client, split) for split in ("train", "val", "test")]
            train, val, test = np.split(np.arange(start, start + sum(sizes), dtype=np.int64), np.cumsum(sizes)[:-1])
            shards.append(Shard(train, val, test))
            start += sum(sizes)
        x, y = (np.concatenate(parts) for parts in zip(*samples, strict=True))
        joined = replace(self._dataset, x=x, y=y)
        return FederatedData(joined, shards, self.x.device, self.dtype, "none", clients)

    def _samples(self, client: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return a client's samples in the order train, val, test: kept from the last time, or made."""
        if client in self._cache:
            self._cache.move_to_end(client)
            return self._cache[client]
        x, y, given = self._dataset.make(int(self._numbers[client]))
        order = permutation(fold(self._seed, client, Purpose.SPLIT), len(y)).numpy()
        n_val, n_test = self.size(client, "val"), self.size(client, "test")
        is_test = np.arange(len(y)) < n_test if given is None else order >= len(y) - n_test
        test, rest = order[is_test], order[~is_test]
        order = np.concatenate([rest[n_val:], rest[:n_val], test])
        self._cache[client] = x[order], y[order]
        self._cached += x.nbytes + y.nbytes
        while self._cached > _CACHE:
            _, oldest = self._cache.popitem(last=False)
            self._cached -= sum(array.nbytes for array in oldest)
        return x[order], y[order]

    def describe_clients(self, clients: Tensor) -> list[dict[str, float]]:
        """Return the sizes of clients, and the entropy of their training labels in bits."""
        return [row for some in clients.split(_AT_ONCE) for row in self._joined(some.tolist()).describe_clients(some)]

    def pooled_ids(self, split: Split) -> Tensor:
        """Refuse: the samples of all clients are never in memory together."""
        raise FedobpError("this needs all clients' samples at once, and they are made lazily: leave out lazy=True")

    def inputs(self, client: int, split: Split) -> Tensor:
        """Return a client's normalized inputs."""
        return self._joined([client]).inputs(client, split)

    def targets(self, client: int, split: Split) -> Tensor:
        """Return a client's labels."""
        return self._joined([client]).targets(client, split)

    def counts(self, client: int) -> Tensor:
        """Return the label counts of a client's training split."""
        return self._joined([client]).counts(client)
