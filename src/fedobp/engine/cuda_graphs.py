"""Training steps as captured CUDA graphs: one graph per number of active lanes, replayed once per step.

A graph reads and writes fixed addresses, so lanes are copied into buffers. A counter on the device selects the step's
samples in the plan: during a phase the host only launches replays and never synchronises. Numbers of lanes are rounded
up to a few sizes; a lane without samples does not change.
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

from fedobp.engine.sgd import Make, active

CACHE_SIZE = 32  # groups of phases; a method that creates its loss in every round has a new group in every round


def padded_lanes(lanes: int) -> int:
    """Return the number of lanes of the graph for `lanes` active ones: few sizes, and little computed for padding."""
    step = 1 if lanes <= 8 else 2 if lanes <= 32 else 4
    return -(-lanes // step) * step


def capture(run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Capture a function's kernel launches as one graph, and return the function that replays it.

    It may be replayed on this stream, or on another one while this one is idle: they share libraries' workspaces. The
    default stream cannot be captured, so a new stream is used instead.
    Deleting another graph during a capture invalidates it. `torch.cuda.graph` therefore runs the garbage collector
    beforehand, which takes longer than the capture; here the collector is disabled during the capture.
    """
    graph, gc_enabled, current = torch.cuda.CUDAGraph(), gc.isenabled(), torch.cuda.current_stream()
    capturing = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
    capturing.wait_stream(current)
    gc.disable()
    try:
        with torch.cuda.stream(capturing):
            # Of this thread alone: another one may be copying a checkpoint to the host.
            graph.capture_begin(pool, capture_error_mode="thread_local")
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
    """Buffers for a stack of lanes, with its graphs by number of lanes."""

    make: Make
    given: Any
    moving: Any
    plan: dict[str, Tensor]
    counter: Tensor
    pool: Any  # memory shared by the graphs: only one of them runs at a time
    graphs: dict[int, Callable[[], None]] = field(default_factory=dict)

    @property
    def capacity(self) -> tuple[int, int]:
        """The largest (steps, lanes) that fit."""
        steps, lanes = self.plan["counts"].shape
        return steps, lanes

    def step(self, lanes: int) -> Callable[[], None]:
        """Return a step of the first lanes, on the samples at the counter."""
        step = self.make(self.given, self.moving, lanes)

        def run() -> None:
            step({name: values.index_select(0, self.counter)[0, :lanes] for name, values in self.plan.items()})
            self.counter.add_(1)

        return run

    def load(self, given: Any, moving: Any) -> None:
        """Copy a stack into the buffers. Padding lanes are copies of its first lane."""
        pairs = zip(trees.tree_leaves((self.given, self.moving)), trees.tree_leaves((given, moving)), strict=True)
        for target, values in pairs:
            lanes = len(values)
            target[:lanes] = values
            target[lanes : padded_lanes(lanes)] = values[:1]

    def load_plan(self, plan: Mapping[str, Tensor]) -> None:
        """Copy a plan into the buffers, and reset the counter."""
        self.counter.zero_()
        self.plan["counts"].zero_()
        for name, values in plan.items():
            self.plan[name][: len(values), : values.shape[1]] = values


class Graphs:
    """Runs stacks with captured graphs, and caches these for the next phase of the same group."""

    def __init__(self) -> None:
        self._cache: dict[Hashable, _Buffers] = {}

    def run_steps(
        self, group: Hashable, given: Any, moving: Any, plan: Mapping[str, Tensor], steps: Sequence[int], make: Make
    ) -> int:
        """Do what `sgd.run_steps` does. Phases of one group must have the same `make` but for the tensors."""
        buffers = self._buffers(group, given, moving, plan, make)
        runs = [(lanes, len(list(same))) for lanes, same in groupby(map(padded_lanes, active(steps)))]
        buffers.load(given, moving)
        missing = {lanes for lanes, _ in runs} - set(buffers.graphs)
        if missing:
            buffers.plan["counts"].zero_()  # lanes without samples do not change during warm-up and capture
            for lanes in missing:
                buffers.graphs[lanes] = self._capture(buffers, lanes)
            buffers.load(given, moving)  # warm-up steps change the velocities
        buffers.load_plan(plan)
        for lanes, times in runs:
            for _ in range(times):
                buffers.graphs[lanes]()
        for target, values in zip(trees.tree_leaves(moving), trees.tree_leaves(buffers.moving), strict=True):
            target.copy_(values[: len(target)])
        return sum(lanes * times for lanes, times in runs) * plan["ids"].shape[2]

    def _buffers(self, group: Hashable, given: Any, moving: Any, plan: Mapping[str, Tensor], make: Make) -> _Buffers:
        leaves, _ = trees.tree_flatten_with_path((given, moving))
        tensors = tuple((trees.keystr(path), values.shape[1:], values.dtype) for path, values in leaves)
        key = (group, tensors, plan["ids"].shape[2])
        steps, lanes = plan["counts"].shape
        buffers = self._cache.pop(key, None)
        old = buffers.capacity if buffers else (0, 0)
        if buffers is None or old[0] < steps or old[1] < padded_lanes(lanes):
            # Twice the steps of this phase: rounds differ in length, and larger buffers would need new graphs.
            buffers, capacity = None, (max(2 * steps, old[0]), max(padded_lanes(lanes), old[1]))
            for oldest in list(self._cache)[: 1 - CACHE_SIZE]:  # free the oldest before allocating
                del self._cache[oldest]
            buffers = self._empty(given, moving, plan, make, *capacity)
        self._cache[key] = buffers  # at the end: the cache is ordered by last use
        return buffers

    def _empty(
        self, given: Any, moving: Any, plan: Mapping[str, Tensor], make: Make, steps: int, lanes: int
    ) -> _Buffers:
        """Return zeroed buffers with the tensors of a stack, for the given numbers of steps and lanes."""
        given, moving = trees.tree_map(lambda values: values.new_zeros(lanes, *values.shape[1:]), (given, moving))
        empty_plan = {name: values.new_zeros(steps, lanes, *values.shape[2:]) for name, values in plan.items()}
        counter = torch.zeros(1, dtype=torch.int64, device=plan["counts"].device)
        pool = torch.cuda.graph_pool_handle() if counter.is_cuda else None
        return _Buffers(make, given, moving, empty_plan, counter, pool)

    def _capture(self, buffers: _Buffers, lanes: int) -> Callable[[], None]:
        """Return a function that takes a step: a graph, or the step itself where a method's code synchronises."""
        step = buffers.step(lanes)
        if not buffers.counter.is_cuda:
            return step
        synchronizes = _synchronizes(step)
        buffers.counter.zero_()
        return step if synchronizes else capture(step, buffers.pool)


def _synchronizes(step: Callable[[], None]) -> bool:
    """Take a step and return whether it synchronises. It is also the warm-up that libraries need before a capture."""
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
