"""Output of commands: JSON or tables on stdout, notes and errors on stderr."""

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
    """Writing to standard output failed; `reason` is the OSError. Failures of other files are other exceptions."""

    def __init__(self, reason: OSError) -> None:
        self.reason = reason


class StandardOutput:
    """Standard output whose failures raise `OutputError`.

    After a failure the rest is discarded, because the interpreter flushes the stream again at exit.
    """

    def __init__(self) -> None:
        _reserve_descriptors()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # closed by the caller, as in `fedobp methods >&-`
                setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
            elif isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # for terminals whose encoding has no ±
        self._stream = sys.stdout
        self._failed: OSError | None = None  # raised again if the caller ignored it
        if not self._stream.isatty():
            os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")  # typer treats CI services as terminals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or raise `OutputError`."""
        with self._watched():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush, or raise `OutputError`."""
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
    """Open the descriptors 0 to 2 that are closed, so that no file gets one and receives what a library prints."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, with what it has buffered."""
    with suppress(OSError):  # a stream in memory has no descriptor
        target = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, target)
        os.close(null)


def print_stderr(line: str) -> None:
    """Write a line to stderr; a closed or full stderr is ignored."""
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
    """Print each line of an error, after the traceback of a bug; return the exception that ends the command."""
    if bug:
        traceback.print_exception(bug)
    for line in str(error).splitlines():
        code = print_error(line, 1000)
    return typer.Exit(code)


def stdout_console() -> "Console":
    """Return a console on stdout, without colour if stdout is no terminal or NO_COLOR is set."""
    from rich.console import Console

    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return Console()
    return Console(color_system=None, width=None if sys.stdout.isatty() else 120)


def print_result(content: "Mapping[str, Any] | RenderableType", footer: str = "") -> None:
    """Print a JSON object alone, or a text or table with a footer; texts hold paths, and are printed as they are."""
    if isinstance(content, dict):
        sys.stdout.write(json.dumps(content, allow_nan=False) + "\n")
        return
    for part in (content, footer):
        if not isinstance(part, str):
            stdout_console().print(part, soft_wrap=False)
        elif part:
            sys.stdout.write(f"{part}\n")


def next_command(dataset: str, data_dir: str | None, *flags: object) -> str:
    """Return the hint for the next command: a run on this dataset, quoted for a shell."""
    place = [] if data_dir is None else ["--data-dir", data_dir]
    return f"Next: {shlex.join(['fedobp', 'run', '--dataset', dataset, *place, *map(str, flags)])}"
