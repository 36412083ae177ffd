"""The networks: sizes, initialisation, forward pass, and what is refused."""

from collections import OrderedDict
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedobp.errors import FedobpError
from fedobp.models import NETS, Model, register
from fedobp.models.probes import linear_layers


@pytest.fixture(autouse=True)
def _registry():
    known = dict(NETS)
    yield
    NETS.clear()
    NETS.update(known)


def registered(**layers: nn.Module) -> str:
    register("made-up")(lambda shape, classes: nn.Sequential(OrderedDict(layers)))
    return "made-up"


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return x


PAPER = {  # dataset: input, classes, (conv1, conv2, fc1, classifier), total
    "cifar10, svhn": ((3, 32, 32), 10, (2_432, 51_264, 819_712, 5_130), 878_538),
    "cifar100": ((3, 32, 32), 100, (2_432, 51_264, 819_712, 51_300), 924_708),
    "emnist": ((1, 28, 28), 62, (832, 51_264, 524_800, 31_806), 608_702),
    "mnist, fmnist": ((1, 28, 28), 10, (832, 51_264, 524_800, 5_130), 582_026),
    "medmnist": ((1, 28, 28), 11, (832, 51_264, 524_800, 5_643), 582_539),
}


def by_layer(model: Model) -> dict[str, int]:
    """Entries of each layer, weight and bias together."""
    sizes: dict[str, int] = {}
    for name, shape in zip(model.layout.names, model.layout.shapes, strict=True):
        layer = name.split(".")[0]
        sizes[layer] = sizes.get(layer, 0) + prod(shape)
    return sizes


@pytest.mark.parametrize(("shape", "classes", "layers", "total"), PAPER.values(), ids=PAPER.keys())
def test_the_papers_cnn_has_the_papers_sizes(shape, classes, layers, total):
    model = Model("cnn", shape, classes)
    assert by_layer(model) == dict(zip(("conv1", "conv2", "fc1", "classifier"), layers, strict=True))
    assert model.layout.size == total == sum(p.numel() for p in model.module().parameters())
    assert int(model.layout.is_head().sum()) == layers[-1]
    assert [name.split(".")[1] for name in model.layout.names] == ["weight", "bias"] * 4


def test_the_small_networks_have_the_sizes_worked_out_by_hand():
    small = {"conv1": 32 * 9 + 32, "conv2": 64 * 32 * 9 + 64, "fc1": 128 * (64 * 2 * 2) + 128, "classifier": 1_290}
    assert by_layer(Model("cnn-small", (1, 8, 8), 10)) == small
    assert Model("cnn-small", (1, 8, 8), 10).layout.size == 53_002
    assert by_layer(Model("mlp", (4,), 2)) == {"fc1": 4 * 128 + 128, "classifier": 128 * 2 + 2}
    assert Model("mlp", (2, 3, 5), 2).layout.sizes == (30 * 128, 128, 256, 2)


