"""The search for tile shapes: every kernel of a step over a grid of shapes, timed on the card.

Shapes are searched kernel by kernel, the slowest first, each with the best shapes found so far for the others. A shape
that does not compile, does not fit, has a race or makes no sense on the card is skipped. When the time is over, what
was found so far is the table.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from fedobp.engine.cuda_graphs import capture
from fedobp.engine.kernels import cache
from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.checks import problems
from fedobp.engine.kernels.compilers import Compilers
from fedobp.engine.kernels.launches import Launch
from fedobp.engine.kernels.shapes import Shapes
from fedobp.engine.kernels.shared_memory import fitting_table
from fedobp.engine.kernels.step import Buffers, KernelPrecision, Launches, Samples, StepConfig, launches, refresh
from fedobp.engine.kernels.tiles import EXACT, Table, Tile, Tiles, default_table, shipped_table
from fedobp.progress import report

# What is searched, by its share of a step's time, largest first. `splits` belongs to `weights_backward`.
SEARCHED = ("weights_backward", "splits", "dense_backward", "conv2_inputs", "conv2", "dense", "conv1", "head")
_SHAPES = Shapes(32, 3, 10, 32)  # the paper's CIFAR10
_STEPS = 512
_REPLAY = 5_000.0  # microseconds of work in a graph that is timed
_SAMPLES = 4096
_MOST = 64  # processes that compile
_SPLITS = {True: tuple(product((28, 49), (5, 12))), False: tuple(product((4, 7, 14), (1, 2, 5)))}  # few lanes, many

Price = Callable[[Tiles, str], float]


@dataclass(frozen=True)
class Timing:
    """The time of a step at a number of lanes, in microseconds."""

    lanes: int
    before: float  # with the shapes that the search started from
    step: float
    kernels: dict[str, float]


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    table: Table
    seconds: float
    path: Path | None  # the file that keeps it
    timings: list[Timing]


def candidates(what: str, tiles: Tiles, precision: str, capability: tuple[int, int]) -> list[Tiles]:
    """Return an entry with the shapes to try for one kernel, or with other numbers of partial sums."""
    few = tiles.lanes <= EXACT
    if what == "splits":
        return [replace(tiles, splits=splits) for splits in _SPLITS[few]]
    # With two warps Triton uses the older matrix instruction, which reads float32 operands in any layout.
    warps = (4, 8) if precision == "bf16" else (2, 4, 8)
    # Triton 3.6 compiles this kernel for 10.x with two warps only, 3.7 in bf16 with more.
    few_warps = capability[0] in (10, 11) and (precision != "bf16" or triton.__version__.startswith("3.6."))
    grids: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]] = {
        "conv1": ((64,), (1,) if few else (2, 7, 14), warps, (2, 3)),
        "conv2": ((16, 32, 64) if few else (32, 64), (0,), warps, (2, 3, 4)),
        "dense": ((16, 32) if few else (32, 64), (64, 128), (4,), (3, 5)),
        "head": ((32, 64, 128, 256), (0,), (4, 8), (2,)),
        "dense_backward": ((16, 32, 64) if few else (64,), (64, 128), warps, (2, 3)),
        "conv2_inputs": ((64, 128), (1, 2), warps, (2, 3, 4)),
        "weights_backward": ((32, 64), (32, 64), (2,) if few_warps else (2, 4, 8), (2, 3)),
    }
    return [replace(tiles, **{what: Tile(*shape)}) for shape in product(*grids[what])]  # type: ignore[arg-type]


def search(
    start: Tiles,
    candidates: Callable[[str, Tiles], Sequence[Tiles]],
    price: Price,
    prepare: Callable[[str, Sequence[Tiles], float], None],
    seconds_left: Callable[[], float],
) -> Tiles:
    """Return the best entry that is found in the time that is left.

    `prepare` is told which shapes will be priced next, and how long it may take; a shape that cannot be used, or was
    not prepared in time, has an infinite price.
    """
    best = start
    for what in SEARCHED:
        left = seconds_left()
        if left <= 0:
            break
        entries = list(dict.fromkeys([best, *candidates(what, best)]))
        prepare(what, entries, left)
        prices = [price(entry, what) if seconds_left() > 0 else math.inf for entry in entries]
        best = entries[prices.index(min(prices))]
    return best


class Bench:
    """A step of lanes on random images, whose kernels are timed."""

    def __init__(
        self,
        card: Card,
        precision: KernelPrecision,
        lanes: int,
        device: torch.device,
        must_read: bool,
        compilers: Compilers,
    ) -> None:
        self.config, self._must_read, self._compilers = StepConfig(_SHAPES, precision, "all"), must_read, compilers
        self.card, self.lanes, self.device = card, lanes, device
        splits = [*_SPLITS[True], *_SPLITS[False], (49, 12)]
        most = max(first for first, _ in splits), max(second for _, second in splits)
        self.buf = Buffers(self.config, lanes, _STEPS, most, device)
        self._small = Buffers(self.config, 1, 1, most, device)
        draw = torch.Generator(device).manual_seed(0)
        image = (_SAMPLES, _SHAPES.channels, _SHAPES.side, _SHAPES.side)
        images = torch.randint(0, 256, image, generator=draw, device=device, dtype=torch.uint8)
        self.samples = Samples(images, torch.randint(0, _SHAPES.classes, (_SAMPLES,), generator=draw, device=device))
        self.buf.scale.fill_(1 / 64)
        self.buf.shift.fill_(128)
        self.buf.order.random_(0, _SAMPLES, generator=draw)
        self.buf.counts.fill_(_SHAPES.batch)
        self.buf.theta.normal_(0, 0.02, generator=draw)
        self.buf.numbers[:, 0] = 0.001
        self._usable: dict[object, bool] = {}
        self.reset()

    def reset(self) -> None:
        """Start at the first batch."""
        self.buf.step.zero_()
        refresh(self.config, self.buf, self.lanes, self.samples)()

    def launches(self, tiles: Tiles, buffers: Buffers | None = None) -> Launches:
        """Return a step's launches; with other buffers, of one lane."""
        lanes = self.lanes if buffers is None else 1
        return launches(self.config, buffers or self.buf, tiles, lanes, self.lanes > EXACT, self.samples)

    def prepare(self, what: str, entries: Sequence[Tiles], seconds: float) -> None:
        """Compile a kernel in many shapes at once, and note which can be used, on one lane."""
        chosen = {one.variant: one for tiles in entries for one in self._timed(tiles, what, self._small)}

        new = [one for name, one in chosen.items() if name not in self._usable]
        for at in self._compilers.compile([one.description(self.card.capability) for one in new], seconds):
            self._usable[new[at].variant] = self._is_usable(new[at])
        torch.cuda.synchronize(self.device)

    def _is_usable(self, one: Launch) -> bool:
        """Check a kernel that is in Triton's cache, and launch it."""
        try:
            if problems(one.compiled(), self.card, must_read=self._must_read):
                return False
            one()
        except Exception:  # too few resources on the card
            return False
        return True

    def _timed(self, tiles: Tiles, what: str, buffers: Buffers | None = None) -> list[Launch]:
        """Return the launches that a shape changes; more partial sums make `update` slower."""
        steps = self.launches(tiles, buffers)
        return [steps["weights_backward"], steps["update"]] if what in SEARCHED[:2] else [steps[what]]

    def price(self, tiles: Tiles, what: str) -> float:
        """Return the microseconds of a kernel; infinite if its shape cannot be used."""
        if fitting_table([tiles], _SHAPES, self.config.precision, self.card) != (tiles,):
            return math.inf
        if not all(self._usable.get(one.variant) for one in self._timed(tiles, what, self._small)):
            return math.inf
        return sum(self._time(one) for one in self._timed(tiles, what))

    def step_time(self, tiles: Tiles) -> float:
        """Return the microseconds of a whole step."""

        def step() -> None:
            for launch in self.launches(tiles).values():
                launch()

        return self._time(step)

    def kernel_times(self, tiles: Tiles) -> dict[str, float]:
        """Return the microseconds of each kernel of a step."""
        return {name: self._time(launch) for name, launch in self.launches(tiles).items()}

    def _time(self, job: Callable[[], Any], times: int = 20, loops: int = 5) -> float:
        """Return the microseconds of a job, replayed from a graph: up to 20 times at once, less often if it is slow."""
        job()
        times = max(1, min(times, int(_REPLAY / self._elapsed(job))))

        def repeated() -> None:
            for _ in range(times):
                job()

        replay = capture(repeated)
        return median([self._elapsed(replay) / times for _ in range(loops + 1)][1:])

    def _elapsed(self, job: Callable[[], Any]) -> float:
        """Return the microseconds of a job, from the first batch on."""
        self.reset()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        job()
        ended.record()
        torch.cuda.synchronize(self.device)
        return float(begun.elapsed_time(ended)) * 1e3


