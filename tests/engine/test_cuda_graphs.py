"""The bookkeeping of CUDA graphs, tested without CUDA: padded sizes, buffers, and idle lanes."""

import gc
import weakref
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from lanes_cases import BATCH as CASE_BATCH
from lanes_cases import CHANGES, FAST, PHASES, Plan, agree, made, played, uses_logits

from fedobp.engine import Lanes, Serial
from fedobp.engine.cuda_graphs import KINDS, Graphs, padded_lanes
from fedobp.engine.lanes.vectorised import Vectorised
from fedobp.engine.sgd import active, run_steps, training
from fedobp.engine.stack import Grouped, stacked
from fedobp.method import Sweep
from fedobp.models import Model

MODEL = Model("mlp", (5,), 3)
FORWARD, LAYOUT = stacked(MODEL, Grouped), MODEL.layout
BATCH, SAMPLES = 4, 20
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
DATA = SimpleNamespace(x=X, y=torch.arange(SAMPLES) % 3, unit=2.0)
NUMBERS = {"lr": 0.1, "momentum": 0.8, "decay": 0.05, "pull": 0.3}
RULES = {
    "plain": ("lr",),
    "momentum": ("lr", "momentum"),
    "decay": ("lr", "decay"),
    "pull": ("lr", "pull"),
    "mask": ("lr", "moving"),
    "everything": ("lr", "momentum", "decay", "pull", "drift", "moving"),
}
ALL = pytest.mark.parametrize("used", RULES.values(), ids=RULES)
MAKE = training(DATA, LAYOUT.names, LAYOUT, FORWARD, False)


def stack_of(steps, used=("lr",), seed=0):
    """Return (given, moving, plan) of lanes with some numbers of steps, longest first, with partial batches."""
    generator = torch.Generator().manual_seed(seed)
    lanes, most = len(steps), max(steps)

    def vectors():
        return torch.randn(lanes, LAYOUT.size, generator=generator, dtype=torch.float64) / 3

    def number(name):
        return NUMBERS[name] * (1 + torch.arange(lanes, dtype=torch.float64)[:, None] / 10)

    rule = {name: number(name) for name in NUMBERS if name in used}
    if "pull" in used:
        rule["anchor"] = vectors()
    if "drift" in used:
        rule["drift"] = vectors()
    if "moving" in used:
        rule["moving"] = vectors() > -0.1
    if "momentum" in used:
        rule["velocity"] = torch.zeros(lanes, LAYOUT.size, dtype=torch.float64)
    scales = torch.linspace(0, 1, lanes, dtype=torch.float64)[:, None, None].expand(lanes, 1, 5)
    given = {"rule": rule, "mean": scales.clone(), "std": 1 + scales}
    tensors = {name: tensor.contiguous() for name, tensor in LAYOUT.views(vectors()).items()}
    real = torch.arange(most)[:, None] < torch.tensor(steps)
    plan = {
        "ids": torch.randint(SAMPLES, (most, lanes, BATCH), generator=generator),
        "counts": torch.randint(2, BATCH + 1, (most, lanes), generator=generator) * real,
    }
    return given, {"tensors": tensors, "loss": torch.zeros(lanes, dtype=torch.float64)}, plan


def flat(moving):
    return LAYOUT.flatten(moving["tensors"])


# Sizes.


def test_padded_sizes_are_few_and_waste_little():
    sizes = [padded_lanes(lanes) for lanes in range(1, 257)]
    assert sizes == sorted(sizes)
    assert all(lanes <= size <= 1.25 * lanes for lanes, size in enumerate(sizes, start=1))
    assert [padded_lanes(size) for size in sizes] == sizes
    assert sizes[:8] == list(range(1, 9))
    assert len(set(sizes)) < 100


def test_active_lanes_are_a_prefix_that_shrinks():
    assert active([5, 3, 3, 1]) == [4, 3, 3, 1, 1]
    assert active([2, 2]) == [2, 2]
    assert active([1]) == [1]


# Idle lanes.


