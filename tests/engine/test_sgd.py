"""SGD on stacks of lanes: which lanes take a step, and which do not change."""

import torch

from engine.stack_cases import ALL, DATA, FORWARD, LAYOUT, MAKE, flat, stack_of
from fedobp.engine.sgd import active, run_steps, training


def test_active_lanes_are_a_prefix_that_shrinks():
    assert active([5, 3, 3, 1]) == [4, 3, 3, 1, 1]
    assert active([2, 2]) == [2, 2]
    assert active([1]) == [1]


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
    run_steps(given, moving, plan, [2, 2], training(DATA, some, LAYOUT, FORWARD))
    assert {name for name, tensor in moving["tensors"].items() if not torch.equal(tensor, before[name])} == some
