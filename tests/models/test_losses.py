"""The cross-entropy of samples, by hand."""

import math

import torch

from fedobp.models import sample_losses


def test_one_label_a_sample():
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    found = sample_losses(logits, torch.tensor([1, 0]))
    assert torch.allclose(found, torch.tensor([math.log(4 / 3), math.log(2)]))


def test_a_sequence_is_the_mean_over_its_positions():
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0]]])
    found = sample_losses(logits, torch.tensor([[1, 0]]))
    assert torch.allclose(found, torch.tensor([(math.log(4 / 3) + math.log(2)) / 2]))


def test_lanes_of_samples():
    logits = torch.randn(3, 4, 5, 2)
    y = torch.randint(2, (3, 4, 5))
    found = sample_losses(logits, y, axes=2)
    assert found.shape == (3, 4)
    assert torch.allclose(found[1], sample_losses(logits[1], y[1]))
