"""Numbers on their way to a device, without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def send(values: Sequence[float] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a tensor on a device.

    A plain copy to CUDA waits until the device has done all that it was told before; from pinned memory it need not.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
