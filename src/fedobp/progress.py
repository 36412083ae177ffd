"""Progress of long work deep inside a run, such as tuning: reported to whoever shows progress, if anyone does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, float], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def report(what: str, share: float) -> None:
    """Tell what is being done, and the share of it that is done."""
    if listener := _listener.get():
        listener(what, share)


@contextmanager
def shown_by(listener: Listener) -> Iterator[None]:
    """Let a function show the progress of what happens in this block."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)
