"""The SGD update of parameters, with its optional terms."""

import triton
import triton.language as tl

# The terms of an update, as bits of RULE.
MOMENTUM = tl.constexpr(1)
DECAY = tl.constexpr(2)
PULL = tl.constexpr(4)
DRIFT = tl.constexpr(8)
MASK = tl.constexpr(16)


@triton.jit
def moved(gradient, at, theta, velocity, anchor, drift, moving, numbers, RULE: tl.constexpr):
    """Return the new values of entries `at`: v <- momentum v + (gradient + mu (theta - anchor) + drift + decay theta),
    then theta - lr v where `moving` is set. `numbers` is the lane's (lr, momentum, decay, mu)."""
    value = tl.load(theta + at)
    if PULL & RULE:
        gradient += tl.load(numbers + 3) * (value - tl.load(anchor + at))
    if DRIFT & RULE:
        gradient += tl.load(drift + at)
    if DECAY & RULE:
        gradient += tl.load(numbers + 2) * value
    if MOMENTUM & RULE:
        gradient += tl.load(numbers + 1) * tl.load(velocity + at)
        tl.store(velocity + at, gradient)
    if MASK & RULE:
        gradient = tl.where(tl.load(moving + at) != 0, gradient, 0.0)
    return value - tl.load(numbers) * gradient
