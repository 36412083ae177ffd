"""Many runs in one call: their order, their launches, their folders, and what becomes of those that fail."""

import json

import pytest
import torch
from lanes_cases import vector

import fedobp.federation as federation_module
from fedobp import Config, Federation, FedobpError, sweep

TINY = {"clients": 6, "rounds": 4, "participation": 0.5, "epochs": 1, "model": "mlp", "precision": "fp64"}
MLP_SIZE = 64 * 128 + 128 + 128 * 10 + 10

SIDE_BY_SIDE = [{"method": "fedavg"}, {"method": "fedper", "rounds": 2}, {"method": "local", "seed": 7}]


@pytest.mark.essential
def test_a_sweep_returns_its_runs_in_order_and_says_which_one_it_is_at(tmp_path):
    configs = [Config(**{**TINY, **change}) for change in SIDE_BY_SIDE]
    seen = []
    folders = [tmp_path / name for name in "abc"]
    results = sweep(configs, out=folders, progress=lambda at: seen.append((at.run, at.method, at.round, at.rounds)))
    assert [result.config for result in results] == configs
    assert [result.out for result in results] == folders
    assert all((folder / "result.json").exists() for folder in folders)
    assert sorted(seen) == [
        (run, config.method, round, config.rounds)
        for run, config in enumerate(configs)
        for round in range(1, config.rounds + 1)
    ]
    assert [result.history[-1][0] for result in results] == [4, 2, 4]


def test_runs_that_cannot_share_a_launch_still_come_in_order():
    changes = [{"model": "cnn-small"}, {}, {"batch_size": 16}, {"precision": "fp32"}, {"engine": "serial"}, {}]
    configs = [Config(**{**TINY, "rounds": 1, **change}) for change in changes]
    results = sweep(configs)
    assert [result.config for result in results] == configs
    for config, result in zip(configs, results, strict=True):
        assert torch.allclose(vector(result), vector(Federation(config).run()), rtol=0, atol=1e-9)


def test_a_sweep_without_models_keeps_the_global_ones():
    [result] = sweep([Config(**{**TINY, "rounds": 1})], keep_models=False)
    assert len(vector(result)) == MLP_SIZE
    with pytest.raises(FedobpError):
        result.state_dict(3)


@pytest.mark.parametrize(("runs_at_once", "launches"), [(2, [2, 2, 1]), (0.5, [1, 1, 1, 1, 1]), (9, [5])])
def test_a_sweep_takes_as_many_runs_at_once_as_their_clients_state_fits(monkeypatch, runs_at_once, launches):
    launched, launch = [], federation_module._launch

    def watched(plans, *rest):
        launched.append(len(plans))
        return launch(plans, *rest)

    monkeypatch.setattr(federation_module, "_launch", watched)
    state = 3 * 8 * MLP_SIZE * 6  # three vectors of float64 for each of 6 clients
    memory = runs_at_once * state / 2**30
    configs = [Config(**{**TINY, "rounds": 1, "seed": seed, "store_memory": memory}) for seed in range(5)]
    results = sweep(configs)
    assert launched == launches
    assert [result.config.seed for result in results] == list(range(5))


def test_an_empty_sweep_is_empty():
    assert sweep([]) == []


def test_a_run_that_fails_lets_the_others_finish_and_is_named(tmp_path):
    settings = {"rounds": 3, "eval_every": 3, "clients": 8, "model": "mlp", "save_models": "none"}
    configs = [
        Config(**settings),
        Config(**settings, lr=1e9, method="fedavg", seed=7),
        Config(**settings, method="local"),
    ]
    outs = [tmp_path / name for name in "abc"]
    with pytest.raises(FedobpError, match=r"^fedavg, seed 7: round \d, client \d+: .*no longer finite"):
        sweep(configs, out=outs)
    for folder, rounds in zip(outs, (3, None, 3), strict=True):
        assert (folder / "result.json").exists() == (rounds is not None)
        if rounds:
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]


def test_shares_of_the_time_of_runs_of_different_length_add_up():
    short, long = sweep([Config(rounds=r, eval_every=99, clients=8, model="mlp") for r in (1, 9)])
    assert 0 < short.seconds < long.seconds


@pytest.mark.parametrize(
    ("out", "complaint"),
    [("abc", "a folder for each of the 2 runs"), (["a"], "a folder for each of the 2 runs"), (["a", "a"], "twice")],
)
def test_a_sweeps_folders_are_checked_first(tmp_path, monkeypatch, out, complaint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedobpError, match=complaint):
        sweep([Config(rounds=1, clients=8, model="mlp"), Config(rounds=1, clients=8, model="mlp", seed=1)], out=out)
    assert not list(tmp_path.iterdir())


def test_an_occupied_folder_of_a_sweep_is_noticed_before_anything_runs(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.toml").touch()
    with pytest.raises(FedobpError, match="already holds a run"):
        sweep([Config(rounds=1), Config(rounds=1, batch_size=16)], out=[tmp_path / "a", tmp_path / "b"])
    assert not list((tmp_path / "a").iterdir())


def test_a_sweep_takes_any_iterable_of_configurations():
    results = sweep(Config(rounds=1, clients=8, model="mlp", seed=seed) for seed in (1, 2))
    assert [result.config.seed for result in results] == [1, 2]
