"""An upper bound of the shared memory that Triton allocates for a kernel, and tiles that fit a card's limit.

Triton keeps in shared memory: operands of a loop's products, which are copied asynchronously, several tiles ahead;
operands that all iterations use; and the scratch in which tiles change their layout. Each bound counts what one kernel
needs of these, for any terms of the update and any trained part. How many tiles are copied ahead, and how much scratch
there is, was found by compiling tiles of up to 128 rows for capabilities 8.0 to 12.1 by Triton 3.6 and 3.7.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.tiles import Tile, Tiles

if TYPE_CHECKING:
    from fedobp.engine.kernels.shapes import Shapes
    from fedobp.engine.kernels.step import KernelPrecision

_SLACK = 1024  # barriers, and aligning what follows them
_LEAST = 16  # a product's smallest dimension
_LEAST_DEPTH = {"dense": _LEAST, "dense_backward": _LEAST, "conv2_inputs": 1, "weights_backward": _LEAST}


def shared_bound(
    kernel: str, tile: Tile, shapes: "Shapes", precision: "KernelPrecision", capability: tuple[int, int]
) -> int:
    """Return a bound in bytes for a kernel (a field of `Tiles`) on cards of a compute capability."""
    (major, _), (size, depth, warps, stages) = capability, tile
    batch, outputs, low = shapes.batch, shapes.outputs, 2 if precision == "bf16" else 4
    # On cards 9.x to 11.x, products of 64 rows by four warps read shared memory while the next tile is copied: one tile
    # more. From 10.0 on, their sums are in tensor memory. Products of float32 (`ieee`) never do this.
    rows = {"dense": batch, "dense_backward": max(batch, depth), "weights_backward": 64}.get(kernel, size)
    direct = 9 <= major < 12 and rows >= 64 and warps >= 4 and precision != "fp32"
    tensor = direct and major >= 10
    ahead = max(1, stages - 1)
    copies = stages if direct else ahead

    match kernel:
        case "conv1":
            weights, patch = 5 * 32 * 64 * low, size * 32 * low
            # A patch outside of the pipeline, or the part of the sums [size, 64] that changes its layout at a time.
            scratch = size * 64 * 4 if precision == "fp32" else max(patch, size * 32 * warps)
            if depth == 1 or stages == 1:  # a loop that is not pipelined
                return weights + scratch + _SLACK
            # Two products read each of the four patches in the middle: with tensor memory, one tile more of these.
            return weights + (6 * copies + 4 * tensor) * patch + scratch + _SLACK
        case "conv2":
            # A tap's weights, and the pixels of the four positions.
            return copies * (64 * 32 + 4 * size * 32) * low + _SLACK
        case "dense":
            # Weights are copied as float32. After the loop: hidden values and the head's weights, then logits.
            loop = copies * (batch * depth * low + depth * size * 4)
            return max(loop, batch * size * low + outputs * size * 4, batch * outputs * 4) + _SLACK
        case "head":
            # No loop: the operands of both products, and the scratch of the largest tile in float32.
            operands = (batch * outputs + batch * size + outputs * size) * low
            return operands + 4 * max(batch * outputs, batch * size, outputs * size) + _SLACK
        case "dense_backward":
            x, dh, theta = batch * size * low, batch * depth * low, depth * size * 4
            # The scratch of weights, or of `dh`, which is also transposed.
            found = x + max(copies, 1 + direct) * dh + ahead * theta + max(dh, theta)
            if tensor:
                # The product still reads `dh` in the next iteration: three tiles, two of them transposed. A term of
                # the update, such as the velocity, becomes the product's initial sum, and is copied like `theta`.
                weights = 2 * (stages - 1) * theta + depth * size * low
                found = max(found, x + max(3, stages) * dh + weights + min(theta, depth * 16 * warps))
            return found + _SLACK
        case "conv2_inputs":
            columns = 32 * depth**2
            return max(copies * (size + columns) * 64, size * columns) * low + _SLACK  # the loop, or the result
        case "weights_backward":
            # conv1: patches for the upper and the lower positions, gradients and the argmax, in bytes; and the unpooled
            # gradients, with their scratch. conv2: gradients and pixels. After the loop: sums, transposed.
            first = copies * size * (2 * (128 + 32) * low + 32 * low + 32) + 2 * 64 * size * low
            second = copies * depth * (64 + 128 + 32) * low
            return max(first, second, 64 * 128 * 4) + _SLACK
    raise ValueError(f"no kernel {kernel}")


@cache
def fitting(
    tiles: Tiles, shapes: "Shapes", precision: "KernelPrecision", limit: int, capability: tuple[int, int]
) -> Tiles:
    """Return the entry with tiles changed as little as possible, so that every bound is at most `limit` bytes.

    Stages are reduced first, then rows, columns or depth are halved. A tile that fits is not changed. An entry that
    fits a batch of 64 and 128 classes fits any.
    """

    def fitted(kernel: str, tile: Tile) -> Tile:
        for smaller in _smaller(kernel, tile):
            if shared_bound(kernel, smaller, shapes, precision, capability) <= limit:
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


def fitting_table(
    entries: Sequence[Tiles], shapes: "Shapes", precision: "KernelPrecision", card: Card | None
) -> tuple[Tiles, ...]:
    """Return the entries of a table made to fit a card; without a card, as they are."""
    if card is None:
        return tuple(entries)
    return tuple(fitting(one, shapes, precision, card.shared, card.capability) for one in entries)