def lanes_of(entry: Tiles) -> int:
    """Return the number of lanes at which an entry is timed: typical of those that use it."""
    return {2: 1, 6: 4, EXACT: 10}.get(entry.lanes, 160)


def start_table(card: Card, precision: KernelPrecision) -> Table:
    """Return the table that a search starts from, made to fit."""
    start = shipped_table(card.capability, precision) or default_table(card.capability)
    return Table(fitting_table(start.entries, _SHAPES, precision, card), start.source)


def tune(
    card: Card,
    precision: KernelPrecision,
    device: torch.device,
    seconds: float,
    start: Table | None = None,
    must_read: bool = True,
) -> Tuned:
    """Search for the shapes of a card for some seconds, and keep them in the user's cache; 0: only time the first.

    With `must_read`, shapes with which a kernel's IR cannot be read are not used.
    """
    begun = time.perf_counter()
    start = start or start_table(card, precision)

    def seconds_left(until: float) -> float:
        spent = time.perf_counter() - begun
        report(f"tuning kernels for {card.name}", min(1.0, spent / seconds) if seconds else 0.0)
        return until - spent

    # What an entry does not use of its share of the time is for the later ones. The first with exact lanes, and that
    # with padded ones, have the larger shares: they compile the kernels.
    exact = [entry.lanes <= EXACT for entry in start.entries]
    parts = [1 if known in exact[:at] else 4 for at, known in enumerate(exact)]
    entries, timings = [], []
    with Compilers(_MOST if seconds else 0) as compilers:
        for at, entry in enumerate(start.entries):
            until = 0.9 * seconds * sum(parts[: at + 1]) / sum(parts)
            bench = Bench(card, precision, lanes_of(entry), device, must_read, compilers)
            before = bench.step_time(entry)
            shapes = partial(candidates, precision=precision, capability=card.capability)
            best = search(entry, shapes, bench.price, bench.prepare, partial(seconds_left, until))
            after = before if best == entry else bench.step_time(best)
            best = best if after < before else entry
            entries.append(best)
            timings.append(Timing(bench.lanes, before, min(before, after), bench.kernel_times(best)))
    if not seconds:
        return Tuned(start, time.perf_counter() - begun, None, timings)
    table = Table(tuple(entries), "tuned")
    path = cache.save("tiles", cache.key_for(card, precision), table.to_json())
    return Tuned(table, time.perf_counter() - begun, path, timings)
