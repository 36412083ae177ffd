"""Compilation of kernels before their use: in parallel, each checked."""

from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.checks import problems
from fedobp.engine.kernels.launches import Launch
from fedobp.errors import FedobpError

_checked: set[Hashable] = set()  # variants, each with the card for which it was checked


def compile_all(launches: Sequence[Launch], device: torch.device, card: Card | None, must_read: bool = True) -> None:
    """Launch kernels once, in parallel, so that Triton compiles and loads them.

    Triton's passes and the assembler run without Python's lock, so threads are enough. With a card, a kernel that has a
    race is refused, and if it `must_read` them also one whose IR cannot be read.
    """
    stream = torch.cuda.current_stream(device)

    def launch(one: Launch) -> tuple[str, Any]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return one.kernel.__name__, one()

    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(launch, launches))
    for name, kernel in compiled:
        _refuse_problems(name, kernel, card, must_read)


def launch_checked(launches: Iterable[Launch], card: Card | None, must_read: bool) -> None:
    """Launch kernels one after another; those whose variant is new are checked like the others."""
    for one in launches:
        kernel, known = one(), (one.variant, card, must_read)
        if known not in _checked:
            _refuse_problems(one.kernel.__name__, kernel, card, must_read)
            _checked.add(known)


def _refuse_problems(name: str, kernel: Any, card: Card | None, must_read: bool) -> None:
    wrong = problems(kernel, card, must_read=must_read) if card else []
    if wrong:
        raise FedobpError(f"the kernel {name} cannot be used on this card: {'; '.join(wrong)}; use --kernels off")
