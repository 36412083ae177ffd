"""Sums of squared gradients, and the curvature along a direction, against autograd sample by sample."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedobp.importance import curvature, squared_gradients
from fedobp.method import Batch
from fedobp.models import Model

# Squared gradients


IMAGE = (1, 8, 8)


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("mlp", (6,)), ("cnn-small", IMAGE), ("residual", IMAGE), ("products", IMAGE), ("without-bias", IMAGE)],
)
def test_squared_gradients_are_summed_over_real_samples(name, shape, dtype):
    model, draw = Model(name, shape, 3), torch.Generator().manual_seed(1)
    thetas = torch.stack([model.initial(seed) for seed in (0, 1)]).to(dtype)
    x, y = torch.randn(2, 5, *shape, generator=draw).to(dtype), torch.randint(3, (2, 5), generator=draw)
    weight = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).to(dtype)
    found = torch.func.vmap(
        lambda theta, x, y, weight: squared_gradients(model, theta, Batch(x, y, weight, *[torch.tensor(0)] * 3))
    )(thetas, x, y, weight)
    for client, samples in ((0, 3), (1, 5)):
        module, total = model.module(thetas[client]), torch.zeros_like(thetas[client])
        for sample in range(samples):
            module.zero_grad()
            module(x[client, sample][None]).log_softmax(dim=1)[0, y[client, sample]].backward()
            total += torch.cat([p.grad.flatten() for p in module.parameters()]) ** 2
        torch.testing.assert_close(found[client], total)
        assert total.max() > 0


# Curvature


def samples_of(shape, *, classes=3, positions=()):
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(5, *shape, generator=draw, dtype=torch.float64)
    y = torch.randint(classes, (5, *positions), generator=draw)
    return Batch(x, y, torch.tensor([1, 1, 0, 1, 1]).double(), *[torch.tensor(0)] * 3)


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize(("name", "shape"), [("mlp", (6,)), ("cnn-small", (1, 8, 8)), ("residual", (1, 8, 8))])
def test_curvature_is_that_of_the_fisher_information_along_a_direction(name, shape):
    """The Fisher information is the covariance of the gradients of log p over labels drawn from the model."""
    model, batch = Model(name, shape, 3), samples_of(shape)
    theta, step = model.initial(0).double(), model.initial(1).double()
    expected = 0.0
    for at, weight in enumerate(batch.weight):
        logits = lambda w, at=at: model.logits(w, batch.x[at : at + 1])[0]  # noqa: E731
        jacobian, p = torch.autograd.functional.jacobian(logits, theta), logits(theta).softmax(dim=0)
        for label in range(3):
            score = (torch.eye(3).double()[label] - p) @ jacobian  # d log p(label) / d theta
            expected += weight * p[label] * (score @ step) ** 2
    torch.testing.assert_close(curvature(model, theta, step, batch), expected)


def test_curvature_of_a_linear_model_is_the_second_derivative_of_its_loss():
    model = Model(lambda shape, classes: nn.Sequential(OrderedDict(classifier=nn.Linear(4, 3))), (4,), 3)
    batch = samples_of((4,))
    theta, step = model.initial(0).double(), model.initial(1).double()
    each = lambda at: functional.cross_entropy(model.logits(at, batch.x), batch.y, reduction="none")  # noqa: E731
    hessian = torch.autograd.functional.hessian(lambda at: (each(at) * batch.weight).sum(), theta)
    torch.testing.assert_close(curvature(model, theta, step, batch), step @ hessian @ step)


def test_curvature_of_a_sequence_is_the_mean_over_its_positions():
    model = Model("lstm", (4,), 7, vocabulary=7, every_position=True)
    theta, step = model.initial(0).double(), model.initial(1).double()
    tokens = torch.randint(7, (5, 4), generator=torch.Generator().manual_seed(0))
    batch = samples_of((4,), classes=7, positions=(4,))._replace(x=tokens)
    jacobian = torch.autograd.functional.jacobian(lambda at: model.logits(at, tokens), theta)
    change, p = jacobian @ step, model.logits(theta, tokens).softmax(dim=-1)
    each = (p * change**2).sum(dim=-1) - (p * change).sum(dim=-1) ** 2
    torch.testing.assert_close(curvature(model, theta, step, batch), (each.mean(dim=1) * batch.weight).sum())