def perceptron(z: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Apply fc1, ReLU and the classifier."""
    z = (z @ tensors["fc1.weight"].T + tensors["fc1.bias"]).relu()
    return z @ tensors["classifier.weight"].T + tensors["classifier.bias"]


@pytest.mark.essential
def test_the_papers_cnn_computes_what_the_paper_says():
    model = Model("cnn", (3, 32, 32), 10)
    theta = model.initial(3)
    tensors = model.layout.views(theta)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    z = functional.max_pool2d(functional.conv2d(x, tensors["conv1.weight"], tensors["conv1.bias"]).relu(), 2)
    z = functional.max_pool2d(functional.conv2d(z, tensors["conv2.weight"], tensors["conv2.bias"]).relu(), 2)
    assert z.shape == (2, 64, 5, 5)
    with torch.no_grad():
        assert torch.allclose(model.module(theta)(x), perceptron(z.flatten(1), tensors), atol=1e-5)


def test_the_small_networks_compute_what_their_docstrings_say():
    x = torch.randn(3, 2, 9, 14, generator=torch.Generator().manual_seed(0))
    model = Model("cnn-small", (2, 9, 14), 4)
    tensors = model.layout.views(model.initial(1))
    z = functional.conv2d(x, tensors["conv1.weight"], tensors["conv1.bias"], padding=1)
    z = functional.conv2d(functional.max_pool2d(z.relu(), 2), tensors["conv2.weight"], tensors["conv2.bias"], padding=1)
    z = functional.max_pool2d(z.relu(), 2).flatten(1)
    with torch.no_grad():
        assert torch.allclose(model.module(model.initial(1))(x), perceptron(z, tensors), atol=1e-5)
        model = Model("mlp", (2, 9, 14), 4)
        tensors = model.layout.views(model.initial(2))
        assert torch.allclose(model.module(model.initial(2))(x), perceptron(x.flatten(1), tensors), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cnn", (1, 30, 30)),
        ("cnn", (3, 20, 40)),
        ("cnn-small", (3, 20, 40)),
        ("cnn", (3, 29, 31)),
        ("cnn", (1, 16, 16)),
        ("cnn", (2, 19, 17)),
        ("cnn-small", (1, 30, 30)),
        ("cnn-small", (3, 29, 31)),
        ("cnn-small", (1, 4, 4)),
        ("cnn-small", (1, 5, 7)),
        ("mlp", (3, 29, 31)),
        ("mlp", (7,)),
    ],
)
def test_any_input_size_runs(name, shape):
    with torch.no_grad():
        assert Model(name, shape, 3).module()(torch.zeros(2, *shape)).shape == (2, 3)


def test_initial_is_torchs_default_initialisation_after_seeding():
    model = Model("cnn-small", (1, 8, 8), 10)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        expected = torch.cat([p.detach().reshape(-1) for p in NETS["cnn-small"]((1, 8, 8), 10).parameters()])
    assert model.initial(42).equal(expected)
    assert model.initial(42).equal(Model("cnn-small", (1, 8, 8), 10).initial(42))
    assert not model.initial(43).equal(expected)
    assert expected.dtype == torch.float32
    assert not model.initial(42).requires_grad


def test_torchs_global_generator_is_left_as_it_was():
    before = torch.get_rng_state()
    model = Model("mlp", (4,), 2)
    model.module(model.initial(5))
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_holds_a_copy_of_the_vector_in_its_dtype(dtype):
    model = Model("mlp", (4,), 2)
    theta = torch.arange(model.layout.size, dtype=dtype)
    module = model.module(theta)
    assert all(p.dtype == dtype and p.requires_grad for p in module.parameters())
    assert model.read(module).equal(theta)
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert theta.equal(torch.arange(model.layout.size, dtype=dtype))


def test_load_and_read_are_inverse():
    model = Model("mlp", (4,), 2)
    module = model.module()
    model.load(module, model.initial(9))
    assert model.read(module).equal(model.initial(9))
    assert not model.read(module).requires_grad
    assert module.state_dict().keys() == dict.fromkeys(model.layout.names).keys()


def test_a_model_remembers_what_it_was_made_for():
    model = Model("mlp", [4], 2)
    assert (model.name, model.shape, model.classes) == ("mlp", (4,), 2)


def test_modules_are_fresh():
    model = Model("mlp", (4,), 2)
    one, other = model.module(), model.module()
    with torch.no_grad():
        next(one.parameters()).fill_(7)
    assert not (next(other.parameters()) == 7).any()


def test_a_registered_network_is_a_model_even_with_its_classifier_first():
    name = registered(classifier=nn.Linear(2, 3), rest=nn.Linear(3, 3, bias=False))
    model = Model(name, (2,), 3)
    assert model.layout.names == ("classifier.weight", "classifier.bias", "rest.weight")
    assert model.layout.is_head().tolist() == [True] * 9 + [False] * 9


# Refusals


@pytest.mark.parametrize(("name", "near"), [("cnn_small", "cnn-small"), ("CNN", "cnn"), ("mpl", "mlp")])
def test_an_unknown_model_is_refused_with_its_near_miss(name, near):
    with pytest.raises(FedobpError, match=rf"unknown model '{name}': did you mean '{near}'\?"):
        Model(name, (1, 28, 28), 10)


@pytest.mark.parametrize(
    ("name", "shape", "smallest"),
    [
        ("cnn", (1, 15, 28), 16),
        ("cnn", (1, 28, 15), 16),
        ("cnn", (64,), 16),
        ("cnn", (28, 28), 16),
        ("cnn-small", (1, 3, 8), 4),
        ("cnn-small", (1, 8, 3), 4),
        ("cnn-small", (8,), 4),
    ],
)
def test_an_image_too_small_is_refused(name, shape, smallest):
    given = "x".join(map(str, shape))
    with pytest.raises(FedobpError, match=f"'{name}' needs images of at least {smallest}x{smallest}.*shape {given}:"):
        Model(name, shape, 10)


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ({"fc": nn.Linear(2, 2)}, "has no layer called `classifier`"),
        ({"classifiers": nn.Linear(2, 2)}, "has no layer called `classifier`"),
        (
            {"norm": nn.BatchNorm1d(2, momentum=None), "classifier": nn.Linear(2, 2)},
            "has a BatchNorm without running statistics",
        ),
        (
            {"norm": nn.BatchNorm1d(2, track_running_stats=False), "classifier": nn.Linear(2, 2)},
            "has a BatchNorm without running statistics",
        ),
        ({"norm": Buffered(), "classifier": nn.Linear(2, 2)}, "has buffers other than BatchNorm's"),
        ({"drop": nn.Dropout(0.5), "classifier": nn.Linear(2, 2)}, "draws random numbers"),
        ({"deep": nn.Sequential(nn.AlphaDropout(0.5)), "classifier": nn.Linear(2, 2)}, "draws random numbers"),
    ],
)
def test_a_network_that_one_vector_cannot_hold_is_refused(layers, complaint):
    with pytest.raises(FedobpError, match=f"model 'made-up' {complaint}"):
        Model(registered(**layers), (2,), 2)


def test_group_norm_is_welcome():
    name = registered(norm=nn.GroupNorm(1, 2), classifier=nn.Linear(2, 2))
    assert Model(name, (2,), 2).layout.size == 2 + 2 + 4 + 2


def test_a_network_that_draws_in_its_forward_pass_is_refused():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Linear(4, 2)

        def forward(self, x):
            return self.classifier(nn.functional.dropout(x, 0.5, self.training))

    register("hidden-dropout")(lambda shape, classes: Hidden())
    try:
        with pytest.raises(FedobpError, match="draws random numbers"):
            Model("hidden-dropout", (4,), 2)
        with pytest.raises(FedobpError, match="does not take inputs of shape"):
            Model("hidden-dropout", (5,), 2)
    finally:
        del NETS["hidden-dropout"]


# Features and heads.


@pytest.mark.parametrize("name", ["cnn-small", "mlp"])
def test_a_head_on_features_is_the_model(name):
    model = Model(name, (1, 8, 8), 3)
    theta, x = model.initial(1), torch.randn(5, 1, 8, 8)
    weight, bias = model.head(theta)
    torch.testing.assert_close(model.features(theta, x) @ weight.T + bias, model.logits(theta, x))
    assert (weight.shape, bias.shape) == ((3, 128), (3,))


def test_a_head_can_be_exchanged_for_one_or_for_many():
    model = Model("mlp", (4,), 3)
    theta, other = (torch.stack([model.initial(seed), model.initial(seed + 1)]) for seed in (0, 5))
    changed = model.with_head(theta, *model.head(other))
    assert torch.equal(changed, model.layout.join(model.layout.split(theta)[0], model.layout.split(other)[1]))
    assert torch.equal(model.with_head(theta[0], *model.head(other[0])), changed[0])


def test_a_head_that_is_no_linear_layer_is_named():
    name = registered(flatten=nn.Flatten(), classifier=nn.Linear(4, 2, bias=False))
    with pytest.raises(FedobpError, match="one linear layer with a bias"):
        Model(name, (4,), 2).head(torch.zeros(8))


# BatchNorm.


def test_the_papers_cnn_with_batch_norm():
    model, plain = Model("cnn-bn", (3, 32, 32), 10), Model("cnn", (3, 32, 32), 10)
    assert model.layout.learned == plain.layout.size + 2 * (32 + 64)  # a weight and a bias a channel
    assert model.layout.size == model.layout.learned + 2 * (32 + 64)  # and two statistics
    assert [name for name in model.layout.names if model.layout.in_norm(name)] == [
        "bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias",
        "bn1.running_mean", "bn1.running_var", "bn2.running_mean", "bn2.running_var",
    ]  # fmt: skip
    assert not any(plain.layout.in_norm(name) for name in plain.layout.names)
    assert [name for name, _ in model.module().named_children()][:4] == ["conv1", "bn1", "relu1", "pool1"]


@pytest.mark.parametrize("padding", [0, 3])
def test_batch_norm_is_torchs_own_in_training_and_after_it(padding):
    name = registered(
        conv=nn.Conv2d(1, 3, 3), norm=nn.BatchNorm2d(3, eps=1e-3, momentum=0.2), flatten=nn.Flatten(),
        flat=nn.BatchNorm1d(108, affine=False), classifier=nn.Linear(108, 2),
    )  # fmt: skip
    model = Model(name, (1, 8, 8), 2)
    theta = model.initial(0).double() + 0.1 * torch.arange(model.layout.size).cos()
    x, weight = torch.randn(5 + padding, 1, 8, 8, dtype=torch.float64), torch.ones(5 + padding, dtype=torch.float64)
    weight[5:] = 0
    logits, statistics = model.trained(theta, x, weight)
    module = model.module(theta).train()
    torch.testing.assert_close(logits[:5], module(x[:5]))
    after = model.read(module)
    torch.testing.assert_close(statistics, after[model.layout.learned :])
    assert torch.equal(after[: model.layout.learned], theta[: model.layout.learned])
    torch.testing.assert_close(model.logits(after, x), module.eval()(x))
    assert set(module.state_dict()) - set(model.layout.names) == {
        "norm.num_batches_tracked",
        "flat.num_batches_tracked",
    }


# Linear layers.


class Twice(nn.Module):
    """A layer for every row of an image, one that is used twice, two that share a tensor, and two plain ones."""

    def __init__(self):
        super().__init__()
        self.rows, self.again, self.plain = nn.Linear(8, 4), nn.Linear(32, 32), nn.Linear(32, 32)
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight
        self.classifier = nn.Linear(32, 3)

    def forward(self, x):
        x = self.rows(x[:, 0]).flatten(1)
        return self.classifier(self.plain(self.second(self.first(self.again(self.again(x))))))


def test_linear_layers_that_see_one_vector_a_sample_are_known():
    assert linear_layers(Twice(), torch.zeros(2, 1, 8, 8)) == ("plain", "classifier")
    assert Model("cnn", (1, 28, 28), 10).linear == ("fc1", "classifier")
    assert Model("mlp", (6,), 3).linear == ("fc1", "classifier")


def test_probes_show_what_layers_are_fed_and_push_their_outputs():
    model, x = Model("mlp", (6,), 3), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    theta = model.initial(0)
    tensors, nothing = model.layout.views(theta), {"fc1": torch.zeros(128), "classifier": torch.zeros(3)}
    logits, fed = model.probed(tensors, nothing, x)
    torch.testing.assert_close(logits, model.logits(theta, x))
    assert torch.equal(fed["fc1"], x)
    torch.testing.assert_close(fed["classifier"], model.features(theta, x))
    pushed, _ = model.probed(tensors, {**nothing, "classifier": torch.tensor([1.0, 2.0, 3.0])}, x)
    torch.testing.assert_close(pushed - logits, torch.tensor([1.0, 2.0, 3.0]).expand(4, 3))
