"""Many copies of a network at once, against the ordinary module run copy by copy: outputs and gradients in float64."""

from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
from lanes_cases import NETWORKS
from torch import nn
from torch.nn import functional

from fedobp.engine.stack import Columns, Grouped, stacked
from fedobp.models import NETS, Model

FORMS = pytest.mark.parametrize("form", [Grouped, Columns])
LANES, SAMPLES = 3, 4


def model_of(*layers, shape, classes=3):
    """Return a model of some layers, then a classifier."""
    with torch.no_grad():
        entries = nn.Sequential(*layers, nn.Flatten())(torch.zeros(1, *shape)).shape[1]
    ends = [("flatten", nn.Flatten()), ("classifier", nn.Linear(entries, classes))]
    return registered(
        lambda: nn.Sequential(OrderedDict([(f"l{at}", layer) for at, layer in enumerate(layers)] + ends)), shape
    )


def registered(build, shape, classes=3):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETS, "made-up", lambda shape, classes: build())
        return Model("made-up", shape, classes)


def images(shape, seed=0):
    return torch.randn(LANES, SAMPLES, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(model):
    size = LANES, model.layout.size
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 3


def by_copy(model, theta, x, to_scalar):
    """Run the module lane by lane; `to_scalar` maps the outputs to one number."""
    outputs, slopes, inputs = [], [], []
    module = deepcopy(model.structure).double()
    for vector, samples in zip(theta, x, strict=True):
        model.load(module, vector)
        samples = samples.clone().requires_grad_()
        found = module(samples)
        gradients = torch.autograd.grad(to_scalar(found), [samples, *module.parameters()])
        outputs.append(found.detach())
        inputs.append(gradients[0])
        slopes.append(torch.cat([gradient.flatten() for gradient in gradients[1:]]))
    return torch.stack(outputs), torch.stack(slopes), torch.stack(inputs)


def at_once(model, form, theta, x, to_scalar):
    theta, x = theta.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = stacked(model, form)(model.layout.views(theta), x)
    slopes, inputs = torch.autograd.grad(sum(to_scalar(lane) for lane in outputs), [theta, x])
    return outputs.detach(), slopes, inputs


def bent(outputs):
    return (outputs * torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)).sin().sum()


def check(model, form, x, theta=None, atol=1e-11):
    theta = weights(model) if theta is None else theta
    for ours, theirs in zip(at_once(model, form, theta, x, bent), by_copy(model, theta, x, bent), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol * max(1.0, float(theirs.abs().max())))


# Each kernel, padding and number of channels (8 doubles are copied 16 bytes at a time) with and without a bias.
CONVOLUTIONS = [
    (1, 0, 3, True), (1, 2, 1, False), (3, 0, 1, True), (3, 1, 8, False), (5, 0, 5, False), (5, 2, 3, True),
    ((3, 5), (2, 1), 5, True), ((3, 5), (2, 1), 8, False), (3, 1, 8, True), (5, 2, 3, False),
]  # fmt: skip


@FORMS
@pytest.mark.parametrize(("kernel", "padding", "channels", "bias"), CONVOLUTIONS)
def test_convolutions_equal_the_module(form, kernel, padding, channels, bias):
    shape = (channels, 7, 6)
    check(model_of(nn.Conv2d(channels, 4, kernel, padding=padding, bias=bias), shape=shape), form, images(shape))


@FORMS
def test_two_convolutions_in_a_row_equal_the_module(form):
    shape = (3, 9, 8)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 5, 5), nn.Sigmoid()
    check(model_of(*layers, shape=shape), form, images(shape))


ACTIVATIONS = [nn.ReLU(), nn.LeakyReLU(0.3), nn.ELU(), nn.GELU(), nn.SiLU(), nn.Identity()]
POOLS = [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2, padding=1), nn.AvgPool2d(2), nn.MaxPool2d(2, ceil_mode=True)]
# Only ReLU and max-pooling are swapped.
PAIRS = [(ACTIVATIONS[0], pool) for pool in POOLS] + [(activation, POOLS[0]) for activation in ACTIVATIONS[1:]]


@FORMS
@pytest.mark.parametrize(("activation", "pool"), PAIRS, ids=str)
def test_activations_and_pools_equal_the_module(form, activation, pool):
    shape = (2, 7, 9)
    check(model_of(nn.Conv2d(2, 4, 3), activation, pool, shape=shape), form, images(shape))
    check(model_of(nn.Conv2d(2, 4, 3), pool, activation, shape=shape), form, images(shape))


@FORMS
@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
def test_relu_and_pool_agree_on_ties(form, value):
    """On constant images all entries of a window tie: above 0, below 0, and at 0, where the gradient is 0."""
    shape = (1, 6, 6)
    model = model_of(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.MaxPool2d(2), shape=shape)
    theta = weights(model)
    theta[:, :2], theta[:, 2:4] = torch.tensor([1.0, -1.0]), 0.0
    x = torch.full((LANES, SAMPLES, *shape), value, dtype=torch.float64)
    check(model, form, x, theta)
    mixed = x.clone()
    mixed[..., ::2] = -value
    check(model, form, mixed, theta)


@FORMS
def test_a_relu_before_a_pool_is_run_on_a_quarter_of_the_entries(form, monkeypatch):
    shape, seen = (1, 8, 8), []

    def counted(layer, x):
        seen.append(x.numel())
        return x.relu()

    model = model_of(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.MaxPool2d(2), shape=shape)
    monkeypatch.setattr(nn.ReLU, "forward", counted)
    stacked(model, form)(model.layout.views(weights(model)), images(shape))
    assert seen == [LANES * SAMPLES * 2 * 4 * 4]


