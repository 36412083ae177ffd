"""How numbers are computed: precision, determinism and threads, set for a stretch of work and put back after it."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from fedobp.models import Model

Precision = Literal["fp32", "fp64", "tf32", "bf16"]
_SMALL = 200_000  # parameters
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the type of weights, state and uploads: float32 but for fp64; bf16 concerns the arithmetic alone."""
    return torch.float64 if precision == "fp64" else torch.float32


@contextmanager
def steady(precision: Precision, threads: int | None = None) -> Iterator[None]:
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


def keep_memory() -> None:
    """Let this process keep the memory that it frees.

    A step frees and takes the same megabytes again and again. By default glibc hands each large piece back to the
    kernel, which has to clear it before it comes again: in a virtual machine that is a fifth of a CPU step.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        for parameter, value in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
            libc.mallopt(parameter, value)


def serial_threads(model: Model) -> int:
    """Return how many threads one client's step deserves.

    A small model's step is over before a second thread is awake: alone on the machine that thread gains next to
    nothing, and beside other programs it costs several times the step.
    """
    return 1 if model.layout.size < _SMALL else torch.get_num_threads()
