"""Steps and predictions of the fused kernels, interpreted in float32, against autograd in float64."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases import CASES, Case, Problem, fill_with_nan

from engine.kernels.interpreted import LARGE, WITHOUT_GPU, interpreted
from fedobp import Config, Federation
from fedobp.data import Dataset, Shard
from fedobp.engine.kernels.cards import known_card
from fedobp.engine.kernels.fused import Fused, graph_lanes
from fedobp.engine.kernels.reference import rounded, rounded_logits
from fedobp.engine.kernels.step import StepConfig, refresh
from fedobp.engine.kernels.tiles import Tile, default_table
from fedobp.resolution import resolve

pytestmark = WITHOUT_GPU

DRAW = np.random.default_rng(3)
DATASET = Dataset("noise", DRAW.integers(0, 256, (60, 28, 28), dtype=np.uint8), np.arange(60) % 10, tuple(range(10)), 0)
SHARDS = [
    Shard(np.arange(20), np.arange(0), np.arange(20, 30)),
    Shard(np.arange(30, 46), np.arange(0), np.arange(46, 60)),
]


@pytest.mark.parametrize("name", CASES)
def test_two_steps_are_autograds_in_float64(name):
    problem = Problem(CASES[name])
    theta, losses = problem.train(interpreted(problem))
    right, right_losses = problem.expected()
    assert problem.errors(theta, right).max() < 2e-5
    torch.testing.assert_close(losses, right_losses.float(), rtol=1e-5, atol=1e-5)


def test_the_reference_of_lower_precisions():
    """The reference of the GPU tests: values by hand, and the model itself where nothing is rounded."""
    value = torch.tensor([1 + 2**-8 + 2**-9, 1 + 2**-10 + 2**-11, -1 - 2**-10 - 2**-11], dtype=torch.float64)
    assert rounded(value, "bf16").tolist() == [1 + 2**-7, 1, -1]
    assert rounded(value, "tf32").tolist() == [value[0], 1 + 2**-10, -1 - 2**-10]
    problem = Problem(Case())
    x, weights = problem.inputs(torch.arange(4)), problem.theta[0].double().requires_grad_()
    found = rounded_logits(problem.model.layout.views(weights).values(), x, "fp32")
    right = problem.model.logits(weights, x)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), weights) for one in (found, right)))


def test_idle_lanes_do_not_change(padded):
    """The second lane finishes before the first; its terms would change it even without a gradient."""
    problem = Problem(Case(terms=("momentum", "decay")))
    theta, losses = problem.train(interpreted(problem))
    right, right_losses = problem.expected()
    assert problem.errors(theta, right).max() < 2e-5
    torch.testing.assert_close(losses, right_losses.float(), rtol=1e-5, atol=1e-5)


def test_rows_of_single_pixels_and_a_graph_of_several_steps(monkeypatch):
    """The other variant of conv2's input gradient; three steps, each with the velocity of all before it."""
    monkeypatch.setattr("fedobp.engine.kernels.fused._STEPS_PER_GRAPH", 2)
    problem = Problem(Case(steps=(3,), counts=((16, 9, 4),), terms=("momentum",)))
    theta, _ = problem.train(interpreted(problem, replace(LARGE, conv2_inputs=Tile(256, 1, 4, 1))))
    assert problem.errors(theta, problem.expected()[0]).max() < 5e-5


def test_lanes_of_different_scalings():
    problem = Problem(Case(steps=(1, 1), counts=((16,), (16,))))
    other, theta, fused = copy(problem.data), problem.theta.clone(), interpreted(problem)
    other.mean, other.std = problem.data.mean + 0.3, problem.data.std * 2
    fused.train(theta, problem.rule(), "all", problem.ids, problem.counts, [problem.data, other], (1, 1))
    first, _ = problem.expected()
    problem.data = other
    second, _ = problem.expected()
    wanted = torch.stack([first[0], second[1]])
    change = (wanted - problem.theta.double()).norm(dim=1)
    assert ((theta.double() - wanted).norm(dim=1) / change).max() < 2e-5


@pytest.mark.essential
def test_untrained_and_masked_entries_keep_their_bits():
    problem = Problem(Case(part="head", terms=("momentum", "decay", "moving"), steps=(1,), counts=((16,),)))
    theta, _ = problem.train(interpreted(problem))
    still = ~problem.model.layout.is_head() | ~problem.vectors["moving"][0]
    assert torch.equal(theta[0, still], problem.theta[0, still])
    assert not torch.equal(theta[0, ~still], problem.theta[0, ~still])


def test_results_do_not_depend_on_old_buffer_contents():
    problem = Problem(Case(steps=(1, 1), counts=((3,), (16,)), terms=("momentum",)))
    fused = interpreted(problem)
    clean, losses = problem.train(fused)
    [cached] = fused._cache.values()
    fill_with_nan(cached.buffers)
    again, losses_again = problem.train(fused)
    assert torch.equal(clean, again)
    assert torch.equal(losses, losses_again)


@pytest.mark.parametrize("idle", [False, True])
def test_fewer_lanes_do_not_depend_on_the_contents_of_unused_lanes(idle, request):
    """Windows at an image's end read pixels of the next lane, with weight 0: they must not be NaN."""
    if idle:
        request.getfixturevalue("padded")
    problem = Problem(Case(steps=(1, 1), counts=((16,), (16,))))
    fused = interpreted(problem)
    cached = fused._buffers(StepConfig(fused._shapes, "fp32", "all"), 2, 1, problem.data)
    fill_with_nan(cached.buffers)
    fewer = Problem(Case(steps=(1,), counts=((7,),)))
    fewer.data = problem.data
    theta, _ = fewer.train(fused)
    assert len(fused._cache) == 1
    assert fewer.errors(theta, fewer.expected()[0]).max() < 2e-5


