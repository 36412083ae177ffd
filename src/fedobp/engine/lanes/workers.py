"""Stacks of lanes, and the cores that run them.

On the CPU lanes are divided into stacks, and each core runs one stack at a time with one thread. The size of a stack
depends on the model: one lane of a large model, dozens of a small one. On CUDA all lanes that fit in memory are one
stack.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fedobp.engine.cost import Cost, cost
from fedobp.engine.precision import deterministic
from fedobp.engine.stack import Forward
from fedobp.models import Model
from fedobp.options import Precision

if TYPE_CHECKING:
    from fedobp.engine.kernels.fused import Fused

_STACK_WORK = 5e8  # floating-point operations in a step of a stack on the CPU: larger stacks are not faster
_STACK_LANES = 32

T = TypeVar("T")


class Workers:
    """Divides lanes into stacks, and runs a function on each. `memory` is the limit of one stack in bytes."""

    def __init__(
        self,
        model: Model,
        batch: int,
        precision: Precision,
        memory: float,
        forms: dict[str, Forward],
        kernels: "Callable[[torch.device], Fused | None]",
    ) -> None:
        self._model, self._batch, self._precision, self._memory = model, batch, precision, memory
        self._forms, self._kernels = forms, kernels
        self._count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._count, "fedobp-lanes")
        self._costs: dict[tuple[str, torch.dtype], Cost] = {}

    def stacks(
        self, longest_first: Sequence[T], like: Tensor, samples: int, plain: bool = True, more: int = 0
    ) -> list[list[T]]:
        """Divide lanes into stacks of about equal length, of which none exceeds the memory.

        `plain` steps have no custom loss, so the fused kernels may run them; others may need `more` bytes a lane.
        """
        fused = self._kernels(like.device) if plain else None
        lanes = len(longest_first)
        size = self._largest(like, samples, lanes, more) if fused is None else self._memory / fused.lane_bytes
        stacks = -(-lanes // max(1, int(min(size, lanes))))
        return [list(longest_first[at::stacks]) for at in range(stacks)]

    def _largest(self, like: Tensor, samples: int, lanes: int, more: int) -> float:
        """Return the largest number of lanes in a stack of the general path."""
        where = like.device.type, like.dtype
        if where not in self._costs:
            self._costs[where] = cost(self._model, self._forms[where[0]], self._batch, like.dtype)
        price = self._costs[where]
        share = samples / self._batch
        at_once = 1 if like.is_cuda else self._count
        size = self._memory / at_once / (price.fixed_bytes + share * price.batch_bytes + more)
        if like.is_cuda:
            return size
        work = max(1, round(_STACK_WORK / max(1, price.flops * share)))
        return min(size, _STACK_LANES, work, -(-lanes // self._count) or 1)

    def map(self, function: Callable[[list[T]], Any], stacks: Sequence[list[T]], device: torch.device) -> list[Any]:
        """Run a function on every stack: on CUDA one after another, on the CPU one on each core."""
        if device.type != "cpu":
            with deterministic(self._precision):
                return [function(stack) for stack in stacks]
        threads = max(1, self._count // max(1, len(stacks)))

        def alone(stack: list[T]) -> Any:
            torch.set_num_threads(threads)  # this is a property of the calling thread
            return function(stack)

        with deterministic(self._precision, threads):
            return list(self._pool.map(alone, stacks))
