"""Copies between the host and a device that do not synchronise with the device."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor


def to_device(values: Sequence[float] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a tensor on a device.

    A copy to CUDA synchronises with the device, unless it is from pinned memory.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class AsyncCopy:
    """A copy of a tensor to the CPU, which is queued at once.

    Reading it waits for the copy alone, and not for work that is queued after it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._value, self._copied = tensor, cast(torch.cuda.Event | None, None)
        if tensor.is_cuda:
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def value(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._value
