"""Steps on CUDA without the host: one captured graph for each number of active lanes, replayed step after step.

A graph's tensors have fixed places, so lanes are copied into buffers of their own. A counter on the device picks the
batch: replaying is all that the host does in a phase, and it never waits. Numbers of lanes are rounded up to a few
sizes; a lane without samples is left as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fedobp.engine.fit import Rule, Stack, Stepper, active
from fedobp.engine.stack import Forward
from fedobp.models import Layout


def rounded(lanes: int) -> int:
    """Return the number of lanes that a graph is made for: few sizes, and little computed in vain."""
    step = 1 if lanes <= 8 else 2 if lanes <= 32 else 4
    return -(-lanes // step) * step


@dataclass
class _Buffers:
    """A stack at a fixed place, with its graphs by number of lanes."""

    stack: Stack
    counter: Tensor
    pool: Any  # memory that the graphs share: only one of them runs at a time
    graphs: dict[int, Any] = field(default_factory=dict)


class Graphs:
    """Runs stacks from captured graphs, and keeps them for the next phase of the same kind."""

    def __init__(self, layout: Layout, forward: Forward, low: bool) -> None:
        self._layout, self._forward, self._low = layout, forward, low
        self._kept: dict[Any, _Buffers] = {}

    def descend(self, stack: Stack, steps: Sequence[int]) -> int:
        """Run all steps of a stack, whose lanes have the given numbers of them; return the batch slots it took."""
        buffers = self._buffers(stack)
        plan = [(lanes, len(list(same))) for lanes, same in groupby(rounded(lanes) for lanes in active(steps))]
        for lanes, _ in plan:
            if lanes not in buffers.graphs:
                buffers.graphs[lanes] = self._captured(buffers, lanes)
        _load(buffers, stack)
        for lanes, times in plan:
            for _ in range(times):
                buffers.graphs[lanes].replay()
        lanes = len(stack.loss)
        for name, tensor in stack.tensors.items():
            tensor.copy_(buffers.stack.tensors[name][:lanes])
        stack.loss.copy_(buffers.stack.loss[:lanes])
        return sum(lanes * times for lanes, times in plan) * stack.ids.shape[2]

    def _buffers(self, stack: Stack) -> _Buffers:
        used = tuple(spec.name for spec in fields(Rule) if getattr(stack.rule, spec.name) is not None)
        kind = (used, stack.learned, stack.loss.dtype, stack.x.data_ptr(), stack.ids.shape[2])
        steps, lanes, _ = stack.ids.shape
        kept = self._kept.get(kind)
        if kept is None or kept.stack.ids.shape[0] < steps or len(kept.stack.loss) < rounded(lanes):
            before = kept.stack.ids.shape[:2] if kept else (0, 0)
            # Twice as many steps as now: rounds differ, and a graph is worth keeping.
            kept = self._kept[kind] = _empty(stack, max(2 * steps, before[0]), max(rounded(lanes), before[1]))
        return kept

    def _captured(self, buffers: _Buffers, lanes: int) -> Any:
        stack, counter = buffers.stack, buffers.counter
        # Every lane is asleep while graphs are made, so that nothing moves.
        stack.counts.zero_()
        counter.zero_()
        stepper = Stepper(stack, lanes, self._layout, self._forward, self._low)

        def step() -> None:
            ids = stack.ids.index_select(0, counter)[0, :lanes]
            counts = stack.counts.index_select(0, counter)[0, :lanes]
            stepper(ids, counts, idle=True)
            counter.add_(1)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        counter.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=buffers.pool):
            step()
        return graph


def _empty(stack: Stack, steps: int, lanes: int) -> _Buffers:
    """Return buffers like a stack, for more steps and lanes; what is in them moves nowhere."""

    def room(values: Tensor | None) -> Any:
        return None if values is None else values.new_zeros(lanes, *values.shape[1:])

    rule = Rule(**{spec.name: room(getattr(stack.rule, spec.name)) for spec in fields(Rule)})
    at = Stack(
        tensors={name: room(tensor) for name, tensor in stack.tensors.items()},
        rule=rule,
        learned=stack.learned,
        ids=stack.ids.new_zeros(steps, lanes, stack.ids.shape[2]),
        counts=stack.counts.new_zeros(steps, lanes),
        x=stack.x,
        y=stack.y,
        unit=stack.unit,
        mean=room(stack.mean),
        std=torch.ones_like(room(stack.std)),
    )
    pool = torch.cuda.graph_pool_handle() if stack.loss.is_cuda else None
    return _Buffers(at, torch.zeros(1, dtype=torch.int64, device=stack.loss.device), pool)


def _load(buffers: _Buffers, stack: Stack) -> None:
    at, (steps, lanes, _) = buffers.stack, stack.ids.shape
    for spec in fields(Rule):
        values = getattr(stack.rule, spec.name)
        if values is not None:
            getattr(at.rule, spec.name)[:lanes] = values
    for name, tensor in stack.tensors.items():
        at.tensors[name][:lanes] = tensor
    at.mean[:lanes], at.std[:lanes] = stack.mean, stack.std
    at.loss.zero_()
    at.counts.zero_()
    at.counts[:steps, :lanes] = stack.counts
    at.ids[:steps, :lanes] = stack.ids
    buffers.counter.zero_()
