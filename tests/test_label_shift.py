"""The label prior of inputs without labels, by EM."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fedobp.label_shift import em_prior

UNIFORM = torch.full((4,), 0.25, dtype=torch.float64)
SKEWED = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def certain(labels):
    """Logits of a classifier that is always right, and sure of it."""
    return 1000 * torch.nn.functional.one_hot(torch.tensor(labels), 4).double()


@pytest.mark.parametrize("prior", [UNIFORM, SKEWED])
def test_a_perfect_classifier_gives_the_frequencies_with_pseudo_counts(prior):
    counts = torch.tensor([3.0, 0.0, 1.0, 2.0])
    found = em_prior(certain([0, 0, 3, 2, 0, 3]), prior)
    assert_close(
        found, (counts + 2 * prior) / (6 + 2)
    )  # four classes with half an input each: two, in the shares of p_g


@pytest.mark.parametrize("prior", [UNIFORM, SKEWED])
@pytest.mark.parametrize("inputs", [0, 7])
def test_inputs_that_say_nothing_leave_the_prior(prior, inputs):
    """Their posterior is p_g."""
    assert_close(em_prior(prior.log() + torch.randn(inputs, 1, dtype=torch.float64), prior), prior)


def test_iterations_by_hand():
    """One input with posterior (3/4, 1/4), and half an input of each class.

    First ((3/4 + 1/2) / 2, (1/4 + 1/2) / 2) = (5/8, 3/8). Then 3/4 * 5/8 to 1/4 * 3/8 is 5 to 1, and
    ((5/6 + 1/2) / 2, (1/6 + 1/2) / 2) = (2/3, 1/3).
    """
    logits, half = torch.tensor([[3.0, 1.0]], dtype=torch.float64).log(), torch.full((2,), 0.5, dtype=torch.float64)
    once, twice = (em_prior(logits, half, iterations=iterations) for iterations in (1, 2))
    assert_close(once, torch.tensor([5 / 8, 3 / 8], dtype=torch.float64))
    assert_close(twice, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))


def test_a_skewed_prior_is_divided_out():
    """p_g = (3/4, 1/4) and posterior (3/4, 1/4): the input says nothing. With p_g = (1/4, 3/4) it says (9/10, 1/10)."""
    logits = torch.tensor([[3.0, 1.0]], dtype=torch.float64).log()
    first, second = (torch.tensor(shares, dtype=torch.float64) for shares in ([0.75, 0.25], [0.25, 0.75]))
    assert_close(em_prior(logits, first), first)
    # With the weight of the pseudo-count near 0, all mass goes to the class that the input speaks for.
    assert em_prior(logits, second, pseudo_count=1e-9)[0] > 0.999


def test_overlapping_classes_are_told_apart():
    """Two normal distributions at -1 and 1: posteriors under a uniform prior are sigmoid(2 x)."""
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x += torch.where(torch.arange(4000) < 3600, 1.0, -1.0)
    found = em_prior(torch.stack([2 * x, torch.zeros_like(x)], dim=1), torch.full((2,), 0.5, dtype=torch.float64))
    counted = (x > 0).double().mean()  # what the labels that it predicts would say
    assert found[0] == pytest.approx(0.9, abs=0.02)
    assert counted < 0.82


cases = st.tuples(st.integers(0, 6), st.integers(2, 5), st.integers(0, 2**31)).map(lambda case: _drawn(*case))


def _drawn(inputs, classes, seed):
    draws = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(3, inputs, classes, generator=draws, dtype=torch.float64)
    return logits, torch.rand(classes, generator=draws, dtype=torch.float64).add(0.05), draws


@given(cases)
def test_it_is_a_distribution_that_depends_on_what_the_logits_say(case):
    logits, prior, draws = case
    prior = prior / prior.sum()
    found = em_prior(logits, prior)
    assert (found > 0).all()
    assert_close(found.sum(dim=-1), torch.ones(3, dtype=torch.float64))
    shift = torch.randn(3, logits.shape[1], 1, generator=draws, dtype=torch.float64)
    assert_close(em_prior(logits + shift, prior), found)
    order = torch.randperm(logits.shape[2], generator=draws)
    assert_close(em_prior(logits[..., order], prior[order]), found[..., order])
    mixed = torch.randperm(logits.shape[1], generator=draws)
    assert_close(em_prior(logits[:, mixed], prior), found)


@given(cases)
def test_clients_of_a_batch_are_apart_and_padding_counts_nothing(case):
    logits, prior, _ = case
    prior = prior / prior.sum()
    weight = torch.ones(logits.shape[:2], dtype=torch.float64)
    weight[1, logits.shape[1] // 2 :] = 0
    found = em_prior(logits, prior.expand(3, -1), weight)
    assert_close(found[0], em_prior(logits[0], prior))
    assert_close(found[1], em_prior(logits[1, : logits.shape[1] // 2], prior))
