"""Child processes of tests: their signals have the defaults, and none outlives its test."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress

# Runs a command with the default signal handlers, whatever they are here (a background job ignores SIGINT). On Linux
# it is killed with this process, also if this process is killed itself.
_LAUNCHER = """
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
    """Yield a function that starts `python ARGUMENTS`, or another program, in a new session.

    Processes that still run at the end are killed, with their children.
    """

    def start(*arguments, program=sys.executable, stderr=subprocess.PIPE, **more):
        process = subprocess.Popen(
            [sys.executable, "-ISc", _LAUNCHER, program, *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True, **more,
        )  # fmt: skip
        ends.enter_context(process)  # waits for it
        ends.callback(_kill, process.pid)
        return process

    with ExitStack() as ends:
        yield start


def _kill(group):
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
