"""Tune tile shapes for a GPU: every kernel of the fused step over a grid of shapes, then the whole step.

    python benchmarks/tune.py --precision bf16 --lanes 1,10,160
    python benchmarks/tune.py --kernels "" --lanes 1,4,10,160    # no search: time the shapes in use

Prints, for each number of lanes, the best shapes as an entry of src/fedobp/engine/kernels/tiles.py, and the times of
each kernel and of the whole step. Shapes that need more resources than the GPU has are skipped.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from multiprocessing import get_context
from statistics import median

import torch

from fedobp.engine.kernels.shapes import Shapes
from fedobp.engine.kernels.step import Buffers, Launches, Samples, StepConfig, launches, refresh
from fedobp.engine.kernels.tiles import EXACT, Tile, Tiles, tiles_for

STEPS = 512
SAMPLES = 4096
# Numbers of partial sums to try, for few lanes and for many.
SPLITS = {True: list(product((28, 49), (5, 12))), False: list(product((4, 7, 14), (1, 2, 5)))}


def candidates(kernel: str, few: bool, precision: str) -> Iterator[dict[str, object]]:
    """Yield the changes to a table entry to try for one kernel."""
    # With two warps Triton uses the older matrix instruction, which reads float32 operands in any layout.
    warps = (4, 8) if precision == "bf16" else (2, 4, 8)
    shapes: dict[str, Iterator[tuple[int, ...]]] = {
        "conv1": product((64,), (1,) if few else (2, 7, 14), warps, (2, 3)),
        "conv2": product((16, 32, 64) if few else (32, 64), (0,), warps, (2, 3, 4)),
        "dense": product((16, 32) if few else (32, 64), (64, 128), (4,), (3, 5)),
        "head": product((32, 64, 128, 256), (0,), (4, 8), (2,)),
        "dense_backward": product((16, 32, 64) if few else (64,), (64, 128), warps, (2, 3)),
        "conv2_inputs": product((64, 128), (1, 2), warps, (2, 3, 4)),
        "weights_backward": product((32, 64), (32, 64), warps, (2, 3)),
    }
    for shape in shapes[kernel]:
        change: dict[str, object] = {kernel: Tile(*shape)}
        if kernel == "weights_backward":
            for splits in SPLITS[few]:
                yield {**change, "splits": splits}
        else:
            yield change


def changed(tiles: Tiles, change: dict[str, object]) -> Tiles:
    """Return a table entry with a change applied."""
    return replace(tiles, **change)  # type: ignore[arg-type]


class Bench:
    """A stack of lanes on random images."""

    def __init__(self, shapes: Shapes, precision: str, lanes: int) -> None:
        self.config = StepConfig(shapes, precision, "all")  # type: ignore[arg-type]
        self.lanes, device = lanes, torch.device("cuda")
        first, second = zip(*SPLITS[True], *SPLITS[False], *(entry.splits for entry in table(precision)), strict=True)
        self.buf = Buffers(self.config, lanes, STEPS, (max(first), max(second)), device)
        draw = torch.Generator(device).manual_seed(0)
        image = (SAMPLES, shapes.channels, shapes.side, shapes.side)
        images = torch.randint(0, 256, image, generator=draw, device=device, dtype=torch.uint8)
        self.samples = Samples(images, torch.randint(0, shapes.classes, (SAMPLES,), generator=draw, device=device))
        self.buf.scale.fill_(1 / 64)
        self.buf.shift.fill_(128)
        self.buf.order.random_(0, SAMPLES, generator=draw)
        self.buf.counts.fill_(shapes.batch)
        self.buf.theta.normal_(0, 0.02, generator=draw)
        self.buf.numbers[:, 0] = 0.001
        self.reset()

    def reset(self) -> None:
        """Start at the first batch."""
        self.buf.step.zero_()
        refresh(self.config, self.buf, self.lanes, self.samples)()

    def launches(self, tiles: Tiles) -> Launches:
        """Return a step's launches."""
        return launches(self.config, self.buf, tiles, self.lanes, self.lanes > EXACT, self.samples)


def timed(job: Callable[[], object], reset: Callable[[], None], times: int = 20, loops: int = 5) -> float:
    """Return the time of a job in microseconds, replayed from a graph."""
    job()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            job()
    took = []
    for _ in range(loops + 1):
        reset()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        took.append(float(begun.elapsed_time(ended)) * 1e3 / times)
    return median(took[1:])


