"""The lanes engine on CUDA. Run with: PYTHONPATH=src python -m pytest tests/gpu

It is compared with the serial engine on the CPU in float64, on the cases of the CPU's tests.
"""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device that torch can use", allow_module_level=True)

from lanes_cases import (
    BATCH,
    CHANGES,
    CLIENTS,
    FAST,
    NETWORKS,
    ONE_ROUND,
    PHASES,
    Plan,
    agree,
    federated,
    make_job,
    make_model,
    make_pool,
    run_rounds,
    same,
    settings_for,
)
from lanes_cases import compare as compare_engines

from fedobp import Callback, Config, Federation, FedobpError, sweep
from fedobp.algorithms import METHODS
from fedobp.checkpoint import Interval
from fedobp.engine import Budget, ClientPool, Lanes, PoolJob, Serial, Store, batch_order, memory_of
from fedobp.engine.lanes import trainer as trainer_module
from fedobp.importance import above
from fedobp.launch import StopTraining
from fedobp.method import RoundContext
from fedobp.records import Sparse
from fedobp.transfer import Deferred
from fedobp.wire import payload_bytes, run_bytes

pytestmark = [
    pytest.mark.usefixtures("networks"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

DEVICE = "cuda"
SMALL = {"clients": 8, "rounds": 4, "participation": 0.5, "epochs": 2, "lr": 0.05}
RAGGED = {
    "clients": CLIENTS, "rounds": 3, "participation": 0.7, "epochs": 2, "batch_size": BATCH, "lr": 0.05,
    "eval_every": 1, "precision": "fp64", "model": "mlp", "momentum": 0.8, "weight_decay": 0.02, "finetune_epochs": 1,
}  # fmt: skip
# Eleven lanes of one group, which a graph of twelve runs, beside runs of other groups.
MIXED = [
    Plan(),
    Plan(hparams={"lr": 0.02, "momentum": 0.5}, seed=6),
    Plan(hparams=FAST, partition=1, cohort=(5, 0, 3)),
    Plan(cohort=(4,), epochs=3),
    Plan("mask", {"lr": 0.3}, cohort=(1,), epochs=3),
    Plan("everything", FAST),
    Plan("everything", {"mu": 0.9}, seed=8, cohort=(4, 1), partition=1, epochs=1),
    Plan("two phases", epochs=1),
    Plan("plain, then loss", {"momentum": 0.5}, partition=1),
]


def compare(model, plans, engine=None, **options):
    """Compare lanes on CUDA with the serial engine on the CPU."""
    compare_engines(model, plans, engine, DEVICE, **options)


# Lanes on CUDA against the oracle.


@pytest.mark.parametrize("hparams", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", PHASES)
def test_every_kind_of_phase_equals_the_oracle(phases, hparams):
    compare(make_model("mlp"), [Plan(phases, hparams)])


@pytest.mark.parametrize("phases", ["plain", "all but a loss", "everything"])
@pytest.mark.parametrize("name", ["cnn-small", *(name for name in NETWORKS if name != "normed")])
def test_every_kind_of_network_equals_the_oracle(name, phases):
    compare(make_model(name), [Plan(phases, FAST)])


@pytest.mark.parametrize("hparams", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize(
    ("name", "phases"), [("conv", "plain"), ("resnet8", "plain"), ("resnet8", "everything"), ("resnet8-bn", "plain")]
)
def test_shipped_networks_equal_the_oracle(name, phases, hparams):
    compare(make_model(name), [Plan(phases, hparams), Plan(phases, seed=9, cohort=(4, 0))], rounds=ONE_ROUND)


@pytest.mark.parametrize("name", ["mlp", "cnn-small"])
def test_runs_side_by_side_equal_the_oracle(name):
    compare(make_model(name), MIXED)


@pytest.mark.parametrize("hparams", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", ["plain", "pull", "everything"])
def test_graphs_run_rounds_of_more_and_fewer_lanes_and_steps(phases, hparams):
    model = make_model("mlp")
    engine = Lanes(model, BATCH)
    compare(model, [Plan(phases, hparams)], engine, rounds=CHANGES)
    compare(model, [Plan(phases, hparams), Plan(phases, FAST, seed=9)], engine, rounds=CHANGES[::-1])


@pytest.mark.parametrize("memory", [1.0, 3e6])
def test_a_small_memory_splits_the_lanes_and_changes_nothing(memory):
    model = make_model("mlp")
    compare(model, MIXED, Lanes(model, BATCH, memory=memory))


def test_prepared_orders_are_used_where_they_are_right_and_change_nothing(monkeypatch):
    computed, orders = [], batch_order.orders

    def watched(*given):
        computed.append(given)
        return orders(*given)

    monkeypatch.setattr(trainer_module, "orders", watched)
    model, plans, ends = make_model("mlp"), [Plan(hparams=FAST), Plan(hparams=FAST, seed=6)], []
    for engine, device, prepares in (
        (Lanes(model, BATCH), DEVICE, True),
        (Lanes(model, BATCH), DEVICE, False),
        (Serial(model, BATCH), "cpu", False),
    ):
        theta, prepared = model.initial(3).to(device, torch.float64), None
        pools = [make_pool(model, device, seed=plan.seed) for plan in plans]
        for round in (1, 2, 3):
            computed.clear()
            engine.train(
                [make_job(plan, pool, theta, round) for plan, pool in zip(plans, pools, strict=True)], prepared
            )
            # The runs have separate samples, so each has its own order. In round 2 the second run has other epochs
            # than were prepared.
            assert len(computed) == ({1: 2, 2: 1, 3: 0}[round] if prepares else 0 if device == "cpu" else 2)
            if prepares:
                epochs = 1 if round == 1 else None
                expected = [plans[0], replace(plans[1], epochs=epochs)]
                coming = [make_job(plan, pool, theta, round + 1) for plan, pool in zip(expected, pools, strict=True)]
                prepared = engine.prepare([replace(job, download={}) for job in coming])
                assert len(prepared.orders) == 2
        ends.append(torch.stack([pool.state.gather(range(CLIENTS))["theta"].cpu() for pool in pools]))
    assert torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-9)


@pytest.mark.parametrize("phases", ["plain", "everything"])
def test_only_the_lane_that_diverges_is_not_finite(phases):
    model = make_model("cnn-small")
    calm, wild = Plan(phases, FAST), Plan(phases, {**FAST, "lr": 1e200, "slow": 1e200}, cohort=(0, 3, 4))
    engine = Lanes(model, BATCH)
    for _ in range(2):  # the second time in buffers that hold values of the first
        found = run_rounds(engine, model, [calm, wild], device=DEVICE, rounds=ONE_ROUND)
        agree(found[:1], run_rounds(Serial(model, BATCH), model, [calm], rounds=ONE_ROUND))
        assert found[1]["finite"].tolist() == [False, True, False]


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small", "residual"])
def test_personal_models_and_predictions_are_the_oracles(name, split):
    model, models, labels, logits = make_model(name), [], [], []
    for engine, device in ((Lanes(model, BATCH), DEVICE), (Serial(model, BATCH), "cpu")):
        theta = model.initial(3).to(device, torch.float64)
        job = make_job(Plan(hparams=FAST), make_pool(model, device), theta)
        found = engine.personalize(job)
        models.append({"theta": found.theta, "mine": found.mine, "processed": torch.tensor(found.processed)})
        labels.append(engine.predict(job, found.theta, split))
        logits.append(engine.logits(job, found.theta, split))
    agree(models[:1], models[1:])
    assert [one.tolist() for one in labels[0]] == [one.tolist() for one in labels[1]]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-9)


# Whole runs.


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_cuda_equals_the_oracle_in_float64(method):
    options = {"finetune": 1} if method == "fedavg-ft" else {}
    on_cuda = Federation(Config(**SMALL, precision="fp64", device=DEVICE)).run(method, **options)
    oracle = Federation(Config(**SMALL, precision="fp64", device="cpu", engine="serial")).run(method, **options)
    same(on_cuda, oracle, fitted=5e-3)


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("method", METHODS)
def test_a_run_with_clients_of_unequal_size_and_momentum_equals_the_oracle(method):
    settings = settings_for(method, RAGGED)
    ours = Federation(Config(**settings, device=DEVICE)).run(method)
    same(ours, Federation(Config(**settings, device="cpu", engine="serial")).run(method))


@pytest.mark.usefixtures("ragged")
def test_the_serial_engine_on_cuda_equals_itself_on_the_cpu():
    ours, theirs = (
        Federation(Config(**RAGGED, device=device, engine="serial")).run("fedobp", q=0.9) for device in (DEVICE, "cpu")
    )
    same(ours, theirs)


@pytest.mark.usefixtures("ragged")
def test_runs_of_a_sweep_equal_each_run_alone_on_the_oracle():
    changes = [
        {}, {"seed": 7}, {"seed": 8, "partition_seed": 1}, {"options": {"q": 0.5}}, {"momentum": 0.0, "rounds": 2},
        {"method": "fedper", "epochs": 1}, {"method": "fedavg-last", "rounds": 5, "lr_schedule": "cosine"},
        {"method": "fedavg-ft", "batch_size": 5}, {"model": "strided"}, {"store_memory": 1e-9},
        {"lane_memory": 1e-9},
    ]  # fmt: skip
    configs = [Config(**{**RAGGED, "device": DEVICE, **change}) for change in changes]
    for config, result in zip(configs, sweep(configs), strict=True):
        same(result, Federation(replace(config, device="cpu", engine="serial")).run())


@pytest.mark.parametrize("method", ["fedobp", "fedavg-last", "fedpac", "seqfededt"])
def test_new_clients_equal_the_oracle(method):
    given = {**SMALL, "holdout_clients": 1, "rounds": 2, "precision": "fp64"}
    ours = Federation(Config(**given, device=DEVICE)).run(method)
    theirs = Federation(Config(**given, device="cpu", engine="serial")).run(method)
    assert (ours.new_clients, ours.accuracy, ours.partition) == (theirs.new_clients, theirs.accuracy, theirs.partition)


def test_a_run_that_diverges_names_its_client():
    config = Config(**{**SMALL, "lr": 1e9, "device": DEVICE})
    with pytest.raises(FedobpError, match=r"^round \d, client \d: .* \(it is 1e\+09\)"):
        Federation(config).run("fedavg")


def test_callbacks_hear_of_every_round_once_in_order_although_it_is_logged_late(tmp_path):
    heard = []

    class Listener(Callback):
        def on_round(self, config, line):
            heard.append(json.dumps(line))

    config = Config(**{**SMALL, "rounds": 5, "eval_every": 4, "device": DEVICE})
    Federation(config).run("fedavg", out=tmp_path / "run", callbacks=[Listener()])
    assert heard == (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in heard] == [1, 2, 3, 4, 5]


# The same every time, and in other precisions.


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bytes_twice(method, tmp_path):
    for name in ("first", "second"):
        Federation(Config(**SMALL, momentum=0.5, device=DEVICE)).run(method, out=tmp_path / name)
    for name in ("config.toml", "metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small", "resnet8"])
def test_the_same_bits_twice_in_every_precision(name, precision):
    model = make_model(name)
    first, second = (
        run_rounds(Lanes(model, BATCH, precision), model, MIXED, device=DEVICE, dtype=torch.float32) for _ in range(2)
    )
    agree(first, second, atol=0)


# On the CPU bf16 differs by up to 0.24: a few steps with pooling, where two values of a window change their order.
@pytest.mark.parametrize(
    ("precision", "share", "atol"), [("fp32", 1e-4, 1e-4), ("tf32", 0.4, 0.02), ("bf16", 0.4, 0.02)]
)
@pytest.mark.parametrize("engine", [Lanes, Serial])
@pytest.mark.parametrize("phases", ["plain", "everything"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small"])
def test_other_precisions_are_near_float64_after_a_few_steps(name, phases, engine, precision, share, atol):
    model, plan = make_model(name), Plan(phases)
    [start] = run_rounds(Serial(model, BATCH), model, [replace(plan, epochs=0)], rounds=ONE_ROUND)
    [exact] = run_rounds(Serial(model, BATCH), model, [plan], rounds=ONE_ROUND)
    [found] = run_rounds(
        engine(model, BATCH, precision), model, [plan], device=DEVICE, dtype=torch.float32, rounds=ONE_ROUND
    )
    assert found["upload theta"].dtype == found["loss"].dtype == torch.float32
    theta, loss = (found[entry].cpu().double() for entry in ("upload theta", "loss"))
    change = (exact["upload theta"] - start["upload theta"]).norm(dim=1)
    wrong = (theta - exact["upload theta"]).norm(dim=1)
    assert (wrong <= share * change + 1e-6).all(), (wrong, change)
    torch.testing.assert_close(loss, exact["loss"], rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("engine", ["lanes", "serial"])
def test_a_run_learns_in_every_precision(engine, precision):
    settings = {"clients": 6, "rounds": 6, "participation": 1.0, "epochs": 2, "lr": 0.05, "model": "mlp"}
    exact = Federation(Config(**settings, device="cpu")).run("fedper").accuracy.pooled
    found = Federation(Config(**settings, device=DEVICE, engine=engine, precision=precision)).run("fedper")
    assert exact > 80
    assert found.accuracy.pooled == pytest.approx(exact, abs=3)


# The host does not wait for the device.


@contextmanager
def without_synchronization():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_synchronization_is_an_error_here():
    one = torch.ones(1, device=DEVICE)
    with pytest.raises(RuntimeError, match="synchroniz"), without_synchronization():
        one.item()


@pytest.mark.parametrize("phases", ["plain", "all but a loss", "everything", "plain, then loss"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small", "resnet8"])
def test_training_does_not_wait_once_its_graphs_are_captured(name, phases):
    model = make_model(name)
    engine, theta = Lanes(model, BATCH), model.initial(3).to(DEVICE)
    pools = [make_pool(model, DEVICE, torch.float32, seed) for seed in (5, 6)]
    plans = Plan(phases), Plan(phases, FAST)

    def jobs(round):
        return [make_job(plan, pool, theta, round) for plan, pool in zip(plans, pools, strict=True)]

    prepared = None
    for round in (1, 2):
        engine.train(jobs(round), prepared)
        prepared = engine.prepare([replace(job, download={}) for job in jobs(round + 1)])
    current, coming = jobs(3), [replace(job, download={}) for job in jobs(4)]
    torch.cuda.synchronize()
    with without_synchronization():
        engine.train(current, prepared)
        engine.prepare(coming)


# FedALA asks its clients after every epoch whether to go on, and FedPAC's server whether all problems are solved.
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("fedala", "fedpac")])
def test_a_whole_round_does_not_wait(method):
    """Download, train, aggregate and keep, while the next round's order is prepared; evaluation may wait."""
    model, data = make_model("cnn-small"), federated(DEVICE, torch.float32)
    chosen = METHODS[method].configure({"q": 0.9, "ema": 0.5} if method == "fedobp" else {})
    theta = model.initial(3).to(DEVICE)
    initial = chosen.init(model, theta, 0)
    server, records = initial.server, Store(initial.record, CLIENTS, Budget())
    keeps, engine = chosen.keeps_last_model, Lanes(model, BATCH)
    clients = ClientPool(data, initial.state, theta, 5, Budget(), keeps_last_model=keeps)
    hparams = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, **chosen.hparams()}
    all_clients, prepared = torch.arange(CLIENTS), None
    cohorts = all_clients.split(1) if chosen.sequential else [all_clients]
    groups = all_clients % 2  # on the host, as in a run

    def job_of(round, cohort):
        ctx = RoundContext(model, round, 9, CLIENTS, 2, cohort, groups=groups)
        return PoolJob(ctx, chosen.client_update(ctx), hparams, {}, clients=clients)

    def play(round):
        nonlocal server, prepared
        for cohort in cohorts:
            job = job_of(round, cohort)
            download, sent = chosen.download(job.ctx, server, records.gather(cohort.tolist()))
            [update] = engine.train([replace(job, download=download)], prepared)
            server, kept = chosen.aggregate(job.ctx, server, sent, update)
            records.scatter(cohort.tolist(), kept)
        prepared = engine.prepare([job_of(round + 1, cohorts[0])])

    for round in (1, 2):
        play(round)
    torch.cuda.synchronize()
    with without_synchronization():
        play(3)
    assert server["theta"].isfinite().all()


# Storage, defaults and generators.


def test_client_state_may_be_in_a_file():
    start = {"theta": torch.zeros(3, device=DEVICE), "seen": torch.zeros((), dtype=torch.bool, device=DEVICE)}
    store = Store(start, 4, Budget(0))
    store.scatter([2, 0], {"theta": torch.arange(6.0, device=DEVICE).view(2, 3), "seen": torch.tensor([True, False])})
    found = store.gather([0, 1, 2])
    assert found["theta"].device.type == found["seen"].device.type == DEVICE
    assert found["theta"].tolist() == [[3, 4, 5], [0, 0, 0], [0, 1, 2]]
    assert found["seen"].tolist() == [False, False, True]


def test_auto_is_cuda():
    assert Federation(Config(**SMALL)).config.device == "cuda"


def test_the_memory_of_a_device():
    assert memory_of(torch.device("cuda")) == torch.cuda.get_device_properties(0).total_memory


def test_thresholds_agree_with_the_cpu():
    score = torch.rand(10, 878_538, generator=torch.Generator().manual_seed(0))
    for q in (0.99998, 0.995, 0.3, 0.0, 1.0):
        assert torch.equal(above(score.cuda(), q).cpu(), above(score, q))


def test_bytes_of_masks_agree_with_the_cpu():
    random = torch.Generator().manual_seed(0)
    for share in (1e-5, 1e-3, 0.5):
        keep = torch.rand(10, 878_538, generator=random) >= share
        assert run_bytes(keep.to(DEVICE)).tolist() == run_bytes(keep).tolist()
        values = torch.zeros(keep.shape)
        assert payload_bytes({"theta": Sparse(values.to(DEVICE), keep.to(DEVICE))}) == payload_bytes(
            {"theta": Sparse(values, keep)}
        )


def test_a_deferred_value_does_not_wait_for_later_work():
    """But for its tensor. The work around it takes about a second, and the value is there before the end."""

    def count(mask):
        return int(run_bytes(mask).sum())

    random = torch.rand(10, 878_538, generator=torch.Generator().manual_seed(0))
    on_device, right = random.to(DEVICE), count(random > 0.001)
    matrix, done = torch.ones(8192, 8192, device=DEVICE), torch.cuda.Event()
    keep = on_device > 0.001
    assert Deferred(count, keep).value() == right  # loads and allocates what it needs
    keep.zero_()
    torch.cuda.synchronize()
    for _ in range(25):
        matrix = matrix @ matrix
    keep.copy_(on_device > 0.001)
    value = Deferred(count, keep)
    for _ in range(25):
        matrix = matrix @ matrix
    done.record()
    assert value.value() == right
    assert not done.query()
    torch.cuda.synchronize()


def test_a_run_does_not_change_the_cuda_generator():
    before = torch.cuda.get_rng_state()
    Federation(Config(**SMALL, device="cuda")).run("fedobp")
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_interrupted_launch_goes_on_to_the_same_bytes(precision, tmp_path):
    """Checkpoints are copied to the host and written while the next rounds train."""
    configs = [
        Config(rounds=8, seed=seed, device="cuda", precision=precision, eval_every=4, method=method, clients=20)
        for seed, method in ((1, "fedobp"), (2, "fedavg"), (3, "scaffold"))
    ]

    def stop(at):
        if at.round == 6:
            raise StopTraining

    whole, cut = ([tmp_path / f"{name}{at}" for at in range(len(configs))] for name in ("whole", "cut"))
    sweep(configs, out=whole)
    with pytest.raises(StopTraining):
        sweep(configs, out=cut, progress=stop, interval=Interval(1))
    sweep(configs, out=cut, interval=Interval(1), resume=True)
    for one, other in zip(whole, cut, strict=True):
        for name in ("metrics.jsonl", "clients.csv", "models/global.safetensors", "models/clients.safetensors"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
