"""Kernels that some version of Triton compiles with a race, on some cards: the check for races must find them there."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:  # a process that compiles these kernels does without torch
    from fedobp.engine.kernels.launches import Launch


@triton.jit
def summed_too(a, b, out, TILES: tl.constexpr):
    """Sum a tile that a product reads, too: a race on 9.0 (Triton's issue 6691)."""
    r = tl.arange(0, 64)
    z = tl.zeros((64, 64), tl.float32)
    total = tl.zeros((64,), tl.float32)
    for i in range(TILES):
        at = (i * 64 + r)[:, None] * 64 + r[None, :]
        tile = tl.load(a + at)
        z = tl.dot(tl.trans(tile), tl.load(b + at), z)
        total += tl.sum(tile.to(tl.float32), 0)
    tl.store(out + r[:, None] * 64 + r[None, :], z + total[None, :])


@triton.jit
def read_twice(a, b, c, out, TILES: tl.constexpr):
    """Read a tile from registers in two products: a race on 10.0 from Triton 3.7 on, which waits for one of them."""
    r = tl.arange(0, 64)
    z1 = tl.zeros((64, 64), tl.float32)
    z2 = tl.zeros((64, 64), tl.float32)
    for i in range(TILES):
        at = (i * 64 + r)[:, None] * 64 + r[None, :]
        tile = tl.load(a + at)
        positive = tl.trans(tl.where(tile > 0, tile, 0.0))
        z1 = tl.dot(positive, tl.load(b + at), z1)
        z2 = tl.dot(positive, tl.load(c + at), z2)
    tl.store(out + r[:, None] * 64 + r[None, :], z1 + z2)


def specimens(capability: tuple[int, int]) -> "dict[str, Launch]":
    """Return the specimens for a compute capability by name."""
    import torch

    from fedobp.engine.kernels.launches import Launch

    tile, out = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    found = {"summed_too": Launch(summed_too, (1,), (tile, tile, out), (8,))}
    if capability[0] != 10 or not triton.__version__.startswith("3.6."):  # which does not compile it for 10.0
        found["read_twice"] = Launch(read_twice, (1,), (tile, tile, tile, out), (8,))
    return found
