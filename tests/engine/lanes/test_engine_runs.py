"""Whole runs of the lanes engine against the serial engine, with clients of unequal size.

The parity of the partition seed selects one of two partitions.
"""

from dataclasses import replace

import pytest
import torch
from lanes_cases import BATCH, CLIENTS, TRAIN, metrics, same, settings_for, vector

from fedobp import Config, Federation, FedobpError, sweep
from fedobp.algorithms import METHODS
from fedobp.engine import Lanes, batch_order
from fedobp.engine.im2col import patched
from fedobp.engine.lanes.vectorised import Vectorised
from fedobp.sampling import cohorts

pytestmark = pytest.mark.usefixtures("networks")

RAGGED = {
    "clients": CLIENTS, "rounds": 4, "participation": 0.7, "epochs": 2, "batch_size": BATCH, "lr": 0.05,
    "eval_every": 1, "precision": "fp64", "model": "pooled",
}  # fmt: skip
EVERYTHING = {"momentum": 0.8, "weight_decay": 0.02, "lr_schedule": "cosine", "finetune_epochs": 1}
CASES = {
    "fedobp": [
        {}, {"q": 0.0}, {"q": 0.5}, {"q": 1.0}, {"q": 0.9, "score": "product"}, {"q": 0.9, "norm": "layer"},
        {"q": 0.9, "norm": "global"}, {"q": 0.9, "scope": "classifier"}, {"q": 0.9, "ema": 0.7},
        {"q": 0.9, "start": "literal"},
    ],
    "fedavg-ft": [{}, {"finetune": 0}, {"finetune": 2}],
    "fedper": [{}, {"mode": "as-published"}],
    "fedrep": [{}, {"base_epochs": 0}, {"final_epochs": 2}, {"mode": "as-published", "final_epochs": 1}],
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
        {"endpoints": 1}, {"endpoints": 4, "tau": 3},
    ],
    "apfl": [{}, {"mix": 0.8, "adaptive": "on"}, {"mode": "as-published"}],
    "pfedme": [{}, {"inner": 2, "lam": 3.0, "eta_p": 0.05, "mu": 0.1, "beta": 0.5}],
    "fedala": [{}, {"eta": 20.0, "tensors": 3}, {"mode": "as-published", "tensors": 99}],
    "flute": [
        {}, {"simplex": 1.0, "weights": 0.1, "features": 0.02}, {"joint_epochs": 2, "server_lr": 0.0},
        {"final_epochs": 2}, {"mode": "as-published"},
    ],
    "feddpa": [
        {}, {"threshold": 0.1, "near": 1.0, "level": 0.5, "bound": 0.1},
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
        {"rule": "rms", "c": 2.0}, {"rule": "rms", "c": 1.5, "pool": "tensor", "score": "fisher"},
        {"rule": "statistic", "pool": "tensor"}, {"q": 0.99, "warmup": 3}, {"q": 0.99, "warmup": 3, "score": "obd"},
        {"q": 0.9, "soft": 1.0}, {"rule": "rms", "c": 2.0, "soft": 0.5, "score": "fisher", "ema": 0.7},
    ],
}  # fmt: skip
ALL = [(method, options) for method in METHODS for options in CASES.get(method, [{}])]


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize(("method", "options"), ALL)
def test_every_method_equals_the_oracle(method, options, tmp_path):
    settings = settings_for(method, {**RAGGED, **EVERYTHING})
    found = {
        engine: Federation(Config(**settings, engine=engine)).run(method, out=tmp_path / engine, **options)
        for engine in ("lanes", "serial")
    }
    same(found["lanes"], found["serial"])
    assert found["serial"].validation is not None
    assert found["serial"].finetuned is not None
    assert len(metrics(tmp_path / "lanes")) == 4


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize(
    ("method", "options"), [*((name, {}) for name in METHODS), ("decoupled", {"rule": "statistic", "pool": "tensor"})]
)
def test_every_method_equals_the_oracle_with_a_cnn(method, options, monkeypatch):
    """In the CPU's form and in that of CUDA. The statistic takes a second derivative."""
    settings = {**RAGGED, "model": "cnn-small", "rounds": 3, "eval_every": 3}
    oracle = Federation(Config(**settings, engine="serial")).run(method, **options)
    same(Federation(Config(**settings)).run(method, **options), oracle)
    monkeypatch.setattr(Vectorised, "model_on", lambda self, device: patched(self._model))
    same(Federation(Config(**settings)).run(method, **options), oracle)


