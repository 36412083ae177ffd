"""The sizes of the paper's CNN, and the permutation between the flat vector and the kernels' order of parameters."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fedobp.engine.kernels.param_layout import B1, B2, BF, HIDDEN, W1, W2, WF
from fedobp.models import Layout


@dataclass(frozen=True)
class Shapes:
    """Sizes for square images of `side` pixels, and batches of up to `batch` samples."""

    side: int
    channels: int
    classes: int
    batch: int  # a power of two, from 16

    @property
    def pooled1(self) -> int:
        """Side of the first pooled map."""
        return (self.side - 4) // 2

    @property
    def pooled2(self) -> int:
        """Side of the second pooled map."""
        return (self.pooled1 - 4) // 2

    @property
    def features(self) -> int:
        """Inputs of the hidden layer."""
        return 64 * self.pooled2**2

    @property
    def outputs(self) -> int:
        """Number of classes, rounded up to a size that a matrix product supports."""
        return max(16, 1 << (self.classes - 1).bit_length())

    @property
    def frame(self) -> int:
        """Side of the zero-padded gradient of conv2's outputs."""
        return 2 * self.pooled2 + 8

    @property
    def size(self) -> int:
        """Number of entries of a lane's vector in the kernels' order."""
        end: int = WF.value + HIDDEN.value * self.features + self.outputs * (HIDDEN.value + 1)
        return -(-end // 32) * 32


def kernel_order(layout: Layout, shapes: Shapes) -> Tensor:
    """Return, for each entry in the kernels' order, its index in the flat vector; -1 for padding."""
    flat = layout.views(torch.arange(layout.size))
    index = torch.full((shapes.size,), -1)
    side, hidden = shapes.pooled2, HIDDEN.value

    def part(start: int, *shape: int) -> Tensor:
        return index[start : start + prod(shape)].view(shape)

    part(W1.value, 5, 8, 4, 32)[:, :5, : shapes.channels] = flat["conv1.weight"].permute(2, 3, 1, 0)
    part(B1.value, 32)[:] = flat["conv1.bias"]
    part(W2.value, 5, 5, 32, 64)[:] = flat["conv2.weight"].permute(2, 3, 1, 0)
    part(B2.value, 64)[:] = flat["conv2.bias"]
    part(BF.value, hidden)[:] = flat["fc1.bias"]
    weights = flat["fc1.weight"].view(hidden, 64, side, side)
    part(WF.value, hidden, side, side, 64)[:] = weights.permute(0, 2, 3, 1)
    head = WF.value + hidden * shapes.features
    part(head, shapes.outputs, hidden)[: shapes.classes] = flat["classifier.weight"]
    part(head + shapes.outputs * hidden, shapes.outputs)[: shapes.classes] = flat["classifier.bias"]
    return index


def flat_order(order: Tensor, size: int) -> Tensor:
    """Return the inverse: for each entry of the flat vector, its index in the kernels' order."""
    back = torch.empty(size, dtype=torch.int64)
    real = order >= 0
    back[order[real]] = torch.arange(len(order))[real]
    return back
