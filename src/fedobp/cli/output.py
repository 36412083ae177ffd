"""What commands print: JSON or something to read on stdout, notes and errors on stderr."""

import io
import json
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from fedobp.errors import FedobpError, short

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class OutputError(Exception):
    """Standard output did not take what was printed; other files fail with errors of their own."""

    def __init__(self, reason: OSError) -> None:
        self.reason = reason


class StandardOutput:
    """Standard output that says whose failure it was, and drops the rest: the interpreter flushes it once more."""

    def __init__(self) -> None:
        _reserve_descriptors()
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
            _discard(self._stream)
            raise OutputError(error) from error


def _reserve_descriptors() -> None:
    """Take the numbers of closed standard streams, so that no file of ours gets what a library prints there."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _discard(stream: TextIO) -> None:
    """Send what a stream still holds, and all that follows, nowhere."""
    with suppress(OSError):  # a stream in memory has no number
        target = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)


def print_stderr(line: str) -> None:
    """Write a line to stderr, if anybody takes it."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def print_note(message: object) -> None:
    """Write a note to stderr, in one line."""
    print_stderr(f"note: {short(message, 1000)}")


def print_error(sentence: str, limit: int) -> int:
    """Write a user error to stderr, in one line, and return its exit code."""
    print_stderr(f"error: {short(sentence, limit)}")
    return 2


def report_failures(error: FedobpError, bug: BaseException | None = None) -> typer.Exit:
    """Print every line of an error, after the traceback of a bug, and return what ends the command."""
    if bug:
        traceback.print_exception(bug)
    for line in str(error).splitlines():
        code = print_error(line, 1000)
    return typer.Exit(code)


def stdout_console() -> "Console":
    """Return where to print: without colour where nobody sees it."""
    from rich.console import Console

    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return Console()
    return Console(color_system=None, width=None if sys.stdout.isatty() else 120)


def print_result(content: "Mapping[str, Any] | RenderableType", footer: str = "") -> None:
    """Print a JSON object alone, or something to read with a line after it."""
    if isinstance(content, dict):
        sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")
        return
    console = stdout_console()
    console.print(content, soft_wrap=False)
    if footer:
        console.print(footer, soft_wrap=True, highlight=False, markup=False)


def next_command(dataset: str, data_dir: str | None, *flags: object) -> str:
    """Return the sentence that names a run to go on with: quoted for a shell, in the data folder that was named."""
    place = [] if data_dir is None else ["--data-dir", data_dir]
    return f"Next: {shlex.join(['fedobp', 'run', '--dataset', dataset, *place, *map(str, flags)])}"
