"""Compilation of kernels before their use: in parallel, each checked."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.checks import problems
from fedobp.engine.kernels.hazards import UnreadableError
from fedobp.engine.kernels.launches import Launch
from fedobp.errors import FedobpError


def compile_all(launches: Sequence[Launch], device: torch.device, card: Card | None) -> None:
    """Launch kernels once, in parallel, so that Triton compiles and loads them.

    Triton's passes and the assembler run without Python's lock, so threads are enough. With a card, a kernel that has a
    race is refused. IR that cannot be read is no reason here: `--kernels on` allows it.
    """
    stream = torch.cuda.current_stream(device)

    def launch(one: Launch) -> tuple[str, Any]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return one.kernel.__name__, one()

    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(launch, launches))
    for name, kernel in compiled:
        try:
            wrong = problems(kernel, card) if card else []
        except UnreadableError:
            continue
        if wrong:
            raise FedobpError(f"the kernel {name} cannot be used on this card: {'; '.join(wrong)}; use --kernels off")
