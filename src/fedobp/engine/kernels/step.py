"""One step of many lanes: its buffers, and its kernel launches in order."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedobp.engine.kernels import backward, forward
from fedobp.engine.kernels.launches import Launch
from fedobp.engine.kernels.param_layout import HIDDEN, SPREAD1, SUMS1, TAPS2
from fedobp.engine.kernels.sgd import DRIFT, MASK, MOMENTUM, PULL
from fedobp.engine.kernels.shapes import Shapes
from fedobp.engine.kernels.tiles import Tiles
from fedobp.method import Part

KernelPrecision = Literal["bf16", "tf32", "fp32"]
Launches = dict[str, Launch]
TAIL = 64  # zeros after the last image: kernels read 8 pixels where they use 6


def operand_dtype(precision: KernelPrecision) -> torch.dtype:
    """Return the dtype of the operands of matrix products; sums and weights are float32."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def dot_precision(precision: KernelPrecision) -> str:
    """Return Triton's `input_precision` for products of float32 tensors."""
    return "ieee" if precision == "fp32" else "tf32"


@dataclass(frozen=True)
class StepConfig:
    """What a step computes. Steps with equal configurations share buffers and graphs."""

    shapes: Shapes
    precision: KernelPrecision
    part: Part | None  # the trained part; None: evaluation, which predicts labels
    rule: int = 0  # the terms of the SGD update, as bits

    @property
    def base(self) -> bool:
        """Whether the base is trained."""
        return self.part in ("all", "base")


