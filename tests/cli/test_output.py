"""What is printed where: terminals, pipes, and streams that are closed or full."""

import os
import sys
from pathlib import Path

import pytest

from cli.cases import TINY


def test_python_dash_m_and_no_colour_or_bars_without_a_terminal(ran, tmp_path):
    said = ran("-m", "fedobp", "run", *TINY, cwd=tmp_path, env={**os.environ, "FORCE_COLOR": ""})
    assert (said.code, said.err) == (0, "")
    assert "\x1b" not in said.out


def test_an_ascii_terminal_gets_what_it_can_show(ran, tmp_path):
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = ran("-m", "fedobp", "partition", "--clients", 5, cwd=tmp_path, env=ascii_only)
    assert (said.code, said.err) == (0, "")
    assert "5 clients" in said.out


def test_a_ci_service_is_no_terminal(ran):
    said = ran("-m", "fedobp", "--help", env={**os.environ, "GITHUB_ACTIONS": "true", "FORCE_COLOR": "1"})
    assert "Usage:" in said.out
    assert "\x1b" not in said.out


def test_a_reader_that_goes_away_is_no_error(ran):
    piped = f"{sys.executable} -m fedobp methods | head -n 1; exit ${{PIPESTATUS[0]}}"
    said = ran("-c", piped, program="/bin/bash")
    assert (said.code, said.err) == (0, "")


@pytest.mark.parametrize("arguments", [("--help",), ("run", *TINY, "--out", "here"), ("methods", "--json")])
@pytest.mark.parametrize("stream", ["gone", "closed", "full"])
def test_standard_output_may_be_gone_closed_or_full(command, monkeypatch, arguments, stream):
    if stream == "gone":
        reader, writer = os.pipe()
        os.close(reader)
        output = os.fdopen(writer, "w")
    else:
        output = Path("/dev/full").open("w") if stream == "full" else None  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        said = command(*arguments)
        sys.stdout.close()  # what is buffered is discarded
    full = "error: cannot write the output (No space left on device): send it elsewhere\n"
    assert (said.code, said.err) == ((2, full) if stream == "full" else (0, ""))
    assert "run" not in arguments or Path("here/result.json").exists()


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("arguments", "code"), [("--version", 0), ("run --rounds x", 2)])
def test_the_exit_code_does_not_depend_on_the_reader(closed, arguments, code, ran):
    said = ran("-c", f"{sys.executable} -m fedobp {arguments} {closed}", program="/bin/bash")
    assert (said.code, said.err) == (code, "")


def test_a_failure_of_standard_output_that_a_library_ignored_is_still_reported(ran):
    """Unbuffered: click writes an empty text to find out a stream's type, and that fails already."""
    said = ran("-c", f"{sys.executable} -u -m fedobp --version >/dev/full", program="/bin/bash")
    assert said.code == 2
    assert said.err.startswith("error: cannot write the output")


def test_files_do_not_take_the_numbers_of_closed_streams(tmp_path, ran):
    code = "import os, sys; from fedobp.cli import output; output.StandardOutput(); "
    code += "sys.exit(os.open('file', os.O_CREAT))"
    said = ran("-c", f'{sys.executable} -c "{code}" <&- >&- 2>&-', program="/bin/bash", cwd=tmp_path)
    assert said.code > 2
