"""The layout of a model's flat vector: the position of each tensor and of each part (head, base)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import prod

import torch
from torch import Tensor

from fedobp.models.batch_norm import is_statistic

Inside = Callable[[str], bool]  # from a tensor's name to whether it belongs to a part

HEAD = "classifier."  # a model's last layer is called `classifier`; the rest is its base


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's tensors, in the order of the vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each tensor."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """The number of entries of the vector."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of each tensor in the vector."""
        ends = list(accumulate(self.sizes))
        return {name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)}

    @cached_property
    def learned(self) -> int:
        """The number of entries with a gradient: all but BatchNorm's running statistics, which are at the end."""
        return sum(size for name, size in zip(self.names, self.sizes, strict=True) if not is_statistic(name))

    def among_learned(self, choose: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """Return the mask that a function computes from vectors [..., N]; False for BatchNorm's running statistics."""
        parts = [vector.tensor_split([self.learned], dim=-1) for vector in vectors]
        statistics = torch.zeros_like(parts[0][1], dtype=torch.bool)
        return torch.cat([choose(*(learned for learned, _ in parts)), statistics], dim=-1)

    def in_norm(self, name: str) -> bool:
        """Return whether a tensor belongs to a BatchNorm layer."""
        return f"{name.rpartition('.')[0]}.running_mean" in self.slices

    @staticmethod
    def in_head(name: str) -> bool:
        """Return whether a tensor belongs to the head."""
        return name.startswith(HEAD)

    def _segments(self, inside: Inside) -> list[tuple[bool, int]]:
        """Return the vector as alternating segments: (belongs to the part, length)."""
        tensors = zip(self.names, self.sizes, strict=True)
        groups = groupby(tensors, key=lambda tensor: inside(tensor[0]))
        return [(part, sum(size for _, size in group)) for part, group in groups]

    def views(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of a vector; leading axes stay in front."""
        pieces = theta.split(self.sizes, dim=-1)  # one backward pass; slices would have one each
        return {
            name: piece.reshape((*theta.shape[:-1], *shape))
            for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
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
        return self.mask(self.in_head, device)

    def mask(self, inside: Inside, device: torch.device | None = None) -> Tensor:
        """Return the mask of a part's entries: those of the tensors for whose names `inside` is true."""
        return torch.cat([torch.full((size,), part, device=device) for part, size in self._segments(inside)])

    def split(self, theta: Tensor, inside: Inside | None = None) -> tuple[Tensor, Tensor]:
        """Return (rest, part), each a shorter vector; leading axes stay in front. By default the part is the head."""
        segments = self._segments(inside or self.in_head)
        chosen: dict[bool, list[Tensor]] = {False: [], True: []}
        for (part, _), piece in zip(segments, theta.split([size for _, size in segments], dim=-1), strict=True):
            chosen[part].append(piece)
        empty = theta[..., :0]
        return torch.cat([empty, *chosen[False]], dim=-1), torch.cat([empty, *chosen[True]], dim=-1)

    def join(self, rest: Tensor, part: Tensor, inside: Inside | None = None) -> Tensor:
        """Return the vector made of (rest, part): the inverse of `split`."""
        segments = self._segments(inside or self.in_head)
        sizes = {which: [size for one, size in segments if one == which] for which in (False, True)}
        pieces = {False: iter(rest.split(sizes[False], dim=-1)), True: iter(part.split(sizes[True], dim=-1))}
        return torch.cat([next(pieces[which]) for which, _ in segments], dim=-1)