@pytest.mark.parametrize("q", [0.3, 0.5])
def test_engines_differ_in_nothing_but_tied_entries(q):
    """Weights of pixels that are blank in all digits change alike: rounding decides which are above a threshold.

    One round, after which only the served models depend on the choice.
    """
    settings = Config(clients=6, participation=1.0, rounds=1, epochs=2, batch_size=10, lr=0.05, model="mlp",
                      precision="fp64")  # fmt: skip
    lanes, serial = (Federation(replace(settings, engine=one)).run("fedobp", q=q) for one in ("lanes", "serial"))
    assert (vector(lanes) - vector(serial)).abs().max() < 1e-9
    ties = 0
    for client in range(6):
        apart = (vector(serial, client) - vector(serial)).abs()  # 0 for entries that are shared
        least = apart[apart > 0].min()
        between = (vector(lanes, client) - vector(serial, client)).abs()
        differing = between[between > 1e-9]  # personal on one engine only
        assert ((differing - least).abs() <= 1e-9 * least).all()
        ties += int(((apart - least).abs() <= 1e-9 * least).sum()) - 1
    assert ties  # some threshold is in a group of equal scores


NO_NORMS = {"pfedfda", "fedrod", "floco", "apfl", "pfedme", "fedala", "flute", "feddpa", "fedpac",
            "fedobp-auto"}  # fmt: skip


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
        alone = Federation(replace(config, engine="serial"))
        assert result.config == replace(alone.config, engine=engine)
        assert result.out == folder
        same(result, alone.run(out=tmp_path / f"{folder.name}-alone"))


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
    config = Config(**{**RAGGED, "model": "mlp", "precision": "fp32", "lr": 1e9, "participation": 1.0})
    first, *_ = [one for one in next(cohorts(Federation(config).config)).tolist() if TRAIN[one] > 1]
    errors = []
    for engine in ("lanes", "serial"):
        with pytest.raises(FedobpError, match=rf"^round 1, client {first}: .* \(it is 1e\+09\)") as caught:
            Federation(replace(config, engine=engine)).run("fedavg")
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("engine", ["lanes", "serial"])
def test_a_run_in_bfloat16_learns_as_in_float32(engine):
    settings = {"clients": 6, "rounds": 6, "participation": 1.0, "epochs": 2, "lr": 0.05, "model": "mlp"}
    exact, rough = (
        Federation(Config(**settings, engine=engine, precision=precision)).run("fedper").accuracy.pooled
        for precision in ("fp32", "bf16")
    )
    assert exact > 80
    assert rough == pytest.approx(exact, abs=3)


# Batches larger than any client.

WIDE = {"clients": 6, "rounds": 2, "participation": 0.7, "epochs": 2, "model": "mlp", "holdout_clients": 1,
        "finetune_epochs": 1, "partition": "dirichlet-equal"}  # fmt: skip


@pytest.mark.parametrize("method", ["fedavg", "fedpac", "fedala"])
def test_a_batch_larger_than_any_client_holds_all_samples_of_a_client(method, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        "fedobp.grouping.Lanes", lambda model, batch, *rest: made.append(batch) or Lanes(model, batch, *rest)
    )
    federation = Federation(Config(**WIDE))
    largest = max(federation.data.size(client, "train") for client in range(6))
    for batch in (10**9, largest):
        Federation(Config(**WIDE, method=method, batch_size=batch)).run(out=tmp_path / str(batch))
    assert made == [largest, largest]
    for name in ("metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
        assert (tmp_path / f"{10**9}" / name).read_bytes() == (tmp_path / f"{largest}" / name).read_bytes()
    assert "\nbatch_size = 1000000000\n" in (tmp_path / f"{10**9}" / "config.toml").read_text()
    lanes, serial = (
        Federation(Config(**WIDE, method=method, batch_size=10**9, precision="fp64", engine=engine)).run()
        for engine in ("lanes", "serial")
    )
    torch.testing.assert_close(vector(lanes), vector(serial), rtol=0, atol=1e-9)
    for name in ("accuracy", "last", "finetuned", "new_clients", "bytes", "compute"):
        assert getattr(lanes, name) == getattr(serial, name)


@pytest.mark.usefixtures("ragged")
def test_batches_are_no_wider_than_the_largest_client(monkeypatch):
    """In every kind of phase."""
    widths, orders = [], batch_order.orders

    def watched(*given):
        widths.append((found := orders(*given)).positions.shape[-1])
        return found

    for module in ("trainer", "vectorised"):
        monkeypatch.setattr(f"fedobp.engine.lanes.{module}.orders", watched)
    sweep(
        [
            Config(**{**RAGGED, "method": method, "rounds": 1, "batch_size": 1000})
            for method in ("fedavg", "fedala", "fedpac")
        ]
    )
    assert widths
    assert max(widths) == max(TRAIN)


@pytest.mark.filterwarnings("default")
def test_a_batch_larger_than_any_client_is_noted_once(command):
    note = "note: --batch-size 5000 is more than any client's training samples: they are one batch\n"
    tiny = ("--clients", 5, "--rounds", 1, "--model", "mlp", "--batch-size", 5000)
    said = command("compare", *tiny, "--methods", "fedavg,local", "--seeds", 2, "--store-memory", 1e-9)
    assert (said.code, said.err) == (0, note)
    assert command("run", *tiny, "--engine", "serial").err == note
    assert command("run", *tiny[:-2], "--batch-size", 2).err == ""
