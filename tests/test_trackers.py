"""Trackers: TensorBoard for real, Weights & Biases and MLflow by what they are told."""

import json
import os
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedobp import Config, FedobpError, Result, sweep
from fedobp.trackers import MLflow, TensorBoard, Wandb, trackers_named

TINY = {"clients": 5, "rounds": 4, "participation": 0.4, "epochs": 1, "model": "mlp", "eval_every": 2}
CONFIGS = [
    Config(**TINY, method="fedprox", options={"mu": 0.5}),
    Config(**TINY, method="fedprox", options={"mu": 0.5}),  # the same again
    Config(**TINY, lr=1e9),  # diverges
]


def logged(folder):
    """Return the numbers that a run has logged: (name, round, value)."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    groups = ("accuracy", "last", "personal", "personal_by_tensor")
    numbers = {(name, line["round"]): line[name] for line in lines for name in ("loss", "bytes_down", "bytes_up")}
    numbers |= {
        (f"{group}/{name}", line["round"]): value
        for line in lines
        for group in groups
        for name, value in line.get(group, {}).items()
    }
    return numbers


def expected_results(result):
    found = result.to_json()
    groups = ("accuracy", "last", "personal", "bytes", "compute")
    numbers = {f"result/{group}/{name}": value for group in groups for name, value in found[group].items()}
    return numbers | {"result/seconds": found["seconds"], "result/parameters": found["parameters"]}


def tracked(tracker, tmp_path):
    outs = [tmp_path / "runs" / str(run) for run in range(len(CONFIGS))]
    results = sweep(CONFIGS, out=outs, callbacks=[tracker], failures="return")
    assert [isinstance(one, Result) for one in results] == [True, True, False]
    return results, [logged(out) for out in outs[:2]]


@pytest.mark.essential
def test_tensorboard_reads_back_the_rounds_and_the_result(tmp_path):
    results, logs = tracked(TensorBoard(tmp_path / "board"), tmp_path)
    names = ["fedobp-seed42", "fedprox-seed42", "fedprox-seed42-2"]
    assert sorted(path.name for path in (tmp_path / "board").iterdir()) == names
    for name, result, numbers in zip(names[1:], results, logs, strict=False):
        board = EventAccumulator(str(tmp_path / "board" / name)).Reload()
        found = {(tag, e.step): e.value for tag in board.Tags()["scalars"] for e in board.Scalars(tag)}
        numbers = numbers | {(name, 4): value for name, value in expected_results(result).items()}
        assert found == {key: pytest.approx(value, rel=1e-6) for key, value in numbers.items()}
        [text] = board.Tensors("config/text_summary")
        assert 'method = "fedprox"' in text.tensor_proto.string_val[0].decode()
    failed = EventAccumulator(str(tmp_path / "board" / names[0])).Reload()
    assert (failed.Tags()["scalars"], len(failed.Tensors("config/text_summary"))) == ([], 1)


class Recorded:
    """A stand-in for what a package returns: every call is kept in one list."""

    def __init__(self, calls, name):
        self._calls, self._name = calls, name

    def __getattr__(self, name):
        def call(*arguments, **more):
            self._calls.append((self._name, name, arguments, more))

        return call


@pytest.fixture
def wandb(monkeypatch):
    module, calls = ModuleType("wandb"), []

    def init(**settings):
        warnings.warn("a warning of the package", DeprecationWarning, stacklevel=1)
        run = Recorded(calls, f"run {len([call for call in calls if call[1] == 'init'])}")
        calls.append((run._name, "init", (), settings))
        run.summary = Recorded(calls, run._name)
        return run

    module.init, module.Settings = init, lambda **settings: settings
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    return calls


def test_wandb_is_offline_and_gets_every_run_by_itself(wandb, tmp_path):
    results, logs = tracked(Wandb(tmp_path / "here"), tmp_path)
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    settings = {name: more for name, what, _, more in wandb if what == "init"}
    assert [one["name"] for one in settings.values()] == ["fedprox-seed42", "fedprox-seed42", "fedobp-seed42"]
    for one in settings.values():
        assert (one["mode"], one["dir"], one["reinit"]) == ("offline", str(tmp_path / "here"), "create_new")
        assert one["settings"]["silent"]
    first = settings["run 0"]["config"]
    assert (first["options.mu"], first["rounds"], first["clients"], first["method"]) == (0.5, 4, 5, "fedprox")
    for run, (result, numbers) in enumerate(zip(results, logs, strict=False)):
        told = [
            (arguments[0], more["step"])
            for name, what, arguments, more in wandb
            if (name, what) == (f"run {run}", "log")
        ]
        assert [step for _, step in told] == [1, 2, 3, 4]
        assert {(name, step): value for values, step in told for name, value in values.items()} == numbers
        [summary] = [arguments[0] for name, what, arguments, _ in wandb if (name, what) == (f"run {run}", "update")]
        assert summary == expected_results(result)
    ends = {name: more["exit_code"] for name, what, _, more in wandb if what == "finish"}
    assert ends == {"run 0": 0, "run 1": 0, "run 2": 1}


@pytest.fixture
def mlflow(monkeypatch):
    """A stand-in with one store for each address."""
    stores = {}

    class Client:
        def __init__(self, uri):
            self.store = stores.setdefault(uri, {"experiments": {}, "runs": {}})

        def get_experiment_by_name(self, name):
            known = self.store["experiments"]
            return SimpleNamespace(experiment_id=known[name]) if name in known else None

        def create_experiment(self, name, artifact_location):
            assert artifact_location.startswith("file:///")
            return self.store["experiments"].setdefault(name, "1")

        def create_run(self, experiment, run_name):
            assert experiment == "1"
            run = f"{run_name}#{len(self.store['runs'])}"
            self.store["runs"][run] = {"params": {}, "metrics": {}}
            return SimpleNamespace(info=SimpleNamespace(run_id=run))

        def log_batch(self, run, metrics=(), params=()):
            assert all(stamp > 1.7e12 for _, _, stamp, _ in metrics)  # milliseconds
            self.store["runs"][run]["metrics"] |= {(name, step): value for name, value, _, step in metrics}
            self.store["runs"][run]["params"] |= dict(params)

        def set_terminated(self, run, status):
            self.store["runs"][run]["status"] = status

    module = ModuleType("mlflow")
    module.MlflowClient = Client
    module.entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    return stores


def test_mlflow_writes_one_database_without_telemetry(mlflow, tmp_path):
    results, logs = tracked(MLflow(tmp_path / "here"), tmp_path)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    [(uri, store)] = mlflow.items()
    assert uri == f"sqlite:///{tmp_path}/here/mlflow.db"
    assert list(store["runs"]) == ["fedprox-seed42#0", "fedprox-seed42#1", "fedobp-seed42#2"]
    assert [run["status"] for run in store["runs"].values()] == ["FINISHED", "FINISHED", "FAILED"]
    for run, result, numbers in zip(store["runs"].values(), results, logs, strict=False):
        assert run["params"]["options.mu"] == "0.5"
        assert run["params"]["lr"] == "0.01"
        assert run["metrics"] == numbers | {(name, 4): value for name, value in expected_results(result).items()}


# What cannot be tracked.


@pytest.mark.parametrize("tracker", [TensorBoard, Wandb, MLflow])
def test_a_missing_package_is_refused_before_anything_runs(tracker, tmp_path, monkeypatch):
    for module in ("torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    said = rf"tracking with {tracker.name} needs its package \(.*\): pip install 'fedobp\[{tracker.name}\]'"
    for make in (lambda: tracker(tmp_path), lambda: trackers_named([tracker.name])):
        with pytest.raises(FedobpError, match=said):
            make()


def test_trackers_are_named_once_each_in_any_way(wandb, mlflow):
    assert trackers_named(["tensorboard, mlflow", "wandb", "mlflow"]) == [TensorBoard, MLflow, Wandb]
    assert trackers_named([]) == []
    with pytest.raises(FedobpError, match="unknown tracker 'tensorbord': did you mean 'tensorboard'"):
        trackers_named(["wandb,tensorbord"])


def test_a_folder_that_cannot_be_made_ends_the_run_with_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FedobpError, match=r"cannot write .*file/board"):
        sweep([Config(**TINY)], callbacks=[TensorBoard(tmp_path / "file" / "board")])
