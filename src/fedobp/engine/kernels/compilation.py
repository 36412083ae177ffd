"""Compilation of kernels before their use: in parallel, each checked before it is launched."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.checks import problems
from fedobp.engine.kernels.launches import Launch
from fedobp.errors import FedobpError

T = TypeVar("T")
_checked: set[Hashable] = set()  # variants, each with the card for which it was checked


def compile_all(launches: Sequence[Launch], device: torch.device, card: Card | None, must_read: bool = True) -> None:
    """Compile and launch kernels once, in parallel, so that they are loaded before a graph is captured.

    In threads, because Triton's passes and the assembler run without Python's lock. With a card, a kernel that has a
    race is refused before it is launched, and if it `must_read` them also one whose IR cannot be read.
    """
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(on_stream(device, Launch.compiled), launches))
    for one, kernel in zip(launches, compiled, strict=True):
        _refuse_problems(one, kernel, card, must_read)
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
        known = one.variant, card, must_read
        if card and known not in _checked:
            _refuse_problems(one, one.compiled(), card, must_read)
            _checked.add(known)
        one()


def _refuse_problems(launch: Launch, kernel: Any, card: Card | None, must_read: bool) -> None:
    wrong = problems(kernel, card, must_read=must_read) if card else []
    if wrong:
        name = launch.kernel.__name__
        raise FedobpError(f"the kernel {name} cannot be used on this card: {'; '.join(wrong)}; use --kernels off")
