"""The shared memory that Triton allocates for a kernel, bounded from above, and tiles that fit a card's limit.

Triton keeps in shared memory: the operands of a loop's products, which are copied asynchronously, once for each stage;
operands that a loop reuses; and the scratch in which tiles change their layout. The bounds count what each kernel needs
of these. They hold for every term of the update and every trained part, on cards of compute capability 8.0 to 12.x, in
Triton 3.6 and 3.7.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.tiles import Tile, Tiles

if TYPE_CHECKING:
    from fedobp.engine.kernels.shapes import Shapes
    from fedobp.engine.kernels.step import KernelPrecision

Capability = tuple[int, int]

_SLACK = 1024  # barriers, and the scratch of sums over rows
_TEST_BATCH = 64  # `dense` evaluates batches of this size with the tiles of training
_LEAST = 16  # of a dimension of a product
_LEAST_DEPTH = {"dense": _LEAST, "dense_backward": _LEAST, "conv2_inputs": 1, "weights_backward": _LEAST}


def shared_bound(
    kernel: str, tile: Tile, shapes: "Shapes", precision: "KernelPrecision", capability: Capability | None = None
) -> int:
    """Return a bound in bytes for a kernel (a field of `Tiles`), on cards of one compute capability or on all cards."""
    majors = (8, 9, 10) if capability is None else (capability[0],)
    return max(_bound(kernel, tile, shapes, precision, major) for major in majors)


def fitting(
    tiles: Tiles, shapes: "Shapes", precision: "KernelPrecision", limit: int, capability: Capability | None = None
) -> Tiles:
    """Return the entry with tiles changed as little as possible, so that every bound is at most `limit` bytes.

    Stages are reduced first, then rows, columns or depth are halved. A tile that fits is not changed.
    """
    larger = replace(shapes, batch=max(shapes.batch, _TEST_BATCH))

    def fitted(kernel: str, tile: Tile) -> Tile:
        sizes = larger if kernel == "dense" else shapes  # other bounds of the forward pass do not depend on the batch
        for smaller in _smaller(kernel, tile):
            if shared_bound(kernel, smaller, sizes, precision, capability) <= limit:
                return smaller
        raise ValueError(f"no tile of {kernel} fits in {limit} bytes of shared memory")

    found = {name: fitted(name, tile) for name, tile in vars(tiles).items() if isinstance(tile, Tile)}
    return replace(tiles, **found)  # type: ignore[arg-type]


def _smaller(kernel: str, tile: Tile) -> list[Tile]:
    """Return the tile and all smaller ones that the kernel allows, those that change least first."""
    size, depth, warps, stages = tile
    # Without pipelining, Triton 3.6 makes `conv1_weights` read beyond its shared memory (`step.splits_of`).
    fewest = min(stages, 2 if kernel == "weights_backward" else 1)
    sizes = sorted(
        product(_halved(size, _LEAST), _halved(depth, _LEAST_DEPTH.get(kernel, depth))),
        key=lambda both: -both[0] * both[1],
    )
    return [Tile(*both, warps, some) for both in sizes for some in range(stages, fewest - 1, -1)]


def _halved(number: int, least: int) -> list[int]:
    """Return a number, its half, and so on, as long as they are at least `least`."""
    return [number, *_halved(number // 2, least)] if number >= 2 * least > 0 else [number]


def _bound(kernel: str, tile: Tile, shapes: "Shapes", precision: "KernelPrecision", major: int) -> int:
    size, depth, warps, stages = tile
    batch, outputs, low = shapes.batch, shapes.outputs, 2 if precision == "bf16" else 4
    # Products of 64 rows by four warps read operands from shared memory on cards 9.0 to 11.x (in tensor memory, from
    # 10.0), while the next tile is copied: a copy more than stages that are ahead.
    rows = {"dense": batch, "dense_backward": max(batch, depth), "weights_backward": 64}.get(kernel, size)
    direct = 9 <= major < 12 and rows >= 64 and warps >= 4 and precision != "fp32"
    tensor = direct and major >= 10
    ahead = max(1, stages - 1)
    copies = max(1, stages) if direct else ahead

    match kernel:
        case "conv1":
            weights, patch = 5 * 32 * 64 * low, size * 32 * low
            # A patch outside of the pipeline, or the part of the sums [size, 64] that changes its layout at once.
            scratch = size * 64 * 4 if precision == "fp32" else max(patch, size * 32 * warps)
            if depth == 1 or stages == 1:  # a loop that is not pipelined
                return weights + scratch + _SLACK
            # Two products read each of the four patches in the middle: with tensor memory these have one copy more.
            return weights + (6 * copies + 4 * tensor) * patch + scratch + _SLACK
        case "conv2":
            return copies * (64 * 32 + 4 * size * 32) * low + _SLACK
        case "dense":
            # Weights are float32; those of the head after the loop too, where they change their layout.
            loop = copies * (batch * depth * low + depth * size * 4)
            return max(loop, batch * size * low + outputs * size * 4, batch * outputs * 4) + _SLACK
        case "head":
            operands = (batch * outputs + batch * size + outputs * size) * low
            return operands + 4 * max(batch * outputs, batch * size, outputs * size) + _SLACK
        case "dense_backward":
            x, dh, theta = batch * size * low, batch * depth * low, depth * size * 4
            # `dh` is also transposed. The scratch is that of `theta`, or of the transposed `dh`.
            found = x + max(copies, 1 + direct) * dh + ahead * theta + max(dh, theta)
            if tensor:
                # A term of the update, such as the velocity, becomes the initial sum of a product: copied like `theta`.
                # Operands that tensor memory cannot transpose have a copy of their own.
                found = max(found, 2 * x + (stages - 1) * (dh + 2 * theta) + 2 * dh + depth * size * low)
            return found + _SLACK
        case "conv2_inputs":
            return copies * (size + 32 * depth**2) * 64 * low + _SLACK
        case "weights_backward":
            # Patches (for the upper and the lower positions), gradients and the argmax; the unpooled gradients of both
            # positions, with their scratch.
            first = copies * size * (2 * (128 + 32) * low + 32 * low + 32) + 2 * 64 * size * low
            second = copies * depth * (64 + 128 + 32) * low
            return max(first, second, 64 * 128 * 4) + _SLACK  # the last: the float32 sums, transposed after the loop
    raise ValueError(f"no kernel {kernel}")


def fitting_table(
    entries: Sequence[Tiles], shapes: "Shapes", precision: "KernelPrecision", card: Card | None
) -> tuple[Tiles, ...]:
    """Return the entries of a table made to fit a card; without a card, as they are."""
    if card is None:
        return tuple(entries)
    return tuple(fitting(one, shapes, precision, card.shared, card.capability) for one in entries)
