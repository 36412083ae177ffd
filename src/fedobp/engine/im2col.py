"""Convolutions by im2col: a batched product of patches and kernels, for lanes that each have their own weights on CUDA.

cuDNN runs the groups of a grouped convolution one after the other. Here patches are copied once, and one batched matrix
product computes all lanes (docs/performance.md has the measurements).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.nn import functional

from fedobp.models import Model


class PatchProduct(torch.autograd.Function):
    """A convolution: images [L, B, H, W, C], weights [L, O, C, k, m], biases [L, O], and the stride.

    Returns outputs [L, positions, O], and patches and kernels for the backward pass. The size of a patch is
    padded with zeros to a multiple of 8, as tensor cores need. The weight gradient is a sum over all positions of all
    samples: it is computed per sample and then added up, because one product per lane would leave most of the device
    idle when there are few lanes.
    """

    @staticmethod
    def forward(image: Tensor, weight: Tensor, bias: Tensor, stride: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the patches, and multiply."""
        lanes, samples, *sides, channels = image.shape
        outputs, (kernel_h, kernel_w) = weight.shape[1], weight.shape[3:]
        rows, columns = _positions(sides, (kernel_h, kernel_w), stride)
        patch_size = kernel_h * kernel_w * channels
        padded = -(-patch_size // 8) * 8
        patches = image.new_empty(lanes, samples, rows, columns, padded)
        patches[..., patch_size:] = 0
        source, target, row_size = image.contiguous(), patches[..., :patch_size], kernel_w * channels
        if padded == patch_size and channels * image.element_size() % 16 == 0:
            # A copy moves one element at a time: view 16 bytes as one element.
            source, target = (tensor.view(torch.complex128) for tensor in (source, target))
            row_size = row_size * image.element_size() // 16
        lane, sample, down, right, _ = source.stride()
        overlapping = source.as_strided(
            (lanes, samples, rows, columns, kernel_h, row_size),
            (lane, sample, stride[0] * down, stride[1] * right, down, 1),
        )
        target.unflatten(-1, (kernel_h, row_size)).copy_(overlapping)
        patches = patches.flatten(1, 3)
        kernels = weight.permute(0, 3, 4, 2, 1).reshape(lanes, patch_size, outputs)
        kernels = functional.pad(kernels, (0, 0, 0, padded - patch_size)) if padded > patch_size else kernels
        return torch.baddbmm(bias[:, None], patches, kernels), patches, kernels

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save tensors for the backward pass. They are outputs, so that the backward pass is differentiable too."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])
        ctx.shapes = inputs[0].shape, inputs[1].shape, inputs[3]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients of images and biases (if needed) and weights."""
        patches, kernels = ctx.saved_tensors
        grad_out, grad_patches, grad_kernels = gradients
        (lanes, samples, height, width, channels), (_, outputs, _, kernel_h, kernel_w), (down, right) = ctx.shapes
        patch_size = kernel_h * kernel_w * channels
        rows, columns = _positions((height, width), (kernel_h, kernel_w), (down, right))
        grad_image = grad_weight = grad_bias = None
        with torch.autocast(patches.device.type, enabled=False):  # all tensors already have the dtype of the products
            if grad_out is not None:
                gradient = grad_out.reshape(lanes, samples * rows * columns, outputs)
                by_sample = lanes * samples, rows * columns
                products = torch.bmm(
                    patches.reshape(*by_sample, patches.shape[-1]).transpose(1, 2),
                    gradient.reshape(*by_sample, outputs),
                )
                grad_kernels = _add(grad_kernels, products.unflatten(0, (lanes, samples)).sum(dim=1))
                grad_bias = gradient.sum(dim=1) if ctx.needs_input_grad[2] else None
                if ctx.needs_input_grad[0]:
                    grad_patches = _add(grad_patches, torch.bmm(gradient, kernels.transpose(1, 2)))
            if grad_kernels is not None:
                by_position = grad_kernels[:, :patch_size].reshape(lanes, kernel_h, kernel_w, channels, outputs)
                grad_weight = by_position.permute(0, 4, 3, 1, 2)
            if grad_patches is not None and ctx.needs_input_grad[0]:
                windows = grad_patches[..., :patch_size].unflatten(1, (samples, rows, columns))
                windows = windows.unflatten(-1, (kernel_h, kernel_w, channels))
                grad_image = windows.new_zeros(lanes, samples, height, width, channels)
                for row in range(kernel_h):
                    for column in range(kernel_w):
                        window = windows[:, :, :, :, row, column]
                        ends = row + down * (rows - 1) + 1, column + right * (columns - 1) + 1
                        grad_image[:, :, row : ends[0] : down, column : ends[1] : right] += window
        return grad_image, grad_weight, grad_bias, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], image: Tensor, weight: Tensor, bias: Tensor, stride: tuple[int, int]
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Merge the new axis into the samples where weights are shared, and into the lanes where they are not."""
        batch_size: int = info.batch_size
        if in_dims[1:3] == (None, None):
            images = image.movedim(in_dims[0] or 0, 1)
            out, patches, kernels = _apply(images.flatten(1, 2), weight, bias, stride)
            return (*(one.unflatten(1, (batch_size, -1)) for one in (out, patches)), kernels), (1, 1, None)
        image, weight, bias = merge_vmap_axis(batch_size, in_dims[:3], (image, weight, bias))
        outputs = _apply(image, weight, bias, stride)
        return tuple(tensor.unflatten(0, (batch_size, -1)) for tensor in outputs), (0, 0, 0)


def _positions(sides: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the numbers of rows and columns of a convolution's outputs."""
    return [(side - size) // step + 1 for side, size, step in zip(sides, kernel, stride, strict=True)]


def _add(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def merge_vmap_axis(batch_size: int, in_dims: Sequence[int | None], given: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors [L, ...] with a `vmap` axis as [batch_size * L, ...]."""
    moved = (
        tensor.expand(batch_size, *tensor.shape) if at is None else tensor.movedim(at, 0)
        for tensor, at in zip(given, in_dims, strict=True)
    )
    return [tensor.flatten(0, 1) for tensor in moved]


def at_most_one_grad() -> bool:
    """Return whether `torch.func` takes at most one derivative, in reverse mode, so that no second one is needed."""
    transforms = [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]
    return transforms.count(TransformType.Grad) <= 1 and TransformType.Jvp not in transforms


def _apply(image: Tensor, weight: Tensor, bias: Tensor, stride: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor]
    result = PatchProduct.apply(image, weight, bias, stride)  # type: ignore[no-untyped-call]
    return result


def supports_im2col(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution that im2col can compute."""
    return (
        type(layer) is nn.Conv2d
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and layer.dilation == (1, 1)
        and not (layer._forward_hooks or layer._forward_pre_hooks)  # a hook may do anything
    )


def im2col_conv2d(layer: nn.Conv2d, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve images [L, B, H, W, C] as a layer does, with each lane's weights; return [L, B, rows, columns, O]."""
    assert not isinstance(layer.padding, str)
    down, right = layer.padding
    if down or right:
        image = functional.pad(image, (0, 0, right, right, down, down))
    bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias
    stride = layer.stride[0], layer.stride[1]
    positions = _positions(image.shape[2:4], weight.shape[3:], stride)
    out: Tensor = _apply(image, weight, bias, stride)[0].unflatten(1, (image.shape[1], *positions))
    return out


class PatchConv2d(nn.Conv2d):
    """A convolution with the same tensors, whose `vmap` over lanes is one batched product."""

    def __init__(self, like: nn.Conv2d) -> None:
        self.__dict__.update(like.__dict__)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [B, C, H, W]."""
        if not at_most_one_grad():
            return super().forward(x)
        tensors = [x.permute(0, 2, 3, 1), self.weight, *([] if self.bias is None else [self.bias])]
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            tensors = [tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in tensors]
        image, weight, *bias = (tensor[None] for tensor in tensors)
        return im2col_conv2d(self, image, weight, bias[0] if bias else None)[0].permute(0, 3, 1, 2)


class PatchGroupNorm(nn.GroupNorm):
    """GroupNorm with the same tensors, in the memory format that `PatchConv2d` returns, and at least in float32.

    torch's own would copy the images to another format, and `vmap` of it refuses them on the CPU.
    """

    def __init__(self, like: nn.GroupNorm) -> None:
        self.__dict__.update(like.__dict__)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [B, C, ...]."""
        groups: Tensor = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (self.num_groups, -1))
        variance, mean = torch.var_mean(groups, list(range(2, groups.ndim)), correction=0, keepdim=True)
        scale = (variance + self.eps).rsqrt()
        if not self.affine:
            return ((groups - mean) * scale).flatten(1, 2)
        shape = [self.num_groups, -1, *[1] * (x.ndim - 2)]
        scale = scale * self.weight.view(shape)
        return torch.addcmul(self.bias.view(shape) - mean * scale, groups, scale).flatten(1, 2)


def patched(model: Model) -> Model:
    """Return a model that computes the same, with `PatchConv2d` for the convolutions that im2col supports."""

    def replace_layers(module: nn.Module) -> nn.Module:
        for name, layer in list(module.named_modules()):
            parent, _, leaf = name.rpartition(".")
            if isinstance(layer, nn.Conv2d) and supports_im2col(layer):
                setattr(module.get_submodule(parent), leaf, PatchConv2d(layer))
            elif type(layer) is nn.GroupNorm and not (layer._forward_hooks or layer._forward_pre_hooks):
                setattr(module.get_submodule(parent), leaf, PatchGroupNorm(layer))
        return module

    return model.like(replace_layers)
