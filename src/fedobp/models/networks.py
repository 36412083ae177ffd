"""The networks: ordinary modules with a last layer called `classifier`.

Inputs are [B, C, H, W], [B, features], or tokens [B, length].
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from torch import nn

from fedobp.errors import FedobpError, short
from fedobp.models.registry import register

_LARGEST = 4_096  # of an option: larger networks are asked for by mistake


def image_shape(name: str, shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """Return the channels, height and width of a network's inputs; what is no image, or a small one, is refused."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise FedobpError(
            f"model '{name}' needs images of at least {smallest}x{smallest} pixels, not inputs of shape "
            f"{'x'.join(map(str, shape))}: choose another --model, such as mlp"
        )
    return shape[0], shape[1], shape[2]


def check_sizes(name: str, **options: int) -> None:
    """Refuse options of a network that are no size of a layer and no number of layers."""
    for option, value in options.items():
        if not 1 <= value <= _LARGEST:
            raise FedobpError(
                f"option '{option}' of model '{name}' must be between 1 and {_LARGEST}, not {short(value)}"
            )


@register("cnn")
def cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """Return the paper's CNN: two 5x5 convolutions without padding, one hidden layer of 512."""
    channels, height, width = image_shape("cnn", shape, 16)
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
    channels, height, width = image_shape("cnn-small", shape, 4)
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


@register("conv")
def conv(shape: Sequence[int], classes: int, *, depth: int = 4, width: int = 32) -> nn.Module:
    """Return a plain CNN: `depth` padded 3x3 convolutions to `width` channels, and no hidden layer after them.

    Each has a ReLU and, while both sides are at least 2, 2x2 max-pooling.
    """
    check_sizes("conv", depth=depth, width=width)
    channels, *sides = image_shape("conv", shape, 1)
    layers: list[tuple[str, nn.Module]] = []
    for at in range(1, depth + 1):
        layers += [(f"conv{at}", nn.Conv2d(channels, width, 3, padding=1)), (f"relu{at}", nn.ReLU())]
        channels = width
        if min(sides) >= 2:
            layers.append((f"pool{at}", nn.MaxPool2d(2)))
            sides = [side // 2 for side in sides]
    head = nn.Linear(width * prod(sides), classes)
    return nn.Sequential(OrderedDict([*layers, ("flatten", nn.Flatten()), ("classifier", head)]))


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
