"""The exception for user errors, and helpers for its messages."""

import re
import signal
from collections.abc import Iterable

# The signals that stop the command line, and what it prints on stderr then.
STOP_SIGNALS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

# Out of memory: torch on CUDA and on the CPU, C++, threads, and shared libraries that cannot be loaded.
_NO_MEMORY = re.compile(
    "OutOfMemoryError|out of memory|ALLOC_FAILED|[Cc]an('t|not) allocate memory|bad_alloc|can't start new thread|"
    "failed to map segment"
)
LESS_MEMORY = "use a smaller --participation, --batch-size or --model"
_LISTED, _LISTED_CHARACTERS = 50, 450  # names in a message, and their length; a table may have thousands of columns


class FedobpError(Exception):
    """A user error: its text is one sentence that says what is wrong and what to do."""


class TryAgain(FedobpError):
    """A user error whose cause is not the run, such as a full disk: the run is not noted as one that failed."""


class NoMemory(FedobpError):
    """A user error: what is asked for needs more memory than is free now."""


class Stopped(BaseException):
    """A signal asks the process to stop.

    It is a BaseException, so that code that isolates failures of runs does not catch it. It is no KeyboardInterrupt,
    because typer turns each of those into exit code 130, also after SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number  # the convention of shells


def out_of_memory(error: object) -> bool:
    """Say whether an exception means that there is not enough memory."""
    if isinstance(error, RuntimeError | ImportError):
        return _NO_MEMORY.search(f"{type(error).__name__}: {error}") is not None
    return isinstance(error, MemoryError | NoMemory)


def short(value: object, limit: int = 60) -> str:
    """Return a value as one line of at most `limit` characters, for an error to quote.

    Control characters are escaped; `…` replaces the middle of a longer value.
    """
    try:
        text = str(value)
    except ValueError:  # an integer with thousands of digits
        text = f"{value:#x}"
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    if len(text) > 2 * limit:  # escapes only make it longer
        text = text[:limit] + text[-limit:]
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(line) <= limit:
        return line
    head = limit // 2
    return f"{line[:head]}…{line[len(line) - limit + head + 1 :]}"


def described(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # `__str__` of another library may fail
        lines = []
    return ": ".join([type(error).__name__, *lines[:1]])


def first_line(error: BaseException) -> str:
    """Return the first line of another library's exception, shortened; its type if it has no message."""
    return short(str(error).strip().partition("\n")[0] or type(error).__name__, 200)


def unknown(kind: str, name: str, choices: Iterable[str]) -> FedobpError:
    """Return the error for an unknown name: it suggests the nearest name, and lists the first ones."""
    from difflib import get_close_matches

    names = list(choices)
    lowered = {one.lower(): one for one in names}
    near = get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    hint = f"did you mean '{short(lowered[near[0]])}'? " if near else ""
    listed: list[str] = []
    for one in map(short, names[:_LISTED]):
        if listed and len(", ".join([*listed, one])) > _LISTED_CHARACTERS:
            break
        listed.append(one)
    rest = f" and {len(names) - len(listed):,} more" if len(names) > len(listed) else ""
    return FedobpError(f"unknown {kind} '{short(name)}': {hint}choose from {', '.join(listed)}{rest}")