def test_inputs_far_from_0_keep_their_digits():
    """Images of float32 whose mean is thousands of times their deviation: the mean is subtracted first."""
    problem = Problem(Case(steps=(1,), counts=((16,),)))
    data = problem.data
    data.x, data.unit = 0.5 + 2e-5 * torch.randn(data.x.shape, generator=torch.Generator().manual_seed(0)), 1
    data.mean, data.std = torch.full_like(data.mean, 0.5), torch.full_like(data.std, 2e-5)
    theta, _ = problem.train(interpreted(problem))
    assert problem.errors(theta, problem.expected()[0]).max() < 1e-4


def test_lane_bytes_cover_its_buffers():
    problem = Problem(CASES["everything, 32x32"])
    fused = interpreted(problem)
    cached = fused._buffers(StepConfig(fused._shapes, "fp32", "all", 31), 3, 2, problem.data)
    taken = sum(
        one.numel() * one.element_size() for one in vars(cached.buffers).values() if isinstance(one, torch.Tensor)
    )
    # In addition to the buffers (here for a smaller batch) there are copies of its vector.
    assert taken / cached.buffers.lanes < fused.lane_bytes < 8 * taken / cached.buffers.lanes


def test_labels_are_the_largest_logits():
    right_labels(Case(32, 3, 62, steps=(1, 1), counts=((2,), (2,))), [70, 3])


@pytest.mark.usefixtures("small_tests")
@pytest.mark.parametrize("sizes", [[34, 16, 0], [18, 17, 3]])
def test_labels_of_lanes_beside_idle_ones(sizes, padded):
    right_labels(Case(steps=(1,) * 3, counts=((2,),) * 3), sizes)


def right_labels(case, sizes):
    problem = Problem(case)
    for found, logits in problem.labels(interpreted(problem), sizes):
        assert torch.equal(found, logits.argmax(dim=1))


@pytest.mark.usefixtures("small_tests")
def test_the_engine_with_kernels_equals_the_serial_one(monkeypatch):
    """A whole run, with evaluations and fine-tuning: without warnings, and with the same predictions."""
    used = []

    class WatchedFused(Fused):
        def train(self, *given):
            used.append("train")
            return super().train(*given)

        def labels(self, *given):
            used.append("labels")
            return super().labels(*given)

    monkeypatch.setattr(
        "fedobp.engine.lanes.engine.fused_for",
        lambda model, batch, precision, mode, device: WatchedFused(model, batch, "fp32", [LARGE], device),
    )
    monkeypatch.setattr("fedobp.federation.partition", lambda *_, **__: SHARDS)
    given = {"clients": 2, "rounds": 2, "participation": 0.5, "epochs": 1, "batch_size": 16, "model": "cnn",
             "method": "fedobp", "options": {"q": 0.9}, "momentum": 0.5, "finetune_epochs": 1, "lr": 0.1,
             "eval_every": 2, "device": "cpu"}  # fmt: skip
    found = {}
    for engine in ("serial", "lanes"):
        settings = resolve(Config(**given, engine=engine), DATASET)
        found[engine] = Federation.resolved(DATASET, *settings).run()
    assert sorted(set(used)) == ["labels", "train"]
    for column in ("accuracy", "last", "finetuned"):
        assert getattr(found["lanes"], column) == getattr(found["serial"], column)
    for client in range(2):
        for name, tensor in found["lanes"].state_dict(client).items():
            torch.testing.assert_close(tensor, found["serial"].state_dict(client)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("part", ["all", None])
def test_every_variant_that_steps_use_is_compiled_in_advance(part, precision):
    """With the tables of a card, for every number of lanes that its buffers can hold."""
    problem, card = Problem(Case(batch=32)), known_card("8.6")
    fused = Fused(problem.model, 32, precision, default_table((8, 6)).entries, problem.device, card)
    config = fused._evaluation if part is None else StepConfig(fused._shapes, precision, part)
    for lanes in (1, 2, 3, 7, 16, 24):
        cached = fused._buffers(config, lanes, 1, problem.data)
        used = {one.variant for n in range(1, lanes + 1) for one in fused._launches(cached, graph_lanes(n)).values()}
        used |= {refresh(config, cached.buffers, lanes, cached.samples).variant}
        compiled = fused._variants(config, cached.buffers.lanes, problem.data)
        assert used == set(compiled)
        assert all(one.grid[-1] == 1 for one in compiled.values())


def test_training_compiles_what_its_evaluation_needs_and_nothing_twice(monkeypatch):
    problem, compiled = Problem(Case(batch=32)), []
    monkeypatch.setattr("fedobp.engine.kernels.fused.compile_all", lambda launches, *_: compiled.append(launches))
    fused = Fused(problem.model, 32, "bf16", default_table((8, 6)).entries, problem.device, known_card("8.6"))
    training = StepConfig(fused._shapes, "bf16", "all")
    fused._compile(training, 2, problem.data)
    assert {one.variant for one in compiled[-1]} == {
        *fused._variants(training, 2, problem.data),
        *fused._variants(fused._evaluation, problem.data.clients, problem.data),
    }
    for config, lanes in ((training, 2), (fused._evaluation, 1)):
        fused._compile(config, lanes, problem.data)
        assert compiled[-1] == []
    fused._compile(training, 24, problem.data)
    assert [one.kernel.__name__ for one in compiled[-1]].count("conv1") == 2  # with padding lanes, of both
