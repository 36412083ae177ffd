"""Checks of free memory before large reads, because the system kills a process that runs out of memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedobp.errors import NoMemory, first_line


def free_bytes() -> float:
    """Return the bytes that this process may still allocate: the least of machine, container and process limit."""
    page = os.sysconf("SC_PAGE_SIZE")
    free, mapped, resident = float(page * os.sysconf("SC_PHYS_PAGES")), 0, 0
    with suppress(OSError, ValueError, IndexError):  # Linux only
        mapped, resident = (int(pages) * page for pages in Path("/proc/self/statm").read_text().split()[:2])
        [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
        free = 1024.0 * int(line.split()[1])
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no limit, or the word "max"
            free = min(free, float(Path(limit).read_text()) - resident)
    with suppress(ImportError):  # not on Windows
        import resource

        limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit_bytes != resource.RLIM_INFINITY:
            free = min(free, float(limit_bytes - mapped))
    return max(0.0, free)


def require_free_memory(what: str, size: float) -> None:
    """Raise a user error if `what` needs more bytes than are free."""
    if size > free_bytes():
        raise _out_of_memory(what, _format_bytes(size))


@contextmanager
def memory_guard(what: str, size: float = 0) -> Iterator[None]:
    """Raise a user error if `what` needs more bytes than are free, or if a MemoryError occurs inside the block."""
    require_free_memory(what, size)
    try:
        yield
    except MemoryError as error:
        raise _out_of_memory(what, _format_bytes(size) if size else first_line(error)) from error


def _out_of_memory(what: str, asked: str) -> NoMemory:
    return NoMemory(
        f"{what} needs more memory than there is (asked for: {asked}; free: {_format_bytes(free_bytes())}): use "
        "fewer or smaller samples, or a machine with more memory"
    )


def _format_bytes(size: float) -> str:
    return f"{size:,.0f} bytes" if size < 2**20 else f"{size / 2**20:,.0f} MiB"
