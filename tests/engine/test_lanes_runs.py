"""Whole runs of the lanes engine against the serial one. Clients are ragged; partition seeds deal samples anew."""

from dataclasses import replace

import pytest
from lanes_cases import BATCH, CLIENTS, TRAIN, metrics, same

from fedobp import Config, Federation, FedobpError, sweep
from fedobp.algorithms import METHODS
from fedobp.course import cohorts
from fedobp.engine.patches import patched
from fedobp.engine.vectorised import Vectorised

pytestmark = pytest.mark.usefixtures("networks")

RAGGED = {
    "clients": CLIENTS, "rounds": 4, "participation": 0.7, "epochs": 2, "batch_size": BATCH, "lr": 0.05,
    "eval_every": 1, "precision": "fp64", "model": "mlp",
}  # fmt: skip
EVERYTHING = {"momentum": 0.8, "weight_decay": 0.02, "lr_schedule": "cosine", "finetune_epochs": 1}
CASES = {
    "fedobp": [
        {}, {"q": 0.0}, {"q": 0.5}, {"q": 1.0}, {"q": 0.9, "score": "product"}, {"q": 0.9, "norm": "layer"},
        {"q": 0.9, "norm": "global"}, {"q": 0.9, "scope": "classifier"}, {"q": 0.9, "ema": 0.7},
        {"q": 0.9, "start": "literal"},
    ],
    "fedavg-ft": [{}, {"finetune": 0}, {"finetune": 2}],
    "fedrep": [{}, {"base_epochs": 0}, {"final_epochs": 2}],
    "fedbabu": [{}, {"finetune": 1, "tune": "head"}, {"finetune": 1, "tune": "base"}],
    "ditto": [{}, {"personal_epochs": 2, "lam": 3.0}, {"personal_epochs": 0}],
    "fedprox": [{}, {"mu": 2.0}],
    "fedpac": [{}, {"lam": 3.0, "head_lr": 0.02}, {"head_epochs": 0}, {"head_epochs": 2}],
    "pfedfda": [
        {}, {"betas": "one", "beta_steps": 3}, {"betas": "own"}, {"last": "all"}, {"mode": "as-published"},
    ],
    "lg-fedavg": [{}, {"mode": "as-published"}],
    "pspfl": [{}, {"keep": 0.9, "share": 0.2}],
    "fedrod": [{}, {"gamma": 0.0}, {"gamma": 2.5}],
    "floco": [
        {}, {"mode": "as-published"}, {"mode": "as-published", "tau": 1}, {"endpoints": 3, "tau": 1, "rho": 0.5},
        {"endpoints": 1}, {"endpoints": 4, "tau": 4},
    ],
    "apfl": [{}, {"mix": 0.8, "adaptive": "on"}, {"mode": "as-published"}],
    "pfedme": [{}, {"inner": 2, "lam": 3.0, "eta_p": 0.05, "mu": 0.1, "beta": 0.5}],
    "fedala": [{}, {"eta": 20.0, "tensors": 3}, {"mode": "as-published", "tensors": 99}],
    "flute": [
        {}, {"simplex": 1.0, "weights": 0.1, "features": 0.02}, {"joint_epochs": 2, "server_lr": 0.0},
        {"final_epochs": 2}, {"mode": "as-published"},
    ],
    "feddpa": [
        {}, {"threshold": 0.1, "near": 1.0, "level": 0.5, "bound": 0.1}, {"shared_epochs": 1},
        {"mode": "as-published"}, {"mode": "as-published", "threshold": 0.8},
    ],
    "fedselect": [
        {}, {"every": 1}, {"every": 1, "grow": 0.6, "cap": 0.5}, {"mode": "as-published"},
        {"mode": "as-published", "every": 5, "grow": 0.0001, "cap": 0.3},
    ],
    "pfedsim": [{}, {"rho": 0.0}, {"rho": 0.25}],
    "seqfededt": [
        {}, {"q": 0.9}, {"q": 0.9, "score": "squared", "norm": "layer"}, {"q": 0.9, "scope": "classifier"},
        {"q": 0.9, "ema": 0.7, "start": "literal"},
    ],
    "decoupled": [
        {}, {"q": 0.9, "score": "product", "pool": "tensor"}, {"q": 0.9, "score": "gradient"},
        {"q": 0.9, "score": "gradient", "ema": 0.7}, {"q": 0.9, "score": "random", "start": "literal"},
        {"q": 0.9, "score": "magnitude", "scope": "classifier"}, {"q": 0.9, "score": "taylor"},
        {"q": 0.9, "score": "fisher"},
        {"q": 0.9, "score": "fisher", "pool": "tensor", "norm": "layer"}, {"q": 0.9, "score": "fisher-batch"},
        {"q": 0.9, "score": "fisher-batch", "scope": "classifier", "start": "literal"}, {"q": 0.9, "score": "obd"},
        {"q": 0.9, "score": "obd", "norm": "global", "ema": 0.7}, {"q": 0.9, "score": "fisher", "pool": "tensor",
        "scope": "classifier"},
    ],
}  # fmt: skip
ALL = [(method, options) for method in METHODS for options in CASES.get(method, [{}])]


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize(("method", "options"), ALL)
def test_every_method_equals_the_oracle(method, options, tmp_path):
    found = {
        engine: Federation(Config(**RAGGED, **EVERYTHING, engine=engine)).run(method, out=tmp_path / engine, **options)
        for engine in ("lanes", "serial")
    }
    same(found["lanes"], found["serial"])
    assert found["serial"].validation is not None
    assert found["serial"].finetuned is not None
    assert len(metrics(tmp_path / "lanes")) == 4


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_the_oracle_with_a_cnn(method, monkeypatch):
    """In the CPU's form and in that of CUDA."""
    settings = {**RAGGED, "model": "cnn-small", "rounds": 3, "eval_every": 3}
    oracle = Federation(Config(**settings, engine="serial")).run(method)
    same(Federation(Config(**settings)).run(method), oracle)
    monkeypatch.setattr(Vectorised, "model_on", lambda self, device: patched(self._model))
    same(Federation(Config(**settings)).run(method), oracle)


