"""Tile shapes, one table per card and precision: shipped, tuned on the user's card, or a default to start from.

The best shapes depend on the number of lanes: few lanes need many small tiles, so that every multiprocessor has one;
many lanes need large tiles, which load less. The same holds for partial sums (splits).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Literal, NamedTuple


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
_SHIPPED = {(9, 0): _HOPPER}


@dataclass(frozen=True)
class Table:
    """The tile shapes of a card in a precision, fewest lanes first."""

    entries: tuple[Tiles, ...]
    source: Literal["shipped", "tuned", "default"]

    @property
    def hash(self) -> str:
        """What identifies its shapes."""
        return table_hash(self.entries)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the entries for a file."""
        return [{spec.name: getattr(one, spec.name) for spec in fields(Tiles)} for one in self.entries]


def table_hash(entries: Sequence[Tiles]) -> str:
    """Return what identifies tile shapes: runs with equal ones have equal bytes."""
    return hashlib.sha256(json.dumps([astuple(one) for one in entries]).encode()).hexdigest()[:12]


def shipped_table(capability: tuple[int, int], precision: str) -> Table | None:
    """Return the table that comes with fedobp; None: there is none for this compute capability."""
    entries = _SHIPPED.get(capability, {}).get(precision)
    return Table(entries, "shipped") if entries else None


def default_table(capability: tuple[int, int]) -> Table:
    """Return a table that was not tuned: small shapes, which suit no card best and fit every one."""
    # With four warps Triton 3.6 does not compile this kernel for 10.x, and 3.7 for 10.x and 11.x not in tf32. With two,
    # products read registers.
    backward = Tile(32, 32, 2 if capability[0] in (10, 11) else 4, 2)
    small = Tiles(2, Tile(64, 1, 4, 2), Tile(32, 0, 4, 2), Tile(32, 64, 4, 3), Tile(64, 0, 4, 2), Tile(32, 64, 4, 2),
                  Tile(64, 1, 4, 2), backward, (28, 5))  # fmt: skip
    few = [replace(small, lanes=lanes) for lanes in (2, 6, EXACT)]
    return Table((*few, replace(small, lanes=_MANY, conv1=Tile(64, 7, 4, 2), splits=(7, 2))), "default")


def table_from_json(content: Any) -> Table:
    """Return a tuned table from a file's content; raise ValueError if it is none."""
    try:
        entries = tuple(Tiles(**{name: _tile(name, value) for name, value in one.items()}) for one in content)
        lanes = [one.lanes for one in entries]
        if not lanes or lanes != sorted(set(lanes)) or lanes[-1] < _MANY:
            raise ValueError
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError("not a tile table") from error
    return Table(entries, "tuned")


def _tile(name: str, value: Any) -> Any:
    """Return one value of an entry: a number, the splits, or a tile."""
    numbers = [value] if name == "lanes" else list(value)
    if name == "splits" and len(numbers) != 2:
        raise ValueError
    if not all(type(number) is int and 0 <= number <= _MANY for number in numbers):
        raise ValueError
    if name == "lanes":
        return value
    return (numbers[0], numbers[1]) if name == "splits" else Tile(*numbers)
