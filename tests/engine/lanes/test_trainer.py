"""Lanes in their order, their samples step by step, and the key under which orders are prepared."""

import pytest
import torch
from lanes_cases import BATCH, TRAIN, Plan, fit_scale, make_job, make_model, make_pool

from fedobp.engine import Lanes, Prepared
from fedobp.engine.batch_order import batches
from fedobp.engine.lanes.phases import Phase
from fedobp.engine.lanes.trainer import order_key
from fedobp.keys import fold
from fedobp.method import Sweep, Train

MODEL = make_model("mlp")
THETA = MODEL.initial(3).double()


@pytest.fixture
def trainer():
    return Lanes(MODEL, BATCH)._trainer


def phase_of(item, pool, plan=None, round=1, prepared=None):
    job = make_job(plan or Plan(), pool, THETA, round)
    return Phase(job, item, None, fold(pool.seed, round, job.ctx.cohort), prepared)


def test_lanes_are_the_clients_with_a_step_to_take_and_those_with_most_steps_come_first(trainer):
    pools = [make_pool(MODEL), make_pool(MODEL, seed=6)]
    lanes = trainer.lanes([phase_of(Train(2), pools[0]), phase_of(Train(1), pools[1], Plan(cohort=(4, 3, 0)))])
    found = [(lane.index, lane.row, lane.client, lane.n, lane.steps) for lane in lanes]
    # Batches of 4, 4, 3; 4, 4 (a single sample is skipped); none; none; 4, 2; 4, 4.
    assert found == [
        (0, 0, 0, 11, 6), (0, 1, 1, 9, 4), (0, 4, 4, 6, 4), (0, 5, 5, 8, 4), (1, 2, 0, 11, 3), (1, 0, 4, 6, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sweep", "steps"),
    [
        (Sweep(fit_scale, 2), {0: 3, 1: 3, 3: 1, 4: 2, 5: 2}),  # of one epoch
        (Sweep(fit_scale, smallest=2), {0: 3, 1: 2, 4: 2, 5: 2}),
        (Sweep(fit_scale, whole=True), {0: 1, 1: 1, 3: 1, 4: 1, 5: 1}),
        (Sweep(fit_scale, fraction=0.5), {0: 2, 1: 1, 3: 1, 4: 1, 5: 1}),
        (Sweep(fit_scale, 0), {}),
    ],
)
def test_steps_of_a_sweep(trainer, sweep, steps):
    found = trainer.lanes([phase_of(sweep, make_pool(MODEL))])
    assert {lane.client: lane.steps for lane in found} == steps


def test_the_samples_of_a_step_are_those_of_each_clients_batches(trainer):
    pool = make_pool(MODEL)
    phase = phase_of(Train(2), pool)
    lanes = trainer.lanes([phase])
    ids, counts = trainer.data_order(lanes)
    assert ids.shape == (6, 4, BATCH)
    for at, lane in enumerate(lanes):
        samples = pool.data.ids(torch.tensor([lane.client]), torch.arange(lane.n)[None], "train")[0]
        key = phase.keys[lane.row]
        expected = [samples[batch].tolist() for epoch in range(2) for batch in batches(fold(key, epoch), lane.n, BATCH)]
        found = [row[:count].tolist() for row, count in zip(ids[:, at], counts[:, at].tolist(), strict=True)]
        assert found == expected + [[]] * (6 - len(expected))


def test_orders_have_the_same_key_where_they_are_the_same_and_only_there(trainer):
    pool, other = make_pool(MODEL), make_pool(MODEL)

    def key(item=None, pool=pool, **options):
        return order_key(trainer.lanes([phase_of(item or Train(2), pool, **options)]))

    assert key() == key(Train(2, part="head"))
    assert len({key(), key(Train(1)), key(pool=other), key(round=2), key(plan=Plan(cohort=(0, 1)))}) == 5


def test_orders_that_were_prepared_for_other_lanes_are_not_used(trainer):
    pool = make_pool(MODEL)
    other = trainer.lanes([phase_of(Train(1), pool)])
    prepared = Prepared({order_key(other): trainer.data_order(other)})
    expected = trainer.data_order(trainer.lanes([phase_of(Train(2), pool)]))
    found = trainer.data_order(trainer.lanes([phase_of(Train(2), pool, prepared=prepared)]))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_client_is_trained_on_all_its_samples_but_a_last_single_one(trainer):
    pool = make_pool(MODEL)
    ids, counts = trainer.data_order(trainer.lanes([phase_of(Train(1), pool)]))
    seen = ids[torch.arange(BATCH) < counts[..., None]].tolist()
    assert len(seen) == len(set(seen)) == sum(n - (n % BATCH == 1) for n in TRAIN)
