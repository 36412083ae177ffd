"""The self-check of the fused kernels: sound ones pass, and what is wrong with others is named."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from engine.kernels.interpreted import CPU, LARGE, WITHOUT_GPU
from fedobp.engine.kernels import self_check
from fedobp.engine.kernels.cards import known_card
from fedobp.engine.kernels.fused import Fused
from fedobp.engine.kernels.reference import change_errors, expected_steps, rounded_logits, scaled_inputs
from fedobp.engine.kernels.self_check import compile_ahead, disagreement, noise
from fedobp.engine.kernels.step import StepConfig
from fedobp.engine.kernels.tiles import default_table
from fedobp.engine.sgd import active
from fedobp.models import Layout, Model

pytestmark = WITHOUT_GPU

MODEL = Model("cnn", (1, 28, 28), 10)
CONV2 = MODEL.layout.slices["conv2.weight"]


@pytest.fixture(autouse=True)
def _few_lanes(monkeypatch):
    """One training is compared with the reference."""
    monkeypatch.setattr("fedobp.engine.kernels.self_check._LANES", 2)


class Computed(Fused):
    """The reference instead of kernels, with a fault: `spoil` changes what a call has computed."""

    def __init__(self, spoil=lambda start, theta, call: None, label=0, precision="fp32", computed_in=None):
        super().__init__(MODEL, 16, precision, [LARGE], CPU)
        self.spoil, self.label, self.computed_in, self.active = spoil, label, computed_in or precision, []

    def train(self, *given):
        start = given[0].clone()
        theta, losses = expected_steps(MODEL, self.computed_in, *given)
        given[0].copy_(theta)
        self.active.append(active(given[-1]))
        self.spoil(start, given[0], len(self.active))
        return losses, 0

    def labels(self, theta, ids, sizes, data):
        tensors = [MODEL.layout.views(one).values() for one in theta.double()]
        inputs = [scaled_inputs(data, one, "fp32") for one in ids]
        found = torch.stack([rounded_logits(*both, "fp32").argmax(dim=1) for both in zip(tensors, inputs, strict=True)])
        found[0, -1] += self.label
        return found


def scaled(lanes, factor):
    def spoil(start, theta, call):
        if not torch.equal(*start):  # a sound kernel makes the same of equal lanes
            theta[lanes, CONV2] = start[lanes, CONV2] + factor * (theta - start)[lanes, CONV2]

    return spoil


def flipped(call_of_fault=None):
    def spoil(start, theta, call):
        if call_of_fault in (None, call):
            theta.view(torch.int32)[1, 5] ^= 1

    return spoil


def not_finite(start, theta, call):
    theta[1, CONV2.start] = torch.nan


BOTH, FIRST = slice(None), slice(1)
FAULTS = {
    "a tensor": (
        Computed(scaled(FIRST, 1.3)),
        "a step differs from the reference by 0.3 in conv2.weight (at most 0.1 ",
    ),
    "of all lanes": (
        Computed(scaled(BOTH, 0.95)),
        "a step differs from the reference by 0.05 in conv2.weight in half of the lanes (at most 0.0005 is allowed)",
    ),
    "in bf16": (
        Computed(scaled(BOTH, 1.05), precision="bf16"),
        "a step differs from the reference by 0.05 in conv2.weight in half of the lanes (at most 0.03 is allowed)",
    ),
    "without rounding": (Computed(precision="bf16", computed_in="fp32"), " in half of the lanes (at most 0.03 "),
    "NaN": (Computed(not_finite), "a step differs from the reference by nan in conv2.weight (at most 0.1 is allowed)"),
    "the second launch": (Computed(flipped(2)), "a repeated launch differs in 1 of 582,026 entries"),
    "the second lane": (Computed(flipped()), "two equal lanes differ in 1 of 582,026 entries"),
    "no class": (Computed(label=10), "a label's logit is inf below the largest (at most 0.02)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name):
    fused, sentence = FAULTS[name]
    said = disagreement(fused, MODEL, (2,))
    assert said.startswith("with 2 lanes, ")
    assert sentence in said


def test_a_wrong_label_is_named_by_its_logit():
    fused = Computed(label=-1)
    said = disagreement(fused, MODEL, (2,))
    gap = said.removeprefix("with 2 lanes, a label's logit is ").removesuffix(" below the largest (at most 0.02)")
    assert 0.02 < float(gap) < 1


def test_an_unusual_lane_is_allowed():
    """One of two, in which values have changed places."""
    assert disagreement(Computed(scaled(FIRST, 1.05)), MODEL, (2,)) is None
    assert disagreement(Computed(scaled(FIRST, 0.85), precision="bf16"), MODEL, (2,)) is None


def test_idle_lanes_are_among_exact_and_padded_ones(monkeypatch):
    """A call that is compared, one that repeats it, and one of equal lanes, for each number of lanes."""
    one_more = lambda model, precision, theta, *rest: (theta + 1, None)  # noqa: E731
    for module in (__name__, "fedobp.engine.kernels.self_check"):
        monkeypatch.setattr(f"{module}.expected_steps", one_more)
    fused = Computed()
    assert disagreement(fused, MODEL) is None
    assert fused.active == [[20, 18], [20, 18], [20, 20], [2, 1], [2, 1], [2, 2]]


@pytest.mark.essential
def test_the_error_is_relative_to_the_change_of_a_tensor_in_a_lane():
    layout = Layout(("a.weight", "b.weight"), ((2,), (1,)))
    start = torch.tensor([[1.0, 1.0, 5.0], [0.0, 0.0, 0.0]])
    right = torch.tensor([[4.0, 5.0, 5.0], [0.0, 2.0, -4.0]])
    found = torch.tensor([[4.0, 6.0, 5.5], [0.6, 2.8, -4.0]])
    # (0, 1) of a change of (3, 4); (0.6, 0.8) of (0, 2); where nothing should change, 0.5 itself; nothing.
    torch.testing.assert_close(
        change_errors(layout, start, found, right), torch.tensor([[0.2, 0.5], [0.5, 0.0]]).double()
    )


def test_the_error_of_a_bias_whose_terms_cancel_is_relative_to_the_change_of_its_layer():
    layout = Layout(("a.weight", "a.bias"), ((3,), (1,)))
    start, right = torch.zeros(1, 4), torch.tensor([[6.0, 6.0, 0.0, 0.0]])
    found = torch.tensor([[6.0, 6.0, 0.0, 0.3]])
    # Root mean square of the layer's change: sqrt(72 / 4), of which the bias has sqrt(1); its weight's norm is larger.
    errors = change_errors(layout, start, found, right)
    torch.testing.assert_close(errors, torch.tensor([[0.0], [0.3 / 18**0.5]]).double(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("small_tests")
def test_interpreted_kernels_pass_and_nothing_remains():
    fused = Fused(MODEL, 16, "fp32", [LARGE], CPU)
    other = noise(MODEL, 1, CPU)
    kept = fused._buffers(StepConfig(fused._shapes, "fp32", "all"), 1, 1, other), fused._scale(other)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert disagreement(fused, MODEL, (2,)) is None
    assert (*fused._cache.values(), *fused._scales.values()) == kept
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])


def test_other_processes_compile_the_kernels_and_the_specimens_first(monkeypatch):
    given = []

    class Compilers(nullcontext):
        def __init__(self, most):
            super().__init__(self)
            self.most = most

        def compile(self, descriptions):
            assert len(descriptions) == self.most
            given.extend(descriptions)
            return range(0, self.most, 2)  # what the others do not compile is not checked yet

    monkeypatch.setattr(self_check, "Compilers", Compilers)
    checked = []
    monkeypatch.setattr(Fused, "check", lambda fused, one: checked.append(one.kernel.__name__))
    card = known_card("8.6")
    compile_ahead(Fused(MODEL, 16, "bf16", default_table(card.capability).entries, CPU, card), MODEL, card)
    names = [one.kernel for one in given]
    assert set(names) >= {"conv1", "conv2", "conv2_inputs", "weights_backward", "update", "answer", "summed_too"}
    assert {one.capability for one in given} == {(8, 6)}
    slow = [name in ("update", "conv2") for name in names]
    assert slow == sorted(slow, reverse=True)
    assert checked == [name for name in names[::2] if name not in ("summed_too", "read_twice")]
