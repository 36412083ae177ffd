"""What holds for every engine: the lanes engine and the serial engine, alone and in whole runs."""

import random
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from lanes_cases import (
    BATCH,
    CLIENTS,
    FAST,
    ONE_ROUND,
    Plan,
    agree,
    federated,
    make_job,
    make_model,
    make_pool,
    run_rounds,
)

from fedobp import Config, Federation, FedobpError
from fedobp.algorithms import METHODS
from fedobp.algorithms.fedobp import FedOBP, keep_and_upload
from fedobp.engine import Budget, ClientPool, Counters, Lanes, Serial
from fedobp.method import Train
from fedobp.sampling import cohorts

ENGINES = pytest.mark.parametrize("engine", [Lanes, Serial])
NAMES = pytest.mark.parametrize("engine", ["serial", "lanes"])


def test_counters_add_up_and_measure_occupancy():
    first, second = Counters(1, 10, 5), Counters(2, 20, 20)
    assert first + second == Counters(3, 30, 25)
    assert first + second - second == first
    assert (first + second).occupancy == 25 / 30
    assert Counters().occupancy == 1.0


# Preparation and failures.


def jobs_of(plans, pools, theta, round):
    return [make_job(plan, pool, theta, round) for plan, pool in zip(plans, pools, strict=True)]


@ENGINES
@pytest.mark.parametrize("phases", ["plain", "everything", "two phases", "a sweep"])
def test_training_with_prepared_orders_is_the_same_as_without(engine, phases):
    model = make_model("mlp")
    plans, theta, found = [Plan(phases, FAST), Plan(phases, seed=6, cohort=(4, 0))], model.initial(3).double(), []
    for prepares in (False, True):
        one, pools, prepared, updates = engine(model, BATCH), [make_pool(model, seed=s) for s in (5, 6)], None, []
        for round in (1, 2, 3):
            updates = one.try_train(jobs_of(plans, pools, theta, round), prepared)
            if prepares:  # as in a run: the next jobs have no downloads yet
                coming = [replace(job, download={}) for job in jobs_of(plans, pools, theta, round + 1)]
                prepared = one.prepare(coming)
        state = [pool.state.gather(range(CLIENTS)) for pool in pools]
        last = [pool.last_models(torch.arange(CLIENTS), theta) for pool in pools]
        found.append(
            [
                {**state, "last": last, **update.upload, "loss": update.loss, "n": update.n, "finite": update.finite}
                for state, last, update in zip(state, last, updates, strict=True)
            ]
        )
        found[-1].append({"processed": torch.tensor([update.processed for update in updates])})
    agree(*found, atol=0)


@ENGINES
def test_prepared_orders_of_other_jobs_change_nothing(engine):
    model = make_model("mlp")
    theta, ends = model.initial(3).double(), []
    for other in (None, Plan(epochs=1)):
        one, pool = engine(model, BATCH), make_pool(model)
        prepared = other and one.prepare([make_job(other, pool, theta, 1)])
        one.train([make_job(Plan(), pool, theta)], prepared)
        ends.append(pool.state.gather(range(CLIENTS)))
    agree(ends[:1], ends[1:], atol=0)


@ENGINES
def test_a_run_that_fails_returns_its_exception_and_does_not_affect_the_others(engine):
    def fail(model, client):
        raise ZeroDivisionError("on purpose")

    model = make_model("mlp")
    theta, pools = model.initial(3).double(), [make_pool(model) for _ in range(3)]
    alone, before, failing = (make_job(Plan(), pool, theta) for pool in pools)
    one = engine(model, BATCH)
    [expected] = engine(model, BATCH).train([alone])
    [found, error] = one.try_train([before, replace(failing, program=[fail])])
    agree([found.upload], [expected.upload], atol=0)
    assert isinstance(error, ZeroDivisionError)
    assert all(client not in pools[2].state for client in range(CLIENTS))
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        one.train([replace(failing, program=[fail])])


