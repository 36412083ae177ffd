"""The one exception for what a caller can put right, and sentences that suggest the near miss."""

from collections.abc import Iterable
from difflib import get_close_matches

_LISTED = 50  # a table may have thousands of columns


class FedobpError(Exception):
    """Something the caller can put right: its text is one sentence that says what is wrong and what to do."""


def described(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # a message that cannot be made
        lines = []
    return ": ".join([type(error).__name__, *lines[:1]])


def unknown(kind: str, name: str, known: Iterable[str]) -> FedobpError:
    """Return the error for a name that does not exist, with the nearest one that does; of very many, the first."""
    names = list(known)
    lowered = {one.lower(): one for one in names}
    near = get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    hint = f"did you mean '{lowered[near[0]]}'? " if near else ""
    rest = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return FedobpError(f"unknown {kind} '{name}': {hint}known are {', '.join(names[:_LISTED])}{rest}")
