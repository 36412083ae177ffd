"""The forward pass: from a batch of images to hidden values and logits, for training and evaluation.

Grids are (tiles, lanes). Rows of a tile are pooling windows or samples, columns are channels. Convolutions compute the
four positions of a pooling window and store only the largest, so nothing larger than a pooled map is stored; `arg` is
the index of the largest (0 to 3), or 4 where ReLU is zero: all that the backward pass needs.
"""

import triton
import triton.language as tl

from fedobp.engine.kernels.param_layout import B1, B2, BF, HIDDEN, SPREAD1, TAPS2, WF


@triton.jit
def pooled(a0, a1, a2, a3, bias, out, arg, at, real, TRAIN: tl.constexpr):
    """Apply bias, ReLU and max-pooling to the four positions of a window (ties: the first), and store the result."""
    largest = tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3))
    value = largest + bias[None, :]
    tl.store(out + at, tl.maximum(value, 0.0).to(out.dtype.element_ty), mask=real[:, None])
    if TRAIN:
        first = tl.where(a0 == largest, 0, tl.where(a1 == largest, 1, tl.where(a2 == largest, 2, 3)))
        tl.store(arg + at, tl.where(value > 0, first, 4).to(tl.int8), mask=real[:, None])


@triton.jit
def halves(sums, ROWS: tl.constexpr):
    """Return the left and the right half of [ROWS, 64]."""
    return tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, 32)), (0, 2, 1)))


