"""Processes that tests start: they do not depend on who started the tests, and none outlives them."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress

# Runs a command with the signals' defaults, whatever they are here (a background job ignores SIGINT). Under Linux it
# is killed when this process is, which then has no time to do it.
_FRESH = """
import os, signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def children():
    """Give a function that starts `python ARGUMENTS`, or another program, in a session of its own.

    What is still there at the end is killed, with all that it started.
    """

    def start(*arguments, program=sys.executable, stderr=subprocess.PIPE, **more):
        process = subprocess.Popen(
            [sys.executable, "-ISc", _FRESH, program, *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True, **more,
        )  # fmt: skip
        ends.enter_context(process)  # which waits for it
        ends.callback(_kill, process.pid)
        return process

    with ExitStack() as ends:
        yield start


def _kill(group):
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
