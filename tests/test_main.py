"""The start of the command line, and stop signals: the message on stderr, the exit code, and the files of a run."""

import json
import re
import signal
import sys
import time

import pytest
from cli.cases import TINY

import fedobp
from fedobp.errors import Stopped


def test_interrupting_a_run_exits_130_without_a_traceback_and_keeps_the_metrics(start, tmp_path):
    process = start("-m", "fedobp", "run", *TINY, "--rounds", 100_000, "--out", "here", cwd=tmp_path)
    metrics = tmp_path / "here" / "metrics.jsonl"

    def rounds():
        return metrics.read_text().splitlines() if metrics.exists() else []

    while process.poll() is None and len(rounds()) < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    enough = len(rounds()) + 100
    while process.poll() is None and len(rounds()) < enough:
        time.sleep(0.05)
    assert process.poll() == 130, "it goes on, or has ended by itself"
    assert process.communicate() == (
        "",
        "The round ends first, then a checkpoint is written; a second signal ends it at once.\n"
        "note: fedobp run --resume here goes on with it\ninterrupted\n",
    )
    assert [json.loads(line)["round"] for line in rounds()][:3] == [1, 2, 3]
    assert not list(tmp_path.rglob("*.part"))
    assert (tmp_path / "here" / "checkpoint" / f"server-{len(rounds())}.safetensors").exists()


def test_a_second_signal_ends_a_run_at_once_without_a_torn_file(start, tmp_path):
    """The first round takes long, so both signals arrive in it."""
    flags = ("--clients", 2, "--epochs", 1000, "--participation", 1, "--alpha", 100, "--rounds", 1000, "--out", "here")
    process = start("-m", "fedobp", "run", *flags, cwd=tmp_path)
    while process.poll() is None and not (tmp_path / "here" / "config.toml").exists():
        time.sleep(0.05)
    time.sleep(1)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    assert process.wait(60) == 143
    assert process.communicate()[1].endswith("terminated\n")
    assert not (tmp_path / "here" / "checkpoint").exists()


STOPS = {
    "compare, before its plan is written": ("fedobp.sweep_plan.plan_sweep", "compare", ""),
    "compare": ("fedobp.launch._train", "compare", "note: fedobp sweep runs/.* goes on with it\n"),
    "paper": (
        "fedobp.paper.experiment.resume_sweep",
        "paper table1 --scale smoke",
        "note: the same command goes on with it\n",
    ),
}


@pytest.mark.parametrize(("where", "arguments", "note"), STOPS.values(), ids=STOPS)
def test_a_stopped_command_says_how_to_go_on_if_it_can(where, arguments, note, command, monkeypatch):
    def stop(*_, **__):
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(where, stop)
    said = command(*arguments.split())
    assert said.code == 130
    assert re.fullmatch(f"{note}interrupted\n", said.err)


# Each case sends its own process a signal, at another point of its life.
STOP = "import os, signal, sys; stop = lambda number=signal.SIGINT: os.kill(os.getpid(), number)\n"


CASES = {
    "in a command": """
import fedobp.cli.app
fedobp.cli.app.app = lambda **_: stop()
""",
    "in a command, by SIGTERM": """
import fedobp.cli.app
fedobp.cli.app.app = lambda **_: stop(signal.SIGTERM)
""",
    "within typer, by SIGTERM": """
import fedobp.cli.app
fedobp.cli.compare.refuse_flags = lambda *_: stop(signal.SIGTERM)
sys.argv = ["fedobp", "compare", "--config", "none.toml"]
""",
    "in an import": """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            stop()
sys.meta_path.insert(0, Finder())
sys.argv = ["fedobp", "--version"]
""",
    "in an import of a command": """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            try:
                stop()
            except BaseException:
                raise ImportError("as extension modules do")
sys.meta_path.insert(0, Finder())
sys.argv = ["fedobp", "methods"]
""",
    "again while the first unwinds": """
import fedobp.cli.app
def run():
    try:
        stop()
    finally:
        stop()
        print("too late")
fedobp.cli.main = run
""",
    "after the end": """
import atexit
atexit.register(stop)
sys.argv = ["fedobp", "--version"]
""",
}


@pytest.mark.parametrize("case", CASES)
def test_a_stop_signal_has_its_message_and_exit_code(case, ran):
    said = ran("-c", STOP + CASES[case] + "from fedobp.__main__ import main; main()")
    assert (said.code, said.err) == ((143, "terminated\n") if "SIGTERM" in case else (130, "interrupted\n"))
    assert "too late" not in said.out


def test_a_signal_that_the_caller_ignores_stays_ignored(ran):
    code = STOP + "signal.signal(signal.SIGINT, signal.SIG_IGN); import atexit; atexit.register(stop)\n"
    code += "sys.argv = ['fedobp', '--version']; from fedobp.__main__ import main; main()"
    assert ran("-c", code) == (0, f"fedobp {fedobp.__version__}\n", "")


@pytest.mark.parametrize("arguments", ["methods", "--version"])
def test_a_current_folder_that_is_deleted_is_a_user_error(arguments, ran, tmp_path):
    commands = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m fedobp {arguments}"
    said = ran("-c", commands, program="/bin/bash", cwd=tmp_path)
    assert said == (2, "", "error: the current folder no longer exists: change to another one\n")