@ALL
def test_a_lane_without_samples_does_not_change(used):
    given, moving, plan = stack_of([3, 3, 3, 3], used)
    before = flat(moving)
    plan["counts"][:, [1, 3]] = 0
    run_steps(given, moving, plan, [3, 3, 3, 3], MAKE)
    after = flat(moving)
    assert torch.equal(after[[1, 3]], before[[1, 3]])
    assert moving["loss"][[1, 3]].tolist() == [0, 0]
    assert ((after - before)[[0, 2]].abs().max(dim=1).values > 1e-3).all()
    assert (moving["loss"][[0, 2]] > 0).all()


@ALL
def test_idle_lanes_do_not_affect_the_others(used):
    idle, busy = stack_of([2, 2], used), stack_of([2, 2], used)
    idle[2]["counts"][:, 1] = 0
    for stack in (idle, busy):
        run_steps(*stack, [2, 2], MAKE)
    torch.testing.assert_close(flat(idle[1])[0], flat(busy[1])[0], rtol=0, atol=1e-15)


@ALL
def test_a_step_of_fewer_lanes_does_not_change_the_others(used):
    given, moving, plan = stack_of([2, 2, 2], used)
    before = flat(moving)
    MAKE(given, moving, 2)({name: values[0, :2] for name, values in plan.items()})
    assert torch.equal(flat(moving)[2], before[2])
    assert (flat(moving)[:2] - before[:2]).abs().max() > 1e-3


@ALL
def test_tensors_that_are_not_learned_do_not_move(used):
    given, moving, plan = stack_of([2, 2], used)
    before = {name: tensor.clone() for name, tensor in moving["tensors"].items()}
    some = {"fc1.bias", "classifier.weight"}
    run_steps(given, moving, plan, [2, 2], training(DATA, some, LAYOUT, FORWARD, False))
    assert {name for name, tensor in moving["tensors"].items() if not torch.equal(tensor, before[name])} == some


# Graphs whose replay is the step itself.


class Counted(Graphs):
    """Graphs that count how many were captured."""

    made = 0

    def _capture(self, buffers, lanes):
        self.made += 1
        return super()._capture(buffers, lanes)


@ALL
def test_replaying_equals_stepping_through_rounds_of_all_sizes(used):
    graphs = Counted()
    # Shorter, longer, wider, narrower; 9 and 11 active lanes are rounded up.
    rounds = [[3, 2], [1, 1], [9, 4, 4], [3] * 11 + [2] * 9, [2], [40, 1], [7] * 9, [9, 4, 4]]
    for round, steps in enumerate(rounds):
        stack = stack_of(steps, used, seed=round)
        plain = deepcopy(stack)
        slots = graphs.run_steps("kind", *stack, steps, MAKE)
        run_steps(*plain, steps, MAKE)
        torch.testing.assert_close(flat(stack[1]), flat(plain[1]), rtol=0, atol=1e-12)
        torch.testing.assert_close(stack[1]["loss"], plain[1]["loss"], rtol=0, atol=1e-12)
        assert slots == BATCH * sum(map(padded_lanes, active(steps)))


def test_graphs_are_made_once_for_each_size():
    graphs = Counted()
    for seed, steps in enumerate([[4, 3, 3], [4, 4, 4], [8, 2, 1], [2, 2]]):
        graphs.run_steps("kind", *stack_of(steps, seed=seed), steps, MAKE)
    assert graphs.made == 3


def test_other_tensors_and_other_kinds_have_separate_graphs():
    graphs = Counted()
    for used in RULES.values():
        stack = stack_of([2, 2], used)
        plain = deepcopy(stack)
        graphs.run_steps("kind", *stack, [2, 2], MAKE)
        run_steps(*plain, [2, 2], MAKE)
        torch.testing.assert_close(flat(stack[1]), flat(plain[1]), rtol=0, atol=1e-12)
    assert graphs.made == len(RULES)
    graphs.run_steps("another", *stack_of([2, 2]), [2, 2], MAKE)
    assert graphs.made == len(RULES) + 1


