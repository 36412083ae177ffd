"""Compilation of kernels before their use: in parallel, each checked before it is launched."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Thread
from typing import Any, TypeVar

import torch

from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.checks import problems
from fedobp.engine.kernels.compilers import hash_triton
from fedobp.engine.kernels.launches import Launch
from fedobp.errors import FedobpError

T = TypeVar("T")
_checked: set[Hashable] = set()  # variants without a problem, each with the card for which it was checked


@cache
def hashing() -> Thread:
    """Return the thread that computes what all compilations need: start it early, beside other work."""
    thread = Thread(target=hash_triton, name="fedobp-hash", daemon=True)
    thread.start()
    return thread


def compile_all(launches: Sequence[Launch], device: torch.device, card: Card | None, must_read: bool = True) -> None:
    """Compile and launch kernels once, in parallel, so that they are loaded before a graph is captured.

    In threads, because Triton's passes and the assembler run without Python's lock. With a card, a kernel that has a
    race is refused before it is launched, and if it `must_read` them also one whose IR cannot be read.
    """
    hashing().join()  # otherwise each thread would compute it
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(on_stream(device, Launch.compiled), launches))
    for one, kernel in zip(launches, compiled, strict=True):
        check(one, card, must_read, kernel)
    # One after another: Triton 3.6 may load the launcher of another kernel when two threads load one. What it has lost
    # of a thread's kernels, in a table that it does not lock, is in its cache on disk.
    for one in launches:
        one()


def on_stream(device: torch.device, function: Callable[[Launch], T]) -> Callable[[Launch], T]:
    """Return a function for other threads, which uses the device and stream of this one."""
    stream = torch.cuda.current_stream(device)

    def call(launch: Launch) -> T:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return function(launch)

    return call


def launch_checked(launches: Iterable[Launch], card: Card | None, must_read: bool) -> None:
    """Launch kernels one after another; those whose variant is new are checked before."""
    for one in launches:
        check(one, card, must_read)
        one()


def check(launch: Launch, card: Card | None, must_read: bool, kernel: Any = None) -> None:
    """Refuse a kernel that has a problem on a card. What has none is not checked again.

    It is compiled if it is not given.
    """
    known = launch.variant, card, must_read
    if card is None or known in _checked:
        return
    if wrong := problems(kernel or launch.compiled(), card, must_read=must_read):
        name = launch.kernel.__name__
        raise FedobpError(f"the kernel {name} cannot be used on this card: {'; '.join(wrong)}; use --kernels off")
    _checked.add(known)
