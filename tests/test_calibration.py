"""The last layer fitted to one client: by hand, and against the problems' own gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fedobp.calibration import fit_biases, fit_head, log_prior

HELD = 0.1  # samples, with whose weight an entry is held at the global value


def test_log_prior_by_hand():
    """Counts 3, 1, 0, 0 with half a sample a class: 3.5, 1.5, 0.5, 0.5 of 6, and K p = 4/6 of these."""
    found = log_prior(torch.tensor([3, 1, 0, 0]))
    assert found.tolist() == pytest.approx([math.log(v * 4 / 6) for v in (3.5, 1.5, 0.5, 0.5)])
    assert log_prior(torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


@pytest.mark.parametrize("level", [0.0, -3.0])
def test_inputs_that_say_nothing_give_the_prior(level):
    y = torch.tensor([0, 0, 0, 1, 3])
    scale, biases = fit_biases(torch.full((5, 4), level), y, torch.ones(5))
    expected = log_prior(torch.bincount(y, minlength=4))
    torch.testing.assert_close(biases, expected - expected.mean())
    assert float(scale) == 1


def objective(z, y, a, b):
    """The problem of the module's docstring, in other words: pseudo-samples are added as samples."""
    k = z.shape[1]
    z = z - z.mean(dim=1, keepdim=True)
    real = functional.cross_entropy(a * z + b, y, reduction="sum")
    pseudo = functional.cross_entropy(b.expand(k, k), torch.arange(k), reduction="sum") / 2
    return real + pseudo + k / 4 * z.var(dim=1, correction=0).mean() * (a - 1) ** 2


def problem(seed, n, k, spread):
    stream = torch.Generator().manual_seed(seed)
    y = torch.randint(0, max(1, k // 2), (n,), generator=stream)  # half of the classes do not occur
    z = spread * torch.randn(n, k, generator=stream, dtype=torch.float64)
    return z + spread * functional.one_hot(y, k), y


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 12), st.sampled_from([0.01, 0.3, 1.0, 5.0, 10.0]))
def test_fitted_biases_are_at_the_minimum(seed, n, k, spread):
    """The gradient is 0 there; the problem is convex."""
    z, y = problem(seed, n, k, spread)
    a, b = (value.requires_grad_() for value in fit_biases(z, y, torch.ones(n)))
    slopes = torch.autograd.grad(objective(z, y, a, b), (a, b))
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-5 * (1 + spread) * n


def test_padding_and_a_constant_in_the_logits_change_nothing():
    z, y = problem(0, 20, 5, 1.0)
    expected = fit_biases(z, y, torch.ones(20))
    padded = fit_biases(
        torch.cat([z, torch.full((3, 5), 7.0)]), torch.cat([y, y[:3]]), torch.tensor([1.0] * 20 + [0.0] * 3)
    )
    moved = fit_biases(z + torch.arange(20.0)[:, None], y, torch.ones(20))
    for found in (padded, moved):
        torch.testing.assert_close(found, expected)


def test_classes_may_be_renamed():
    z, y = problem(1, 30, 4, 1.0)
    order = torch.tensor([2, 0, 3, 1])
    a, b = fit_biases(z, y, torch.ones(30))
    again, renamed = fit_biases(z[:, order], order.argsort()[y], torch.ones(30))
    torch.testing.assert_close((again, renamed), (a, b[order]))


def test_biases_are_those_of_the_shift_where_the_model_is_right():
    """Gaussian classes with equal priors give exact logits; a client with other priors finds log p_i again."""
    stream, prior = torch.Generator().manual_seed(3), torch.tensor([0.7, 0.2, 0.1])
    y = torch.multinomial(prior, 60_000, replacement=True, generator=stream)
    x = 2 * functional.one_hot(y, 3) + torch.randn(len(y), 3, generator=stream)
    a, b = fit_biases(2 * x, y, torch.ones(len(y)))  # log p(x | y) = 2 x_y + what all classes have
    torch.testing.assert_close(b - b[0], (prior.log() - prior.log()[0]).double(), atol=0.05, rtol=0)
    assert float(a) == pytest.approx(1, abs=0.02)


# The head.


def head_problem(seed, n=40, k=4, d=6, concept=None):
    """Features whose class means are unit vectors, a classifier that finds them, and labels, renamed by `concept`."""
    stream = torch.Generator().manual_seed(seed)
    true = torch.randint(0, k, (n,), generator=stream)
    f = 3 * functional.one_hot(true, d) + torch.randn(n, d, generator=stream, dtype=torch.float64)
    y = true if concept is None else torch.tensor(concept)[true]
    return f, y, 2 * torch.eye(k, d, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)


def test_a_head_that_is_right_keeps_its_weight():
    """The largest of K D statistics is about 2 ln(K D) by chance, so next to no entry is chosen."""
    chosen = 0
    for seed in range(20):
        f, y, weight, bias = head_problem(seed)
        fit = fit_head(f, y, torch.ones(len(y)), weight, bias, most=24)
        assert fit.weight[~fit.chosen].eq(0).all()
        chosen += int(fit.chosen.sum())
    assert chosen <= 5  # of 480


