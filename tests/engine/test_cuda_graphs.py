"""The bookkeeping of CUDA graphs, tested without CUDA: padded sizes, buffers and the cache."""

from copy import deepcopy

import torch

from engine.stack_cases import ALL, BATCH, MAKE, RULES, flat, stack_of
from fedobp.engine.cuda_graphs import CACHE_SIZE, Graphs, padded_lanes
from fedobp.engine.sgd import active, run_steps


def test_padded_sizes_are_few_and_waste_little():
    sizes = [padded_lanes(lanes) for lanes in range(1, 257)]
    assert sizes == sorted(sizes)
    assert all(lanes <= size <= 1.25 * lanes for lanes, size in enumerate(sizes, start=1))
    assert [padded_lanes(size) for size in sizes] == sizes
    assert sizes[:8] == list(range(1, 9))
    assert len(set(sizes)) < 100


# Graphs whose replay is the step itself.


class CountingGraphs(Graphs):
    """Graphs that count how many were captured."""

    captured = 0

    def _capture(self, buffers, lanes):
        self.captured += 1
        return super()._capture(buffers, lanes)


@ALL
def test_replaying_equals_stepping_through_rounds_of_all_sizes(used):
    graphs = CountingGraphs()
    # Shorter, longer, wider, narrower; 9 and 11 active lanes are rounded up.
    rounds = [[3, 2], [1, 1], [9, 4, 4], [3] * 11 + [2] * 9, [2], [40, 1], [7] * 9, [9, 4, 4]]
    for round, steps in enumerate(rounds):
        stack = stack_of(steps, used, seed=round)
        plain = deepcopy(stack)
        slots = graphs.run_steps("group", *stack, steps, MAKE)
        run_steps(*plain, steps, MAKE)
        torch.testing.assert_close(flat(stack[1]), flat(plain[1]), rtol=0, atol=1e-12)
        torch.testing.assert_close(stack[1]["loss"], plain[1]["loss"], rtol=0, atol=1e-12)
        assert slots == BATCH * sum(map(padded_lanes, active(steps)))


def test_graphs_are_captured_once_for_each_size():
    graphs = CountingGraphs()
    for seed, steps in enumerate([[4, 3, 3], [4, 4, 4], [8, 2, 1], [2, 2]]):
        graphs.run_steps("group", *stack_of(steps, seed=seed), steps, MAKE)
    assert graphs.captured == 3


def test_other_tensors_and_other_groups_have_separate_graphs():
    graphs = CountingGraphs()
    for used in RULES.values():
        stack = stack_of([2, 2], used)
        plain = deepcopy(stack)
        graphs.run_steps("group", *stack, [2, 2], MAKE)
        run_steps(*plain, [2, 2], MAKE)
        torch.testing.assert_close(flat(stack[1]), flat(plain[1]), rtol=0, atol=1e-12)
    assert graphs.captured == len(RULES)
    graphs.run_steps("another", *stack_of([2, 2]), [2, 2], MAKE)
    assert graphs.captured == len(RULES) + 1


def test_the_most_recently_used_groups_are_cached():
    graphs, stack = CountingGraphs(), stack_of([2, 2])
    for group in [*range(CACHE_SIZE), 0, CACHE_SIZE, 0, 1]:
        graphs.run_steps(group, *deepcopy(stack), [2, 2], MAKE)
    assert [key[0] for key in graphs._cache] == [*range(3, CACHE_SIZE), CACHE_SIZE, 0, 1]
    assert graphs.captured == CACHE_SIZE + 2


def test_results_do_not_depend_on_old_buffer_contents():
    """Velocities, counters, and the contents of unused lanes and steps."""
    steps, used = [3, 2, 2], RULES["everything"]
    graphs, stack = Graphs(), stack_of(steps, used)
    graphs.run_steps("group", *stack_of([9] * 12, used, seed=1), [9] * 12, MAKE)
    [kept] = graphs._cache.values()
    tensors = [*kept.given["rule"].values(), kept.given["std"], *kept.moving["tensors"].values(), kept.moving["loss"]]
    for tensor in tensors:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.nan)
    kept.counter.fill_(5)
    plain = deepcopy(stack)
    graphs.run_steps("group", *stack, steps, MAKE)
    run_steps(*plain, steps, MAKE)
    torch.testing.assert_close(flat(stack[1]), flat(plain[1]), rtol=0, atol=1e-12)