@pytest.mark.usefixtures("networks")
@ENGINES
@pytest.mark.parametrize("phases", ["loss", "a sweep"])
def test_batch_norm_is_refused_where_a_method_computes_logits_itself(engine, phases):
    with pytest.raises(FedobpError, match="not made for BatchNorm"):
        run_rounds(engine(make_model("normed"), BATCH), make_model("normed"), [Plan(phases)])


# Precision.


@ENGINES
@pytest.mark.parametrize("phases", ["plain", "everything"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small"])
def test_bfloat16_is_roughly_float32_and_keeps_float32_weights(name, phases, engine):
    model, plan = make_model(name), Plan(phases)
    [exact], [rough] = (
        run_rounds(engine(model, BATCH, precision), model, [plan], dtype=torch.float32, rounds=ONE_ROUND)
        for precision in ("fp32", "bf16")
    )
    assert rough["upload theta"].dtype == rough["loss"].dtype == torch.float32
    agree([rough], [exact], atol=0.05)
    assert not torch.equal(rough["upload theta"], exact["upload theta"])


@ENGINES
def test_predictions_in_bfloat16_are_nearly_those_in_float32(engine):
    model = make_model("mlp")
    first = model.initial(3)
    thetas = torch.stack([first * (-1) ** client * (1 + client) for client in range(CLIENTS)])
    job = make_job(Plan(), ClientPool(federated(dtype=torch.float32), {}, first, 5, Budget()), first)
    engines = [engine(model, BATCH, precision) for precision in ("fp32", "bf16")]
    exact, rough = (torch.cat(one.predict(job, thetas, "train")) for one in engines)
    assert (exact == rough).double().mean() > 0.9
    exact, rough = (torch.cat(one.logits(job, thetas, "train")) for one in engines)
    assert exact.dtype == rough.dtype == torch.float32
    assert 0 < (exact - rough).abs().max() < 0.05 * exact.abs().max()


# Whole runs.


@dataclass(frozen=True)
class Cheat(FedOBP):
    """FedOBP that reads the whole global model, also the entries that were not sent."""

    name: ClassVar[str] = "cheat"

    def client_update(self, ctx):
        def use_all(model, client):
            return client.set(theta=client.download["theta"].values)

        return [use_all, Train(ctx.epochs), keep_and_upload]


@NAMES
def test_a_method_that_reads_entries_it_was_not_sent_ends_with_an_error(monkeypatch, engine):
    monkeypatch.setitem(METHODS, "cheat", Cheat)
    config = Config(clients=5, rounds=2, epochs=1, model="mlp", participation=1, eval_every=2, engine=engine)
    with pytest.raises(FedobpError, match="round 2, client"):
        Federation(config).run("cheat", q=0.9)


@NAMES
def test_diverging_training_names_round_and_client_and_what_to_do(engine):
    federation = Federation(Config(clients=5, rounds=2, epochs=1, model="mlp", lr=1e9, engine=engine))
    (client,) = next(cohorts(federation.config)).tolist()
    sentence = rf"round 1, client {client}: .* no longer finite; use a smaller --lr \(it is 1e\+09\)"
    with pytest.raises(FedobpError, match=sentence):
        federation.run("fedavg")


def generators():
    name, state, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), (name, state.tolist(), rest), random.getstate()


@NAMES
@pytest.mark.parametrize("sampling", ["keyed", "published"])
@pytest.mark.parametrize("method", ["fedobp", "fedavg-ft"])
def test_a_run_neither_uses_nor_changes_the_global_generators(method, sampling, engine):
    settings = {"clients": 5, "rounds": 2, "epochs": 1, "model": "mlp", "val_ratio": 0.2, "finetune_epochs": 1}
    config = Config(**settings, sampling=sampling, engine=engine)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = generators()
        results.append(Federation(config).run(method))
        assert generators() == before
    first, second = results
    assert first.history == second.history
    for name, tensor in first.state_dict(3).items():
        assert torch.equal(tensor, second.state_dict(3)[name])