@triton.jit
def windows(row, B: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    """Return which rows are pooling windows of the batch, and the corner pixel of each in [B,H,H]."""
    real = row < B * P * P
    window = tl.where(real, row, 0)
    image, window = window // (P * P), window % (P * P)
    return real, image * (H * H) + (window // P) * (2 * H) + (window % P) * 2


@triton.jit
def conv1(
    x, count, step, spread, theta, out, arg,
    SIZE: tl.constexpr, B: tl.constexpr, H: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    TRAIN: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """First convolution, bias, ReLU, pooling: [B,H,H,4] -> [B,P,P,32]; a program computes TILES tiles.

    A pooling window reads a patch of 6x6 pixels as six rows of 8 pixels x 4 channels; the last two pixels have weight
    0. The upper two positions use rows 0 to 4, the lower two rows 1 to 5; the weights of the left and the right
    position are side by side: `spread` is [5,32,2*32].
    """
    lane = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) == 0:
        tl.store(step + lane, tl.load(step + lane) + 1)  # here, because no other program reads it now
    if PADDED:
        if tl.load(count + lane) == 0:
            return
    k = tl.arange(0, 32)
    n = tl.arange(0, 64)
    channel = tl.arange(0, 32)
    weights = spread + lane * SPREAD1 + k[:, None] * 64 + n[None, :]
    w0 = tl.load(weights)
    w1 = tl.load(weights + 2048)
    w2 = tl.load(weights + 2 * 2048)
    w3 = tl.load(weights + 3 * 2048)
    w4 = tl.load(weights + 4 * 2048)
    bias = tl.load(theta + lane * SIZE + B1 + channel)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        real, corner = windows(row, B, H, P)
        patch = x + lane * (B * H * H * 4) + (corner * 4)[:, None] + k[None, :]
        upper = tl.dot(tl.load(patch), w0, input_precision=PRECISION)
        v = tl.load(patch + H * 4)
        upper = tl.dot(v, w1, upper, input_precision=PRECISION)
        lower = tl.dot(v, w0, input_precision=PRECISION)
        v = tl.load(patch + 2 * H * 4)
        upper = tl.dot(v, w2, upper, input_precision=PRECISION)
        lower = tl.dot(v, w1, lower, input_precision=PRECISION)
        v = tl.load(patch + 3 * H * 4)
        upper = tl.dot(v, w3, upper, input_precision=PRECISION)
        lower = tl.dot(v, w2, lower, input_precision=PRECISION)
        v = tl.load(patch + 4 * H * 4)
        upper = tl.dot(v, w4, upper, input_precision=PRECISION)
        lower = tl.dot(v, w3, lower, input_precision=PRECISION)
        lower = tl.dot(tl.load(patch + 5 * H * 4), w4, lower, input_precision=PRECISION)
        a0, a1 = halves(upper, ROWS)
        a2, a3 = halves(lower, ROWS)
        at = lane * (B * P * P * 32) + row[:, None] * 32 + channel[None, :]
        pooled(a0, a1, a2, a3, bias, out, arg, at, real, TRAIN)


@triton.jit
def conv2(
    x, count, weights, theta, out, arg,
    SIZE: tl.constexpr, B: tl.constexpr, H: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    TRAIN: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Second convolution, bias, ReLU, pooling: [B,H,H,32] -> [B,P,P,64]. `weights` is [25,64,32]."""
    lane = tl.program_id(1).to(tl.int64)
    if PADDED:
        if tl.load(count + lane) == 0:
            return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real, corner = windows(row, B, H, P)
    k = tl.arange(0, 32)
    n = tl.arange(0, 64)
    patch = x + lane * (B * H * H * 32) + (corner * 32)[:, None] + k[None, :]
    tap = weights + lane * TAPS2 + n[:, None] * 32 + k[None, :]
    a0 = tl.zeros((ROWS, 64), tl.float32)
    a1 = tl.zeros((ROWS, 64), tl.float32)
    a2 = tl.zeros((ROWS, 64), tl.float32)
    a3 = tl.zeros((ROWS, 64), tl.float32)
    for t in range(25):
        at = patch + ((t // 5) * H + t % 5) * 32
        w = tl.trans(tl.load(tap + t * 2048))
        a0 = tl.dot(tl.load(at), w, a0, input_precision=PRECISION)
        a1 = tl.dot(tl.load(at + 32), w, a1, input_precision=PRECISION)
        a2 = tl.dot(tl.load(at + H * 32), w, a2, input_precision=PRECISION)
        a3 = tl.dot(tl.load(at + H * 32 + 32), w, a3, input_precision=PRECISION)
    to = lane * (B * P * P * 64) + row[:, None] * 64 + n[None, :]
    pooled(a0, a1, a2, a3, tl.load(theta + lane * SIZE + B2 + n), out, arg, to, real, TRAIN)


@triton.jit
def dense(
    x, count, theta, hidden, logits,
    SIZE: tl.constexpr, B: tl.constexpr, F: tl.constexpr, NC: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    TRAIN: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Hidden layer and ReLU, [B,F] -> [B,512], and these units' contribution to the logits: [512/COLUMNS,B,NC]."""
    lane = tl.program_id(1).to(tl.int64)
    if PADDED:
        if tl.load(count + lane) == 0:
            return
    low = x.dtype.element_ty
    unit = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, B)
    k = tl.arange(0, DEPTH)
    c = tl.arange(0, NC)
    row = x + lane * (B * F) + r[:, None] * F + k[None, :]
    weights = theta + lane * SIZE + WF + unit[None, :] * F + k[:, None]
    sums = tl.zeros((B, COLUMNS), tl.float32)
    for i in range(0, F, DEPTH):
        inside = i + k < F
        v = tl.load(row + i, mask=inside[None, :], other=0.0)
        w = tl.load(weights + i, mask=inside[:, None], other=0.0)
        sums = tl.dot(v, w.to(low), sums, input_precision=PRECISION)
    value = tl.maximum(sums + tl.load(theta + lane * SIZE + BF + unit)[None, :], 0.0).to(low)
    WC: tl.constexpr = WF + HIDDEN * F
    head = tl.load(theta + lane * SIZE + WC + c[:, None] * HIDDEN + unit[None, :]).to(low)
    part = tl.dot(value, tl.trans(head), input_precision=PRECISION)
    if tl.program_id(0) == 0:
        part += tl.load(theta + lane * SIZE + WC + NC * HIDDEN + c)[None, :]
    block = lane * (HIDDEN // COLUMNS) + tl.program_id(0)
    tl.store(logits + (block * B + r[:, None]) * NC + c[None, :], part)
    if TRAIN:
        tl.store(hidden + lane * (B * HIDDEN) + r[:, None] * HIDDEN + unit[None, :], value)


@triton.jit
def summed(logits, lane, B: tl.constexpr, NC: tl.constexpr, CLASSES: tl.constexpr, PARTS: tl.constexpr):
    """Return the logits [B,NC]: the sum of their parts, in a fixed order. Padding classes get -1e30."""
    r = tl.arange(0, B)
    c = tl.arange(0, NC)
    z = tl.zeros((B, NC), tl.float32)
    for part in tl.static_range(PARTS):
        z += tl.load(logits + ((lane * PARTS + part) * B + r[:, None]) * NC + c[None, :])
    return tl.where((c < CLASSES)[None, :], z, -1e30)


@triton.jit(do_not_specialize=["most"])
def answer(
    logits, count, done, found, most,
    B: tl.constexpr, NC: tl.constexpr, CLASSES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write a batch's predicted labels to found[lane] (ties: the first); `done` counts batches including this one."""
    lane = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, B)
    label = tl.argmax(summed(logits, lane, B, NC, CLASSES, PARTS), 1)
    real = r < tl.load(count + lane)
    tl.store(found + lane * most + (tl.load(done + lane) - 1) * B + r, label, mask=real)
