"""Randomness without generators: every draw is a hash of (seed, round, client, purpose, ...).

A hash has no state, so the serial engine, a vectorised one and a remote node draw the same numbers in any order, and no
global generator is used. The hash is splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014) in wrapping int64
arithmetic; it works elementwise, so one call gives the keys of a whole cohort.
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
NO_CLIENT = -1  # the client of a draw that belongs to no client


class Purpose(IntEnum):
    """The purpose of a key. The numbers determine results: never reuse or change one."""

    COHORT = 1
    TRAIN = 2
    PERSONALIZE = 3
    INIT = 4  # a method's draws before round 1
    SCORE = 5  # a server's draws for a client in a round
    EVALUATE = 6  # the sample of clients that are evaluated
    SPLIT = 7  # the order in which a client's samples are divided into train, val and test, where they are made lazily


def _wrap_int64(value: IntLike) -> IntLike:
    """Wrap a Python integer to signed 64 bits; tensors are int64 already."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63) if isinstance(value, int) else value


def _logical_shift_right(value: IntLike, bits: int) -> IntLike:
    """Shift right and fill with zeros (`>>` of int64 copies the sign)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: IntLike) -> IntLike:
    value = _wrap_int64(value)
    value = _wrap_int64((value ^ _logical_shift_right(value, 30)) * _FIRST)
    value = _wrap_int64((value ^ _logical_shift_right(value, 27)) * _SECOND)
    return value ^ _logical_shift_right(value, 31)


def fold(key: IntLike, *parts: IntLike) -> Tensor:
    """Hash integers into a key, one after the other; tensors broadcast, so a key may have a leading axis.

    Python integers are hashed in Python: one-element tensors take twenty times as long.
    """
    if isinstance(key, Tensor):
        key = key.long()
    for part in parts:
        if isinstance(part, Tensor):
            part = part.to(key.device if isinstance(key, Tensor) else part.device, torch.int64)
        key = _mix(_wrap_int64(key * _FIRST) + _mix(part + _GOLDEN) + _GOLDEN)
    return torch.as_tensor(key, dtype=torch.int64)


def permutation(key: Tensor, n: int) -> Tensor:
    """Return a random permutation of n items: they are sorted by their hashes."""
    return fold(key, torch.arange(n, device=key.device)).argsort(stable=True)


def uniform(key: Tensor, n: int) -> Tensor:
    """Return n numbers strictly between 0 and 1, in float64: the midpoints of 2^52 equal intervals."""
    bits = (fold(key, torch.arange(n, device=key.device)) >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) * 2**-52


def normal(key: Tensor, n: int) -> Tensor:
    """Return n numbers of the standard normal distribution, in float64 (Box and Muller)."""
    return (-2 * uniform(fold(key, 0), n).log()).sqrt() * (2 * math.pi * uniform(fold(key, 1), n)).cos()