class Buffers:
    """All tensors of steps of up to `lanes` lanes, for up to `steps` steps. `splits`: numbers of partial sums."""

    def __init__(
        self, config: StepConfig, lanes: int, steps: int, splits: tuple[int, int], device: torch.device
    ) -> None:
        shapes, low, byte, whole = config.shapes, operand_dtype(config.precision), torch.int8, torch.int32
        batch, side1, side2, size = shapes.batch, shapes.pooled1, shapes.pooled2, shapes.size
        self.lanes, self.steps = lanes, steps

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(lanes, *shape, dtype=dtype, device=device)

        def optional(bit: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return zeros(size, dtype=dtype) if config.rule & bit else self.theta  # never read if the term is absent

        # State, in the kernels' order of parameters.
        self.theta, self.numbers, self.loss = zeros(size), zeros(4), zeros()
        self.velocity, self.anchor, self.drift = optional(MOMENTUM.value), optional(PULL.value), optional(DRIFT.value)
        self.moving = optional(MASK.value, byte)
        # Copies of weights in the dtype and layout of the products.
        self.spread, self.taps, self.flipped = (zeros(n, dtype=low) for n in (SPREAD1.value, TAPS2.value, TAPS2.value))
        # Activations and gradients. `d2` has a border of zeros that is never written.
        map1, map2, learns, base = batch * side1**2 * 32, batch * side2**2 * 64, config.part is not None, config.base
        self.pooled1, self.arg1 = zeros(map1, dtype=low), zeros(map1 * base, dtype=byte)
        self.pooled2, self.arg2 = zeros(map2, dtype=low), zeros(map2 * base, dtype=byte)
        self.hidden, self.dh = (zeros(batch * HIDDEN.value * some, dtype=low) for some in (learns, base))
        self.logits = zeros(HIDDEN.value // 16 * batch * shapes.outputs)
        self.d1 = zeros(map1 * base, dtype=low)
        self.d2 = zeros(batch * shapes.frame**2 * 64 * base, dtype=low)
        self.sums1, self.sums2 = zeros(splits[0] * SUMS1.value * base), zeros(splits[1] * TAPS2.value * base)
        self.bias2 = zeros(shapes.features * base)
        # The order of samples, the scaling of inputs ((x - shift) * scale), and the current batch.
        self.order, self.counts = zeros(steps, batch, dtype=whole), zeros(steps, dtype=whole)
        self.scale, self.shift = zeros(4), zeros(4)
        self.x = torch.zeros(lanes * batch * shapes.side**2 * 4 + TAIL, dtype=low, device=device)
        self.labels = zeros(batch, dtype=whole)
        self.step, self.count, self.awake = (zeros(dtype=whole) for _ in range(3))
        self.predictions = zeros(0 if config.part else steps * batch, dtype=torch.int64)


def splits_of(shapes: Shapes, tiles: Tiles) -> tuple[int, int]:
    """Return the numbers of partial sums, such that each sums at least two tiles where there are two.

    A loop over one tile is not pipelined, and Triton 3.6 then makes `conv1_weights` read beyond its shared memory.
    """
    rows = shapes.batch * shapes.pooled1**2, shapes.batch * (2 * shapes.pooled2) ** 2
    sizes = tiles.weights_backward[:2]
    first, second = (max(1, min(n, all // (2 * size))) for n, all, size in zip(tiles.splits, rows, sizes, strict=True))
    return first, second


class Samples(NamedTuple):
    """All samples as stored, [n, channels, side, side], and their labels."""

    x: Tensor
    y: Tensor


def convolutions(config: StepConfig, buf: Any, tiles: Tiles, lanes: int, padded: bool) -> Launches:
    """Return the launches of both convolutions by name; `buf` holds their tensors."""
    shapes, base, product = config.shapes, config.base, dot_precision(config.precision)
    batch, side, pooled1, pooled2 = shapes.batch, shapes.side, shapes.pooled1, shapes.pooled2
    size = buf.theta.shape[1]

    rows, several, *options = tiles.conv1
    conv1 = Launch(
        forward.conv1, (-(-batch * pooled1**2 // (rows * several)), lanes),
        (buf.x, buf.count, buf.step, buf.spread, buf.theta, buf.pooled1, buf.arg1),
        (size, batch, side, pooled1, rows, several, base, padded, product),
        *options)  # fmt: skip

    rows, _, *options = tiles.conv2
    conv2 = Launch(
        forward.conv2, (-(-batch * pooled2**2 // rows), lanes),
        (buf.pooled1, buf.count, buf.flipped, buf.theta, buf.pooled2, buf.arg2),
        (size, batch, pooled1, pooled2, rows, base, padded, product),
        *options)  # fmt: skip

    return {"conv1": conv1, "conv2": conv2}


def gradients(config: StepConfig, buf: Any, tiles: Tiles, lanes: int, padded: bool) -> Launches:
    """Return the launches of both convolutions' backward pass by name; `buf` holds their tensors."""
    shapes, product, (splits1, splits2) = (
        config.shapes,
        dot_precision(config.precision),
        splits_of(config.shapes, tiles),
    )
    batch, side, pooled1, pooled2 = shapes.batch, shapes.side, shapes.pooled1, shapes.pooled2

    rows, block, *options = tiles.conv2_inputs
    conv2_inputs = Launch(
        backward.conv2_inputs, (-(-(batch * (pooled1 // block) ** 2) // rows), lanes),
        (buf.d2, buf.taps, buf.d1, buf.count),
        (batch, pooled1, pooled2, block, rows, padded, product),
        *options)  # fmt: skip

    rows1, rows2, *options = tiles.weights_backward
    weights_backward = Launch(
        backward.weights_backward, (splits1 + 5 * splits2, lanes),
        (buf.x, buf.count, buf.awake, buf.pooled1, buf.d1, buf.d2, buf.arg1, buf.sums1, buf.sums2),
        (batch, side, pooled1, pooled2, splits1, rows1, splits2, rows2, padded, product),
        *options)  # fmt: skip

    return {"conv2_inputs": conv2_inputs, "weights_backward": weights_backward}


def launches(config: StepConfig, buf: Buffers, tiles: Tiles, lanes: int, padded: bool, samples: Samples) -> Launches:
    """Return a step's launches by name. With `padded`, lanes without samples do not change."""
    shapes, learns, batch, pooled2 = config.shapes, config.part is not None, config.shapes.batch, config.shapes.pooled2
    features, outputs, classes, size = shapes.features, shapes.outputs, shapes.classes, shapes.size
    parts, product = HIDDEN.value // tiles.dense.size, dot_precision(config.precision)
    rule = (buf.theta, buf.velocity, buf.anchor, buf.drift, buf.moving, buf.numbers)
    splits = splits_of(shapes, tiles)

    columns, depth, *options = tiles.dense
    dense = Launch(
        forward.dense, (parts, lanes),
        (buf.pooled2, buf.count, buf.theta, buf.hidden, buf.logits),
        (size, batch, features, outputs, columns, depth, learns, padded, product),
        *options)  # fmt: skip
    steps = {**convolutions(config, buf, tiles, lanes, padded), "dense": dense}

    if learns:
        columns, _, *options = tiles.head
        steps["head"] = Launch(
            backward.head, (HIDDEN.value // columns, lanes),
            (buf.hidden, buf.logits, buf.labels, buf.count, buf.loss, *rule, buf.dh),
            (size, batch, features, outputs, classes, parts, columns,
             config.base, config.part != "base", config.rule, padded, product),
            *options)  # fmt: skip
    else:
        steps["answer"] = Launch(
            forward.answer, (lanes,),
            (buf.logits, buf.count, buf.step, buf.predictions, buf.steps * batch),
            (batch, outputs, classes, parts))  # fmt: skip

    if config.base:
        columns, depth, *options = tiles.dense_backward
        steps["dense_backward"] = Launch(
            backward.dense_backward, (features // columns, lanes),
            (buf.pooled2, buf.arg2, buf.dh, buf.count, *rule, buf.d2, buf.bias2),
            (size, batch, features, pooled2, columns, depth, config.rule, padded, product),
            *options)  # fmt: skip
        steps |= gradients(config, buf, tiles, lanes, padded)
    return steps | {"update": _update(config, buf, lanes, splits, config.base, padded, samples)}


def refresh(config: StepConfig, buf: Buffers, lanes: int, samples: Samples) -> Launch:
    """Return the launch that copies the weights for the products, and loads every lane's first batch."""
    return _update(config, buf, lanes, (0, 0), True, False, samples)


def _update(
    config: StepConfig, buf: Buffers, lanes: int, splits: tuple[int, int], weights: bool, padded: bool, samples: Samples
) -> Launch:
    shapes = config.shapes
    return Launch(
        backward.update, (backward.MOVERS.value * weights + shapes.batch, lanes),
        (buf.theta, buf.velocity, buf.anchor, buf.drift, buf.moving, buf.numbers,
         buf.spread, buf.taps, buf.flipped, buf.sums1, buf.sums2, buf.bias2,
         buf.order, buf.counts, samples.x, samples.y, buf.scale, buf.shift,
         buf.step, buf.x, buf.count, buf.awake, buf.labels, buf.steps),
        (shapes.size, shapes.batch, shapes.side, shapes.channels, shapes.pooled2, *splits,
         weights, config.rule, padded))  # fmt: skip
