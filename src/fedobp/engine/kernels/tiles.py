"""Tile shapes, one table a device: found by `python benchmarks/tune.py`, which prints an entry at a time.

What is best depends on how many lanes there are: a few want many small tiles, so that every multiprocessor has one;
many want large ones, which load less. Partial sums (splits) likewise.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Tile(NamedTuple):
    """Rows or columns of a program's tile, its depth where it walks along one, and how the compiler deals with it."""

    size: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """One set of tile shapes, for up to so many lanes."""

    lanes: int
    conv1: Tile  # `depth`: tiles that a program takes
    conv2: Tile
    dense: Tile
    head: Tile
    dense_backward: Tile
    conv2_inputs: Tile  # `depth`: the side of the pixel blocks that are its rows
    weights_backward: Tile  # rows of conv1's tiles (size), and of conv2's (depth)
    splits: tuple[int, int]  # partial sums of conv1's and conv2's weight gradient


EXACT = 16  # up to here there is a graph for each number of lanes, beyond it numbers are rounded up

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
    # A check, not a race: small enough that no register is spilled, and not tuned.
    "fp32": (
        Tiles(_MANY, Tile(32, 1, 8, 2), Tile(64, 0, 8, 3), Tile(32, 64, 4, 5), Tile(64, 0, 4, 2), Tile(64, 64, 8, 2),
              Tile(64, 2, 8, 3), Tile(32, 32, 8, 2), (28, 5)),
    ),
}  # fmt: skip
_DEVICES = {(9, 0): _HOPPER}


def tiles_for(capability: tuple[int, int], precision: str) -> tuple[Tiles, ...] | None:
    """Return a device's tile shapes, fewest lanes first; None where nobody has tuned them."""
    return _DEVICES.get(capability, {}).get(precision)
