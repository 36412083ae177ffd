"""Named tensors that clients and server hold and send: one client's, or a cohort's, which have a leading axis."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Sparse(NamedTuple):
    """A vector of which only the entries in `keep` are sent; the receiver finds NaN (in integers 0) in all others."""

    values: Tensor
    keep: Tensor

    def fill(self, other: Tensor) -> Tensor:
        """Return the values where they were sent, and `other` elsewhere."""
        return torch.where(self.keep, self.values, other)

    def at(self, index: int | slice | list[int]) -> "Sparse":
        """Return one client's vector of a cohort's, or a part of the cohort."""
        return Sparse(self.values[index], self.keep[index])


Record = dict[str, Tensor | Sparse]
R = TypeVar("R", Tensors, Record)


def take(record: R, index: int | slice | list[int]) -> R:
    """Return one client's record of a cohort's, or that of a part of the cohort."""
    return {name: value.at(index) if isinstance(value, Sparse) else value[index] for name, value in record.items()}


def stack(records: Sequence[Record]) -> Record:
    """Return clients' records as the cohort's: the inverse of `take`."""
    stacked: Record = {}
    for name, first in records[0].items():
        values = [record[name] for record in records]
        if isinstance(first, Sparse):
            pairs = [value for value in values if isinstance(value, Sparse)]
            stacked[name] = Sparse(torch.stack([p.values for p in pairs]), torch.stack([p.keep for p in pairs]))
        else:
            stacked[name] = torch.stack([value for value in values if isinstance(value, Tensor)])
    return stacked


def shapes_of(record: Record) -> dict[str, tuple[int, ...]]:
    """Return the shape of each value of a record."""
    return {name: tuple((v.values if isinstance(v, Sparse) else v).shape) for name, v in record.items()}


def types_of(record: Record) -> dict[str, str]:
    """Return the type of each value of a record, and whether it may be sent in part."""
    return {name: f"sparse {v.values.dtype}" if isinstance(v, Sparse) else str(v.dtype) for name, v in record.items()}


def unsent(values: Tensor) -> Tensor:
    """Return what a receiver finds in entries that are not sent: NaN, and 0 in integers, which are codes."""
    return values.new_full((), math.nan if values.is_floating_point() else 0)


def mask_unsent(record: Record) -> Record:
    """Return a record as its receiver gets it: with NaN in entries that are not sent, or 0 in integers."""
    return {
        name: Sparse(torch.where(value.keep, value.values, unsent(value.values)), value.keep)
        if isinstance(value, Sparse)
        else value
        for name, value in record.items()
    }
