"""`fedobp bench`: its counts are right, and its estimates follow from what it measured. No time is asserted."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from resolved import resolved

from fedobp import Config, Federation, FedobpError, Model
from fedobp import bench as bench_module
from fedobp.bench import bench, noise, peak, stand_in, step_flops, steps_by_round, train
from fedobp.data import FederatedData, partition
from fedobp.engine import Budget
from fedobp.engine.batch_order import batches
from fedobp.grouping import engine_for
from fedobp.keys import fold
from fedobp.launch import simulate
from fedobp.sampling import cohorts

TINY = {"dataset": "digits", "clients": 6, "participation": 0.5, "model": "mlp", "rounds": 7, "device": "cpu"}


@pytest.mark.parametrize(
    ("name", "shape", "by_hand"),
    [
        # Forward and the weights' gradients for both layers, the inputs' gradient for the second.
        ("mlp", (1, 8, 8), 2 * (2 * (64 * 128 + 128 * 10) + 128 * 10)),
        ("cnn", (1, 28, 28),
         2 * (2 * (24 * 24 * 25 * 32) + 3 * (8 * 8 * 32 * 25 * 64) + 3 * 1024 * 512 + 3 * 512 * 10)),
    ],
)  # fmt: skip
def test_a_steps_operations_by_hand(name, shape, by_hand):
    config = resolved(**TINY | {"batch_size": 8})
    assert step_flops(config, Model(name, shape, 10)) == 8 * by_hand


@pytest.mark.parametrize("more", [{}, {"batch_size": 7, "epochs": 2, "seed": 3}, {"sampling": "published"}])
def test_the_steps_of_every_round_by_brute_force(more):
    config = resolved(**TINY | more)
    data = Federation(config).data
    expected = [
        sum(
            len(batches(fold(round, client, epoch), data.size(client, "train"), config.batch_size))
            for client in cohort.tolist()
            for epoch in range(config.epochs)
        )
        for round, cohort in enumerate(cohorts(config))
    ]
    assert steps_by_round(config, data) == expected
    assert len(expected) == 7


@pytest.mark.parametrize("name", ["serial", "lanes"])
def test_rounds_are_those_of_a_real_run(name):
    federation = Federation(Config(**TINY | {"rounds": 3, "engine": name, "save_models": "none"}))
    config, engine = federation.config, engine_for(federation.config, federation.model)
    simulation = simulate(federation.plan(config, federation.method), engine, Budget())
    train(engine, [simulation], [simulation.run.plan(round) for round in (1, 2, 3)])
    assert engine.counters.steps == sum(steps_by_round(config, federation.data))
    real = federation.model.layout.flatten(federation.run().state_dict())
    assert torch.equal(simulation.run.server["theta"], real)


def check(found):
    """Every estimate follows from what was measured."""
    serial, lanes = found.engines
    assert (serial.engine, lanes.engine) == ("serial", "lanes")
    assert (serial.occupancy, serial.speedup) == (1.0, 1.0)
    assert lanes.speedup == pytest.approx(lanes.steps_per_second / serial.steps_per_second)
    for speed in found.engines:
        assert 0 < speed.occupancy <= 1
        assert speed.rounds > 0
        # A step is on a full batch at most.
        assert 0 < speed.flops_per_second <= speed.steps_per_second * found.flops_per_step * (1 + 1e-9)
        assert speed.share_of_peak == pytest.approx(speed.flops_per_second / found.peak_flops_per_second)
        assert speed.seconds_per_round == pytest.approx(found.steps_per_round / speed.steps_per_second)
        evaluations = found.evaluations * speed.seconds_per_evaluation
        assert speed.seconds_per_run == pytest.approx(found.rounds * speed.seconds_per_round + evaluations)


def test_numbers_agree_with_each_other():
    config = resolved(**TINY | {"batch_size": 16})
    parts = []
    found = bench(config, seconds=1, progress=lambda what, share: parts.append((what, share)))
    check(found)
    assert found.steps_per_round == pytest.approx(np.mean(steps_by_round(config, Federation(config).data)))
    assert (found.runs, found.rounds, found.evaluations, found.cohort) == (1, 7, 7, 3)
    assert (found.random_data, found.samples, found.parameters) == (False, 1797, 9610)
    assert {"data", "matrix product", "serial", "lanes"} <= {what for what, _ in parts}
    assert [share for _, share in parts] == sorted(share for _, share in parts)
    assert all(0 <= share <= 1 for _, share in parts)


@pytest.fixture
def fake_time(monkeypatch):
    """Let an epoch of a run take a second; return what was trained: (engine, runs, rounds, epochs)."""
    now, seen, real = [0.0], [], bench_module.train

    def tick():
        now[0] += 1e-6
        return now[0]

    def slow(engine, simulations, rounds):
        real(engine, simulations, rounds)
        epochs = rounds[0][0].ctx.epochs
        seen.append((type(engine).__name__, len(simulations), [jobs[0].ctx.round for jobs in rounds], epochs))
        now[0] += len(simulations) * len(rounds) * epochs
        return float(len(simulations) * len(rounds) * epochs)

    monkeypatch.setattr(bench_module, "time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(bench_module, "peak", lambda device, precision, seconds: 1e9)
    monkeypatch.setattr(bench_module, "train", slow)
    return seen


def test_the_most_typical_rounds_are_measured_by_both_engines(fake_time):
    config = resolved(**TINY)
    found = bench(config, seconds=62)
    check(found)
    steps = steps_by_round(config, Federation(config).data)
    nearest = sorted(range(7), key=lambda round: abs(steps[round] - np.mean(steps)))
    # Of 62 s, 27.9 end the lanes: 1 for the warm-up, 1 for one epoch as a trial, and 5 for a round.
    rounds = {name: [at[0] - 1 for engine, _, at, epochs in fake_time if (engine, epochs) == (name, 5)]
              for name in ("Lanes", "Serial")}  # fmt: skip
    assert rounds["Lanes"] == nearest[:5]
    assert rounds["Serial"] == nearest[:5]
    assert [speed.rounds for speed in found.engines] == [5, 5]


def test_the_peak_is_the_best_of_several_measurements(monkeypatch, fake_time):
    rates = iter([1e9, 3e9])
    monkeypatch.setattr(bench_module, "peak", lambda device, precision, seconds: next(rates))
    found = bench(Config(**TINY), seconds=12)
    assert found.peak_flops_per_second == 3e9
    check(found)


def test_where_a_round_is_too_long_a_part_of_it_is_measured(fake_time):
    found = bench(Config(**TINY), seconds=12)
    check(found)
    # 5.4 s end the lanes: 1 + 1 are spent, and 3 epochs are affordable; then 5.8 s are left, and 2 spent again.
    assert [epochs for engine, _, _, epochs in fake_time if engine == "Lanes"] == [1, 1, 3]
    assert [epochs for engine, _, _, epochs in fake_time if engine == "Serial"] == [1, 1, 3]
    assert [speed.rounds for speed in found.engines] == [pytest.approx(0.6)] * 2


def test_where_an_epoch_is_too_long_it_is_all_that_is_measured(fake_time):
    found = bench(Config(**TINY), seconds=2)
    check(found)
    assert [epochs for _, _, _, epochs in fake_time] == [1] * 4
    assert [speed.rounds for speed in found.engines] == [pytest.approx(0.2)] * 2


def test_runs_train_side_by_side_and_times_are_one_runs_share(fake_time):
    config = resolved(**TINY)
    found = bench(config, runs=3, seconds=80)
    check(found)
    # All three in the lanes, as many as the time allows one after the other: a whole round of three takes 15 s.
    assert {runs for engine, runs, _, epochs in fake_time if (engine, epochs) == ("Lanes", 5)} == {3}
    assert {runs for engine, runs, _, epochs in fake_time if (engine, epochs) == ("Serial", 5)} == {3}
    found = bench(config, runs=3, seconds=30)
    assert {runs for engine, runs, _, epochs in fake_time[-2:] if engine == "Serial"} == {1}
    data = Federation(config).data
    steps = [np.mean(steps_by_round(replace(config, seed=seed), data)) for seed in (42, 43, 44)]
    assert found.steps_per_round == pytest.approx(np.mean(steps))
    for speed in found.engines:
        # An epoch of a run takes a second here, whichever engine.
        assert speed.seconds_per_round == pytest.approx(5, rel=0.5)


def test_evaluation_of_some_clients_is_scaled_to_all(fake_time, monkeypatch):
    asked = []

    def evaluate(engine, plan):
        data = plan.data
        asked.append(data.clients)
        return 2.0 * sum(data.size(client, "test") for client in range(data.clients))

    monkeypatch.setattr(bench_module, "evaluate", evaluate)
    data = Federation(Config(**TINY)).data
    tested = sum(data.size(client, "test") for client in range(6))
    for seconds, all_clients in ((1, False), (60, True)):
        asked.clear()
        found = bench(Config(**TINY | {"rounds": 1}), seconds=seconds)
        assert [speed.seconds_per_evaluation for speed in found.engines] == [pytest.approx(2.0 * tested)] * 2
        assert (set(asked) == {6}) is all_clients


def test_noise_has_the_shape_and_the_partition_of_the_real_set(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDOBP_DATA", str(tmp_path))
    found = stand_in(Config(dataset="cifar10"))
    assert found.x.shape == (60_000, 32, 32, 3)
    assert (found.x.dtype, found.name, found.classes) == (np.uint8, "cifar10", 10)
    assert np.bincount(found.y).tolist() == [6_000] * 10
    # docs/data.md: clients of 14 to 3,091 samples at seed 42 and alpha 0.1.
    sizes = [len(shard.train) + len(shard.test) for shard in partition(found.y, 100, alpha=0.1, seed=42)]
    assert (min(sizes), max(sizes)) == (14, 3091)
    np.savez(tmp_path / "cifar10.npz", x=found.x[:100], y=found.y[:100])
    assert stand_in(Config(dataset="cifar10")) is None
    assert stand_in(Config(dataset="digits")) is None


def test_noise_repeats():
    first, second = (noise("any", (4, 4), 50, 3) for _ in range(2))
    assert np.array_equal(first.x, second.x)
    data = FederatedData(first, partition(first.y, 3, kind="iid"), torch.device("cpu"), torch.float32)
    assert data.shape == (1, 4, 4)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_the_peak_is_a_rate_and_leaves_the_generators_alone(precision):
    before = torch.get_rng_state()
    assert peak(torch.device("cpu"), precision, 0.01) > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"runs": 0}])
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises(FedobpError, match=f"--{next(iter(wrong))} must be between 1 and"):
        bench(Config(**TINY), **wrong)


def test_a_batch_larger_than_any_client_is_estimated_as_the_largest_clients():
    config = resolved(**TINY | {"batch_size": 100_000})
    federation = Federation(config)
    largest = max(federation.data.size(client, "train") for client in range(config.clients))
    found = bench(config, seconds=1)
    assert found.batch_size == 100_000
    assert found.flops_per_step == step_flops(replace(config, batch_size=largest), federation.model)
