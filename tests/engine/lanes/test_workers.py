"""Stacks of lanes: bounded by memory, divided between cores, without an effect on results."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lanes_cases import (
    BATCH,
    CLIENTS,
    FAST,
    MIXED,
    ONE_ROUND,
    Plan,
    agree,
    compare,
    make_job,
    make_model,
    make_pool,
    run_rounds,
)

from fedobp.engine import Counters, Lanes, Serial
from fedobp.engine.lanes.workers import Workers
from fedobp.engine.stack import Columns, Grouped, stacked
from fedobp.models import Model

pytestmark = pytest.mark.usefixtures("networks")


def two_workers(model, **options):
    """Return an engine as on a machine with two cores; torch's threads stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        return Lanes(model, BATCH, **options)


@pytest.mark.parametrize("memory", [1.0, 3e6, 1e7])
@pytest.mark.parametrize("phases", ["plain", "everything"])
def test_a_small_memory_splits_the_lanes_and_changes_nothing(phases, memory):
    model = make_model("mlp")
    compare(model, [Plan(phases, FAST), Plan(phases, seed=9, epochs=1)], Lanes(model, BATCH, memory=memory))


def test_the_memory_bounds_the_lanes_of_a_stack():
    model = make_model("mlp")
    slots = {}
    for memory in (1.0, float("inf")):
        engine = Lanes(model, BATCH, memory=memory)
        run_rounds(engine, model, [Plan(epochs=1)], rounds=ONE_ROUND)
        slots[memory] = engine.counters
    # Batches of 4, 4, 3; 4, 4; 4, 2; 4, 4. Alone nothing is padded; in one stack 4 lanes twice 4 wide, then one 3 wide.
    assert slots[1.0] == Counters(steps=9, slots=33, samples=33)
    assert slots[float("inf")] == Counters(steps=9, slots=4 * 4 + 4 * 4 + 3, samples=33)
    assert slots[float("inf")].occupancy == pytest.approx(33 / 35)


@pytest.mark.parametrize(("name", "memory"), [("mlp", float("inf")), ("mlp", 1.0), ("residual", 1.0)])
def test_two_workers_equal_the_oracle(name, memory):
    model = make_model(name)
    compare(model, MIXED, two_workers(model, memory=memory))


def test_two_workers_share_the_lanes():
    model = make_model("mlp")
    engine = two_workers(model)
    run_rounds(engine, model, [Plan(epochs=1)], rounds=ONE_ROUND)
    # Longest first, assigned in turn: batches of 4, 4, 3 beside 4, 2, and of 4, 4 beside 4, 4.
    assert engine.counters == Counters(steps=9, slots=8 + 8 + 3 + 16, samples=33)


def test_workers_leave_the_callers_threads_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = make_model("mlp")
        plan = Plan("plain", FAST, cohort=(0, 1))
        found = run_rounds(Lanes(model, BATCH), model, [plan])  # a lane and a core each
        assert torch.get_num_threads() == 2
        agree(found, run_rounds(Serial(model, BATCH), model, [plan]))
    finally:
        torch.set_num_threads(before)


def test_two_workers_give_the_same_bytes_every_time():
    model = make_model("cnn-small")
    first, second = (run_rounds(two_workers(model), model, MIXED[:5], dtype=torch.float32) for _ in range(2))
    agree(first, second, atol=0)


# The size of a stack.


def make_workers(model, kernels, memory=float("inf")):
    forms = {"cpu": stacked(model, Grouped), "cuda": stacked(model, Columns)}
    return Workers(model, 32, "fp32", memory, forms, lambda device: kernels)


def test_without_a_memory_limit_all_lanes_of_the_kernels_are_one_stack():
    model, kernels = Model("cnn", (1, 28, 28), 10), SimpleNamespace(lane_bytes=1000)
    lanes, like = list(range(9)), torch.zeros(1)
    assert make_workers(model, kernels).stacks(lanes, like, 32) == [lanes]
    assert [len(stack) for stack in make_workers(model, kernels, 4500).stacks(lanes, like, 32)] == [3, 3, 3]
    assert make_workers(model, kernels).stacks([], like, 32) == []


@pytest.mark.parametrize(
    ("verb", "custom", "stacks"), [("predict", False, 1), ("predict", True, CLIENTS), ("logits", False, CLIENTS)]
)
def test_what_the_kernels_cannot_do_is_stacked_by_the_memory_of_the_general_path(verb, custom, stacks, monkeypatch):
    """A lane of the kernels needs one byte here, and a lane of the general path more than the limit."""
    kernels = SimpleNamespace(lane_bytes=1, vectorised=lambda model: model)
    monkeypatch.setattr("fedobp.engine.lanes.engine.fused_for", lambda *_: kernels)
    counts = []
    monkeypatch.setattr(Workers, "map", lambda self, function, stacks, device: counts.append(len(stacks)))
    model = make_model("mlp")
    theta = model.initial(0).double()
    predict = (lambda model, scratch, x: model.logits(scratch["theta"], x)) if custom else None
    job = replace(make_job(Plan(), make_pool(model), theta), predict=predict)
    thetas = theta.expand(CLIENTS, -1)
    getattr(Lanes(model, BATCH, memory=10), verb)(job, thetas, "test", {"theta": thetas})
    assert counts == [stacks]
