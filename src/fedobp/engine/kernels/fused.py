"""Training and evaluation of the paper's CNN by the fused kernels, as replays of captured CUDA graphs."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fedobp.data import FederatedData
from fedobp.engine.cuda_graphs import capture
from fedobp.engine.im2col import patched
from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.compilation import check, compile_all, launch_checked
from fedobp.engine.kernels.convolutions import ConvConfig, FusedCNN
from fedobp.engine.kernels.launches import Launch
from fedobp.engine.kernels.param_layout import arrange
from fedobp.engine.kernels.sgd import DECAY, DRIFT, MASK, MOMENTUM, PULL
from fedobp.engine.kernels.shapes import Shapes, flat_order, kernel_order
from fedobp.engine.kernels.shared_memory import fitting_table
from fedobp.engine.kernels.step import (
    Buffers,
    KernelPrecision,
    Launches,
    Samples,
    StepConfig,
    launches,
    refresh,
    splits_of,
)
from fedobp.engine.kernels.tiles import EXACT, Tiles, table_hash
from fedobp.engine.sgd import Rule, active
from fedobp.method import Part
from fedobp.models import Model
from fedobp.transfer import to_device

_BLOCK = 1024
_LANE_MULTIPLE = 8  # beyond EXACT, numbers of lanes are rounded up to a multiple of this; idle lanes cost little
_STEPS_PER_GRAPH = 8  # in a long graph
_TEST_BATCH = 64


def graph_lanes(lanes: int) -> int:
    """Return the number of lanes of the graph for `lanes` active ones."""
    return lanes if lanes <= EXACT else -(-lanes // _LANE_MULTIPLE) * _LANE_MULTIPLE


@dataclass
class _CachedSteps:
    """Buffers, and the graphs that use them, by number of lanes and of steps."""

    config: StepConfig
    tiles: tuple[Tiles, ...]
    samples: Samples
    buffers: Buffers
    graphs: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)


class Fused:
    """Trains and evaluates stacks of lanes of one model on one device.

    `tiles` are changed where they need more shared memory than the card has; without a card they stay as they are.
    Compiled kernels are checked for races, and with `must_read` also refused if their IR cannot be read.
    """

    def __init__(
        self,
        model: Model,
        batch: int,
        precision: KernelPrecision,
        tiles: Sequence[Tiles],
        device: torch.device,
        card: Card | None = None,
        must_read: bool = True,
    ) -> None:
        channels, side, _ = model.shape
        self._batch, self._precision, self._table, self._device, self._card = batch, precision, tiles, device, card
        self._must_read = must_read
        self._shapes = Shapes(side, channels, model.classes, max(16, 1 << (batch - 1).bit_length()))
        order = kernel_order(model.layout, self._shapes)
        self._size = model.layout.size
        self._to_kernel_order = order.to(device, torch.int32)
        self._to_flat_order = flat_order(order, self._size).to(device, torch.int32)
        self._cache: dict[tuple[StepConfig, object], _CachedSteps] = {}
        self._scales: dict[FederatedData, Tensor] = {}
        self._compiled: set[Hashable] = set()  # variants of kernels

    @property
    def batch(self) -> int:
        """The largest number of samples of a step."""
        return self._batch

    @property
    def precision(self) -> KernelPrecision:
        """The precision of the operands of products."""
        return self._precision

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._device

    @cached_property
    def lane_bytes(self) -> int:
        """The most memory that a lane needs: buffers with all terms of the update, and four copies of its vector."""
        shapes = replace(self._shapes, batch=max(self._shapes.batch, _TEST_BATCH))
        config = StepConfig(shapes, self._precision, "all", ~0)
        one = Buffers(config, 1, 1, self._splits(config), torch.device("meta"))
        tensors = [value for value in vars(one).values() if isinstance(value, Tensor)]
        return 16 * self._size + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def table_hash(self) -> str:
        """What identifies its tile shapes."""
        return table_hash(self._table)

    @property
    def _evaluation(self) -> StepConfig:
        """The configuration of steps that predict labels."""
        return StepConfig(replace(self._shapes, batch=_TEST_BATCH), self._precision, None)

    def vectorised(self, model: Model) -> Model:
        """Return a model that computes the same, with fused convolutions under `torch.func`."""
        shapes, checks = self._shapes, (self._card, self._must_read)
        config = ConvConfig(shapes.side, shapes.channels, self._precision, tuple(self._table), *checks)
        return patched(model).like(lambda module: FusedCNN(module, config, (1, self._batch)))

    def train(
        self,
        theta: Tensor,
        rule: Rule,
        part: Part,
        ids: Tensor,
        counts: Tensor,
        data: Sequence[FederatedData],
        steps: Sequence[int],
    ) -> tuple[Tensor, int]:
        """Train the lanes of `theta` in place; return the sums of their losses, and the number of batch slots computed.

        `ids` is [steps, lanes, batch], of which `counts` [steps, lanes] are real; `data` has one entry per lane.
        """
        config = StepConfig(self._shapes, self._precision, part, _term_bits(rule))
        cached = self._buffers(config, len(theta), len(ids), data[0])
        now = active(steps)
        plan = [(lanes, len(list(same))) for lanes, same in groupby(map(graph_lanes, now))]
        # As many graphs of several steps as fit, then graphs of one step.
        replays = [
            self._graph(cached, lanes, repeat)
            for lanes, times in plan
            for repeat in [_STEPS_PER_GRAPH] * (times // _STEPS_PER_GRAPH) + [1] * (times % _STEPS_PER_GRAPH)
        ]
        self._load(cached, theta, rule, ids, counts, data)
        for replay in replays:
            replay()
        self._arrange(cached.buffers.theta, theta, self._to_flat_order)
        return cached.buffers.loss[: len(theta)].clone(), sum(now) * self._shapes.batch

    def labels(self, theta: Tensor, ids: Tensor, sizes: Sequence[int], data: FederatedData) -> Tensor:
        """Return the labels that each lane's model predicts for samples `ids` [lanes, most], of which `sizes` are real.

        Lanes are sorted by their number of samples, largest first.
        """
        lanes, most = ids.shape
        steps = -(-most // _TEST_BATCH)
        cached = self._buffers(self._evaluation, lanes, steps, data)
        whole = torch.nn.functional.pad(ids, (0, steps * _TEST_BATCH - most)).view(lanes, steps, _TEST_BATCH)
        starts = torch.arange(0, most, _TEST_BATCH)[:, None]
        counts = to_device((torch.tensor(sizes) - starts).clamp(0, _TEST_BATCH), ids.device)
        self._load(cached, theta, None, whole.transpose(0, 1), counts, [data] * lanes)
        for step in range(steps):
            active_lanes = sum(size > step * _TEST_BATCH for size in sizes)
            for launch in self._launches(cached, graph_lanes(active_lanes)).values():
                launch()
        return cached.buffers.predictions[:lanes].view(lanes, -1)[:, :most].clone()

    def needed(self, lanes: int, data: FederatedData) -> list[Launch]:
        """Return launches of all kernel variants that plain SGD of so many lanes, and an evaluation, may use."""
        return list(self._needed(StepConfig(self._shapes, self._precision, "all"), lanes, data).values())

    def check(self, launch: Launch) -> None:
        """Compile a kernel, and refuse it if it has a problem on the card."""
        check(launch, self._card, self._must_read)

    def forget(self, data: FederatedData) -> None:
        """Free the buffers and graphs for these samples, under all partitions, and the scaling of this one."""
        self._cache = {key: cached for key, cached in self._cache.items() if key[1] is not data.storage_key}
        self._scales.pop(data, None)

    def _buffers(self, config: StepConfig, lanes: int, steps: int, data: FederatedData) -> _CachedSteps:
        key = config, data.storage_key
        cached = self._cache.get(key)
        if cached is None or cached.buffers.lanes < lanes or cached.buffers.steps < steps:
            old = (cached.buffers.lanes, cached.buffers.steps) if cached else (0, 0)
            # Twice the steps of this phase: rounds differ in length, and larger buffers would need new graphs.
            capacity = max(graph_lanes(lanes), old[0]), max(2 * steps, old[1])
            cached = None
            self._cache.pop(key, None)  # free the old buffers before allocating
            buffers = Buffers(config, *capacity, self._splits(config), self._device)
            if self._device.type == "cuda":
                self._compile(config, capacity[0], data)
            tiles, samples = self._tiles(config.shapes), Samples(data.x, data.y)
            cached = self._cache[key] = _CachedSteps(config, tiles, samples, buffers)
        return cached

    def _tiles(self, shapes: Shapes) -> tuple[Tiles, ...]:
        """Return the tile shapes for the sizes of a step."""
        return fitting_table(self._table, shapes, self._precision, self._card)

    def _splits(self, config: StepConfig) -> tuple[int, int]:
        """Return the largest numbers of partial sums of any tile shapes."""
        splits = [splits_of(config.shapes, tiles) for tiles in self._tiles(config.shapes)]
        return max(first for first, _ in splits), max(second for _, second in splits)

    def _launches(self, cached: _CachedSteps, lanes: int) -> Launches:
        tiles = next(tiles for tiles in cached.tiles if lanes <= tiles.lanes)
        return launches(cached.config, cached.buffers, tiles, lanes, lanes > EXACT, cached.samples)

    def _variants(self, config: StepConfig, lanes: int, data: FederatedData) -> dict[Hashable, Launch]:
        """Return launches, on buffers of one lane, of all kernel variants that steps of up to `lanes` lanes may use."""
        buffers = Buffers(config, 1, 1, self._splits(config), self._device)
        samples = Samples(data.x[:1], data.y[:1])
        found = [refresh(config, buffers, 1, samples)]
        for below in sorted({0, EXACT, *(tiles.lanes for tiles in self._table)}):
            if below < lanes:  # another variant begins at one lane more
                tiles = next(tiles for tiles in self._tiles(config.shapes) if below < tiles.lanes)
                found += launches(config, buffers, tiles, 1, below >= EXACT, samples).values()
        return {one.variant: one for one in found}

    def _needed(self, config: StepConfig, lanes: int, data: FederatedData) -> dict[Hashable, Launch]:
        """Return all variants that training so many lanes, and an evaluation of all clients, may use."""
        return self._variants(config, lanes, data) | self._variants(self._evaluation, max(lanes, data.clients), data)

    def _compile(self, config: StepConfig, lanes: int, data: FederatedData) -> None:
        """Compile all kernel variants that steps of up to `lanes` lanes need, and check them.

        Training also compiles what an evaluation of all clients will need, because all of it compiles in parallel.
        """
        needed = self._needed(config, lanes, data)
        new = {variant: one for variant, one in needed.items() if variant not in self._compiled}
        compile_all(list(new.values()), self._device, self._card, self._must_read)
        self._compiled |= set(new)

    def _graph(self, cached: _CachedSteps, lanes: int, repeat: int) -> Callable[[], None]:
        """Return a function that takes `repeat` steps: a captured graph, or plain launches in Triton's interpreter."""
        if (lanes, repeat) not in cached.graphs:
            steps = list(self._launches(cached, lanes).values())

            def run() -> None:
                for _ in range(repeat):
                    for launch in steps:
                        launch()

            cached.graphs[lanes, repeat] = run
            if self._device.type == "cuda":
                cached.graphs[lanes, repeat] = capture(run)
        return cached.graphs[lanes, repeat]

    def _load(
        self,
        cached: _CachedSteps,
        theta: Tensor,
        rule: Rule | None,
        ids: Tensor,
        counts: Tensor,
        data: Sequence[FederatedData],
    ) -> None:
        buf, (steps, lanes, batch) = cached.buffers, ids.shape
        self._arrange(theta, buf.theta, self._to_kernel_order)
        if rule is not None:
            numbers = (rule.lr, rule.momentum, rule.decay, rule.pull)
            for column, values in enumerate(numbers):
                if values is not None:
                    buf.numbers[:lanes, column] = values[:, 0]
            for values, target in ((rule.anchor, buf.anchor), (rule.drift, buf.drift), (rule.moving, buf.moving)):
                if values is not None:
                    self._arrange(values, target, self._to_kernel_order)
            if rule.momentum is not None:
                buf.velocity.zero_()
        for tensor in (buf.loss, buf.step, buf.counts):
            tensor.zero_()
        buf.order[:lanes, :steps, :batch] = ids.transpose(0, 1)
        buf.counts[:lanes, :steps] = counts.t()
        scaling = torch.stack([self._scale(one) for one in data])
        for values, target in zip(scaling.unbind(dim=1), (buf.shift, buf.scale), strict=True):
            target[:lanes] = values
            target[lanes:].zero_()
        # One lane more: windows at the end of the last image read pixels of the next lane, with weight 0.
        refresh(cached.config, buf, min(graph_lanes(lanes) + 1, buf.lanes), cached.samples)()

    def _scale(self, data: FederatedData) -> Tensor:
        """Return (shift, scale), padded to four channels: an input is (x - shift) * scale."""
        if data not in self._scales:
            both = torch.zeros(2, 4, device=self._device)
            channels = data.mean.numel()
            both[0, :channels] = data.unit * data.mean.flatten()
            both[1, :channels] = 1 / (data.unit * data.std.flatten())
            if both.is_cuda:  # once: the next reader may be on another stream
                torch.cuda.current_stream().synchronize()
            self._scales[data] = both
        return self._scales[data]

    def _arrange(self, source: Tensor, target: Tensor, index: Tensor) -> None:
        """Copy vectors from one order of entries to the other, for as many lanes as both tensors have."""
        lanes, size = min(len(source), len(target)), len(index)
        source = source.contiguous()
        if source.dtype == torch.bool:
            source = source.view(torch.uint8)
        args = source, target, index, source.shape[1], target.shape[1]
        launch = Launch(arrange, (-(-size // _BLOCK), lanes), args, (_BLOCK,))
        launch_checked([launch], self._card, self._must_read)


def _term_bits(rule: Rule) -> int:
    """Return the terms of a rule as bits."""
    terms: tuple[tuple[Tensor | None, Any], ...] = (
        (rule.momentum, MOMENTUM),
        (rule.decay, DECAY),
        (rule.pull, PULL),
        (rule.drift, DRIFT),
        (rule.moving, MASK),
    )
    return sum(bit.value for values, bit in terms if values is not None)
