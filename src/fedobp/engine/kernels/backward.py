"""The backward pass and the SGD update, for all lanes of a launch.

Five launches. `head` and `dense_backward` compute the gradients of these layers and update their weights.
`conv2_inputs` computes the gradient of the second convolution's inputs; `weights_backward` computes the weight
gradients of both convolutions as a fixed number of partial sums (those of the second bias come from `dense_backward`);
`update` adds these in a fixed order, updates the weights, copies them for the products, and loads the next batch. There
are no atomic additions: the same input gives the same bits.
"""

import triton
import triton.language as tl

from fedobp.engine.kernels.forward import summed, windows
from fedobp.engine.kernels.param_layout import B1, B2, BF, HIDDEN, SPREAD1, SUMS1, TAPS2, W1, W2, WF
from fedobp.engine.kernels.sgd import moved


@triton.jit
def head(
    hidden, logits, labels, count, loss, theta, velocity, anchor, drift, moving, numbers, dh,
    SIZE: tl.constexpr, B: tl.constexpr, F: tl.constexpr, NC: tl.constexpr, CLASSES: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    BASE: tl.constexpr, LEARNS: tl.constexpr, RULE: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Loss, and the head's update. A program has COLUMNS hidden units: it writes their gradient `dh` [B,512], before
    ReLU, if the BASE is trained, and then updates the weights that it has read if the head is trained (LEARNS)."""
    lane = tl.program_id(1).to(tl.int64)
    if PADDED:
        if tl.load(count + lane) == 0:
            return
    low = hidden.dtype.element_ty
    WC: tl.constexpr = WF + HIDDEN * F
    r = tl.arange(0, B)
    c = tl.arange(0, NC)
    unit = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mine = lane * SIZE
    lane_numbers = numbers + lane * 4
    at_hidden = lane * (B * HIDDEN) + r[:, None] * HIDDEN + unit[None, :]
    h = tl.load(hidden + at_hidden)
    samples = tl.load(count + lane)
    hit = tl.load(labels + lane * B + r)[:, None] == c[None, :]
    z = summed(logits, lane, B, NC, CLASSES, PARTS)
    z -= tl.max(z, 1)[:, None]
    e = tl.exp(z)
    total = tl.sum(e, 1)
    weight = tl.where(r < samples, 1.0 / tl.maximum(samples, 1).to(tl.float32), 0.0)
    d = (e / total[:, None] - tl.where(hit, 1.0, 0.0)) * weight[:, None]
    dl = d.to(low)
    at = mine + WC + c[:, None] * HIDDEN + unit[None, :]
    if BASE:
        g_hidden = tl.dot(dl, tl.load(theta + at).to(low), input_precision=PRECISION)
        tl.store(dh + at_hidden, tl.where(h > 0, g_hidden, 0.0).to(low))
    if LEARNS:
        g = tl.dot(tl.trans(dl), h, input_precision=PRECISION)
        tl.store(theta + at, moved(g, at, theta, velocity, anchor, drift, moving, lane_numbers, RULE))
    if tl.program_id(0) == 0:
        each = tl.log(total) - tl.sum(tl.where(hit, z, 0.0), 1)
        tl.store(loss + lane, tl.load(loss + lane) + tl.sum(each * weight))
        if LEARNS:
            at_bias = mine + WC + NC * HIDDEN + c
            new = moved(tl.sum(d, 0), at_bias, theta, velocity, anchor, drift, moving, lane_numbers, RULE)
            tl.store(theta + at_bias, new)


@triton.jit
def dense_backward(
    x, arg, dh, count, theta, velocity, anchor, drift, moving, numbers, d2, bias2,
    SIZE: tl.constexpr, B: tl.constexpr, F: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    RULE: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the hidden layer, and compute the gradient of its inputs.

    A program has COLUMNS inputs and loops over all hidden units, so that it has the whole gradient of its inputs and
    updates the weights that it has just read. The gradient of conv2's outputs is written unpooled, into [B,W,W,64] with
    a border of zeros 4 wide; its sum over the batch, a part of the bias gradient, into `bias2` [F].
    """
    lane = tl.program_id(1).to(tl.int64)
    if PADDED:
        if tl.load(count + lane) == 0:
            return
    low = x.dtype.element_ty
    program = tl.program_id(0)
    r = tl.arange(0, B)
    o = tl.arange(0, DEPTH)
    i = program * COLUMNS + tl.arange(0, COLUMNS)
    mine = lane * SIZE
    lane_numbers = numbers + lane * 4
    rows = dh + lane * (B * HIDDEN) + r[:, None] * HIDDEN + o[None, :]
    xv = tl.load(x + lane * (B * F) + r[:, None] * F + i[None, :])
    dx = tl.zeros((B, COLUMNS), tl.float32)
    for s in range(0, HIDDEN, DEPTH):
        # Summed below as well as read by products, unlike `d` of `conv2_weights`: here `g` is complete in the same
        # iteration, before a later tile is copied (`tests/compile_kernels.py` checks this).
        dv = tl.load(rows + s)
        at = mine + WF + (s + o)[:, None] * F + i[None, :]
        dx = tl.dot(dv, tl.load(theta + at).to(low), dx, input_precision=PRECISION)
        g = tl.dot(tl.trans(dv), xv, input_precision=PRECISION)
        tl.store(theta + at, moved(g, at, theta, velocity, anchor, drift, moving, lane_numbers, RULE))
        if program == 0:
            at_bias = mine + BF + s + o
            g_bias = tl.sum(dv.to(tl.float32), 0)
            tl.store(
                theta + at_bias, moved(g_bias, at_bias, theta, velocity, anchor, drift, moving, lane_numbers, RULE)
            )
    av = tl.load(arg + lane * (B * F) + r[:, None] * F + i[None, :])
    g2 = dx.to(low)
    tl.store(bias2 + lane * F + i, tl.sum(tl.where(av < 4, g2, 0.0).to(tl.float32), 0))
    W: tl.constexpr = 2 * P + 8
    place = program * COLUMNS // 64
    corner = ((place // P) * 2 + 4) * W + (place % P) * 2 + 4
    to = d2 + lane * (B * W * W * 64) + (r * (W * W) + corner)[:, None] * 64 + (i % 64)[None, :]
    for q in tl.static_range(4):
        tl.store(to + ((q // 2) * W + q % 2) * 64, tl.where(av == q, g2, 0.0))


@triton.jit
def unpooled(gradient, arg, out, B: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """Unpool the gradient of [B,P,P,64] into [B,W,W,64], which has a border 4 wide."""
    lane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, 64)
    real = (row < B * P * P)[:, None]
    at = lane * (B * P * P * 64) + row[:, None] * 64 + n[None, :]
    g = tl.load(gradient + at, mask=real, other=0.0)
    where = tl.load(arg + at, mask=real, other=4)
    W: tl.constexpr = 2 * P + 8
    window = row % (P * P)
    corner = (row // (P * P)) * (W * W) + ((window // P) * 2 + 4) * W + (window % P) * 2 + 4
    to = out + lane * (B * W * W * 64) + corner[:, None] * 64 + n[None, :]
    for q in tl.static_range(4):
        tl.store(to + ((q // 2) * W + q % 2) * 64, tl.where(where == q, g, 0.0), mask=real)


@triton.jit
def conv2_inputs(
    d2, weights, d1, count,
    B: tl.constexpr, H: tl.constexpr, P: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr,
    PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of conv2's inputs, [B,H,H,32]. The zero border of `d2` makes all pixels alike.

    A row is a block of SIDE x SIDE pixels. It reads (4 + SIDE)^2 pixels of `d2`, each of which is multiplied by up to
    25 taps (`weights` is [25,32,64]): one for each pixel of the block, side by side, and zero where there is none.
    """
    lane = tl.program_id(1).to(tl.int64)
    if PADDED:
        if tl.load(count + lane) == 0:
            return
    W: tl.constexpr = 2 * P + 8
    BLOCKS: tl.constexpr = H // SIDE
    N: tl.constexpr = SIDE * SIDE * 32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < B * BLOCKS * BLOCKS
    block = tl.where(real, row, 0)
    image, block = block // (BLOCKS * BLOCKS), block % (BLOCKS * BLOCKS)
    y = (block // BLOCKS) * SIDE
    x = (block % BLOCKS) * SIDE
    k = tl.arange(0, 64)
    n = tl.arange(0, N)
    py = n // 32 // SIDE
    px = n // 32 % SIDE
    d = d2 + lane * (B * W * W * 64) + ((image * W + y) * W + x)[:, None] * 64 + k[None, :]
    tap = weights + lane * TAPS2 + (n % 32)[:, None] * 64 + k[None, :]
    g = tl.zeros((ROWS, N), tl.float32)
    # From 0: a `Launch` has at most two dimensions. If the assembler knew that, it would unroll the loop, for seconds.
    for t in range(tl.program_id(2), (4 + SIDE) * (4 + SIDE)):
        ty = t // (4 + SIDE)
        tx = t % (4 + SIDE)
        ky = py + 4 - ty
        kx = px + 4 - tx
        if SIDE == 1:
            w = tl.load(tap + ((ky * 5 + kx) * 2048)[:, None])
        else:
            there = (ky >= 0) & (ky < 5) & (kx >= 0) & (kx < 5)
            w = tl.load(tap + ((ky * 5 + kx) * 2048)[:, None], mask=there[:, None], other=0.0)
        g = tl.dot(tl.load(d + (ty * W + tx) * 64), tl.trans(w), g, input_precision=PRECISION)
    pixel = (image * H + y)[:, None] * H + x[:, None] + (py * H + px)[None, :]
    to = d1 + lane * (B * H * H * 32) + pixel * 32 + (n % 32)[None, :]
    tl.store(to, g.to(d1.dtype.element_ty), mask=real[:, None])


@triton.jit
def conv2_weights(
    x, d2, sums, lane, job,
    B: tl.constexpr, H: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one kernel row of conv2's weight gradient over one split of the rows: its five taps are side by side in
    memory, 160 columns of one product [64, rows] x [rows, 160]. sums[split] is [25*32, 64].

    Only products may read `d`. If it is also summed here, for the bias, Triton 3.6 overwrites it with a later tile
    while products still read it: a race that sometimes makes a sum wrong (`tests/compile_kernels.py` checks for it).
    """
    W: tl.constexpr = 2 * P + 8
    Q: tl.constexpr = 2 * P
    ALL: tl.constexpr = B * Q * Q
    TILES: tl.constexpr = (ALL + ROWS * SPLITS - 1) // (ROWS * SPLITS)
    ky = job % 5
    split = job // 5
    n = tl.arange(0, 64)
    most = tl.arange(0, 128)
    rest = 128 + tl.arange(0, 32)
    z1 = tl.zeros((64, 128), tl.float32)
    z2 = tl.zeros((64, 32), tl.float32)
    for i in range(TILES):
        row = (split * TILES + i) * ROWS + tl.arange(0, ROWS)
        # Rows beyond the last one read the first pixel of the border: zero.
        real = row < ALL
        pixel = tl.where(real, row, 0)
        image, pixel = pixel // (Q * Q), pixel % (Q * Q)
        inner = tl.where(real, image * (W * W) + (pixel // Q + 4) * W + pixel % Q + 4, 0)
        d = tl.load(d2 + lane * (B * W * W * 64) + inner[:, None] * 64 + n[None, :])
        at = x + lane * (B * H * H * 32) + ((image * (H * H) + (pixel // Q + ky) * H + pixel % Q) * 32)[:, None]
        dt = tl.trans(d)
        z1 = tl.dot(dt, tl.load(at + most[None, :]), z1, input_precision=PRECISION)
        z2 = tl.dot(dt, tl.load(at + rest[None, :]), z2, input_precision=PRECISION)
    to = sums + (lane * SPLITS + split) * TAPS2
    tl.store(to + (ky * 160 + most)[:, None] * 64 + n[None, :], tl.trans(z1))
    tl.store(to + (ky * 160 + rest)[:, None] * 64 + n[None, :], tl.trans(z2))


@triton.jit
def conv1_weights(
    x, d1, arg, sums, lane, split,
    B: tl.constexpr, H: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute conv1's weight gradient over one split of the rows: pixels of its pooled map.

    The gradients of the upper (then the lower) two positions of a pooling window are multiplied by the image there:
    [32 x left and right, rows] x [rows, 5 kernel rows of 8 pixels x 4 channels]. The result of the right position is
    shifted by one pixel. sums[split] is [5*32, 32*2], followed by the bias.
    """
    ALL: tl.constexpr = B * P * P
    TILES: tl.constexpr = (ALL + ROWS * SPLITS - 1) // (ROWS * SPLITS)
    n = tl.arange(0, 32)
    m = tl.arange(0, 64)
    most = tl.arange(0, 128)
    upper = (most // 32) * (H * 4) + most % 32  # four kernel rows; the fifth is a separate product
    z1 = tl.zeros((64, 128), tl.float32)
    z2 = tl.zeros((64, 32), tl.float32)
    bias = tl.zeros((32,), tl.float32)
    for i in range(TILES):
        row = (split * TILES + i) * ROWS + tl.arange(0, ROWS)
        real, corner = windows(row, B, H, P)
        at = lane * (ALL * 32) + tl.where(real, row, 0)[:, None] * 32 + n[None, :]
        g = tl.load(d1 + at)
        where = tl.where(real[:, None], tl.load(arg + at), 4)
        bias += tl.sum(tl.where(where < 4, g, 0.0).to(tl.float32), 0)
        patch = x + lane * (B * H * H * 4) + (corner * 4)[:, None]
        for qy in tl.static_range(2):
            left = tl.where(where == 2 * qy, g, 0.0)
            right = tl.where(where == 2 * qy + 1, g, 0.0)
            both = tl.trans(tl.reshape(tl.join(left, right), (ROWS, 64)))
            z1 = tl.dot(both, tl.load(patch + (qy * H * 4 + upper)[None, :]), z1, input_precision=PRECISION)
            z2 = tl.dot(both, tl.load(patch + ((qy + 4) * H * 4 + n)[None, :]), z2, input_precision=PRECISION)
    to = sums + (lane * SPLITS + split) * SUMS1
    tl.store(to + most[:, None] * 64 + m[None, :], tl.trans(z1))
    tl.store(to + (128 + n)[:, None] * 64 + m[None, :], tl.trans(z2))
    tl.store(to + 160 * 64 + n, bias)


@triton.jit
def weights_backward(
    image, count, awake, pooled, d1, d2, arg, sums1, sums2,
    B: tl.constexpr, H: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    SPLITS1: tl.constexpr, ROWS1: tl.constexpr, SPLITS2: tl.constexpr, ROWS2: tl.constexpr,
    PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute both convolutions' weight gradients: the first SPLITS1 programs conv1's, 5 * SPLITS2 conv2's.

    In one launch, because the first is memory-bound and the second compute-bound.
    """
    lane = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    if PADDED:
        samples = tl.load(count + lane)
        if program == 0:
            tl.store(awake + lane, samples)  # for `update`, which overwrites the count
        if samples == 0:
            return
    if program < SPLITS1:
        conv1_weights(image, d1, arg, sums1, lane, program, B, H, P1, SPLITS1, ROWS1, PRECISION)
    else:
        conv2_weights(pooled, d2, sums2, lane, program - SPLITS1, B, P1, P2, SPLITS2, ROWS2, PRECISION)


# Programs of `update` for the convolutions' weights: a quarter of a tap each, an eighth of a row, the biases.
MOVERS = tl.constexpr(25 * 4 + 5 * 8 + 1)


@triton.jit(do_not_specialize=["steps"])
def update(
    theta, velocity, anchor, drift, moving, numbers, spread, taps, flipped, sums1, sums2, bias2,
    order, counts, data, targets, scale, shift, step, x, count, awake, labels, steps,
    SIZE: tl.constexpr, B: tl.constexpr, H: tl.constexpr, C: tl.constexpr, P2: tl.constexpr,
    SPLITS1: tl.constexpr, SPLITS2: tl.constexpr, BASE: tl.constexpr, RULE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Update the convolutions' weights and their copies, and load the lane's next batch, one program per sample.

    With SPLITS1 = 0 no weight changes: it only makes the copies and loads the first batch. Without BASE it only loads
    the batch.
    """
    lane = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    mine = lane * SIZE
    lane_numbers = numbers + lane * 4
    WORKERS: tl.constexpr = MOVERS if BASE else 0
    if program < WORKERS:
        if PADDED and SPLITS1:
            if tl.load(awake + lane) == 0:
                return
        if program < 100:  # a quarter of one tap of conv2
            low = taps.dtype.element_ty
            t = program // 4
            k = (program % 4) * 8 + tl.arange(0, 8)
            n = tl.arange(0, 64)
            within = t * 2048 + k[:, None] * 64 + n[None, :]
            at = mine + W2 + within
            if SPLITS1:
                g = tl.zeros((8, 64), tl.float32)
                for s in tl.static_range(SPLITS2):
                    g += tl.load(sums2 + (lane * SPLITS2 + s) * TAPS2 + within)
                w = moved(g, at, theta, velocity, anchor, drift, moving, lane_numbers, RULE)
                tl.store(theta + at, w)
            else:
                w = tl.load(theta + at)
            tl.store(taps + lane * TAPS2 + within, w.to(low))
            tl.store(flipped + lane * TAPS2 + t * 2048 + n[None, :] * 32 + k[:, None], w.to(low))
        elif program < 140:  # four columns of one kernel row of conv1
            dy = (program - 100) // 8
            k1 = ((program - 100) % 8) * 4 + tl.arange(0, 4)
            n1 = tl.arange(0, 32)
            within1 = (dy * 32 + k1[:, None]) * 32 + n1[None, :]
            at1 = mine + W1 + within1
            real = (k1 < 20)[:, None]
            if SPLITS1:
                g1 = tl.zeros((4, 32), tl.float32)
                left = sums1 + lane * (SPLITS1 * SUMS1) + (dy * 32 + k1[:, None]) * 64 + n1[None, :] * 2
                for s in tl.static_range(SPLITS1):
                    g1 += tl.load(left + s * SUMS1, mask=real, other=0.0)
                    g1 += tl.load(left + s * SUMS1 + 4 * 64 + 1, mask=real, other=0.0)
                w1 = moved(g1, at1, theta, velocity, anchor, drift, moving, lane_numbers, RULE)
                tl.store(theta + at1, w1)
            else:
                w1 = tl.load(theta + at1)
            w1 = tl.where(real, w1, 0.0).to(spread.dtype.element_ty)
            for px in tl.static_range(2):  # the right position's weights are shifted by a pixel
                to = dy * 2048 + ((k1[:, None] + 4 * px) % 32) * 64 + px * 32 + n1[None, :]
                tl.store(spread + lane * SPREAD1 + to, w1)
        elif SPLITS1:
            nn = tl.arange(0, 64)
            gb = tl.zeros((64,), tl.float32)
            for place in tl.static_range(P2 * P2):
                gb += tl.load(bias2 + (lane * (P2 * P2) + place) * 64 + nn)
            atb = mine + B2 + nn
            tl.store(theta + atb, moved(gb, atb, theta, velocity, anchor, drift, moving, lane_numbers, RULE))
            mm = tl.arange(0, 32)
            ga = tl.zeros((32,), tl.float32)
            for s in tl.static_range(SPLITS1):
                ga += tl.load(sums1 + (lane * SPLITS1 + s) * SUMS1 + 160 * 64 + mm)
            ata = mine + B1 + mm
            tl.store(theta + ata, moved(ga, ata, theta, velocity, anchor, drift, moving, lane_numbers, RULE))
    else:
        # One sample of the next batch: scaled, in the order y, x, channel, with the channels padded to four.
        r = program - WORKERS
        now = tl.load(step + lane)
        there = now < steps
        sample = tl.load(order + (lane * steps + now) * B + r, mask=there, other=0).to(tl.int64)
        for start in tl.static_range(0, H * H * 4, 1024):
            e = start + tl.arange(0, 1024)
            channel = e % 4
            real1 = (channel < C) & (e < H * H * 4)
            stored = tl.load(data + sample * (C * H * H) + channel * (H * H) + e // 4, mask=real1, other=0)
            value = stored.to(tl.float32) - tl.load(shift + lane * 4 + channel)  # subtract first: means may be large
            value *= tl.load(scale + lane * 4 + channel)
            pixel = tl.where(real1, value, 0.0).to(x.dtype.element_ty)
            tl.store(x + (lane * B + r) * (H * H * 4) + e, pixel, mask=e < H * H * 4)
        tl.store(labels + lane * B + r, tl.load(targets + sample).to(tl.int32))
        if r == 0:
            tl.store(count + lane, tl.load(counts + lane * steps + now, mask=there, other=0))
