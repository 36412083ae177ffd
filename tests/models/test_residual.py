"""Residual networks: the sizes of the literature, and the forward pass, written out."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedobp.models import Model


@pytest.mark.parametrize(("name", "learned", "statistics"), [("resnet8", 78_042, 672), ("resnet18", 11_173_962, 9_600)])
def test_sizes_are_those_of_the_literature(name, learned, statistics):
    """With 1x1 shortcuts, for 32x32x3 and 10 classes. BatchNorm has two statistics for each of its channels."""
    plain, normed = Model(name, (3, 32, 32), 10), Model(f"{name}-bn", (3, 32, 32), 10)
    assert plain.layout.size == normed.layout.learned == learned
    assert normed.layout.size - learned == statistics
    assert plain.layout.names == normed.layout.names[: len(plain.layout.names)]


@pytest.mark.parametrize(
    ("name", "norm"), [("resnet8", nn.GroupNorm), ("resnet8-bn", nn.BatchNorm2d), ("resnet18-bn", nn.BatchNorm2d)]
)
def test_every_convolution_has_a_norm_and_no_bias(name, norm):
    modules = list(Model(name, (1, 8, 8), 3).module().modules())
    convolutions = [layer for layer in modules if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in modules if isinstance(layer, norm)]
    assert len(norms) == len(convolutions) == {"resnet8": 9, "resnet8-bn": 9, "resnet18-bn": 20}[name]
    assert all(layer.bias is None for layer in convolutions)
    assert all(layer.num_groups == 2 for layer in norms if isinstance(layer, nn.GroupNorm))


def test_resnet8_computes_what_its_docstring_says():
    model = Model("resnet8", (3, 12, 10), 4)
    theta = model.initial(1).double() + 0.1 * torch.arange(model.layout.size).cos()
    tensors = model.layout.views(theta)

    def conv(x, name, norm, stride=1):
        x = functional.conv2d(x, tensors[f"{name}.weight"], None, stride, "valid" if "shortcut" in name else 1)
        return functional.group_norm(x, 2, tensors[f"{norm}.weight"], tensors[f"{norm}.bias"])

    x = torch.randn(2, 3, 12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = conv(x, "conv", "norm").relu()
    for stage, (stride, shape) in enumerate([(1, (16, 12, 10)), (2, (32, 6, 5)), (2, (64, 3, 3))]):
        at = f"stages.{stage}.0"
        inner = conv(conv(z, f"{at}.conv1", f"{at}.norm1", stride).relu(), f"{at}.conv2", f"{at}.norm2")
        z = (inner + (conv(z, f"{at}.shortcut.conv", f"{at}.shortcut.norm", stride) if stage else z)).relu()
        assert z.shape == (2, *shape)
    expected = z.mean(dim=(2, 3)) @ tensors["classifier.weight"].T + tensors["classifier.bias"]
    torch.testing.assert_close(model.logits(theta, x), expected)
