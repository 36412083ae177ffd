"""Runs that train side by side: which share a launch, their order, and their shares of the time."""

import json

import pytest
import torch
from lanes_cases import vector
from resolved import resolved

from fedobp import Config, Federation, FedobpError, sweep, sweeps

TINY = {"clients": 6, "rounds": 4, "participation": 0.5, "epochs": 1, "model": "mlp", "precision": "fp64"}
MLP_SIZE = 64 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize(("runs_at_once", "launches"), [(2, [2, 2, 1]), (0.5, [1, 1, 1, 1, 1]), (9, [5])])
def test_a_sweep_takes_as_many_runs_at_once_as_their_clients_state_fits(monkeypatch, runs_at_once, launches):
    launched, train_side_by_side = [], sweeps.train_side_by_side

    def watched(plans, *rest):
        launched.append(len(plans))
        return train_side_by_side(plans, *rest)

    monkeypatch.setattr(sweeps, "train_side_by_side", watched)
    state = 3 * 8 * MLP_SIZE * 6  # three vectors of float64 for each of 6 clients
    memory = runs_at_once * state / 2**30
    configs = [Config(**{**TINY, "rounds": 1, "seed": seed, "store_memory": memory}) for seed in range(5)]
    results = sweep(configs)
    assert launched == launches
    assert [result.config.seed for result in results] == list(range(5))


def test_runs_that_cannot_share_a_launch_still_come_in_order():
    changes = [{"model": "cnn-small"}, {}, {"batch_size": 16}, {"precision": "fp32"}, {"engine": "serial"}, {}]
    configs = [Config(**{**TINY, "rounds": 1, **change}) for change in changes]
    results = sweep(configs)
    assert [result.config for result in results] == list(map(resolved, configs))
    for config, result in zip(configs, results, strict=True):
        assert torch.allclose(vector(result), vector(Federation(config).run()), rtol=0, atol=1e-9)


def test_shares_of_the_time_of_runs_of_different_length_add_up():
    short, long = sweep([Config(rounds=r, eval_every=99, clients=8, model="mlp") for r in (1, 9)])
    assert 0 < short.seconds < long.seconds


@pytest.mark.usefixtures("relay")
def test_sequential_runs_train_side_by_side_with_others():
    given = {"clients": 5, "participation": 0.6, "rounds": 3, "epochs": 1, "precision": "fp64", "model": "mlp"}
    configs = [
        Config(**given, method=method, seed=seed) for method, seed in (("relay", 1), ("fedavg", 2), ("relay", 3))
    ]
    for config, result in zip(configs, sweep(configs), strict=True):
        alone = Federation(config).run()
        assert (alone.accuracy, alone.bytes) == (result.accuracy, result.bytes)


# Launches that are given.


@pytest.mark.parametrize("launches", [[[0]], [[0, 1], [1]], [[0, 2]]])
def test_a_sweep_refuses_launches_that_are_not_its_runs(launches):
    with pytest.raises(FedobpError, match="must name each of the 2 runs once"):
        sweep([Config(rounds=1), Config(rounds=1, seed=1)], launches=launches)


def test_runs_that_cannot_share_a_launch_are_refused():
    configs = [Config(rounds=1), Config(rounds=1, method="local", batch_size=16, seed=3)]
    with pytest.raises(FedobpError, match="fedobp, seed 42, and local, seed 3, cannot share a launch"):
        sweep(configs, launches=[[0, 1]])


def test_a_sweep_records_and_repeats_its_launches(tmp_path):
    given = {"clients": 6, "rounds": 2, "epochs": 1, "participation": 0.5}
    configs = [Config(**given, options={"q": q}) for q in (0.9, 0.99, 0.999)]
    found = []
    for name in ("first", "second"):
        out = [tmp_path / name / str(run) for run in range(3)]
        found.append(sweep(configs, out=out, launches=[[2, 0], [1]]))
    complete = list(map(resolved, configs))
    assert found[0][0].launch == (complete[2], complete[0])
    assert found[0][1].launch == (complete[1],)
    launch = json.loads((tmp_path / "first/0/result.json").read_text())["launch"]
    assert [one.get("options", {}).get("q") for one in launch] == [0.999, None]
    assert "launch" not in json.loads((tmp_path / "first/1/result.json").read_text())
    for run in range(3):
        for name in ("config.toml", "metrics.jsonl", "models/clients.safetensors"):
            assert (tmp_path / f"first/{run}/{name}").read_bytes() == (tmp_path / f"second/{run}/{name}").read_bytes()
