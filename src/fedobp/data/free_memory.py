"""How much memory is free: asked before something large is read, because a full machine ends programs at once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedobp.errors import FedobpError, first_line


def available() -> float:
    """Return the bytes that this process may still take: of the machine, of its container, or of its own limit."""
    page = os.sysconf("SC_PAGE_SIZE")
    found, mapped, resident = float(page * os.sysconf("SC_PHYS_PAGES")), 0, 0
    with suppress(OSError, ValueError, IndexError):  # files of Linux
        mapped, resident = (int(pages) * page for pages in Path("/proc/self/statm").read_text().split()[:2])
        [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
        found = 1024.0 * int(line.split()[1])
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such limit, or the word "max"
            found = min(found, float(Path(limit).read_text()) - resident)
    with suppress(ImportError):  # not on Windows
        import resource

        allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
        if allowed != resource.RLIM_INFINITY:
            found = min(found, float(allowed - mapped))
    return max(0.0, found)


def require(what: str, size: float) -> None:
    """Refuse what needs more bytes than are free."""
    if size > available():
        raise _lacking(what, _amount(size))


@contextmanager
def room_for(what: str, size: float = 0) -> Iterator[None]:
    """Refuse what needs more bytes than are free, and say in a sentence where memory runs out nevertheless."""
    require(what, size)
    try:
        yield
    except MemoryError as error:
        raise _lacking(what, _amount(size) if size else first_line(error)) from error


def _lacking(what: str, asked: str) -> FedobpError:
    return FedobpError(
        f"{what} needs more memory than there is (asked for: {asked}; free: {_amount(available())}): use fewer or "
        "smaller samples, or a machine with more memory"
    )


def _amount(size: float) -> str:
    return f"{size:,.0f} bytes" if size < 2**20 else f"{size / 2**20:,.0f} MiB"
