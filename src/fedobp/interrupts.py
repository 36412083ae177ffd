"""Stop signals during training: the round ends first, and a checkpoint is written."""

from __future__ import annotations

from contextlib import contextmanager

from fedobp.errors import Stopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_waits = False  # whether something will ask for the signal soon
_received: int | None = None


@contextmanager
def deferred() -> Iterator[None]:
    """Keep stop signals for `received` in this block, and raise `Stopped` at its end, not where they arrive."""
    global _waits, _received
    _waits, _received = True, None
    try:
        yield
    finally:
        _waits = False
        if _received is not None:  # not asked for any more: in the last round, or one that failed
            raise Stopped(_received)


def defer(number: int) -> bool:
    """Keep a signal if something waits for it; return whether it was kept."""
    global _received
    if _waits and _received is None:
        _received = number
        return True
    return False


def received() -> int | None:
    """Return the signal that was kept."""
    return _received if _waits else None
