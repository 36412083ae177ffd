"""Progress bars on stderr."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from fedobp.progress import shown_by

if TYPE_CHECKING:
    from fedobp.launch import Progress

_TOGETHER = 0.1  # seconds: rounds of runs side by side end nearly at once, and tell the speed only together
_WINDOW = 600.0  # seconds over which the speed is estimated: some rounds, also where one takes minutes


def _bars_disabled() -> bool:
    """Return whether to show no bars: stderr is no terminal, or NO_COLOR is set."""
    return not sys.stderr.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def task_progress() -> Iterator[Callable[[str, float], None]]:
    """Show a bar on stderr; the function it yields takes the current step's name and the share that is done."""
    if _bars_disabled():
        yield lambda what, share: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("[bold]{task.description}"), bars.BarColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("starting", total=1.0)

        def advance(what: str, share: float) -> None:
            shown.update(task, description=what, completed=share)

        with shown_by(advance):
            yield advance
        shown.update(task, description="done", completed=1.0)


@contextmanager
def round_progress(runs: int) -> Iterator[Callable[[str, "Progress"], None]]:
    """Show a bar of all runs' rounds on stderr; the function it yields takes a label and a run's progress."""
    if _bars_disabled():
        yield lambda label, at: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("[bold]{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("round {task.fields[round]}/{task.fields[rounds]}"),
        bars.TextColumn("{task.fields[accuracy]}"),
        bars.TextColumn("{task.fields[speed]}"),
        bars.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with bars.Progress(
        *columns, console=Console(stderr=True), get_time=monotonic, speed_estimate_period=_WINDOW
    ) as shown:
        task = shown.add_task("starting", total=None, round=0, rounds="?", accuracy="", speed="")
        waiting, last = 0, float("-inf")

        def advance(label: str, at: "Progress") -> None:
            nonlocal waiting, last
            now, waiting, step = monotonic(), waiting + 1, 0
            if now > last + _TOGETHER:
                waiting, last, step = 0, now, waiting
            speed = shown.tasks[0].speed
            shown.update(
                task,
                advance=step,
                total=runs * at.rounds,
                description=label,
                round=at.round,
                rounds=at.rounds,
                accuracy="" if at.accuracy is None else f"accuracy {at.accuracy:.1f}",
                speed="" if speed is None else f"{speed:.1f} rounds/s",
            )

        with shown_by(lambda what, share: shown.update(task, description=f"{what} {share:.0%}")):
            yield advance
        shown.update(task, advance=waiting)
