"""Steps on CUDA without the host: one captured graph for each number of active lanes, replayed step after step.

A graph's tensors have fixed places, so lanes are copied into buffers of their own. A counter on the device picks what
the plan says now: replaying is all that the host does in a phase, and it never waits. Numbers of lanes are rounded up
to a few sizes; a lane without samples is left as it is.
"""

import gc
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as trees

from fedobp.engine.fit import Make, active

KINDS = 32  # kept at most: a method that makes its loss anew in every round has a new kind in every round


def padded_lanes(lanes: int) -> int:
    """Return the number of lanes that a graph is made for: few sizes, and little computed in vain."""
    step = 1 if lanes <= 8 else 2 if lanes <= 32 else 4
    return -(-lanes // step) * step


def capture(run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Return what launches a function's kernels again, as one graph.

    It may be replayed on this stream, or on any other while this one rests: they share libraries' scratch memory. The
    default stream cannot be captured, and has one that stands in for it.
    An old graph that is thrown away during a capture spoils it. `torch.cuda.graph` collects all garbage beforehand,
    which takes longer than all the rest; here nobody collects any in the meantime.
    """
    graph, gc_enabled, current = torch.cuda.CUDAGraph(), gc.isenabled(), torch.cuda.current_stream()
    capturing = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
    capturing.wait_stream(current)
    gc.disable()
    try:
        with torch.cuda.stream(capturing):
            graph.capture_begin(*([] if pool is None else [pool]))
            try:
                run()
            finally:
                graph.capture_end()
    finally:
        if gc_enabled:
            gc.enable()
    current.wait_stream(capturing)
    return graph.replay


@dataclass
class _Buffers:
    """A stack at a fixed place, with its graphs by number of lanes."""

    make: Make
    given: Any
    moving: Any
    plan: dict[str, Tensor]
    counter: Tensor
    pool: Any  # memory that the graphs share: only one of them runs at a time
    graphs: dict[int, Callable[[], None]] = field(default_factory=dict)

    @property
    def capacity(self) -> tuple[int, int]:
        """For how many (steps, lanes) it is."""
        steps, lanes = self.plan["counts"].shape
        return steps, lanes

    def step(self, lanes: int) -> Callable[[], None]:
        """Return a step of the first lanes, at where the counter stands."""
        step = self.make(self.given, self.moving, lanes)

        def run() -> None:
            step({name: values.index_select(0, self.counter)[0, :lanes] for name, values in self.plan.items()})
            self.counter.add_(1)

        return run

    def load(self, given: Any, moving: Any) -> None:
        """Copy a stack here. Lanes that a graph has beyond it are like its first."""
        pairs = zip(trees.tree_leaves((self.given, self.moving)), trees.tree_leaves((given, moving)), strict=True)
        for target, values in pairs:
            lanes = len(values)
            target[:lanes] = values
            target[lanes : padded_lanes(lanes)] = values[:1]

    def load_plan(self, plan: Mapping[str, Tensor]) -> None:
        """Copy a plan here, and start at its beginning."""
        self.counter.zero_()
        self.plan["counts"].zero_()
        for name, values in plan.items():
            self.plan[name][: len(values), : values.shape[1]] = values


class Graphs:
    """Runs stacks from captured graphs, and keeps them for the next phase of the same kind."""

    def __init__(self) -> None:
        self._cache: dict[Hashable, _Buffers] = {}

    def descend(
        self, kind: Hashable, given: Any, moving: Any, plan: Mapping[str, Tensor], steps: Sequence[int], make: Make
    ) -> int:
        """Do what `fit.descend` does. Phases of one kind must have the same `make`, but for what the stack holds."""
        buffers = self._buffers(kind, given, moving, plan, make)
        groups = [(lanes, len(list(same))) for lanes, same in groupby(map(padded_lanes, active(steps)))]
        buffers.load(given, moving)
        missing = {lanes for lanes, _ in groups} - set(buffers.graphs)
        if missing:
            buffers.plan["counts"].zero_()  # nobody moves while graphs are made
            for lanes in missing:
                buffers.graphs[lanes] = self._capture(buffers, lanes)
            buffers.load(given, moving)  # but for velocities
        buffers.load_plan(plan)
        for lanes, times in groups:
            for _ in range(times):
                buffers.graphs[lanes]()
        for target, values in zip(trees.tree_leaves(moving), trees.tree_leaves(buffers.moving), strict=True):
            target.copy_(values[: len(target)])
        return sum(lanes * times for lanes, times in groups) * plan["ids"].shape[2]

    def _buffers(self, kind: Hashable, given: Any, moving: Any, plan: Mapping[str, Tensor], make: Make) -> _Buffers:
        leaves, _ = trees.tree_flatten_with_path((given, moving))
        tensors = tuple((trees.keystr(path), values.shape[1:], values.dtype) for path, values in leaves)
        key = (kind, tensors, plan["ids"].shape[2])
        steps, lanes = plan["counts"].shape
        buffers = self._cache.pop(key, None)
        old = buffers.capacity if buffers else (0, 0)
        if buffers is None or old[0] < steps or old[1] < padded_lanes(lanes):
            # Twice as many steps as now: rounds differ, and a graph is worth keeping.
            buffers, capacity = None, (max(2 * steps, old[0]), max(padded_lanes(lanes), old[1]))
            for oldest in list(self._cache)[: 1 - KINDS]:  # old ones go before new ones come
                del self._cache[oldest]
            buffers = self._empty(given, moving, plan, make, *capacity)
        self._cache[key] = buffers  # behind those that were used before it
        return buffers

    def _empty(
        self, given: Any, moving: Any, plan: Mapping[str, Tensor], make: Make, steps: int, lanes: int
    ) -> _Buffers:
        """Return buffers like a stack, for more steps and lanes."""
        given, moving = trees.tree_map(lambda values: values.new_zeros(lanes, *values.shape[1:]), (given, moving))
        empty_plan = {name: values.new_zeros(steps, lanes, *values.shape[2:]) for name, values in plan.items()}
        counter = torch.zeros(1, dtype=torch.int64, device=plan["counts"].device)
        pool = torch.cuda.graph_pool_handle() if counter.is_cuda else None
        return _Buffers(make, given, moving, empty_plan, counter, pool)

    def _capture(self, buffers: _Buffers, lanes: int) -> Callable[[], None]:
        """Return what takes a step: a graph, or the step itself where the method waits for the device in it."""
        step = buffers.step(lanes)
        if not buffers.counter.is_cuda:
            return step
        synchronizes = _synchronizes(step)
        buffers.counter.zero_()
        return step if synchronizes else capture(step, buffers.pool)


def _synchronizes(step: Callable[[], None]) -> bool:
    """Take a step, and say whether it waits for the device. That is also what libraries want before a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            step()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return False