def test_labels_that_mean_something_else_are_learned():
    """Biases cannot: all labels are as frequent as before."""
    f, y, weight, bias = head_problem(0, n=200, concept=[1, 0, 3, 2])
    _, b = fit_biases(f @ weight.T, y, torch.ones(200))
    assert ((f @ weight.T + b).argmax(1) == y).double().mean() < 0.5
    fit = fit_head(f, y, torch.ones(200), weight, bias, most=24)
    assert ((f @ (weight + fit.weight).T + fit.bias).argmax(1) == y).double().mean() > 0.85
    assert 4 <= fit.chosen.sum() <= 24


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_entries_are_chosen_than_allowed(most):
    f, y, weight, bias = head_problem(0, n=200, concept=[1, 0, 3, 2])
    fit = fit_head(f, y, torch.ones(200), weight, bias, most)
    assert fit.chosen.sum() == most
    assert ((fit.weight != 0) == fit.chosen).all()


def test_the_statistic_by_hand():
    """Two classes, one feature, logits of 0, equally many of both: r is +-1/2, g^2 / sum of squares is chosen > 2 ln 2.

    Of class 0, features are 1, 1, 1; of class 1 they are 0, 0, 0: g = -1.5 and the squares sum to 0.75, so 3 > 1.39.
    """
    f, y = torch.tensor([[1.0], [1.0], [1.0], [0.0], [0.0], [0.0]]), torch.tensor([0, 0, 0, 1, 1, 1])
    fit = fit_head(f, y, torch.ones(6), torch.zeros(2, 1), torch.zeros(2), most=2)
    assert fit.chosen.all()
    assert fit.weight[0] > 0 > fit.weight[1]
    # One sample of each: g = -1/2, squares sum to 1/4, and 1 < 1.39.
    fit = fit_head(f[[0, 3]], y[[0, 3]], torch.ones(2), torch.zeros(2, 1), torch.zeros(2), most=2)
    assert not fit.chosen.any()


@pytest.mark.parametrize("seed", range(5))
def test_a_fitted_head_is_at_the_minimum(seed):
    """Of the problem in `fit_head`, whose pseudo-samples are added here as samples."""
    f, y, weight, bias = head_problem(seed, n=60, concept=[2, 1, 0, 3])
    k, z = 4, f @ weight.T
    fit = fit_head(f, y, torch.ones(60), weight, bias, most=24)
    assert fit.chosen.any()
    a, _ = fit_biases(z, y, torch.ones(60))
    d, e = fit.weight.clone().requires_grad_(), fit.bias.clone().requires_grad_()
    loss = functional.cross_entropy(a * (z + f @ d.T + e), y, reduction="sum")
    loss = loss + functional.cross_entropy((a * e).expand(k, k), torch.arange(k), reduction="sum") / 2
    loss = loss + HELD * a.square() / 2 * f.square().mean() * d.square().sum()
    of_d, of_e = torch.autograd.grad(loss, (d, e))
    assert of_d[fit.chosen].abs().max() < 1e-4
    assert of_e.abs().max() < 1e-4


def test_padding_does_not_count():
    f, y, weight, bias = head_problem(1, concept=[1, 0, 3, 2])
    expected = fit_head(f, y, torch.ones(40), weight, bias, most=9)
    more, w = torch.full((3, 6), 7.0, dtype=f.dtype), torch.tensor([1.0] * 40 + [0.0] * 3)
    found = fit_head(torch.cat([f, more]), torch.cat([y, y[:3]]), w, weight, bias, most=9)
    torch.testing.assert_close(found.weight, expected.weight)
    torch.testing.assert_close(found.bias, expected.bias)
    assert found.chosen.equal(expected.chosen)


def test_features_of_zero_leave_the_weight():
    y = torch.tensor([0, 1, 1])
    fit = fit_head(torch.zeros(3, 5), y, torch.ones(3), torch.ones(2, 5), torch.zeros(2), most=4)
    assert not fit.chosen.any()
    assert fit.bias.isfinite().all()
    assert fit.bias[1] > fit.bias[0]


@pytest.mark.parametrize("scale", [30.0, 300.0, 1e6])
def test_huge_logits_end_in_finite_numbers_that_fit_no_worse(scale):
    z, y = problem(5, 40, 5, scale)
    a, b = fit_biases(z, y, torch.ones(40))
    assert objective(z, y, a, b) <= objective(z, y, torch.ones(()), torch.zeros(5))
    f, y, weight, bias = head_problem(3, n=80, concept=[1, 0, 3, 2])
    fit = fit_head(scale * f, y, torch.ones(80), weight, bias, most=9)
    before = functional.cross_entropy(scale * f @ weight.T, y)
    assert functional.cross_entropy(scale * f @ (weight + fit.weight).T + fit.bias, y) <= before


@pytest.mark.parametrize("most", [0, 1, 3, 5])
def test_entries_that_tie_are_no_more_than_allowed(most):
    f, y, weight, bias = head_problem(0, n=200, concept=[1, 0, 3, 2])
    twice = torch.cat([f, f], dim=1)
    fit = fit_head(twice, y, torch.ones(200), torch.cat([weight, 0 * weight], dim=1), bias, most)
    assert fit.chosen.sum() == most
