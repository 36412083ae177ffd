"""The CNN's convolutions as an autograd function, for a method's custom losses and sweeps.

A step of plain SGD is fused as a whole (`step`). Custom losses and sweeps are vectorised by `torch.func`, which needs a
derivative and a `vmap` rule. This function computes the part that takes most of the time, from images to the inputs of
the hidden layer, with the same kernels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn import functional

from fedobp.engine.im2col import PatchConv2d, at_most_one_grad, merge_vmap_axis
from fedobp.engine.kernels import backward
from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.compilation import launch_checked
from fedobp.engine.kernels.launches import Launch
from fedobp.engine.kernels.param_layout import B1, B2, BF, SUMS1, TAPS2
from fedobp.engine.kernels.shapes import Shapes
from fedobp.engine.kernels.shared_memory import fitting_table
from fedobp.engine.kernels.step import (
    TAIL,
    KernelPrecision,
    StepConfig,
    convolutions,
    gradients,
    operand_dtype,
    splits_of,
)
from fedobp.engine.kernels.tiles import Tiles
from fedobp.errors import FedobpError


@dataclass(frozen=True)
class ConvConfig:
    """The configuration of a model's fused convolutions."""

    side: int
    channels: int
    precision: KernelPrecision
    tiles: tuple[Tiles, ...]
    card: Card | None = None
    must_read: bool = True

    def step_config(self, batch: int) -> StepConfig:
        """Return the configuration for a batch size; the number of classes is not used."""
        return StepConfig(Shapes(self.side, self.channels, 2, batch), self.precision, "all")

    def tiles_of(self, lanes: int, batch: int) -> Tiles:
        """Return the tile shapes for a number of lanes; small batches have too few rows for any but the last."""
        tiles = fitting_table(self.tiles, self.step_config(batch).shapes, self.precision, self.card)
        return next((one for one in tiles if batch >= 16 and lanes <= one.lanes), tiles[-1])

    def launch(self, launches: Iterable[Launch]) -> None:
        """Launch kernels one after another."""
        launch_checked(launches, self.card, self.must_read)


class Convolutions(torch.autograd.Function):
    """Both convolutions with ReLU and pooling: images [L, B, C, H, H] -> [L, B, P2, P2, 64].

    Weights are [L, 32, C, 5, 5] and [L, 64, 32, 5, 5], in float32. It also returns the tensors that the backward pass
    needs: images [L, B, H, H, 4], the first pooled maps, the argmax of both poolings, and the second weights.
    """

    @staticmethod
    def forward(
        config: ConvConfig, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Convert the tensors to the kernels' layouts, and launch the kernels."""
        lanes, batch = x.shape[:2]
        step, low, tiles = config.step_config(batch), operand_dtype(config.precision), config.tiles_of(lanes, batch)
        shapes = step.shapes
        storage, image = _image(lanes, batch, shapes.side, low, x.device)
        image[..., : shapes.channels] = x.permute(0, 1, 3, 4, 2)
        # A kernel row for the left position of a pooling window, and one shifted by a pixel for the right position.
        rows = functional.pad(w1.permute(0, 3, 4, 2, 1), (0, 0, 0, 4 - shapes.channels))
        spread = torch.stack([functional.pad(rows, (0, 0, 0, 0, px, 3 - px)) for px in (0, 1)], dim=4).to(low)
        flipped, taps = (w2.permute(0, 3, 4, *axes).to(low).contiguous() for axes in ((1, 2), (2, 1)))
        biases = x.new_empty(lanes, BF.value, dtype=torch.float32)
        biases[:, B1.value : B1.value + 32], biases[:, B2.value : B2.value + 64] = b1, b2
        unused = torch.empty(lanes, dtype=torch.int32, device=x.device)
        pooled1, pooled2 = (
            torch.empty(lanes, batch, size, size, maps, dtype=low, device=x.device)
            for size, maps in ((shapes.pooled1, 32), (shapes.pooled2, 64))
        )
        arg1, arg2 = (torch.empty_like(pooled, dtype=torch.int8) for pooled in (pooled1, pooled2))
        buf = SimpleNamespace(
            x=storage, count=unused, step=unused, spread=spread, flipped=flipped, theta=biases,
            pooled1=pooled1, arg1=arg1, pooled2=pooled2, arg2=arg2,
        )  # fmt: skip
        config.launch(convolutions(step, buf, tiles, lanes, padded=False).values())
        return pooled2, image, pooled1, arg1, arg2, taps

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save tensors for the backward pass."""
        ctx.config = inputs[0]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of weights and biases. Where the images need one, `FusedCNN` uses torch's layers."""
        assert not ctx.needs_input_grad[1]
        if gradients[0] is None:
            return (None,) * 6
        return None, None, *_Gradients.apply(ctx.config, gradients[0], *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], config: ConvConfig, *given: Tensor) -> tuple[Any, Any]:
        """Merge the new axis into the samples where weights are shared, and into the lanes where they are not."""
        x, *weights = given
        if in_dims[2:] == (None,) * 4:
            images = x.movedim(in_dims[1] or 0, 1)
            *outputs, taps = Convolutions.apply(config, images.flatten(1, 2), *weights)  # type: ignore[no-untyped-call]
            return (*(one.unflatten(1, images.shape[1:3]) for one in outputs), taps), (1,) * 5 + (None,)
        outputs = Convolutions.apply(config, *merge_vmap_axis(info.batch_size, in_dims[1:], given))  # type: ignore[no-untyped-call]
        return tuple(one.unflatten(0, (info.batch_size, -1)) for one in outputs), (0,) * 6


