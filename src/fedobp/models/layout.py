"""One model is one flat vector; the layout knows where each tensor and each part (head, base) lies in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import prod

import torch
from torch import Tensor

HEAD = "classifier."  # a model's last layer is called `classifier`; all else is its base


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's tensors, in the order in which they lie in the vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Entries of each tensor."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """Entries of the whole vector."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each tensor lies."""
        ends = list(accumulate(self.sizes))
        return {name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)}

    @staticmethod
    def in_head(name: str) -> bool:
        """Say whether a tensor belongs to the head."""
        return name.startswith(HEAD)

    @cached_property
    def _runs(self) -> list[tuple[bool, int]]:
        """The vector as alternating stretches: (belongs to the head, length)."""
        tensors = zip(self.names, self.sizes, strict=True)
        groups = groupby(tensors, key=lambda tensor: self.in_head(tensor[0]))
        return [(head, sum(size for _, size in group)) for head, group in groups]

    def views(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of a vector; leading axes stay in front."""
        return {
            name: theta[..., where].reshape((*theta.shape[:-1], *shape))
            for (name, where), shape in zip(self.slices.items(), self.shapes, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the vector of named tensors: the inverse of `views`; leading axes stay in front."""
        flat = [
            tensors[name].detach().flatten(tensors[name].ndim - len(shape))
            if shape
            else tensors[name].detach()[..., None]
            for name, shape in zip(self.names, self.shapes, strict=True)
        ]
        return torch.cat(flat, dim=-1)

    def is_head(self, device: torch.device | None = None) -> Tensor:
        """Return the mask of the head's entries."""
        return torch.cat([torch.full((size,), head, device=device) for head, size in self._runs])

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (base, head), each a shorter vector; leading axes stay in front."""
        pieces = theta.split([size for _, size in self._runs], dim=-1)
        parts = zip(self._runs, pieces, strict=True)
        chosen: dict[bool, list[Tensor]] = {False: [], True: []}
        for (head, _), piece in parts:
            chosen[head].append(piece)
        empty = theta[..., :0]
        return torch.cat([empty, *chosen[False]], dim=-1), torch.cat([empty, *chosen[True]], dim=-1)

    def join(self, base: Tensor, head: Tensor) -> Tensor:
        """Return the vector made of (base, head): the inverse of `split`."""
        sizes = {part: [size for is_head, size in self._runs if is_head == part] for part in (False, True)}
        pieces = {False: iter(base.split(sizes[False], dim=-1)), True: iter(head.split(sizes[True], dim=-1))}
        return torch.cat([next(pieces[is_head]) for is_head, _ in self._runs], dim=-1)
