"""Randomness without generators: every draw is a hash of (seed, round, client, purpose, ...).

A hash has no state, so the serial engine, a vectorised one and a remote node draw the same numbers in any order, and
nobody's global generator is touched. The hash is splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014) in wrapping
int64 arithmetic; it works elementwise, so a whole cohort's keys come from one call.
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

# The three odd constants of splitmix64, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


IntLike = Tensor | int
NOBODY = -1  # the client of a draw that belongs to none


class Purpose(IntEnum):
    """What a key is for. Numbers are part of the results: never reuse or change one."""

    COHORT = 1
    TRAIN = 2
    SERVE = 3
    BEGIN = 4  # what a method draws before round 1
    SCORE = 5  # what a method's server draws for a client in a round


def _wrap_int64(value: IntLike) -> IntLike:
    """Return a number as a signed 64-bit one, which tensors are already."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63) if isinstance(value, int) else value


def _logical_shift_right(value: IntLike, bits: int) -> IntLike:
    """Shift right without the sign (int64's own `>>` copies it)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: IntLike) -> IntLike:
    value = _wrap_int64(value)
    value = _wrap_int64((value ^ _logical_shift_right(value, 30)) * _FIRST)
    value = _wrap_int64((value ^ _logical_shift_right(value, 27)) * _SECOND)
    return value ^ _logical_shift_right(value, 31)


def fold(key: IntLike, *parts: IntLike) -> Tensor:
    """Hash integers into a key, one after the other; tensors broadcast, so a key may have a leading axis.

    As long as all are numbers, Python does the sums: a tensor of one element takes twenty times as long.
    """
    if isinstance(key, Tensor):
        key = key.long()
    for part in parts:
        if isinstance(part, Tensor):
            part = part.to(key.device if isinstance(key, Tensor) else part.device, torch.int64)
        key = _mix(_wrap_int64(key * _FIRST) + _mix(part + _GOLDEN) + _GOLDEN)
    return torch.as_tensor(key, dtype=torch.int64)


def permutation(key: Tensor, n: int) -> Tensor:
    """Return the order in which a key visits n things: they are sorted by their hashes."""
    return fold(key, torch.arange(n, device=key.device)).argsort(stable=True)


def uniform(key: Tensor, n: int) -> Tensor:
    """Return n numbers strictly between 0 and 1, in float64: the middles of 2^52 equal steps."""
    bits = (fold(key, torch.arange(n, device=key.device)) >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) * 2**-52


def normal(key: Tensor, n: int) -> Tensor:
    """Return n numbers of the standard normal distribution, in float64 (Box and Muller)."""
    return (-2 * uniform(fold(key, 0), n).log()).sqrt() * (2 * math.pi * uniform(fold(key, 1), n)).cos()
