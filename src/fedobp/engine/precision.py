"""How numbers are computed: precision, determinism and threads, set for a stretch of work and put back after it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedobp.models import Model
from fedobp.options import Precision

_SMALL = 200_000  # parameters


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the type of weights, state and uploads: float32 but for fp64; bf16 concerns the arithmetic alone."""
    return torch.float64 if precision == "fp64" else torch.float32


@contextmanager
def deterministic(precision: Precision, threads: int | None = None) -> Iterator[None]:
    """Compute so that the same input gives the same bits, in the stated precision, on a number of threads."""
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
    """Return how many threads one client's step deserves.

    A small model's step is over before a second thread is awake: alone on the machine that thread gains next to
    nothing, and beside other programs it costs several times the step.
    """
    return 1 if model.layout.size < _SMALL else torch.get_num_threads()


def autocast(precision: Precision, like: Tensor) -> torch.autocast:
    """Return the context in which products on a tensor's device have a precision."""
    return torch.autocast(like.device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
