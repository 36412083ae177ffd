"""Convolutions by im2col, against torch's: alone and under every transform that methods use."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedobp.engine.im2col import PatchConv2d, PatchProduct, patched, supports_im2col
from fedobp.models import Model

LANES, SAMPLES = 3, 4


def layer(channels=2, outputs=5, size=3, **options):
    torch.manual_seed(1)
    return nn.Conv2d(channels, outputs, size, **options).double()


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def lanes_of(one):
    """Return three copies of a layer's tensors that differ."""
    return {
        name: torch.stack([tensor.detach() * (1 + lane) for lane in range(LANES)])
        for name, tensor in one.named_parameters()
    }


def loss_of(module):
    def loss(tensors, x):
        return functional_call(module, tensors, (x,)).pow(3).sum()

    return loss


def same(one, other):
    for a, b in zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


CASES = [
    layer(),
    layer(8, 3, 5),  # patches that are copied 16 bytes at a time
    layer(1, 4, (2, 3)),
    layer(padding=(1, 2)),
    layer(bias=False),
    layer(8, 3, 1, stride=2, bias=False),
    layer(stride=(2, 3), padding=(0, 1)),
    layer(8, 3, stride=2, padding=1),  # of seven rows and six columns: the last column is in no patch
]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_without_transforms_it_equals_the_layer(one):
    x = images(SAMPLES, one.in_channels, 7, 6)
    same(PatchConv2d(one)(x), one(x))
    loss, theirs = loss_of(PatchConv2d(one)), loss_of(one)
    tensors = {name: tensor.detach() for name, tensor in one.named_parameters()}
    same(grad(loss, argnums=(0, 1))(tensors, x), grad(theirs, argnums=(0, 1))(tensors, x))


@pytest.mark.parametrize("one", CASES, ids=str)
def test_vmap_over_weights_and_samples_equals_the_layer(one):
    x = images(LANES, SAMPLES, one.in_channels, 7, 6)
    mine, theirs = (vmap(grad(loss_of(module), argnums=(0, 1))) for module in (PatchConv2d(one), one))
    same(mine(lanes_of(one), x), theirs(lanes_of(one), x))


@pytest.mark.parametrize("one", CASES, ids=str)
@pytest.mark.parametrize("in_dims", [(None, 0), (0, None), (None, 1)], ids=str)
def test_vmap_with_shared_weights_or_samples_equals_the_layer(one, in_dims):
    tensors = lanes_of(one) if in_dims[0] == 0 else {name: tensor.detach() for name, tensor in one.named_parameters()}
    x = images(SAMPLES, SAMPLES, one.in_channels, 7, 6) if in_dims[1] is not None else images(2, one.in_channels, 7, 6)
    mine, theirs = (vmap(grad(loss_of(module), argnums=(0, 1)), in_dims=in_dims) for module in (PatchConv2d(one), one))
    same(mine(tensors, x), theirs(tensors, x))


@pytest.mark.parametrize("one", CASES, ids=str)
def test_per_sample_gradients_of_every_lane_equal_the_layers(one):
    x = images(LANES, SAMPLES, 1, one.in_channels, 7, 6)

    def each(module):
        return vmap(vmap(grad(loss_of(module), argnums=(0, 1)), in_dims=(None, 0)))

    same(each(PatchConv2d(one))(lanes_of(one), x), each(one)(lanes_of(one), x))


def test_gradients_equal_finite_differences():
    given = images(2, 2, 5, 4, 2), images(2, 3, 2, 3, 2), images(2, 3)
    given = tuple(tensor.requires_grad_() for tensor in given)
    for stride in ((1, 1), (2, 3)):
        assert torch.autograd.gradcheck(lambda *args, stride=stride: PatchProduct.apply(*args, stride)[0], given)


def test_under_autocast_it_computes_in_bfloat16():
    one, x = layer(8).float(), images(SAMPLES, 8, 7, 6).float()
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = PatchConv2d(one)(x), one(x)
        gradient = grad(lambda weight: functional_call(PatchConv2d(one), {"weight": weight}, (x,)).float().sum())(
            one.weight.detach()
        )
    assert found.dtype == theirs.dtype == torch.bfloat16
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(found, theirs, rtol=0.02, atol=0.02)


def test_autocast_keeps_float64_and_a_layer_keeps_its_attributes():
    one = PatchConv2d(layer(padding=1))
    with torch.autocast("cpu", torch.bfloat16):
        assert one(images(SAMPLES, 2, 7, 6)).dtype == torch.float64
    assert (one.out_channels, one.padding, list(one.state_dict())) == (5, (1, 1), ["weight", "bias"])


def test_without_samples_gradients_are_zero():
    one = layer()
    tensors = {name: tensor.detach() for name, tensor in one.named_parameters()}
    found = grad(loss_of(PatchConv2d(one)))(tensors, images(0, 2, 7, 6))
    assert all(tensor.eq(0).all() for tensor in found.values())


def penalised(model):
    """A loss with the squared norms of two gradients in it, taken by `torch.autograd` or by `torch.func`."""

    def by_autograd(theta, x, y):
        x = x + 0 * theta.sum()
        loss = functional.cross_entropy(model.logits(theta, x), y)
        gradients = torch.autograd.grad(loss, (theta, x), create_graph=True)
        return loss + sum(one.square().sum() for one in gradients)

    def by_func(theta, x, y):
        def loss(theta, x):
            return functional.cross_entropy(model.logits(theta, x), y)

        return loss(theta, x) + sum(one.square().sum() for one in grad(loss, argnums=(0, 1))(theta, x))

    return by_autograd, by_func


@pytest.mark.essential
def test_second_derivatives_are_right():
    model = Model("cnn-small", (1, 8, 8), 4)
    theta = torch.stack([model.initial(seed).double() for seed in range(LANES)])
    x, y = images(LANES, SAMPLES, 1, 8, 8), torch.arange(LANES * SAMPLES).view(LANES, SAMPLES) % 4
    for mine, theirs in zip(penalised(patched(model)), penalised(model), strict=True):
        same(vmap(grad(mine))(theta, x, y), vmap(grad(theirs))(theta, x, y))


@pytest.mark.parametrize("name", ["cnn", "cnn-bn", "cnn-small"])
def test_a_patched_model_computes_the_same(name):
    model = Model(name, (1, 16, 16), 4)
    other, theta = patched(model), model.initial(3).double()
    assert [type(layer) for layer in other.structure.modules()].count(PatchConv2d) == 2
    assert PatchConv2d not in [type(layer) for layer in model.structure.modules()]
    x, y = images(SAMPLES, 1, 16, 16), torch.tensor([0, 1, 2, 3])

    def loss(model):
        return lambda theta: functional.cross_entropy(model.logits(theta, x), y)

    same(grad(loss(other))(theta), grad(loss(model))(theta))
    same(other.features(theta, x), model.features(theta, x))


class Twice(nn.Conv2d):
    """A subclass with another forward pass."""

    def forward(self, x):
        """Double it."""
        return 2 * super().forward(x)


def test_only_supported_layers_are_replaced():
    hooked = layer()
    hooked.register_forward_hook(lambda *_: None)
    others = [
        hooked, Twice(2, 5, 3), layer(4, 4, groups=2), layer(dilation=2), layer(padding="same"),
        layer(padding=1, padding_mode="circular"), nn.Conv1d(2, 5, 3), nn.Linear(2, 3),
    ]  # fmt: skip
    assert not any(map(supports_im2col, others))
    assert all(map(supports_im2col, CASES))
