"""The command line as its user meets it: what it prints where, its exit codes, and every error."""

import json
import os
import re
import signal
import sys
import time
import tomllib
import warnings
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console

import fedobp
from fedobp import cli
from fedobp.algorithms import METHODS
from fedobp.federation import deal
from fedobp.report.partition import heat_map
from fedobp.report.tables import compare_table, datasets_table, methods_table, run_table, summarise
from fedobp.storage import load_state_dict

TINY = ("--clients", 5, "--rounds", 2, "--epochs", 1, "--model", "mlp")
ACCURACY = {"pooled", "client_mean", "client_std", "worst_decile", "balanced", "majority_class"}


def write_npz(path, n=60, shape=(8, 8), labels=3, **more):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (n, *shape), dtype=np.uint8)
    np.savez(path, x=x, y=np.arange(n) % labels, **more)
    return path


@pytest.mark.essential
def test_run_json_has_exactly_the_documented_shape(command):
    said = command("run", *TINY, "--finetune-epochs", 1, "--out", "here", "--json")
    assert (said.code, said.err) == (0, "")
    assert said.out.count("\n") == 1
    run = said.json
    assert set(run) == {
        "method", "dataset", "seed", "rounds", "protocol", "accuracy", "last", "finetuned", "history",
        "personal", "bytes", "compute", "seconds", "partition", "out",
    }  # fmt: skip
    assert (run["method"], run["dataset"], run["seed"], run["rounds"]) == ("fedobp", "digits", 42, 2)
    assert set(run["accuracy"]) == set(run["last"]) == set(run["finetuned"]) == ACCURACY
    assert set(run["personal"]) == {"mean", "min", "max", "share"}
    assert set(run["compute"]) == {"visit", "use"}
    assert set(run["bytes"]) == {"down_per_round", "up_per_round", "down_total", "up_total"}
    assert [len(point) for point in run["history"]] == [3, 3]
    assert run["history"][-1] == [2, run["accuracy"]["pooled"], run["accuracy"]["client_mean"]]
    assert run["protocol"]["name"] == "default"
    assert run["out"] == "here"
    assert json.loads(Path("here/result.json").read_text()) == run


def test_finetuned_is_null_without_finetune_epochs(command):
    assert command("run", *TINY, "--json").json["finetuned"] is None