@FORMS
@pytest.mark.parametrize("name", [*(name for name in NETWORKS if name != "normed"), "cnn-small", "mlp"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_network_equals_its_module(form, name, channels, monkeypatch):
    for other, build in NETWORKS.items():
        monkeypatch.setitem(NETS, other, build)
    shape = (channels, 8, 8)
    check(Model(name, shape, 3), form, images(shape))


@FORMS
def test_the_papers_cnn_equals_its_module(form):
    shape = (1, 16, 16)
    check(Model("cnn", shape, 3), form, images(shape))


@FORMS
def test_tables_need_no_flattening(form):
    model = registered(
        lambda: nn.Sequential(OrderedDict(fc=nn.Linear(5, 4), relu=nn.ReLU(), classifier=nn.Linear(4, 3))), (5,)
    )
    check(model, form, images((5,)))


@FORMS
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 4),
        nn.Softplus(),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(2),
    ],
    ids=str,
)
def test_layers_without_a_batched_form_equal_the_module(form, layer):
    shape = (4, 6, 6)
    check(model_of(nn.Conv2d(4, 4, 1), layer, shape=shape), form, images(shape))


@FORMS
def test_linear_layers_on_images_and_flattening_of_a_part_equal_the_module(form):
    shape = (2, 4, 5)
    build = lambda: nn.Sequential(OrderedDict(  # noqa: E731
        rows=nn.Linear(5, 3), some=nn.Flatten(2), rest=nn.Flatten(), classifier=nn.Linear(24, 3)
    ))  # fmt: skip
    check(registered(build, shape), form, images(shape))


@FORMS
def test_a_layer_that_occurs_twice_is_applied_twice(form):
    tanh = nn.Tanh()
    check(model_of(nn.Conv2d(1, 3, 3), tanh, nn.Conv2d(3, 3, 3), tanh, shape=(1, 8, 8)), form, images((1, 8, 8)))


@FORMS
def test_a_layer_with_weights_that_occurs_twice_shares_them(form):
    conv = nn.Conv2d(2, 2, 3, padding=1)
    check(model_of(conv, nn.Tanh(), conv, shape=(2, 5, 5)), form, images((2, 5, 5)))


@FORMS
def test_lanes_are_independent(form):
    """Another lane's weights and samples do not change a bit, even if they are NaN."""
    shape = (3, 8, 8)
    model = Model("cnn-small", shape, 3)
    theta, x = weights(model), images(shape)
    before = stacked(model, form)(model.layout.views(theta), x)
    theta[1], x[1] = float("nan"), float("inf")
    after = stacked(model, form)(model.layout.views(theta), x)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert after[1].isnan().all()


@FORMS
def test_samples_are_independent(form):
    shape = (3, 8, 8)
    model = Model("cnn-small", shape, 3)
    x = images(shape)
    whole = stacked(model, form)(model.layout.views(weights(model)), x)
    part = stacked(model, form)(model.layout.views(weights(model)), x[:, 1:3])
    torch.testing.assert_close(part, whole[:, 1:3], rtol=0, atol=1e-12)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 3, 8, 16])
def test_other_types_compute_the_same_in_their_precision(form, dtype, channels):
    """Columns copies 16 bytes at once where the channels allow it: 4 floats, 8 bfloat16s."""
    shape = (channels, 6, 7)
    model = model_of(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3), shape=shape)
    theta, x = weights(model), images(shape)
    exact = stacked(model, form)(model.layout.views(theta), x)
    rough = stacked(model, form)(model.layout.views(theta.to(dtype)), x.to(dtype))
    assert rough.dtype == dtype
    scale = float(exact.abs().max())
    torch.testing.assert_close(rough.double(), exact, rtol=0, atol=scale * (1e-5 if dtype == torch.float32 else 0.05))


def test_gradients_of_columns_equal_finite_differences():
    """With inputs that need no gradient."""
    model = model_of(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, (1, 2)), shape=(2, 3, 4))
    theta, x, forward = weights(model)[:2].requires_grad_(), images((2, 3, 4))[:2, :2], stacked(model, Columns)
    assert torch.autograd.gradcheck(lambda t: forward(model.layout.views(t), x), theta, fast_mode=True)


@pytest.mark.essential
def test_a_step_of_a_stack_is_a_step_of_each_copy():
    """The gradient of cross-entropy, as in training."""
    shape = (1, 8, 8)
    model = Model("cnn-small", shape, 3)
    y = torch.arange(SAMPLES) % 3
    for form in (Grouped, Columns):
        found = at_once(model, form, weights(model), images(shape), lambda out: functional.cross_entropy(out, y))
        plain = by_copy(model, weights(model), images(shape), lambda out: functional.cross_entropy(out, y))
        torch.testing.assert_close(found[1], plain[1], rtol=0, atol=1e-12)


class Tripled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


@FORMS
def test_a_subclass_of_a_layer_is_run_as_it_is(form):
    model = model_of(nn.Flatten(), Tripled(6, 5), shape=(1, 2, 3))
    theta, x = weights(model), images(model.shape)
    found = stacked(model, form)(model.layout.views(theta), x)
    torch.testing.assert_close(found, torch.stack([model.logits(*one) for one in zip(theta, x, strict=True)]))


@FORMS
def test_a_layers_hooks_are_run(form):
    def doubled():
        layer = nn.Linear(6, 5)
        layer.register_forward_hook(lambda module, inputs, output: 2 * output)
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=layer, classifier=nn.Linear(5, 3)))

    model = registered(doubled, (1, 2, 3))
    theta, x = weights(model), images(model.shape)
    found = stacked(model, form)(model.layout.views(theta), x)
    torch.testing.assert_close(found, torch.stack([model.logits(*one) for one in zip(theta, x, strict=True)]))
