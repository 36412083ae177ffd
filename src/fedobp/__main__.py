"""The entry of the command line: `fedobp`, and `python -m fedobp`.

It imports little before it can answer a signal: loading the rest takes a while.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from fedobp.errors import STOP_SIGNALS, Stopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; a signal to stop ends it with 128 plus the signal's number, and without a traceback."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as in `nohup` and in the background of a script
            signal.signal(number, _stop)
    try:
        from fedobp.cli import main as run

        run()
    except Stopped as stop:  # before or after the command itself
        _leave(stop.code - 128, None)
    finally:
        _leave_at_once()


def _stop(number: int, frame: FrameType | None) -> None:
    """Unwind, so that files in the making are removed; a second signal does not wait for that."""
    _leave_at_once()
    while frame:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            _leave(number, frame)  # half of a module is loaded: an exception could come out as another one
        frame = frame.f_back
    raise Stopped(number)


def _leave_at_once() -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == _stop:
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        os.write(2, f"{cursor}{STOP_SIGNALS[number]}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()
