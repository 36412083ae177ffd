"""Child processes of tests have the default signal handlers, and are killed with their own children."""

import os
import signal
import sys
from pathlib import Path

import pytest
from children import children

# A process that is not killed writes to its pipe after a while. It holds the pipe open as long as it lives.
LONG = "import os, sys, time; time.sleep(60); os.write(int(sys.argv[1]), b'not killed')"
PARENT = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:], close_fds=False)
print(1, flush=True)
time.sleep(60)
"""


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    os.close(ends[0])


def read_to_end(pipe):
    """Wait until the pipe's other end is closed, and return what was written."""
    reads, writes = pipe
    os.close(writes)
    return os.read(reads, 100)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_that_are_ignored_or_blocked_here_have_their_defaults_in_a_child(ran, name):
    number = getattr(signal, name)
    before, mask = signal.signal(number, signal.SIG_IGN), signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        said = ran(
            "-c", f"import os, signal; signal.signal({number}, lambda *_: exit(7)); os.kill(os.getpid(), {number})"
        )
        ignored = ran("-c", f"import signal; print(signal.getsignal({number}) is signal.SIG_IGN)")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(number, before)
    assert said.code == 7
    assert ignored.out == "False\n"


def test_a_child_and_what_it_started_end_with_the_test(pipe):
    with children() as start:
        process = start("-c", PARENT, sys.executable, "-c", LONG, pipe[1], pass_fds=[pipe[1]])
        assert process.stdout.readline() == "1\n"
    assert process.returncode == -signal.SIGKILL
    assert read_to_end(pipe) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_child_ends_with_a_test_process_that_is_killed(start, pipe):
    code = f"""
import os, signal
from children import children
with children() as start:
    start("-c", "print(1, flush=True); " + {LONG!r}, {pipe[1]}, pass_fds=[{pipe[1]}]).stdout.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    start("-c", code, pass_fds=[pipe[1]], cwd=Path(__file__).parent)
    assert read_to_end(pipe) == b""