@cache
def _small(shapes: Shapes, precision: str) -> Bench:
    return Bench(shapes, precision, 1)


def compiles(shapes: Shapes, precision: str, lanes: int, kernel: str, tiles: Tiles) -> bool:
    """Compile one kernel into Triton's cache, and return whether it runs."""
    bench = _small(shapes, precision)
    try:
        launches(bench.config, bench.buf, tiles, 1, lanes > EXACT, bench.samples)[kernel]()
        torch.cuda.synchronize()
    except Exception:  # too few resources on the GPU, or the compiler fails
        return False
    return True


def table(precision: str) -> tuple[Tiles, ...]:
    """Return the entries in use; for a GPU or a precision without any, start from the H200's for bf16."""
    found = tiles_for(torch.cuda.get_device_capability(), precision) or tiles_for((9, 0), "bf16")
    assert found is not None
    return found


def entry_for(precision: str, lanes: int) -> Tiles:
    """Return the entry for a number of lanes."""
    return next(entry for entry in table(precision) if lanes <= entry.lanes)


def best_of(bench: Bench, kernel: str, tiles: Tiles, compiled: set[Tiles], show: int) -> Tiles:
    """Return the table entry with the best shape for one kernel."""
    start = entry_for(bench.config.precision, bench.lanes)
    changes = [
        change
        for change in candidates(kernel, bench.lanes <= EXACT, bench.config.precision)
        if changed(start, change) in compiled
    ]
    # More splits make `update` slower.
    extra = ["update"] if kernel == "weights_backward" else []

    def price(shape: Tiles) -> float:
        steps = bench.launches(shape)
        return timed(steps[kernel], bench.reset) + sum(timed(steps[name], bench.reset) for name in extra)

    shapes = [changed(tiles, change) for change in changes]
    found = sorted(((price(shape), shape) for shape in shapes), key=lambda one: one[0])
    for took, shape in found[:show]:
        tile = getattr(shape, kernel)
        print(f"    {kernel:16} {took:8.1f}  {tuple(tile)} splits {shape.splits}", flush=True)
    return found[0][1] if found else tiles


def main() -> None:
    """Tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "tf32", "fp32"])
    parser.add_argument("--lanes", default="1,10,160", help="numbers of lanes to tune for")
    parser.add_argument("--side", type=int, default=32, choices=[28, 32])
    parser.add_argument("--kernels", default="conv1,conv2,dense,head,dense_backward,conv2_inputs,weights_backward")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--show", type=int, default=3, help="how many of the best to print")
    given = parser.parse_args()
    shapes = Shapes(given.side, 3 if given.side == 32 else 1, 10, 32)
    kernels = [kernel for kernel in given.kernels.split(",") if kernel]
    numbers = [int(lanes) for lanes in given.lanes.split(",")]
    jobs = [
        (shapes, given.precision, lanes, kernel, changed(entry_for(given.precision, lanes), change))
        for lanes in numbers
        for kernel in kernels
        for change in candidates(kernel, lanes <= EXACT, given.precision)
    ]
    begun = time.perf_counter()
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        fine = list(pool.map(compiles, *zip(*jobs, strict=True), chunksize=2)) if jobs else []
    print(f"{sum(fine)} of {len(jobs)} shapes compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    for lanes in numbers:
        bench, tiles = Bench(shapes, given.precision, lanes), entry_for(given.precision, lanes)
        print(f"{given.precision}, {lanes} lanes", flush=True)
        for kernel in kernels:
            compiled = {job[4] for job, ok in zip(jobs, fine, strict=True) if ok and job[2:4] == (lanes, kernel)}
            tiles = best_of(bench, kernel, tiles, compiled, given.show)
        steps = bench.launches(tiles)

        def step(steps: Launches = steps) -> None:
            for launch in steps.values():
                launch()

        each = {name: round(timed(launch, bench.reset), 1) for name, launch in steps.items()}
        whole = timed(step, bench.reset)
        print(f"  {tiles}\n  {each}\n  step {whole:.1f} us, {whole / lanes:.2f} a lane", flush=True)


if __name__ == "__main__":
    main()
