"""The convolutions of custom losses, interpreted in float32, against autograd in float64."""

import pytest
import torch
from kernel_cases import Case, Problem
from torch.func import grad, vmap
from torch.nn import functional

from engine.kernels.interpreted import WITHOUT_GPU, interpreted
from fedobp.engine.im2col import PatchConv2d
from fedobp.engine.kernels.convolutions import Convolutions
from fedobp.errors import FedobpError

pytestmark = WITHOUT_GPU


def losses_of(model):
    """A custom loss: neither plain cross-entropy nor a mean."""

    def loss(theta, x, y):
        features, (weight, bias) = model.features(theta, x), model.head(theta)
        logits = features @ weight.T + bias
        return functional.cross_entropy(logits, y, reduction="sum") + 0.01 * features.square().sum()

    return loss


def near(found, right, share=2e-5):
    assert found.shape == right.shape
    assert (found.double() - right).norm() < share * right.norm()


@pytest.mark.parametrize(("side", "channels"), [(28, 1), (32, 3)])
def test_a_custom_loss_has_autograds_gradient(side, channels):
    """Vectorised over lanes; over lanes and their samples, which share weights; and over samples with one model."""
    problem = Problem(Case(side, channels))
    fused, model = interpreted(problem).vectorised(problem.model), problem.model
    assert PatchConv2d in [type(layer) for layer in fused.structure.modules()]
    theta, ids = problem.theta, problem.ids[0]
    x, y = torch.stack([problem.inputs(one) for one in ids]), problem.data.y[ids]
    every_lane, single = vmap(grad(losses_of(fused))), x.float()
    right = vmap(grad(losses_of(model)))(theta.double(), x, y)
    near(every_lane(theta, single, y), right)
    near(
        vmap(fused.logits, in_dims=(None, 0))(theta[0], single),
        vmap(model.logits, in_dims=(None, 0))(theta[0].double(), x),
    )

    def each_sample(model):
        one = grad(losses_of(model))
        return vmap(vmap(lambda theta, x, y: one(theta, x[None], y[None]), in_dims=(None, 0, 0)))

    some = slice(None), slice(3)
    near(each_sample(fused)(theta, single[some], y[some]), each_sample(model)(theta.double(), x[some], y[some]))


def test_kernels_are_used_for_supported_batch_sizes_and_one_derivative(monkeypatch):
    problem = Problem(Case())
    fused, theta, asked = interpreted(problem).vectorised(problem.model), problem.theta[0], []
    real = Convolutions.apply
    monkeypatch.setattr(Convolutions, "apply", lambda *given: asked.append(len(given[1])) or real(*given))
    x, y = problem.inputs(torch.arange(17)).float(), torch.arange(17) % 10
    loss = losses_of(fused)
    grad(loss)(theta, x[:16], y[:16])
    assert asked
    asked.clear()
    for given in ((x, y), (x[:7], y[:7])):
        near(grad(loss)(theta, *given), grad(losses_of(problem.model))(theta.double(), given[0].double(), given[1]))
    twice = grad(lambda theta, of, x: grad(of)(theta, x, y[:16]).square().sum())
    near(twice(theta, loss, x[:16]), twice(theta.double(), losses_of(problem.model), x[:16].double()), 1e-4)
    near(
        grad(loss, argnums=1)(theta, x[:16], y[:16]),
        grad(losses_of(problem.model), argnums=1)(theta.double(), x[:16].double(), y[:16]),
    )

    def one_by_one(model):
        one = vmap(lambda theta, x, y: losses_of(model)(theta, x[None], y[None]), in_dims=(None, 0, 0))
        return grad(lambda x, theta: one(theta, x, y[:3]).sum())

    near(one_by_one(fused)(x[:3], theta), one_by_one(problem.model)(x[:3].double(), theta.double()))
    near(
        grad(loss)(theta.double(), x[:16].double(), y[:16]),
        grad(losses_of(problem.model))(theta.double(), x[:16].double(), y[:16]),
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.logits(theta, x[:16]).dtype == torch.bfloat16
    assert not asked


def test_a_second_derivative_that_cannot_be_detected_is_refused():
    problem = Problem(Case())
    loss = losses_of(interpreted(problem).vectorised(problem.model))
    x, y = problem.inputs(torch.arange(16)).float(), torch.arange(16) % 10

    def penalised(theta):
        [gradient] = torch.autograd.grad(loss(theta, x, y), theta, create_graph=True)
        return gradient.square().sum()

    with pytest.raises(FedobpError, match="kernels have no second derivative: take both"):
        grad(penalised)(problem.theta[0])
