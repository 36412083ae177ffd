"""What commands print: JSON or something to read on stdout, bars on stderr."""

import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fedobp.federation import Progress


class Unwritten(Exception):
    """Standard output did not take what was printed; other files fail with errors of their own."""

    def __init__(self, reason: OSError) -> None:
        self.reason = reason


class Output:
    """Standard output that says whose failure it was, and drops the rest: the interpreter flushes it once more."""

    def __init__(self) -> None:
        _keep_low_numbers()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # closed by the caller, as in `fedobp methods >&-`
                setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
            elif isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal that cannot show ± still gets the rest
        self._stream = sys.stdout
        self._failed: OSError | None = None  # whoever printed may have ignored it
        if not self._stream.isatty():
            os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")  # typer takes a CI service for a terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or say that it was this stream that failed."""
        with self._watched():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush, or say that it was this stream that failed."""
        with self._watched():
            self._stream.flush()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            if self._failed:
                raise self._failed
            yield
        except OSError as error:
            self._failed = error
            _drop(self._stream)
            raise Unwritten(error) from error


def _keep_low_numbers() -> None:
    """Take the numbers of closed standard streams, so that no file of ours gets what a library prints there."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _drop(stream: TextIO) -> None:
    """Send what a stream still holds, and all that follows, nowhere."""
    with suppress(OSError):  # a stream in memory has no number
        target = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)


def tell(line: str) -> None:
    """Write a line to stderr, if anybody takes it."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def console() -> "Console":
    """Return where to print: without colour where nobody sees it."""
    from rich.console import Console

    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return Console()
    return Console(color_system=None, width=None if sys.stdout.isatty() else 120)


def show(content: "Mapping[str, Any] | RenderableType", footer: str = "") -> None:
    """Print a JSON object alone, or something to read with a line after it."""
    if isinstance(content, dict):
        sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")
        return
    screen = console()
    screen.print(content, soft_wrap=False)
    if footer:
        screen.print(footer, soft_wrap=True, highlight=False, markup=False)


def next_run(dataset: str, data_dir: str | None, *flags: object) -> str:
    """Return the sentence that names a run to go on with: quoted for a shell, in the data folder that was named."""
    place = [] if data_dir is None else ["--data-dir", data_dir]
    return f"Next: {shlex.join(['fedobp', 'run', '--dataset', dataset, *place, *map(str, flags)])}"


def _silent() -> bool:
    """Say whether there is nobody to show a bar to: no terminal, or NO_COLOR."""
    return not sys.stderr.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def stopwatch() -> Iterator[Callable[[str, float], None]]:
    """Show on stderr what is under way and how much of its time is gone."""
    if _silent():
        yield lambda what, share: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("[bold]{task.description}"), bars.BarColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda what, share: shown.update(task, description=what, completed=share)
        shown.update(task, description="done", completed=1.0)


@contextmanager
def progress(runs: int, rounds: int) -> Iterator[Callable[[str, "Progress"], None]]:
    """Show a bar on stderr while runs advance; nothing without a terminal or with NO_COLOR."""
    if _silent():
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
    with bars.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("starting", total=runs * rounds, round=0, rounds=rounds, accuracy="", speed="")

        def advance(label: str, at: "Progress") -> None:
            speed = shown.tasks[0].speed
            shown.update(
                task,
                advance=1,
                description=label,
                round=at.round,
                rounds=at.rounds,
                accuracy="" if at.accuracy is None else f"accuracy {at.accuracy:.1f}",
                speed="" if speed is None else f"{speed:.1f} rounds/s",
            )

        yield advance
