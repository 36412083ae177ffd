"""`fedobp compare`: its table, its JSON, and its folder."""

from pathlib import Path

import numpy as np
import pytest

from cli.cases import TINY


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
