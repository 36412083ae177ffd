"""Client data as tensors: one resident array, each client's indices into it, and normalization on read."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from fedobp.data.dataset import Dataset
from fedobp.data.free_memory import require_free_memory
from fedobp.data.normalization import normalization_constants, normalization_for
from fedobp.data.partition import Shard
from fedobp.transfer import to_device

Split = Literal["train", "val", "test"]
_SPLITS: tuple[Split, ...] = ("train", "val", "test")


class _Index:
    """The sample ids of all clients in one vector, client after client."""

    def __init__(self, shards: Sequence[np.ndarray], device: torch.device) -> None:
        self.sizes = [len(shard) for shard in shards]
        ends = np.cumsum(self.sizes)
        self.starts = [int(end) - size for end, size in zip(ends, self.sizes, strict=True)]
        self.ids = torch.as_tensor(np.concatenate(shards).astype(np.int64)).to(device)

    def __getitem__(self, place: int) -> Tensor:
        return self.ids[self.starts[place] : self.starts[place] + self.sizes[place]]


class FederatedData:
    """A dataset partitioned over clients. Inputs stay as stored (uint8 for bytes) and are normalized when read.

    `normalize` is `dataset`, `train`, `none` or `as-published`; None chooses the dataset's default.
    """

    def __init__(
        self,
        dataset: Dataset,
        shards: Sequence[Shard],
        device: torch.device,
        dtype: torch.dtype,
        normalize: str | None = None,
        clients: Sequence[int] | None = None,
    ) -> None:
        """Hold the samples of clients; `clients` are their ids where these are some clients of many."""
        # A client's place among the shards: its id, or where it is among those that are held.
        self._place: Sequence[int] | Mapping[int, int] = (
            range(len(shards)) if clients is None else {client: place for place, client in enumerate(clients)}
        )
        x = torch.as_tensor(dataset.x)
        require_free_memory(
            f"dataset '{dataset.name}'", x.nbytes if x.ndim == 4 else 0
        )  # the permuted copy of colour images
        # Images become [N, C, H, W], tables stay [N, features]: the channel or feature axis is the second one.
        self.x = (x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2) if x.ndim == 4 else x).contiguous()
        self.vocabulary, self.every_position = dataset.vocabulary, dataset.every_position
        self.x, self.y = self.x.to(device), torch.as_tensor(dataset.y).to(device)
        self.dtype, self.classes = dtype, dataset.classes
        self.storage_key = object()  # the same for all partitions of these samples in memory
        self._assign(dataset, shards, normalize)

    def repartitioned(self, dataset: Dataset, shards: Sequence[Shard], normalize: str | None = None) -> Self:
        """Return the same samples under another partition or normalization; the samples are shared, not copied."""
        other = copy(self)
        other._place = range(len(shards))
        other._assign(dataset, shards, normalize)
        return other

    def _assign(self, dataset: Dataset, shards: Sequence[Shard], normalize: str | None) -> None:
        device = self.x.device
        self.clients = len(shards)
        self.trainers = sum(not shard.held_out for shard in shards)  # trainers come first; held-out clients never train
        self.groups = torch.tensor([shard.group for shard in shards])  # of each client; on the host, as cohorts are
        self._index = {split: _Index([getattr(shard, split) for shard in shards], device) for split in _SPLITS}
        counts = [np.bincount(dataset.y[shard.train].ravel(), minlength=self.classes) for shard in shards]
        self.label_counts = torch.as_tensor(np.stack(counts)).to(device)  # [clients, classes], of the training splits
        train_ids = np.concatenate([shard.train for shard in shards[: self.trainers]])
        normalize = normalization_for(dataset.name, normalize, tokens=bool(dataset.vocabulary))
        self.unit, mean, std = normalization_constants(dataset, train_ids, normalize)
        axes = (1, -1, *[1] * (self.x.ndim - 2))
        self._labels = dataset.labels
        self.mean, self.std = (torch.as_tensor(v, dtype=self.dtype, device=device).reshape(axes) for v in (mean, std))

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        samples = sum(sum(index.sizes) for index in self._index.values())
        return f"FederatedData({self.clients:,} clients, {samples:,} samples of {size}, {self.classes} classes)"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one model input."""
        return tuple(self.x.shape[1:])

    def scaled_by(self, unit: float, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Return the same samples with the constants of (x / unit - mean) / std given: a node has only its own."""
        other, axes = copy(self), (1, -1, *[1] * (self.x.ndim - 2))
        other.unit = unit
        given = (torch.tensor(values, dtype=self.dtype, device=self.x.device) for values in (mean, std))
        other.mean, other.std = (values.reshape(axes) for values in given)
        return other

    def metadata(self) -> dict[str, Any]:
        """Return the metadata for a saved model: input shape, labels, and the constants of (x / unit - mean) / std."""
        constants = {"unit": self.unit, "mean": self.mean.flatten().tolist(), "std": self.std.flatten().tolist()}
        return {"input_shape": self.shape, "labels": list(self._labels), "scaling": constants}

    def of(self, clients: Tensor) -> "FederatedData":
        """Return data that holds the samples of some clients, by the same ids: this, because it holds those of all."""
        return self

    def describe_clients(self, clients: Tensor) -> list[dict[str, float]]:
        """Return the sizes of clients, and the entropy of their training labels in bits."""
        counts = self.counts_of(clients).cpu().double()  # CUDA would compile `entr`
        shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        entropy = torch.special.entr(shares).sum(dim=1) / np.log(2)
        return [
            {"client": client, "train": self.size(client, "train"), "test": self.size(client, "test"), "entropy": bits}
            for client, bits in zip(clients.tolist(), entropy.tolist(), strict=True)
        ]

    def size(self, client: int, split: Split) -> int:
        """Return the number of samples of a client."""
        return self._index[split].sizes[self._place[client]]

    def largest(self, split: Split) -> int:
        """Return the most samples that a client has."""
        return max(self._index[split].sizes)

    def ids(self, clients: Tensor, positions: Tensor, split: Split) -> Tensor:
        """Return the sample ids at the clients' positions; `positions` has a leading axis of clients."""
        index = self._index[split]
        starts = to_device([index.starts[self._place[client]] for client in clients.tolist()], positions.device)
        # Positions beyond a client's last sample are padding: any valid id is correct.
        at = starts.reshape(-1, *[1] * (positions.ndim - 1)) + positions
        return index.ids[at.clamp_(max=max(0, len(index.ids) - 1))] if len(index.ids) else torch.zeros_like(positions)

    def pooled_ids(self, split: Split) -> Tensor:
        """Return the ids of all trainers' samples in a split; held-out clients are left out."""
        index = self._index[split]
        return index.ids[: sum(index.sizes[: self.trainers])]

    def samples(self, ids: Tensor) -> Tensor:
        """Return samples' normalized inputs; tokens stay as they are."""
        if self.vocabulary:
            return self.x[ids].long()
        return ((self.x[ids].to(self.dtype) / self.unit) - self.mean) / self.std

    def inputs(self, client: int, split: Split) -> Tensor:
        """Return a client's normalized inputs."""
        return self.samples(self._index[split][self._place[client]])

    def targets(self, client: int, split: Split) -> Tensor:
        """Return a client's labels, [samples], or [samples, length] where every next token is one."""
        return self.y[self._index[split][self._place[client]]]

    def targets_of(self, clients: Sequence[int], split: Split) -> list[Tensor]:
        """Return the labels of several clients on the CPU, by one copy from the device."""
        index = self._index[split]
        ids = torch.cat([index[self._place[client]] for client in clients])
        return list(self.y[ids].cpu().split([self.size(client, split) for client in clients]))

    def counts(self, client: int) -> Tensor:
        """Return the label counts of a client's training split."""
        return self.label_counts[self._place[client]]

    def counts_of(self, clients: Tensor) -> Tensor:
        """Return the label counts of several clients' training splits, [clients, classes]."""
        if isinstance(self._place, range):
            return self.label_counts[clients.to(self.label_counts.device)]
        return self.label_counts[[self._place[client] for client in clients.tolist()]]
