"""Copies between the host and a device that do not wait for the device."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor


def to_device(values: Sequence[float] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a tensor on a device.

    A plain copy to CUDA waits until the device has done all that it was told before; from pinned memory it need not.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class AsyncCopy:
    """A tensor on its way to the CPU.

    The copy is asked for at once, so that later only this one has to have arrived, and not all that the device was told
    in the meantime.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._value, self._there = tensor, cast(torch.cuda.Event | None, None)
        if tensor.is_cuda:
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def value(self) -> Tensor:
        """Wait for it, and return it."""
        if self._there is not None:
            self._there.synchronize()
        return self._value
