"""Entry point of the command line: `fedobp`, and `python -m fedobp`.

The signal handlers are set before the rest is imported, which takes a while.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from fedobp import interrupts
from fedobp.errors import STOP_SIGNALS, Stopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; a stop signal ends it with exit code 128 plus the signal's number, without a traceback."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as in `nohup` and in the background of a script
            signal.signal(number, _stop)
    try:
        _require_folder()
        from fedobp.cli import main as run

        run()
    except Stopped as stop:  # outside of the command itself
        _exit(stop.code - 128, None)
    finally:
        _exit_on_next_signal()


def _require_folder() -> None:
    """End with a user error if the current folder is deleted: torch's libraries cannot be loaded there."""
    try:
        os.getcwd()  # noqa: PTH109 (pathlib takes longer to load)
    except FileNotFoundError:
        with suppress(OSError):
            os.write(2, b"error: the current folder no longer exists: change to another one\n")
        raise SystemExit(2) from None


def _stop(number: int, frame: FrameType | None) -> None:
    """Raise `Stopped`, so that partly written files are removed; a second signal ends the process at once.

    Training ends its round first, and writes a checkpoint.
    """
    _exit_on_next_signal()
    if interrupts.defer(number):
        with suppress(OSError):
            os.write(2, b"The round ends first, then a checkpoint is written; a second signal ends it at once.\n")
        return
    while frame:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            _exit(number, frame)  # an import may turn the exception into another one
        frame = frame.f_back
    raise Stopped(number)


def _exit_on_next_signal() -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == _stop:
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # progress bars hide the cursor
        os.write(2, f"{show_cursor}{STOP_SIGNALS[number]}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()
