"""Precision, determinism and threads of a computation: set in a context, and restored at its end."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedobp.models import Model
from fedobp.options import Precision

_SMALL = 200_000  # parameters


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the type of weights, state and uploads: float32 except for fp64; bf16 concerns products alone."""
    return torch.float64 if precision == "fp64" else torch.float32


@contextmanager
def deterministic(precision: Precision, threads: int | None = None) -> Iterator[None]:
    """Compute deterministically in a precision, on a number of threads (None: as many as before)."""
    tf32 = precision in ("tf32", "bf16")
    before, matmul = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    if threads is not None:
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.set_num_threads(before)


def serial_threads(model: Model) -> int:
    """Return the number of threads for one client's step.

    For a small model a second thread gains almost nothing on an idle machine, and costs several times the step beside
    other programs.
    """
    return 1 if model.layout.size < _SMALL else torch.get_num_threads()


def autocast(precision: Precision, like: Tensor) -> torch.autocast:
    """Return the context in which products on a tensor's device are computed in a precision."""
    return torch.autocast(like.device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
