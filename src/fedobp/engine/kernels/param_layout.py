"""The order of a lane's parameters in memory.

All per-entry state (weights, velocity, anchor, drift, mask) has the same order: [lanes, SIZE] with

    W1 [5, 8 pixels x 4 channels, 32]   first convolution; kernel rows, padded with zeros
    B1 [32]
    W2 [25 taps, 32, 64]                second convolution
    B2 [64]
    BF [512]                            hidden layer
    WF [512, F]                         its inputs in the order y, x, channel
    WC [NC, 512], BC [NC]               head; NC is the number of classes, padded

Padding is zero and stays zero, because its gradient is zero.
"""

import triton
import triton.language as tl

HIDDEN = tl.constexpr(512)
W1 = tl.constexpr(0)
B1 = tl.constexpr(5120)
W2 = tl.constexpr(5152)
B2 = tl.constexpr(56352)
BF = tl.constexpr(56416)
WF = tl.constexpr(56928)
SPREAD1 = tl.constexpr(5 * 32 * 64)  # a copy of W1 for two neighbouring positions side by side
TAPS2 = tl.constexpr(25 * 32 * 64)  # a copy of W2, one with its last two axes swapped, a partial sum of its gradient
SUMS1 = tl.constexpr((5 * 32 + 1) * 64)  # a partial sum of the first convolution's gradient, with its bias


@triton.jit
def arrange(source, target, index, source_size, target_size, BLOCK: tl.constexpr):
    """Permute vectors: target[lane, e] = source[lane, index[e]], and 0 where the index is -1."""
    lane = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(index + e, mask=e < target_size, other=-1)
    value = tl.load(source + lane * source_size + i, mask=i >= 0, other=0)
    tl.store(target + lane * target_size + e, value, mask=e < target_size)