def test_the_most_recently_used_kinds_are_cached():
    graphs, stack = Counted(), stack_of([2, 2])
    for kind in [*range(KINDS), 0, KINDS, 0, 1]:
        graphs.run_steps(kind, *deepcopy(stack), [2, 2], MAKE)
    assert [key[0] for key in graphs._cache] == [*range(3, KINDS), KINDS, 0, 1]
    assert graphs.made == KINDS + 2


def test_results_do_not_depend_on_old_buffer_contents():
    """Velocities, counters, and the contents of unused lanes and steps."""
    steps, used = [3, 2, 2], RULES["everything"]
    graphs, stack = Graphs(), stack_of(steps, used)
    graphs.run_steps("kind", *stack_of([9] * 12, used, seed=1), [9] * 12, MAKE)
    [kept] = graphs._cache.values()
    tensors = [*kept.given["rule"].values(), kept.given["std"], *kept.moving["tensors"].values(), kept.moving["loss"]]
    for tensor in tensors:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.nan)
    kept.counter.fill_(5)
    plain = deepcopy(stack)
    graphs.run_steps("kind", *stack, steps, MAKE)
    run_steps(*plain, steps, MAKE)
    torch.testing.assert_close(flat(stack[1]), flat(plain[1]), rtol=0, atol=1e-12)


# Custom losses and sweeps, replayed.


@pytest.fixture
def replaying(monkeypatch):
    """Let the lanes engine replay a method's functions on the CPU, as it does on CUDA; few lanes leave some idle."""

    def replayed(self, lanes, given, moving, plan, steps, make):
        return self._graphs.run_steps(lanes[0].phase.kind, given, moving, plan, steps, make)

    monkeypatch.setattr(Vectorised, "_descend", replayed)
    monkeypatch.setattr("fedobp.engine.cuda_graphs.padded_lanes", lambda lanes: -(-lanes // 3) * 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # buffers are for one stack at a time


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("hp", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", [name for name, items in PHASES.items() if uses_logits(items)])
def test_custom_functions_equal_the_oracle_in_rounds_of_all_sizes(phases, hparams):
    model = made("mlp")
    engine, serial = Lanes(model, CASE_BATCH), Serial(model, CASE_BATCH)
    for plans, rounds in (
        ([Plan(phases, hparams)], CHANGES),
        ([Plan(phases, hparams), Plan(phases, FAST, seed=9)], CHANGES[::-1]),
    ):
        agree(played(engine, model, plans, rounds=rounds), played(serial, model, plans, rounds=rounds))


@pytest.mark.usefixtures("replaying", "networks")
@pytest.mark.parametrize("phases", ["plain", "mask", "base"])
def test_batch_norm_equals_the_oracle(phases):
    model, plans = made("normed"), [Plan(phases, FAST), Plan(phases, FAST, seed=9, cohort=(4, 0))]
    engine = Lanes(model, CASE_BATCH)
    agree(played(engine, model, plans, rounds=CHANGES), played(Serial(model, CASE_BATCH), model, plans, rounds=CHANGES))


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("phases", ["loss", "a sweep"])
def test_graphs_are_freed_with_their_engine_without_garbage_collection(phases):
    """They hold GPU memory."""
    model = made("mlp")
    engine = Lanes(model, CASE_BATCH)
    played(engine, model, [Plan(phases)])
    kept = weakref.ref(engine._graphs)
    assert kept()._cache
    gc.disable()
    try:
        del engine
        assert kept() is None
    finally:
        gc.enable()


TEACHER = torch.nn.Linear(64, 3).double()


def learn(model, client, batch):
    """A step that uses another module, whose parameters require gradients."""
    return client.set(theta=client.theta + batch.mean(TEACHER(batch.x.flatten(1)).sum(dim=1)) / 10)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_may_use_another_module(graphs, request, monkeypatch):
    if graphs:
        request.getfixturevalue("replaying")
    monkeypatch.setitem(PHASES, "teacher", [Sweep(learn, 2)])
    model, plans = made("mlp"), [Plan("teacher")]
    found = played(Lanes(model, CASE_BATCH), model, plans)
    agree(found, played(Serial(model, CASE_BATCH), model, plans))