class _Gradients(torch.autograd.Function):
    """The backward pass: from the gradient of [L, B, P2, P2, 64] to those of both convolutions' weights and biases."""

    @staticmethod
    def forward(config: ConvConfig, gradient: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Launch the kernels, and add up their partial sums."""
        image, pooled1, arg1, arg2, taps = (one.contiguous() for one in saved)
        lanes, batch = gradient.shape[:2]
        step, tiles, low = config.step_config(batch), config.tiles_of(lanes, batch), pooled1.dtype
        shapes, (splits1, splits2) = step.shapes, splits_of(step.shapes, tiles)
        storage, image_copy = _image(lanes, batch, shapes.side, low, image.device)
        image_copy.copy_(image)
        d2 = image.new_zeros(lanes, batch, shapes.frame, shapes.frame, 64)
        gradient = gradient.to(low).contiguous()
        rows = 64
        unpooled = Launch(
            backward.unpooled, (-(-batch * shapes.pooled2**2 // rows), lanes),
            (gradient, arg2, d2), (batch, shapes.pooled2, rows))  # fmt: skip
        unused = torch.empty(lanes, dtype=torch.int32, device=image.device)
        sums1 = image.new_empty(lanes, splits1, SUMS1.value, dtype=torch.float32)
        sums2 = image.new_empty(lanes, splits2, TAPS2.value, dtype=torch.float32)
        buf = SimpleNamespace(
            x=storage, count=unused, awake=unused, taps=taps, pooled1=pooled1, arg1=arg1,
            d1=torch.empty_like(pooled1), d2=d2, sums1=sums1, sums2=sums2,
        )  # fmt: skip
        config.launch([unpooled, *gradients(step, buf, tiles, lanes, padded=False).values()])
        first = sums1.sum(dim=1)
        both = first[:, : 160 * 64].view(lanes, 5, 8, 4, 32, 2)[:, :, :, : shapes.channels]
        w1 = (both[:, :, :5, ..., 0] + both[:, :, 1:6, ..., 1]).permute(0, 4, 3, 1, 2)
        w2 = sums2.sum(dim=1).view(lanes, 5, 5, 32, 64).permute(0, 4, 3, 1, 2)
        b2 = torch.where(arg2 < 4, gradient, 0).sum(dim=(1, 2, 3), dtype=torch.float32)
        return w1, first[:, 160 * 64 : 160 * 64 + 32], w2, b2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: where `torch.func` takes a second derivative, `FusedCNN` uses torch's layers."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise an error: a second derivative by `torch.autograd` cannot be detected in the forward pass."""
        raise FedobpError(
            "the convolution kernels have no second derivative: take both derivatives with torch.func.grad, "
            "or use --engine serial"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], config: ConvConfig, *given: Tensor) -> tuple[Any, Any]:
        """Merge the new axis into the lanes."""
        outputs = _Gradients.apply(config, *merge_vmap_axis(info.batch_size, in_dims[1:], given))  # type: ignore[no-untyped-call]
        return tuple(one.unflatten(0, (info.batch_size, -1)) for one in outputs), (0,) * 4


def _image(lanes: int, batch: int, side: int, low: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return zeroed storage for images, with a tail, and its view [L, B, H, H, 4].

    The kernels read 8 pixels where they use 6, also at the end of the last image.
    """
    storage = torch.zeros(lanes * batch * side**2 * 4 + TAIL, dtype=low, device=device)
    return storage, storage[:-TAIL].view(lanes, batch, side, side, 4)


def _tracked(x: Tensor) -> bool:
    """Return whether any active transform differentiates with respect to a tensor."""
    while not x.requires_grad and is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.requires_grad


class FusedCNN(nn.Module):
    """The paper's CNN with the same tensors and fused convolutions, for the given batch sizes."""

    conv1: PatchConv2d
    conv2: PatchConv2d
    relu1: nn.Module
    relu2: nn.Module
    relu3: nn.Module
    pool1: nn.Module
    pool2: nn.Module
    flatten: nn.Module
    fc1: nn.Module
    classifier: nn.Module

    def __init__(self, like: nn.Module, config: ConvConfig, batches: Sequence[int]) -> None:
        super().__init__()
        for name, layer in like.named_children():
            setattr(self, name, layer)
        self._config, self._batches = config, frozenset(batches)

    def _is_supported(self, x: Tensor) -> bool:
        """Return whether the kernels support this call: one derivative, of weights, in their precision."""
        device = x.device.type
        low = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        return (
            len(x) in self._batches
            and x.dtype == self.conv1.weight.dtype == torch.float32
            and low == (self._config.precision == "bf16")
            and at_most_one_grad()
            and not _tracked(x)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        if self._is_supported(x):
            tensors: Any = x, self.conv1.weight, self.conv1.bias, self.conv2.weight, self.conv2.bias
            outputs: Any = Convolutions.apply(self._config, *(tensor[None] for tensor in tensors))  # type: ignore[no-untyped-call]
            x = outputs[0][0].permute(0, 3, 1, 2)
        else:
            x = self.pool1(self.relu1(self.conv1(x)))
            x = self.pool2(self.relu2(self.conv2(x)))
        out: Tensor = self.classifier(self.relu3(self.fc1(self.flatten(x))))
        return out
