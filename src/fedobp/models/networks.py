"""The networks: ordinary modules with a last layer called `classifier`. Inputs are [B, C, H, W] or [B, features]."""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from torch import nn

from fedobp.errors import FedobpError
from fedobp.models.registry import register


def _image(name: str, shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise FedobpError(
            f"model '{name}' needs images of at least {smallest}x{smallest} pixels, not inputs of shape "
            f"{'x'.join(map(str, shape))}: choose another --model, such as mlp"
        )
    return shape[0], shape[1], shape[2]


@register("cnn")
def cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """Return the paper's CNN: two 5x5 convolutions without padding, one hidden layer of 512."""
    channels, height, width = _image("cnn", shape, 16)
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * rows * columns, 512),
            relu3=nn.ReLU(),
            classifier=nn.Linear(512, classes),
        )
    )


@register("cnn-bn")
def cnn_bn(shape: Sequence[int], classes: int) -> nn.Module:
    """Return the paper's CNN with BatchNorm after each convolution."""
    layers = []
    for name, layer in cnn(shape, classes).named_children():
        layers.append((name, layer))
        if isinstance(layer, nn.Conv2d):
            layers.append((name.replace("conv", "bn"), nn.BatchNorm2d(layer.out_channels)))
    return nn.Sequential(OrderedDict(layers))


@register("cnn-small")
def cnn_small(shape: Sequence[int], classes: int) -> nn.Module:
    """Return a CNN for small images, such as the 8x8 digits: two padded 3x3 convolutions, one hidden layer of 128."""
    channels, height, width = _image("cnn-small", shape, 4)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * (height // 4) * (width // 4), 128),
            relu3=nn.ReLU(),
            classifier=nn.Linear(128, classes),
        )
    )


@register("mlp")
def mlp(shape: Sequence[int], classes: int) -> nn.Module:
    """Return a perceptron with one hidden layer of 128, for tables and images."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(prod(shape), 128),
            relu=nn.ReLU(),
            classifier=nn.Linear(128, classes),
        )
    )
