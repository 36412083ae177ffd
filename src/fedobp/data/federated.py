"""Client data as tensors: one resident array, each client's indices into it, and scaling on the fly."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedobp.data.datasets import Dataset
from fedobp.data.known import KNOWN
from fedobp.data.partition import Shard

Split = Literal["train", "val", "test"]


class FederatedData:
    """A dataset dealt out to clients. Inputs stay as stored (uint8 where they came so) and are scaled when read."""

    def __init__(self, dataset: Dataset, shards: Sequence[Shard], device: torch.device, dtype: torch.dtype) -> None:
        x = torch.as_tensor(dataset.x)
        # Images become [N, C, H, W], tables stay [N, features]: the channel or feature axis is the second one.
        self.x = (x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2) if x.ndim == 4 else x).to(device)
        self.y = torch.as_tensor(dataset.y).to(device)
        self.classes = dataset.classes
        self.clients = len(shards)
        self.dtype = dtype
        self._index = {
            split: [torch.as_tensor(getattr(shard, split)).to(device) for shard in shards]
            for split in ("train", "val", "test")
        }
        unit, mean, std = _scaling(dataset, shards)
        axes = (1, -1, *[1] * (self.x.ndim - 2))
        self._unit, self._labels = unit, dataset.labels
        self._mean, self._std = (torch.as_tensor(v, dtype=dtype, device=device).reshape(axes) for v in (mean, std))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, as models see it."""
        return tuple(self.x.shape[1:])

    def about(self) -> dict[str, Any]:
        """Return what a saved model needs to be used elsewhere: its inputs are (x / unit - mean) / std."""
        scaling = {"unit": self._unit, "mean": self._mean.flatten().tolist(), "std": self._std.flatten().tolist()}
        return {"input_shape": self.shape, "labels": self._labels.tolist(), "scaling": scaling}

    def size(self, client: int, split: Split) -> int:
        """How many samples a client has."""
        return len(self._index[split][client])

    def inputs(self, client: int, split: Split) -> Tensor:
        """Return a client's scaled inputs."""
        return ((self.x[self._index[split][client]].to(self.dtype) / self._unit) - self._mean) / self._std

    def targets(self, client: int, split: Split) -> Tensor:
        """Return a client's labels."""
        return self.y[self._index[split][client]]

    def counts(self, client: int) -> Tensor:
        """Return how often each label occurs in a client's training part."""
        return torch.bincount(self.targets(client, "train"), minlength=self.classes)


def _scaling(dataset: Dataset, shards: Sequence[Shard]) -> tuple[float, np.ndarray, np.ndarray]:
    """Return (unit, mean, std): an input is scaled as (x / unit - mean) / std, per channel or feature.

    A dataset with published constants uses those; any other takes the mean and deviation of its training parts.
    """
    known = KNOWN.get(dataset.name)
    stored_as_bytes = dataset.x.dtype == np.uint8
    if known and known.mean:
        unit = 255.0 if stored_as_bytes or dataset.x.max() > 1 else 1.0
        return unit, np.array(known.mean), np.array(known.std)
    unit = 255.0 if stored_as_bytes else 1.0
    trained = dataset.x[np.concatenate([shard.train for shard in shards])]
    if trained.ndim == 3:
        trained = trained[..., None]
    axes = tuple(range(trained.ndim - 1))
    mean = trained.mean(axis=axes, dtype=np.float64) / unit
    std = trained.std(axis=axes, dtype=np.float64) / unit
    return unit, mean, np.where(std > 0, std, 1.0)
