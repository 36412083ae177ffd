"""Tile shapes, one table per device: found by `python benchmarks/tune.py`, which prints entries of these tables.

The best shapes depend on the number of lanes: few lanes need many small tiles, so that every multiprocessor has one;
many lanes need large tiles, which load less. The same holds for partial sums (splits).
"""

from dataclasses import dataclass
from typing import NamedTuple


class Tile(NamedTuple):
    """Rows or columns of a program's tile, the depth of its inner loop, and the compiler's options."""

    size: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tile shapes for up to `lanes` lanes."""

    lanes: int
    conv1: Tile  # `depth`: tiles per program
    conv2: Tile
    dense: Tile
    head: Tile
    dense_backward: Tile
    conv2_inputs: Tile  # `depth`: the side of the pixel block of a row
    weights_backward: Tile  # `size`: rows of conv1's tiles; `depth`: of conv2's
    splits: tuple[int, int]  # partial sums of conv1's and conv2's weight gradient


EXACT = 16  # up to this number of lanes there is a graph for each; beyond it, numbers are rounded up

_MANY = 1 << 30
_HOPPER = {
    "bf16": (
        Tiles(2, Tile(64, 1, 4, 2), Tile(16, 0, 4, 3), Tile(16, 128, 4, 5), Tile(64, 0, 8, 2), Tile(16, 128, 4, 3),
              Tile(64, 1, 4, 4), Tile(32, 32, 4, 3), (49, 12)),
        Tiles(6, Tile(64, 1, 4, 2), Tile(64, 0, 4, 4), Tile(16, 128, 4, 5), Tile(64, 0, 8, 2), Tile(64, 128, 4, 2),
              Tile(64, 2, 4, 4), Tile(32, 64, 4, 3), (28, 5)),
        Tiles(EXACT, Tile(64, 1, 4, 2), Tile(64, 0, 4, 4), Tile(16, 128, 4, 3), Tile(64, 0, 8, 2),
              Tile(64, 128, 4, 2), Tile(64, 2, 4, 4), Tile(32, 32, 4, 3), (28, 5)),
        Tiles(_MANY, Tile(64, 7, 4, 3), Tile(64, 0, 4, 4), Tile(64, 64, 4, 5), Tile(128, 0, 4, 2),
              Tile(64, 128, 4, 3), Tile(128, 2, 8, 3), Tile(32, 32, 4, 3), (7, 1)),
    ),
    "tf32": (
        Tiles(2, Tile(64, 1, 2, 2), Tile(16, 0, 2, 3), Tile(16, 64, 4, 5), Tile(32, 0, 8, 2), Tile(32, 64, 4, 3),
              Tile(64, 1, 4, 3), Tile(32, 32, 4, 3), (49, 12)),
        Tiles(EXACT, Tile(64, 1, 2, 2), Tile(64, 0, 4, 4), Tile(32, 64, 4, 5), Tile(64, 0, 4, 2), Tile(64, 128, 4, 2),
              Tile(128, 2, 8, 3), Tile(32, 32, 2, 2), (28, 5)),
        Tiles(_MANY, Tile(64, 7, 2, 2), Tile(64, 0, 4, 4), Tile(64, 64, 4, 5), Tile(128, 0, 4, 2),
              Tile(64, 64, 4, 3), Tile(128, 2, 8, 3), Tile(32, 32, 2, 2), (7, 2)),
    ),
    # For checks, not for speed: not tuned, but small enough that no registers are spilled.
    "fp32": (
        Tiles(_MANY, Tile(32, 1, 8, 2), Tile(64, 0, 8, 3), Tile(32, 64, 4, 5), Tile(64, 0, 4, 2), Tile(64, 64, 8, 2),
              Tile(64, 2, 8, 3), Tile(32, 32, 8, 2), (28, 5)),
    ),
}  # fmt: skip
_DEVICES = {(9, 0): _HOPPER}


def tiles_for(capability: tuple[int, int], precision: str) -> tuple[Tiles, ...] | None:
    """Return a device's tile shapes, fewest lanes first; None if there are none for this precision."""
    return _DEVICES.get(capability, {}).get(precision)