NO_NORMS = {"pfedfda", "fedrod", "floco", "apfl", "pfedme", "fedala", "flute", "feddpa", "fedpac"}


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_the_oracle_with_batch_norm_or_refuses_it(method):
    runs = [Federation(Config(**{**RAGGED, "model": "normed"}, engine=engine)) for engine in ("lanes", "serial")]
    if method in NO_NORMS:
        for one in runs:
            with pytest.raises(FedobpError, match="BatchNorm"):
                one.run(method)
    else:
        same(*(one.run(method) for one in runs))


SWEEP = [
    {},
    {"seed": 7},
    {"seed": 8, "partition_seed": 1},
    {"options": {"q": 0.5}},
    {"lr": 0.01, "momentum": 0.9, "rounds": 2},
    {"method": "fedper", "epochs": 1, "weight_decay": 0.1},
    {"method": "fedavg-last", "rounds": 6, "lr_schedule": "cosine"},
    {"method": "fedavg-ft", "batch_size": 5},
    {"method": "local", "participation": 1.0, "rounds": 1},
    {"batch_size": 5, "finetune_epochs": 2},
    {"model": "strided"},
]


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize(("engine", "runs"), [("lanes", len(SWEEP)), ("serial", 3)])
def test_runs_of_a_sweep_equal_each_run_alone_on_the_oracle(engine, runs, tmp_path):
    configs = [Config(**{**RAGGED, "engine": engine, **change}) for change in SWEEP[:runs]]
    folders = [tmp_path / str(at) for at in range(len(configs))]
    for config, folder, result in zip(configs, folders, sweep(configs, out=folders), strict=True):
        assert result.config == config
        assert result.out == folder
        same(result, Federation(replace(config, engine="serial")).run(out=tmp_path / f"{folder.name}-alone"))


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("memory", [{"lane_memory": 1e-9}, {"store_memory": 1e-9}, {"store_memory": 4e-4}])
def test_little_memory_changes_no_result(memory):
    plain = Config(**RAGGED, options={"q": 0.9, "ema": 0.5})
    for method in ("fedobp", "fedper"):
        same(Federation(replace(plain, **memory)).run(method), Federation(plain).run(method))


@pytest.mark.usefixtures("ragged")
def test_the_same_bytes_run_after_run(tmp_path):
    configs = [Config(**{**RAGGED, "precision": "fp32", **change}) for change in SWEEP]
    for name in ("first", "second"):
        sweep(configs, out=[tmp_path / name / str(at) for at in range(len(configs))])
    for at in range(len(configs)):
        for name in ("config.toml", "metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
            first, second = ((tmp_path / run / str(at) / name).read_bytes() for run in ("first", "second"))
            assert first == second


@pytest.mark.usefixtures("ragged")
def test_the_client_that_diverges_is_named():
    config = Config(**{**RAGGED, "precision": "fp32", "lr": 1e9, "participation": 1.0})
    moving = [client for client in next(cohorts(config)).tolist() if TRAIN[client] > 1]
    said = []
    for engine in ("lanes", "serial"):
        with pytest.raises(FedobpError, match=rf"^round 1, client {moving[0]}: .* \(it is 1e\+09\)") as caught:
            Federation(replace(config, engine=engine)).run("fedavg")
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("engine", ["lanes", "serial"])
def test_a_run_in_bfloat16_learns_as_in_float32(engine):
    settings = {"clients": 6, "rounds": 6, "participation": 1.0, "epochs": 2, "lr": 0.05, "model": "mlp"}
    exact, rough = (
        Federation(Config(**settings, engine=engine, precision=precision)).run("fedper").accuracy.pooled
        for precision in ("fp32", "bf16")
    )
    assert exact > 80
    assert rough == pytest.approx(exact, abs=3)
