"""Transfers between the host and a device that do not wait for all the work that is queued there."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


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


class Deferred(Generic[T]):
    """What a function returns of a tensor that a device may still be computing: it is called by `value`.

    On CUDA it runs on another stream. There it waits for the tensor and for its own work, but not for what was queued
    after the tensor, and that does not wait for it.
    """

    def __init__(self, function: Callable[[Tensor], T], tensor: Tensor) -> None:
        self._function, self._tensor, self._ready = function, tensor, cast(torch.cuda.Event | None, None)
        if tensor.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def value(self) -> T:
        """Call the function, which must return plain values: then nothing of its work remains on the other stream."""
        if self._ready is None:
            return self._function(self._tensor)
        stream = _other_stream(self._tensor.device)
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            return self._function(self._tensor)


@cache
def _other_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream whose kernels come before those of others."""
    return torch.cuda.Stream(device, priority=-1)
