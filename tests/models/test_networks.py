"""The registered networks: sizes, forward pass, and inputs that are too small."""

import re
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedobp.errors import FedobpError
from fedobp.models import NETS, Model

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


def test_the_small_networks_have_the_sizes_computed_by_hand():
    small = {"conv1": 32 * 9 + 32, "conv2": 64 * 32 * 9 + 64, "fc1": 128 * (64 * 2 * 2) + 128, "classifier": 1_290}
    assert by_layer(Model("cnn-small", (1, 8, 8), 10)) == small
    assert Model("cnn-small", (1, 8, 8), 10).layout.size == 53_002
    assert by_layer(Model("mlp", (4,), 2)) == {"fc1": 4 * 128 + 128, "classifier": 128 * 2 + 2}
    assert Model("mlp", (2, 3, 5), 2).layout.sizes == (30 * 128, 128, 256, 2)


def test_the_page_states_the_sizes_of_all_networks():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \|.*\| ([^|]+) \|$", page.split("| network | options")[0], flags=re.M))
    shapes = {"cnn": (1, 28, 28), "cnn-bn": (1, 28, 28), "cnn-small": (1, 8, 8), "mlp": (64,)}
    assert rows.keys() == NETS.keys()
    for name, stated in rows.items():
        if name in ("lstm", "transformer"):
            module = NETS[name]((80,), 90, vocabulary=90, every_position=True)
            size = sum(one.numel() for one in module.parameters())
        else:
            size = Model(name, shapes.get(name, (3, 32, 32)), 10).layout.size
        assert stated.startswith(f"{size:,} at "), name


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
    ("options", "sides", "pools"),
    [({}, 2, 4), ({"depth": 1}, 16, 1), ({"depth": 7, "width": 3}, 1, 5)],
)
def test_conv_has_as_many_layers_as_asked_and_pools_while_the_image_allows(options, sides, pools):
    module = NETS["conv"]((3, 32, 40), 5, **options)
    depth, width = options.get("depth", 4), options.get("width", 32)
    kinds = [type(layer).__name__ for layer in module]
    assert (kinds.count("Conv2d"), kinds.count("ReLU"), kinds.count("MaxPool2d")) == (depth, depth, pools)
    assert kinds[:3] == ["Conv2d", "ReLU", "MaxPool2d"]
    assert module.classifier.in_features == width * sides * (40 >> pools)
    assert module(torch.zeros(2, 3, 32, 40)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("conv", {"depth": 0}, "option 'depth' of model 'conv' must be between 1 and 4096, not 0"),
        ("conv", {"width": -3}, "option 'width' of model 'conv' must be between 1 and 4096, not -3"),
        ("conv", {"depth": 10**30}, "option 'depth' of model 'conv' must be between 1 and 4096"),
    ],
)
def test_sizes_that_make_no_network_are_refused(name, options, complaint):
    with pytest.raises(FedobpError, match=complaint):
        NETS[name]((1, 8, 8), 3, **options)


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
        ("conv", (2, 1, 1)),
        ("conv", (1, 5, 40)),
        ("resnet8", (1, 4, 4)),
        ("resnet8-bn", (3, 5, 9)),
        ("resnet18", (2, 8, 8)),
        ("resnet18-bn", (1, 9, 8)),
    ],
)
def test_any_input_size_runs(name, shape):
    with torch.no_grad():
        assert Model(name, shape, 3).module()(torch.zeros(2, *shape)).shape == (2, 3)


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
        ("conv", (8,), 1),
        ("resnet8", (1, 3, 8), 4),
        ("resnet8-bn", (64,), 4),
        ("resnet18", (1, 8, 7), 8),
        ("resnet18-bn", (28, 28), 8),
    ],
)
def test_an_image_too_small_is_refused(name, shape, smallest):
    given = "x".join(map(str, shape))
    with pytest.raises(FedobpError, match=f"'{name}' needs images of at least {smallest}x{smallest}.*shape {given}:"):
        Model(name, shape, 10)
