"""Processes of a local deployment: all of them end with it, whatever happens."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from fedobp import FedobpError
from fedobp.errors import Stopped
from fedobp.flower.local import LocalDeployment, flower_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

# Starts another program in a session of its own, as Flower's superlink does, and tells its process id.
PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True).pid, flush=True)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(0, flush=True); time.sleep(1000)"


def lines_of(path):
    """Wait until a log has a line, and return its lines."""
    while not (path.exists() and path.read_text().endswith("\n")):
        time.sleep(0.01)
    return path.read_text().splitlines()


def is_running(pid):
    """Say whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("waits", [True, False], ids=["its parent runs", "its parent has died"])
def test_what_a_program_started_in_another_session_ends_too(waits, tmp_path):
    with LocalDeployment(tmp_path) as running:
        running.start("run", "python", ["-c", PARENT + "time.sleep(1000)\n"])
        [pid] = lines_of(running.log("run"))
        running.check_running()
        if not waits:
            os.kill(running.pid("run"), signal.SIGKILL)
            while running.running("run"):
                time.sleep(0.01)
        assert is_running(pid)
    while is_running(pid):  # it is killed, and nobody waits for it but the system
        time.sleep(0.01)


def test_a_program_that_ignores_the_signal_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("fedobp.flower.local.PATIENCE", 0.1)
    with LocalDeployment(tmp_path) as running:
        running.start("node-0", "python", ["-c", STUBBORN])
        lines_of(running.log("node-0"))
        pid = running.pid("node-0")
    assert not is_running(pid)


def test_a_program_that_ends_early_is_named_with_its_log(tmp_path):
    with LocalDeployment(tmp_path) as running:
        running.start("run", "python", ["-c", ""])
        running.start("node-0", "python", ["-c", "raise SystemExit(3)"])
        while running.running("run") or running.running("node-0"):
            time.sleep(0.01)
        with pytest.raises(FedobpError, match=r"^node-0 ended early: .*logs/node-0\.log says why$"):
            running.check_running()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_wait_until_they_are_asked_for(number, tmp_path):
    before = signal.getsignal(number)
    with LocalDeployment(tmp_path) as running:
        running.start("node-0", "python", ["-c", "import time; time.sleep(1000)"])
        pid = running.pid("node-0")
        for _ in range(2):
            os.kill(os.getpid(), number)
        with pytest.raises(Stopped) as stop:
            running.check()
    assert stop.value.code == 128 + number
    assert signal.getsignal(number) == before
    assert not is_running(pid)


def test_programs_end_with_a_process_that_is_killed(start, tmp_path):
    code = f"""
import time
from pathlib import Path
from fedobp.flower.local import LocalDeployment
with LocalDeployment(Path({str(tmp_path)!r})) as running:
    running.start("node-0", "python", ["-c", "import time; time.sleep(1000)"])
    print(running.pid("node-0"), flush=True)
    time.sleep(1000)
"""
    process = start("-c", code)
    pid = process.stdout.readline().strip()
    # The launcher has become the program once its command line is the program's.
    while b"prctl" in Path(f"/proc/{pid}/cmdline").read_bytes():
        time.sleep(0.01)
    process.kill()
    while is_running(pid):
        time.sleep(0.01)


def test_flower_reads_values_as_they_are_written():
    from flwr.common.config import parse_config_args

    values = {"client": 3, "data": '/a folder/it\'s "here".npz', "state": "C:\\state"}
    assert parse_config_args([flower_config(values)]) == values
