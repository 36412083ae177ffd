"""`fedobp compare`: its table, its JSON, and its folder."""

from pathlib import Path

import numpy as np
import pytest

from cli.cases import TINY
from fedobp import FedobpError
from fedobp.algorithms import METHODS
from fedobp.algorithms.fedavg import FedAvg

TABLES = ("results.csv", "history.csv", "report.html")


def test_compare_prints_one_table_and_writes_every_run(command):
    said = command("compare", *TINY, "--methods", "fedobp,fedavg,local", "--seeds", 2, "--out", "here")
    assert said.code == 0
    assert all(name in said.out for name in ("fedobp", "fedavg", "local", "client mean", "seconds", "Run folder: here"))
    assert "±" in said.out
    assert {path.name for path in Path("here").iterdir()} == {"compare.json", "compare.toml", *TABLES} | {
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
    assert both["provenance"].pop("beside") == ["local-seed42", "fedper-seed42"]
    assert alone["provenance"].pop("beside") == ["fedper-seed42"]
    for run in (both, alone):
        assert run.pop("seconds") > 0
    assert {**both, "out": ""} == {**alone, "out": ""}


def test_both_engines_give_the_same_table(command):
    lanes, serial = (
        command(
            "compare", *TINY, "--methods", "fedobp,fedper", "--precision", "fp64", "--engine", engine, "--json"
        ).json
        for engine in ("lanes", "serial")
    )
    assert lanes["table"] == serial["table"]


# Errors.


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--methods", "fedvag"), "did you mean 'fedavg'"),
        (("--methods", "fedobp", "--set", "qq=1"), "did you mean 'q'"),
        (("--methods", "fedavg", "--q", 1), "none of these methods has options"),
        (("--model", "none"), "unknown model 'none'"),
        (("--partition-set", "k=2"), "partition 'dirichlet' has no options"),
        (("--protocol", "paper", "--rounds", 5), "use at least 100 rounds"),
        ((), "dataset 'mnist' is not in"),
    ],
)
def test_what_is_wrong_whatever_the_dataset_is_is_said_before_it_is_missed(command, flags, sentence):
    said = command("compare", "--dataset", "mnist", *flags)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert sentence in said.err
    assert not Path("runs").exists()


def test_an_option_that_is_wrong_for_one_method_fails_its_runs_alone(command):
    said = command("compare", *TINY, "--methods", "fedprox,fedavg", "--seeds", 2, "--set", "mu=-1", "--json")
    assert said.code == 2
    assert [(run["method"], run["seed"]) for run in said.json["runs"]] == [("fedavg", 42), ("fedavg", 43)]
    assert [(one["method"], one["seed"]) for one in said.json["failed"]] == [("fedprox", 42), ("fedprox", 43)]
    [line] = said.err.splitlines()
    assert line.startswith("error: fedprox, seeds 42, 43: option 'mu' of fedprox must be")


def test_failures_of_a_repeated_comparison_are_in_the_order_of_its_runs(command):
    Path("compare.toml").write_text(
        """launches = [["fedprox-seed1", "local-seed4294967296", "fedavg-seed1"], ["fedprox-seed2"]]
[settings]
clients = 5
rounds = 1
model = "mlp"
[[runs]]
method = "fedprox"
seed = [1, 2]
options.mu = -1
[[runs]]
method = "local"
seed = 4294967296
[[runs]]
method = "fedavg"
seed = 1
"""
    )
    said = command("compare", "--config", "compare.toml", "--json")
    assert [run["method"] for run in said.json["runs"]] == ["fedavg"]
    assert [(one["method"], one["seed"]) for one in said.json["failed"]] == [
        ("fedprox", 1),
        ("fedprox", 2),
        ("local", 2**32),
    ]


def test_methods_none_of_which_can_be_loaded_are_named(command, monkeypatch):
    def broken(name):
        raise FedobpError(f"method '{name}' cannot be loaded")

    monkeypatch.setattr("fedobp.algorithms.method_class", broken)
    monkeypatch.setattr("fedobp.algorithms.names", lambda: ["one", "two"])
    said = command("compare", "--methods", "one,two")
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        "error: one, seed 42: method 'one' cannot be loaded\nerror: two, seed 42: method 'two' cannot be loaded\n"
    )
    assert not Path("runs").exists()


def test_a_bug_in_the_plan_of_a_run_is_shown_with_its_traceback(command, monkeypatch):
    class Buggy(FedAvg):
        pass

    monkeypatch.setitem(METHODS, "buggy", Buggy)
    monkeypatch.setattr("fedobp.sweeps.resolve", lambda config, dataset: 1 / 0)
    said = command("compare", *TINY, "--methods", "buggy")
    assert said.code == 2
    assert "Traceback" in said.err
    assert "ZeroDivisionError" in said.err.splitlines()[-1]
