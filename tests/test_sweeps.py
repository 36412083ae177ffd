"""Sweeps: the order of their runs, their folders, and runs that fail."""

import pytest
from cli.cases import write_npz
from lanes_cases import metrics, vector
from resolved import resolved

from fedobp import Config, Failure, FedobpError, Result, Results, SweepError, sweep
from fedobp.data import data_dir, load
from fedobp.sweeps import plan_sweep

TINY = {"clients": 6, "rounds": 4, "participation": 0.5, "epochs": 1, "model": "mlp", "precision": "fp64"}
MLP_SIZE = 64 * 128 + 128 + 128 * 10 + 10
SIDE_BY_SIDE = [{"method": "fedavg"}, {"method": "fedper", "rounds": 2}, {"method": "local", "seed": 7}]


@pytest.mark.essential
def test_a_sweep_returns_its_runs_in_order_and_says_which_one_it_is_at(tmp_path):
    configs = [Config(**{**TINY, **change}) for change in SIDE_BY_SIDE]
    seen = []
    folders = [tmp_path / name for name in "abc"]
    results = sweep(configs, out=folders, progress=lambda at: seen.append((at.run, at.method, at.round, at.rounds)))
    assert [result.config for result in results] == list(map(resolved, configs))
    assert [result.out for result in results] == folders
    assert all((folder / "result.json").exists() for folder in folders)
    assert sorted(seen) == [
        (run, config.method, round, config.rounds)
        for run, config in enumerate(configs)
        for round in range(1, config.rounds + 1)
    ]
    assert [result.history[-1][0] for result in results] == [4, 2, 4]


def test_a_sweep_takes_any_iterable_of_configurations():
    results = sweep(Config(rounds=1, clients=8, model="mlp", seed=seed) for seed in (1, 2))
    assert [result.config.seed for result in results] == [1, 2]


def test_an_empty_sweep_is_empty():
    assert sweep([]) == []


def test_a_sweep_without_models_keeps_the_global_ones():
    [result] = sweep([Config(**{**TINY, "rounds": 1})], keep_models=False)
    assert len(vector(result)) == MLP_SIZE
    with pytest.raises(FedobpError):
        result.state_dict(3)


def test_a_sweep_reads_each_dataset_once(read_files, tmp_path):
    write_npz(tmp_path / "data" / "other.npz", n=90)
    given, methods = {"clients": 3, "rounds": 2, "epochs": 1, "model": "mlp"}, ("fedavg", "local", "fedper")
    configs = [Config(**given, dataset=name, method=method) for method in methods for name in ("mine", "other")]
    configs.append(Config(**given, dataset="mine", seed=7, batch_size=16, engine="serial"))
    sweep(configs)
    assert read_files == ["mine.npz", "other.npz"]


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
            assert [line["round"] for line in metrics(folder)] == [1, 2, 3]


def test_a_run_that_cannot_start_is_named_and_lets_the_others_finish():
    settings = {"rounds": 1, "clients": 8, "model": "mlp"}
    wrong = [{"method": "fedprox", "options": {"mu": -1}}, {"dataset": "nothing"}, {"clients": 1000}]
    configs = [Config(**settings), *(Config(**{**settings, **one}, seed=7) for one in wrong)]
    plan = plan_sweep(configs)
    assert (list(plan.configs), list(plan.failures), plan.launches) == ([0, 3], [1, 2], [[0, 3]])
    assert plan.bug() is None
    with pytest.raises(SweepError) as caught:
        sweep(plan)
    assert [result and result.config.method for result in caught.value.results] == ["fedobp", None, None, None]
    causes = ("option 'mu' of fedprox", "unknown dataset 'nothing'", "fewer than 10 for each of 1000 clients")
    for line, method, cause in zip(
        str(caught.value).splitlines(), ("fedprox", "fedobp", "fedobp"), causes, strict=True
    ):
        assert line.startswith(f"{method}, seed 7: ")
        assert cause in line


def test_a_plan_without_its_failures_counts_the_others_anew():
    configs = [Config(method="none"), Config(clients=5), Config(model="none"), Config(clients=6, batch_size=16)]
    plan = plan_sweep(configs).without_failures()
    assert (plan.asked, plan.launches, plan.failures) == (list(plan.configs.values()), [[0], [1]], {})
    assert [config.clients for config in plan.asked] == [5, 6]
    assert plan_sweep([]).launches == plan_sweep([], dataset=load("digits", data_dir())).launches == []


def test_failures_may_be_returned_in_the_places_of_their_results(tmp_path):
    settings = {"rounds": 2, "clients": 8, "model": "mlp"}
    changes = [{"method": "fedprox", "options": {"mu": -1}}, {}, {"lr": 1e9, "seed": 7}, {"clients": 1000}]
    configs = [Config(**{**settings, **change}) for change in changes]
    found = sweep(configs, failures="return", out=[tmp_path / str(run) for run in range(4)])
    assert [type(one) for one in found] == [Failure, Result, Failure, Failure]
    assert [(one.method, one.seed) for one in found.failed] == [("fedprox", 42), ("fedobp", 7), ("fedobp", 42)]
    for failure, cause in zip(
        found.failed, ("option 'mu' of fedprox", "no longer finite", "1000 clients"), strict=True
    ):
        assert cause in failure.error
        assert isinstance(failure.exception, FedobpError)
    assert found[0].config == configs[0]  # as it was asked
    assert found[2].config == resolved(configs[2])
    assert found[1].out == tmp_path / "1"
    assert sweep([], failures="return") == []
    with pytest.raises(FedobpError, match="unknown value of `failures` 'raises': did you mean 'raise'"):
        sweep(configs, failures="raises")


def test_results_of_a_sweep_are_results_and_its_error_holds_the_exceptions():
    settings = {"rounds": 1, "clients": 8, "model": "mlp"}
    assert isinstance(sweep([Config(**settings)]), Results)
    with pytest.raises(SweepError) as caught:
        sweep([Config(**settings, dataset="nothing")])
    [failure] = caught.value.failed
    assert isinstance(failure.exception, FedobpError)


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
