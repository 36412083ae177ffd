"""What the captured steps of CUDA rest on, without CUDA: rounded sizes, buffers, and lanes that have nothing to do."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from fedobp.engine.fit import Rule, Stack, Stepper, active, descend
from fedobp.engine.graphs import Graphs, _empty, _load, rounded
from fedobp.engine.stack import Grouped, stacked
from fedobp.models import Model

MODEL = Model("mlp", (5,), 3)
FORWARD, LAYOUT = stacked(MODEL, Grouped), MODEL.layout
BATCH, SAMPLES = 4, 20
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
Y = torch.arange(SAMPLES) % 3
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


def stack_of(steps, used=("lr",), seed=0, learned=LAYOUT.names):
    """Return a stack whose lanes have some numbers of steps, longest first, with partial batches."""
    generator = torch.Generator().manual_seed(seed)
    lanes, most = len(steps), max(steps)

    def vectors():
        return torch.randn(lanes, LAYOUT.size, generator=generator, dtype=torch.float64) / 3

    def number(name):
        return NUMBERS[name] * (1 + torch.arange(lanes, dtype=torch.float64)[:, None] / 10)

    real = torch.arange(most)[:, None] < torch.tensor(steps)
    rule = Rule(
        **{name: number(name) for name in NUMBERS if name in used},
        anchor=vectors() if "pull" in used else None,
        drift=vectors() if "drift" in used else None,
        moving=vectors() > -0.1 if "moving" in used else None,
        velocity=torch.zeros(lanes, LAYOUT.size, dtype=torch.float64) if "momentum" in used else None,
    )
    return Stack(
        tensors={name: tensor.contiguous() for name, tensor in LAYOUT.views(vectors()).items()},
        rule=rule,
        learned=frozenset(learned),
        ids=torch.randint(SAMPLES, (most, lanes, BATCH), generator=generator),
        counts=torch.randint(2, BATCH + 1, (most, lanes), generator=generator) * real,
        x=X,
        y=Y,
        unit=2.0,
        mean=torch.linspace(0, 1, lanes, dtype=torch.float64)[:, None, None].expand(lanes, 1, 5).clone(),
        std=torch.linspace(1, 2, lanes, dtype=torch.float64)[:, None, None].expand(lanes, 1, 5).clone(),
    )


def copied(stack):
    return replace(
        stack, tensors={name: tensor.clone() for name, tensor in stack.tensors.items()}, rule=deepcopy(stack.rule)
    )


def flat(stack):
    return LAYOUT.flatten(stack.tensors)


# Sizes.


def test_rounded_sizes_are_few_and_waste_little():
    sizes = [rounded(lanes) for lanes in range(1, 257)]
    assert sizes == sorted(sizes)
    assert all(lanes <= size <= 1.25 * lanes for lanes, size in enumerate(sizes, start=1))
    assert [rounded(size) for size in sizes] == sizes
    assert sizes[:8] == list(range(1, 9))
    assert len(set(sizes)) < 100


def test_active_lanes_are_a_prefix_that_shrinks():
    assert active([5, 3, 3, 1]) == [4, 3, 3, 1, 1]
    assert active([2, 2]) == [2, 2]
    assert active([1]) == [1]


# Lanes with nothing to do.


@ALL
def test_a_lane_without_samples_is_left_exactly_as_it_is(used):
    stack = stack_of([3, 3, 3, 3], used)
    before = flat(stack)
    stack.counts[:, 1] = 0
    stack.counts[:, 3] = 0
    step = Stepper(stack, 4, LAYOUT, FORWARD, False)
    for ids, counts in zip(stack.ids, stack.counts, strict=True):
        step(ids, counts, idle=True)
    after = flat(stack)
    assert torch.equal(after[[1, 3]], before[[1, 3]])
    assert stack.loss[[1, 3]].tolist() == [0, 0]
    assert ((after - before)[[0, 2]].abs().max(dim=1).values > 1e-3).all()
    assert (stack.loss[[0, 2]] > 0).all()


@ALL
def test_lanes_beside_idle_ones_move_as_they_would_alone(used):
    idle, awake = stack_of([2, 2], used), stack_of([2, 2], used)
    idle.counts[:, 1] = 0
    for stack, allowed in ((idle, True), (awake, False)):
        step = Stepper(stack, 2, LAYOUT, FORWARD, False)
        for ids, counts in zip(stack.ids, stack.counts, strict=True):
            step(ids, counts, idle=allowed)
    torch.testing.assert_close(flat(idle)[0], flat(awake)[0], rtol=0, atol=1e-15)


@ALL
def test_a_stepper_of_fewer_lanes_leaves_the_others_alone(used):
    stack = stack_of([2, 2, 2], used)
    before = flat(stack)
    Stepper(stack, 2, LAYOUT, FORWARD, False)(stack.ids[0, :2], stack.counts[0, :2])
    assert torch.equal(flat(stack)[2], before[2])
    assert (flat(stack)[:2] - before[:2]).abs().max() > 1e-3


@ALL
def test_tensors_that_are_not_learned_do_not_move(used):
    stack = stack_of([2, 2], used, learned=["fc1.bias", "classifier.weight"])
    before = {name: tensor.clone() for name, tensor in stack.tensors.items()}
    descend(stack, [2, 2], LAYOUT, FORWARD, False)
    moved = {name for name, tensor in stack.tensors.items() if not torch.equal(tensor, before[name])}
    assert moved == {"fc1.bias", "classifier.weight"}


# Buffers.


def test_a_stack_is_loaded_into_larger_buffers():
    stack = stack_of([3, 1], RULES["everything"])
    buffers = _empty(stack, 6, 4)
    _load(buffers, stack)
    at = buffers.stack
    assert torch.equal(flat(at)[:2], flat(stack))
    assert torch.equal(at.counts[:3, :2], stack.counts)
    assert torch.equal(at.ids[:3, :2], stack.ids)
    assert at.counts[3:].sum() == at.counts[:, 2:].sum() == 0
    for name, values in vars(stack.rule).items():
        assert torch.equal(getattr(at.rule, name)[:2], values), name
    assert torch.equal(at.mean[:2], stack.mean)
    assert torch.equal(at.std[:2], stack.std)
    assert (at.std[2:] == 1).all()
    assert at.x is stack.x


def test_what_a_rule_does_not_use_takes_no_buffer():
    buffers = _empty(stack_of([2], ("lr", "decay")), 2, 1)
    assert {name for name, values in vars(buffers.stack.rule).items() if values is not None} == {"lr", "decay"}


def test_loading_again_forgets_what_was_there():
    long, short = stack_of([5, 4, 4], RULES["everything"]), stack_of([2, 1], RULES["everything"], seed=1)
    buffers = _empty(long, 5, 3)
    _load(buffers, long)
    for values in (buffers.stack.rule.velocity, buffers.stack.loss, buffers.counter):
        values.fill_(7)
    _load(buffers, short)
    at = buffers.stack
    assert torch.equal(flat(at)[:2], flat(short))
    assert at.counts.sum() == short.counts.sum()
    assert at.rule.velocity[:2].abs().sum() == at.loss.abs().sum() == buffers.counter.sum() == 0


# Graphs whose replay is the step itself.


class Replayed(Graphs):
    """Graphs without a card."""

    made = 0

    def _captured(self, buffers, lanes):
        stack, counter, self.made = buffers.stack, buffers.counter, self.made + 1
        stepper = Stepper(stack, lanes, self._layout, self._forward, self._low)

        class Graph:
            @staticmethod
            def replay():
                ids, counts = (values.index_select(0, counter)[0, :lanes] for values in (stack.ids, stack.counts))
                stepper(ids, counts, idle=True)
                counter.add_(1)

        return Graph


@ALL
def test_replaying_equals_stepping_through_rounds_of_all_sizes(used):
    graphs = Replayed(LAYOUT, FORWARD, False)
    # Shorter, longer, wider, narrower; 9 and 11 active lanes are rounded up.
    rounds = [[3, 2], [1, 1], [9, 4, 4], [3] * 11 + [2] * 9, [2], [40, 1], [7] * 9, [9, 4, 4]]
    for round, steps in enumerate(rounds):
        stack = stack_of(steps, used, seed=round)
        plain = copied(stack)
        slots = graphs.descend(stack, steps)
        descend(plain, steps, LAYOUT, FORWARD, False)
        torch.testing.assert_close(flat(stack), flat(plain), rtol=0, atol=1e-12)
        torch.testing.assert_close(stack.loss, plain.loss, rtol=0, atol=1e-12)
        assert slots == BATCH * sum(map(rounded, active(steps)))


def test_graphs_are_made_once_for_each_size():
    graphs = Replayed(LAYOUT, FORWARD, False)
    for seed, steps in enumerate([[4, 3, 3], [4, 4, 4], [8, 2, 1], [2, 2]]):
        graphs.descend(stack_of(steps, seed=seed), steps)
    assert graphs.made == 3


def test_another_kind_of_rule_has_graphs_of_its_own():
    graphs = Replayed(LAYOUT, FORWARD, False)
    for used in RULES.values():
        stack = stack_of([2, 2], used)
        plain = copied(stack)
        graphs.descend(stack, [2, 2])
        descend(plain, [2, 2], LAYOUT, FORWARD, False)
        torch.testing.assert_close(flat(stack), flat(plain), rtol=0, atol=1e-12)
    assert graphs.made == len(RULES)
