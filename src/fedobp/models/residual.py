"""Residual networks for small images (He et al., 2016, section 4.2): a 3x3 stem and no pooling before the last layer.

Where two layers differ in shape, the shortcut is a 1x1 convolution with a norm. The norm is GroupNorm with two groups
in every layer, as Reddi et al. (2021) train ResNet-18 in federations: BatchNorm's statistics over a batch suffer from
unequal label distributions (Hsieh et al., 2020). The form `-bn` has BatchNorm.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional

from fedobp.models.networks import image_shape
from fedobp.models.registry import register

Norm = Callable[[int], nn.Module]


def group_norm(channels: int) -> nn.Module:
    """Return GroupNorm with two groups."""
    return nn.GroupNorm(2, channels)


class Block(nn.Module):
    """Two 3x3 convolutions, the first with the stride, and a shortcut."""

    def __init__(self, channels: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut = nn.Sequential()
        if (channels, stride) != (outputs, 1):
            conv = nn.Conv2d(channels, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=norm(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to [B, C, H, W]."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of `blocks` blocks each, the mean over all positions, and a linear layer.

    `widths` are the stages' channels. Every stage but the first halves the height and the width.
    """

    def __init__(self, channels: int, classes: int, widths: Sequence[int], blocks: int, norm: Norm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = norm(widths[0])
        before = [widths[0], *widths]
        self.stages = nn.Sequential()
        for stage, outputs in enumerate(widths):
            first = Block(before[stage], outputs, 2 if stage else 1, norm)
            self.stages.append(nn.Sequential(first, *(Block(outputs, outputs, 1, norm) for _ in range(blocks - 1))))
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of [B, C, H, W]."""
        x = self.stages(functional.relu(self.norm(self.conv(x))))
        return self.classifier(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


@register("resnet8")
def resnet8(shape: Sequence[int], classes: int) -> nn.Module:
    """Return ResNet-8 with GroupNorm: three stages of one block, with 16, 32 and 64 channels."""
    return _resnet("resnet8", shape, classes, (16, 32, 64), 1, group_norm)


@register("resnet8-bn")
def resnet8_bn(shape: Sequence[int], classes: int) -> nn.Module:
    """Return ResNet-8 with BatchNorm."""
    return _resnet("resnet8-bn", shape, classes, (16, 32, 64), 1, nn.BatchNorm2d)


@register("resnet18")
def resnet18(shape: Sequence[int], classes: int) -> nn.Module:
    """Return ResNet-18 with GroupNorm: four stages of two blocks, with 64, 128, 256 and 512 channels."""
    return _resnet("resnet18", shape, classes, (64, 128, 256, 512), 2, group_norm)


@register("resnet18-bn")
def resnet18_bn(shape: Sequence[int], classes: int) -> nn.Module:
    """Return ResNet-18 with BatchNorm."""
    return _resnet("resnet18-bn", shape, classes, (64, 128, 256, 512), 2, nn.BatchNorm2d)


def _resnet(name: str, shape: Sequence[int], classes: int, widths: Sequence[int], blocks: int, norm: Norm) -> nn.Module:
    smallest = 2 ** (len(widths) - 1)  # of which one pixel is left in the last stage
    return ResNet(image_shape(name, shape, smallest)[0], classes, widths, blocks, norm)
