"""The command line as a whole: exit codes, error messages, notes and help."""

import sys
import warnings
from itertools import count
from unittest.mock import Mock

import pytest
import torch

import fedobp
from cli.cases import TINY
from fedobp import cli


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--method", "fedpr"], "did you mean 'fedper'"),
        (["run", "--dataset", "mnst"], "did you mean 'mnist'"),
        (["run", "--dataset", "mnist"], "fedobp data fetch mnist"),
        (["run", "--metod", "x"], "--method"),
        (["rnu"], "'run'"),
        (["run", "--rounds", "x"], "not a valid int"),
        (["run", "--rounds", "0"], "--rounds must be at least 1"),
        (["run", "--set", "q"], "NAME=VALUE"),
        (["run", "--set", "qq=1"], "did you mean 'q'"),
        (["run", "--set", "q=many"], "must be a number"),
        (["run", "--q", "1.5"], "between 0.0 and 1.0"),
        (["run", "--set", "norm=layers"], "did you mean 'layer'"),
        (["run", "--method", "fedavg", "--q", "0.5"], "has no options"),
        (["run", "--protocol", "paper"], "at least 100 rounds"),
        (["run", "--config", "none.toml"], "cannot read"),
        (["run", "--clients", "400"], "fewer than 10 for each of 400 clients"),
        (["run", "--lr", "1e9", "--rounds", "2"], "smaller --lr"),
        (["run", "--model", "cnn"], "at least 16x16"),
        (["run", "--precision", "tf32", "--device", "cpu"], "use --precision fp32 on the CPU"),
        (["run", "--engine", "lane"], "did you mean 'lanes'"),
        (["run", "--store-memory", "-1"], "--store-memory must be at least 0"),
        (["compare", "--methods", "fedobp,fedvag"], "did you mean 'fedavg'"),
        (["compare", "--seeds", "0"], "--seeds"),
        (["partition", "--alpha", "-1"], "--alpha"),
        (["data", "show", "nothing"], "unknown dataset"),
        (["data", "import", "mine", "none.npz"], "there is no file"),
        (["data", "import", "Bad Name", "none.npz"], "cannot name a dataset"),
        (["run", "--out", ""], "--out must not be empty"),
        (["run", "--out=  "], "--out must not be empty"),
        (["compare", "--methods", ""], "--methods must not be empty"),
        (["partition", "--save", ""], "--save must not be empty"),
        (["partition", "--plot", " "], "--plot must not be empty"),
        (["bench", "--data-dir="], "--data-dir must not be empty"),
        (["data", "list", "--data-dir", ""], "--data-dir must not be empty"),
        (["data", "show", ""], "an argument must not be empty"),
        (["run", "--out", "a\0b"], "'a\\x00b' holds a zero byte"),
        (["run", "--set", "q=" + "9" * 5000], "must be a number, not '999"),
        (["run", "--set", "two\nlines"], r"--set two\nlines must be written NAME=VALUE"),
        (["run", "--method", "two\nlines"], r"--method must be readable text, not 'two\nlines'"),
        (["run", "--rounds", "9" * 5000], "is not a valid int"),
        (["run", "--rounds", "two\nlines"], r"'two\nlines' is not a valid int"),
        (["run", "--" + "x" * 5000], "No such option"),
        (["x" * 5000], "No such command"),
        (["run", "x" * 5000], "unexpected extra argument"),
        (["run", "--out", "x" * 300, "--rounds", "1"], "cannot write xxx"),
        (["run", "--data-dir", "x" * 300, "--dataset", "mnist"], "xxx"),
        (["run", "--config", "x" * 300], "cannot read the configuration xxx"),
        (["compare", "--seeds", "100000000"], "--seeds 100000000 of 5 methods are more than the 1,000 runs"),
        (["compare", "--seeds", "1" + "0" * 30], "more than the 1,000 runs"),
        (["compare", "--methods", "fedavg", "--seeds", "1001"], "--seeds 1001 of 1 methods are more than"),
        (["compare", "--seeds", "2", "--seed", "4294967295"], "--seed must be at most 4294967295"),
        (["bench", "--runs", "100000000"], "--runs must be between 1 and 1000"),
        (["run", "--weight-decay", "1e30", "--rounds", "2"], "use a smaller --weight-decay (it is 1e+30)"),
        (["run", "--method", "fedprox", "--set", "mu=1e9", "--rounds", "2"], "use a smaller --set mu (it is 1e+09)"),
    ],
    ids=map(str, count()),
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_user_error_is_one_sentence_and_exit_code_2(command, arguments, sentence, as_json):
    said = command(*arguments, *(["--json"] if as_json and len(arguments) > 1 else []))
    assert said.code == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert said.err.strip().isprintable()
    assert len(said.err) < 500
    assert sentence in said.err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
    ids=["python", "cuda", "cpu", "c++", "thread", "library"],
)
def test_too_little_memory_is_one_sentence(command, monkeypatch, error):
    monkeypatch.setattr("fedobp.federation.Federation.run", Mock(side_effect=error))
    said = command("run")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: there is not enough memory: use a smaller --participation")


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedobp", "methods"])
    for error in (RuntimeError("a bug"), OSError("a bug")):
        monkeypatch.setattr("fedobp.cli.methods.print_result", Mock(side_effect=error))
        with pytest.raises(type(error), match="a bug"):
            cli.main()


@pytest.mark.filterwarnings("default")
def test_a_warning_is_a_note_in_one_line(command, monkeypatch):
    monkeypatch.setattr(
        "fedobp.engine.lanes.engine.fused_for", lambda *_: warnings.warn("no kernels here", stacklevel=1)
    )
    said = command("run", *TINY)
    assert said.code == 0
    assert "note: no kernels here\n" in said.err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["data"], ["data", "import", "--help"]])
def test_help(command, arguments):
    said = command(*arguments)
    assert said.code == 0
    assert "Usage:" in said.out


@pytest.mark.parametrize("name", ["run", "compare", "partition"])
def test_help_shows_examples(command, name):
    assert f"fedobp {name} --" in command(name, "--help").out


@pytest.mark.parametrize(
    ("name", "words"),
    [("sweep", "A sweep file; or a sweep's folder"), ("collect", "The folder to bring the runs into")],
)
def test_help_says_what_arguments_are(command, name, words):
    """With click 8.4 or newer, typer before 0.21 says nothing of them."""
    assert words in command(name, "--help").out


def test_version(command):
    assert command("--version").out == f"fedobp {fedobp.__version__}\n"


def test_help_loads_nothing_large(ran):
    said = ran("-X", "importtime", "-m", "fedobp", "--help")
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.err.splitlines()}
    assert (said.code, loaded & {"fedobp", "typer"}) == (0, {"fedobp", "typer"})
    assert not loaded & {"torch", "numpy", "scipy", "sklearn", "matplotlib", "PIL", "requests", "pooch", "safetensors"}
