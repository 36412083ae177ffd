"""BatchNorm as a pure function: its running statistics are part of a model's vector, and padding is ignored."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_STATISTICS = (".running_mean", ".running_var")


def is_statistic(name: str) -> bool:
    """Return whether a tensor is a running statistic, which training updates without a gradient."""
    return name.endswith(_STATISTICS)


def batch_norm_layers(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield the BatchNorm layers of a module, with their names."""
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm))


class PureBatchNorm(nn.Module):
    """A BatchNorm layer with the same tensors.

    With `sample_weight` (1 for a sample, 0 for padding) it is in training mode: it normalises by the batch's mean and
    variance, and stores the new running statistics in `updated`.
    """

    def __init__(self, like: _BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self._eps, self._momentum = like.weight, like.bias, like.eps, cast(float, like.momentum)
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", like.running_mean)
        self.register_buffer("running_var", like.running_var)
        self.sample_weight: Tensor | None = None
        self.updated: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each channel."""
        x = x.to(self.running_mean.dtype)  # under autocast a convolution returns bfloat16, too short for sums
        shape, weight = [1, -1, *[1] * (x.ndim - 2)], self.sample_weight
        mean = self.running_mean if weight is None else _channel_means(x, weight)
        centred, variance = x - mean.view(shape), self.running_var
        if weight is not None:
            variance = _channel_means(centred.square(), weight)
            count = weight.sum() * (x.numel() // (x.shape[0] * x.shape[1]))
            old = self.running_mean, self.running_var
            new = mean.detach(), variance.detach() * count / (count - 1)
            self.updated = tuple(a + self._momentum * (b - a) for a, b in zip(old, new, strict=True))
        scale = (variance + self._eps).rsqrt()
        out = centred * (scale if self.weight is None else scale * self.weight).view(shape)
        return out if self.bias is None else out + self.bias.view(shape)


def _channel_means(x: Tensor, weight: Tensor) -> Tensor:
    """Return the means of the channels of [B, C, ...] over real samples; sums of samples first: those are short."""
    means = x.reshape(*x.shape[:2], -1).mean(2)
    return (means * weight[:, None]).sum(0) / weight.sum()


def with_pure_batch_norm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm of a module by `PureBatchNorm`, in place, and return the module."""
    for name, layer in list(batch_norm_layers(module)):
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, PureBatchNorm(layer))
    return module


def updated_statistics(module: nn.Module) -> Tensor:
    """Return the new running statistics after a forward pass in training mode, in the order of the vector."""
    layers = [layer for layer in module.modules() if isinstance(layer, PureBatchNorm)]
    return torch.cat([value for layer in layers for value in layer.updated])