def test_a_run_folder_holds_config_metrics_timings_models_and_result(command):
    assert command("run", *TINY, "--out", "here").code == 0
    assert {path.name for path in Path("here").iterdir()} == {
        "config.toml", "metrics.jsonl", "timings.jsonl", "models", "result.json",
    }  # fmt: skip
    config = tomllib.loads(Path("here/config.toml").read_text())
    assert "out" not in config
    assert config["clients"] == 5
    lines = [json.loads(line) for line in Path("here/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    assert all(not {"seconds", "time"} & set(line) for line in lines)


def test_a_runs_own_config_runs_it_again_to_the_same_bytes(command):
    command("run", *TINY, "--q", 0.9, "--set", "score=product", "--out", "first")
    assert command("run", "--config", "first/config.toml", "--out", "second").code == 0
    for name in ("config.toml", "metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()


def test_flags_win_over_the_configuration_file(command):
    command("run", *TINY, "--q", 0.9, "--out", "first")
    command("run", "--config", "first/config.toml", "--seed", 7, "--method", "fedavg", "--out", "second")
    config = tomllib.loads(Path("second/config.toml").read_text())
    assert (config["seed"], config["clients"], config["method"], config["options"]) == (7, 5, "fedavg", {})


@pytest.mark.filterwarnings("default")
def test_a_warning_is_a_note_in_one_line(command, monkeypatch):
    monkeypatch.setattr("fedobp.engine.lanes.fused_for", lambda *_: warnings.warn("no kernels here", stacklevel=1))
    said = command("run", *TINY)
    assert said.code == 0
    assert "note: no kernels here\n" in said.err


@pytest.mark.essential
def test_a_folder_that_holds_a_run_is_refused_and_left_alone(command):
    command("run", *TINY, "--out", "here")
    before = {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    said = command("run", *TINY, "--out", "here", "--json")
    assert (said.code, said.out) == (2, "")
    assert "already holds a run" in said.err
    assert {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()} == before


def test_the_default_folder_is_always_new_and_named_at_the_end(command):
    first, second = command("run", *TINY), command("run", *TINY)
    folders = [said.out.strip().splitlines()[-1].removeprefix("Run folder: ") for said in (first, second)]
    assert len(set(folders)) == 2
    assert all(Path(folder, "result.json").exists() for folder in folders)


@pytest.mark.parametrize(("choice", "files"), [("none", set()), ("global", {"global"}), ("all", {"global", "clients"})])
def test_save_models(command, choice, files):
    command("run", *TINY, "--save-models", choice, "--out", "here")
    assert {path.stem for path in Path("here").glob("models/*.safetensors")} == files


def test_a_saved_client_loads_into_an_ordinary_module_and_predicts_the_same(command):
    command("run", *TINY, "--method", "fedper", "--out", "here")
    result = fedobp.Federation(fedobp.Config(clients=5, rounds=2, epochs=1, model="mlp")).run("fedper")
    module = fedobp.Model("mlp", (1, 8, 8), 10).module()
    module.load_state_dict(load_state_dict("here", client=3))
    again = fedobp.Model("mlp", (1, 8, 8), 10).module()
    again.load_state_dict(result.state_dict(client=3))
    x = torch.linspace(-1, 1, 64 * 5).reshape(5, 1, 8, 8)
    assert torch.equal(module(x), again(x))


def test_compare_prints_one_table_and_writes_every_run(command):
    said = command("compare", *TINY, "--methods", "fedobp,fedavg,local", "--seeds", 2, "--out", "here")
    assert said.code == 0
    assert all(name in said.out for name in ("fedobp", "fedavg", "local", "client mean", "seconds", "Run folder: here"))
    assert "±" in said.out
    assert {path.name for path in Path("here").iterdir()} == {"compare.json", "compare.toml"} | {
        f"{method}-seed{seed}" for method in ("fedobp", "fedavg", "local") for seed in (42, 43)
    }


def test_compare_json(command):
    found = command("compare", *TINY, "--methods", "fedavg,local", "--seeds", 3, "--json").json
    assert set(found) == {"runs", "table"}
    assert [(run["method"], run["seed"]) for run in found["runs"]] == [
        (method, seed) for seed in (42, 43, 44) for method in ("fedavg", "local")
    ]
    for row in found["table"]:
        pooled = [run["accuracy"]["pooled"] for run in found["runs"] if run["method"] == row["method"]]
        assert row["seeds"] == [42, 43, 44]
        assert row["pooled"]["mean"] == pytest.approx(np.mean(pooled))
        assert row["pooled"]["std"] == pytest.approx(np.std(pooled, ddof=1))
        assert set(row) == {"method", "pooled", "client_mean", "seeds"}


def test_compare_with_one_seed_has_no_deviation(command):
    found = command("compare", *TINY, "--methods", "fedavg", "--json").json
    assert found["table"][0]["pooled"]["std"] is None


def test_compare_gives_an_option_to_the_methods_that_have_it(command):
    found = command("compare", *TINY, "--methods", "fedobp,fedavg", "--q", 1, "--json").json
    assert found["runs"][0]["accuracy"] == found["runs"][1]["accuracy"]
    said = command("compare", *TINY, "--methods", "fedavg,local", "--q", 1)
    assert said.code == 2
    assert "none of these methods has options" in said.err
    said = command("compare", *TINY, "--methods", "fedobp,local", "--set", "qq=1")
    assert (said.code, "did you mean 'q'" in said.err) == (2, True)


def test_a_compared_run_equals_the_same_run_alone(command):
    both = command("compare", *TINY, "--methods", "local,fedper", "--json").json["runs"][1]
    alone = command("run", *TINY, "--method", "fedper", "--json").json
    assert {**both, "seconds": 0, "out": ""} == {**alone, "seconds": 0, "out": ""}


def test_both_engines_give_the_same_table(command):
    lanes, serial = (
        command(
            "compare", *TINY, "--methods", "fedobp,fedper", "--precision", "fp64", "--engine", engine, "--json"
        ).json
        for engine in ("lanes", "serial")
    )
    assert lanes["table"] == serial["table"]


def test_partition_json_counts_every_sample_once(command):
    clients = command("partition", "--clients", 7, "--json").json["clients"]
    assert [client["id"] for client in clients] == list(range(7))
    assert sum(client["train"] + client["test"] for client in clients) == 1797
    for client in clients:
        assert sum(client["labels"].values()) == client["train"] + client["test"]
        assert client["test"] == int(0.25 * (client["train"] + client["test"]))


def test_partition_draws_a_heat_map_and_a_picture(command):
    said = command("partition", "--clients", 6, "--plot", "map.png")
    assert said.code == 0
    assert "1,797 samples on 6 clients" in said.out
    assert "█" in said.out
    assert Path("map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["map.jpg", "nowhere/map.png"])
def test_a_picture_that_cannot_be_written_is_refused(command, name):
    said = command("partition", "--plot", name)
    assert said.code == 2
    assert "--plot" in said.err


def test_data_import_list_and_show(command):
    write_npz("mine.npz", labels=4, n_train=40)
    row = command("data", "import", "mine", "mine.npz", "--json").json
    assert row == {"name": "mine", "samples": 60, "shape": [8, 8], "classes": 4, "available": True, "clients": 0}
    assert command("data", "show", "mine", "--json").json == row
    listed = {entry["name"]: entry for entry in command("data", "list", "--json").json["datasets"]}
    assert listed["mine"] == row
    assert listed["digits"] == {
        "name": "digits", "samples": 1797, "shape": [8, 8], "classes": 10, "available": True, "clients": 0,
    }  # fmt: skip
    assert listed["cifar10"]["available"] is False
    assert {"mnist", "fmnist", "emnist", "cifar10", "cifar100", "svhn", "organamnist", "organcmnist"} <= set(listed)


def test_a_damaged_file_is_listed_as_not_available(command):
    Path("data").mkdir()
    Path("data/broken.npz").write_bytes(b"PK\x03\x04 not a zip file")
    listed = {entry["name"]: entry for entry in command("data", "list", "--json").json["datasets"]}
    assert listed["broken"]["available"] is False
    assert listed["digits"]["available"] is True
    assert command("data", "list").code == 0
    assert "cannot be read" in command("data", "show", "broken").err


def test_an_imported_set_trains(command):
    write_npz("mine.npz", n=120)
    command("data", "import", "mine", "mine.npz")
    said = command("run", "--dataset", "mine", *TINY, "--json")
    assert said.code == 0
    assert said.json["dataset"] == "mine"


def test_an_imported_table_trains_with_the_mlp(command):
    write_npz("table.npz", n=120, shape=(6,))
    command("data", "import", "table", "table.npz")
    said = command("run", "--dataset", "table", "--clients", 5, "--rounds", 1, "--out", "here")
    assert said.code == 0
    assert tomllib.loads(Path("here/config.toml").read_text())["model"] == "mlp"


def test_a_named_set_is_that_set(command):
    write_npz("f.npz", n=300, shape=(28, 28), labels=10)
    command("data", "import", "fmnist", "f.npz")
    said = command(
        "run", "--dataset", "fmnist", "--clients", 4, "--rounds", 1, "--epochs", 1, "--out", "here", "--json"
    )
    assert said.code == 0
    config = tomllib.loads(Path("here/config.toml").read_text())
    assert (config["model"], config["options"]["q"]) == ("cnn", 0.99993)
    about = json.loads(_metadata("here/models/global.safetensors"))
    assert about["scaling"] == {"unit": 255.0, "mean": [pytest.approx(0.286)], "std": [pytest.approx(0.3205)]}


def _metadata(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata()["fedobp"]


def test_methods_lists_ideas_options_and_papers(command):
    found = {method["name"]: method for method in command("methods", "--json").json["methods"]}
    assert set(found) == set(METHODS)
    assert len(found) == 27
    assert [option["name"] for option in found["fedobp"]["options"]] == ["q", "score", "norm", "scope", "ema", "start"]
    assert all(set(method) == {"name", "summary", "options", "paper"} for method in found.values())
    text = command("methods")
    assert all(f"--set {name}" in text.out for name in ("q=0.999", "score=squared", "ema=0.0", "finetune=5"))


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
def test_what_the_user_can_put_right_is_one_sentence_and_exit_code_2(command, arguments, sentence, as_json):
    said = command(*arguments, *(["--json"] if as_json and len(arguments) > 1 else []))
    assert said.code == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert said.err.strip().isprintable()
    assert len(said.err) < 500
    assert sentence in said.err


def test_a_refused_run_makes_no_folder(command):
    command("run", "--clients", 400)
    command("run", "--dataset", "mnist")
    assert not Path("runs").exists()


def test_an_unwritable_folder_is_refused(command):
    Path("file").write_text("")
    said = command("run", *TINY, "--out", "file/run")
    assert said.code == 2
    assert "cannot write" in said.err


def test_a_batch_larger_than_all_data_is_all_data(command):
    sizes = (2**31 - 1, 2000)
    whole, same = (command("run", *TINY, "--batch-size", size, "--json").json for size in sizes)
    assert whole["history"] == same["history"]


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


def test_an_error_of_ours_is_not_hidden(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedobp", "methods"])
    for error in (RuntimeError("a bug"), OSError("a bug")):
        monkeypatch.setattr("fedobp.cli.show", Mock(side_effect=error))
        with pytest.raises(type(error), match="a bug"):
            cli.main()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["data"], ["data", "import", "--help"]])
def test_help(command, arguments):
    said = command(*arguments)
    assert said.code == 0
    assert "Usage:" in said.out


@pytest.mark.parametrize("name", ["run", "compare", "partition"])
def test_help_shows_examples(command, name):
    assert f"fedobp {name} --" in command(name, "--help").out


def test_version(command):
    assert command("--version").out == f"fedobp {fedobp.__version__}\n"


def test_python_dash_m_and_no_colour_or_bars_without_a_terminal(ran, tmp_path):
    said = ran("-m", "fedobp", "run", *TINY, cwd=tmp_path, env={**os.environ, "FORCE_COLOR": ""})
    assert (said.code, said.err) == (0, "")
    assert "\x1b" not in said.out


def test_help_loads_nothing_large(ran):
    said = ran("-X", "importtime", "-m", "fedobp", "--help")
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.err.splitlines()}
    assert (said.code, loaded & {"fedobp", "typer"}) == (0, {"fedobp", "typer"})
    assert not loaded & {"torch", "numpy", "scipy", "sklearn", "matplotlib", "PIL", "requests", "pooch", "safetensors"}


def test_an_ascii_terminal_gets_what_it_can_show(ran, tmp_path):
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = ran("-m", "fedobp", "partition", "--clients", 5, cwd=tmp_path, env=ascii_only)
    assert (said.code, said.err) == (0, "")
    assert "5 clients" in said.out


def test_a_ci_service_is_no_terminal(ran):
    said = ran("-m", "fedobp", "--help", env={**os.environ, "GITHUB_ACTIONS": "true", "FORCE_COLOR": "1"})
    assert "Usage:" in said.out
    assert "\x1b" not in said.out


def test_a_picture_in_place_of_a_folder_is_refused(command):
    Path("map.png").mkdir()
    said = command("partition", "--plot", "map.png")
    assert (said.code, said.out) == (2, "")
    assert "cannot write map.png" in said.err


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
    assert process.communicate() == ("", "interrupted\n")
    assert [json.loads(line)["round"] for line in rounds()][:3] == [1, 2, 3]
    assert not list(tmp_path.rglob("*.part"))


def test_a_reader_that_goes_away_is_no_error(ran):
    piped = f"{sys.executable} -m fedobp methods | head -n 1; exit ${{PIPESTATUS[0]}}"
    said = ran("-c", piped, program="/bin/bash")
    assert (said.code, said.err) == (0, "")


# Each sends its own process a signal at a certain moment.
STOP = "import os, signal, sys; stop = lambda number=signal.SIGINT: os.kill(os.getpid(), number)\n"
MOMENTS = {
    "in a command": """
import fedobp.cli
fedobp.cli.app = lambda **_: stop()
""",
    "in a command, by SIGTERM": """
import fedobp.cli
fedobp.cli.app = lambda **_: stop(signal.SIGTERM)
""",
    "within typer, by SIGTERM": """
import fedobp.cli
fedobp.cli._refuse_flags = lambda *_: stop(signal.SIGTERM)
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
import fedobp.cli
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


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_to_stop_leaves_a_word_and_its_exit_code(moment, ran):
    said = ran("-c", STOP + MOMENTS[moment] + "from fedobp.__main__ import main; main()")
    assert (said.code, said.err) == ((143, "terminated\n") if "SIGTERM" in moment else (130, "interrupted\n"))
    assert "too late" not in said.out


def test_a_signal_that_the_caller_ignores_stays_ignored(ran):
    code = STOP + "signal.signal(signal.SIGINT, signal.SIG_IGN); import atexit; atexit.register(stop)\n"
    code += "sys.argv = ['fedobp', '--version']; from fedobp.__main__ import main; main()"
    assert ran("-c", code) == (0, f"fedobp {fedobp.__version__}\n", "")


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
        sys.stdout.close()  # what it still holds goes nowhere
    full = "error: cannot write the output (No space left on device): send it elsewhere\n"
    assert (said.code, said.err) == ((2, full) if stream == "full" else (0, ""))
    assert "run" not in arguments or Path("here/result.json").exists()


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("arguments", "code"), [("--version", 0), ("run --rounds x", 2)])
def test_the_exit_code_does_not_depend_on_who_reads(closed, arguments, code, ran):
    said = ran("-c", f"{sys.executable} -m fedobp {arguments} {closed}", program="/bin/bash")
    assert (said.code, said.err) == (code, "")


def test_a_failure_of_standard_output_that_a_library_ignored_is_still_said(ran):
    """Unbuffered, already the empty text fails with which click finds out what a stream takes."""
    said = ran("-c", f"{sys.executable} -u -m fedobp --version >/dev/full", program="/bin/bash")
    assert said.code == 2
    assert said.err.startswith("error: cannot write the output")


def test_files_do_not_take_the_numbers_of_closed_streams(tmp_path, ran):
    code = "import os, sys; from fedobp.cli.screen import Output; Output(); sys.exit(os.open('file', os.O_CREAT))"
    said = ran("-c", f'{sys.executable} -c "{code}" <&- >&- 2>&-', program="/bin/bash", cwd=tmp_path)
    assert said.code > 2


WIDTHS = [20, 40, 60, 80, 200]


@pytest.fixture(scope="module")
def results():
    tiny = {"clients": 5, "rounds": 1, "epochs": 1, "model": "mlp", "holdout_clients": 1}
    names = ("fedavg-last", "local")
    return fedobp.sweep([fedobp.Config(**tiny, method=name, seed=seed) for seed in (1, 2) for name in names])


@pytest.mark.parametrize("columns", WIDTHS)
def test_names_and_accuracies_are_never_cut(columns, results):
    shown = rendered(compare_table(results), columns)
    for row in summarise(results):
        value = rf"{row['pooled']['mean']:.2f} ±\s+{row['pooled']['std']:.2f}"
        assert re.search(rf"^ ?{row['method']}\s+(pooled: )?{value}", shown, re.MULTILINE)
    assert ("seconds.\n" in shown) == (columns in (40, 60, 80))  # too narrow for a column, which is named below
    for name, accuracy in (("as served", results[0].accuracy), ("own last local model", results[0].last)):
        value = f"{accuracy.pooled:.2f}"
        line = rf"^ ?{name}\s+(pooled: )?{value}"
        assert re.search(line, rendered(run_table(results[0]), columns), re.MULTILINE)


@pytest.mark.parametrize("columns", WIDTHS)
def test_lists_and_maps_fit_too(command, columns):
    rows = command("methods", "--json").json["methods"]
    assert all(row["name"] in rendered(methods_table(rows), columns) for row in rows)
    rows = command("data", "list", "--json").json["datasets"]
    assert all(row["name"] in rendered(datasets_table(rows), columns) for row in rows)
    dataset, shards = deal(fedobp.Config(clients=5, holdout_clients=1))
    shown = rendered(heat_map(dataset, shards, columns), columns)
    assert len([line for line in shown.splitlines() if re.match(r" {5}\d ", line)]) == 5  # a line for each client


def rendered(table, columns):
    """Return a table as a terminal shows it; nothing may be cut or too wide."""
    console = Console(width=columns, color_system=None)
    with console.capture() as shown:
        console.print(table)
    assert "…" not in shown.get()
    assert max(map(len, shown.get().splitlines())) <= columns
    return shown.get()
