"""The forward pass of many copies of a network at once: each lane has its own parameters and its own batch.

A network that is a plain sequence of common layers uses a batched form of each layer. Any other module is vectorised
with `torch.func.vmap`, which works for all modules but is fast for few. Inputs are [lanes, samples, ...], parameters
[lanes, ...], outputs [lanes, samples, classes].

Between layers, images are in the memory format of the convolution: on the CPU one grouped convolution in channels-last
format, on CUDA im2col and a batched matrix product (`im2col`), also in a module that is vectorised.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from fedobp.engine.im2col import im2col_conv2d, patched, supports_im2col
from fedobp.engine.precision import autocast
from fedobp.models import Model
from fedobp.options import Precision

Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]

_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d)


def _channels_last(x: Tensor) -> Tensor:
    """Return images in channels-last format, with the strides of that format even where there is one channel."""
    nhwc = x.permute(0, 2, 3, 1)
    return nhwc.flatten().view(nhwc.shape).permute(0, 3, 1, 2)


class Grouped:
    """Images as [samples, lanes * channels, height, width]: one grouped convolution for all lanes."""

    @staticmethod
    def to_images(x: Tensor) -> Tensor:
        """Return images of the network's input [lanes, samples, channels, height, width]."""
        lanes, samples, channels, *sides = x.shape
        return _channels_last(x.transpose(0, 1).reshape(samples, lanes * channels, *sides))

    @staticmethod
    def convolve(layer: nn.Conv2d, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a layer with each lane's weights."""
        lanes = len(weight)
        kernels = _channels_last(weight.flatten(0, 1))
        biases = None if bias is None else bias.flatten()
        assert not isinstance(layer.padding, str)
        return functional.conv2d(image, kernels, biases, layer.stride, layer.padding, layer.dilation, lanes)

    @staticmethod
    def to_vectors(image: Tensor, lanes: int) -> Tensor:
        """Return images as vectors [lanes, samples, entries]."""
        return image.reshape(len(image), lanes, -1).transpose(0, 1)


class Columns:
    """Images as [lanes * samples, channels, height, width], channels last: im2col, then a matrix product per lane."""

    @staticmethod
    def to_images(x: Tensor) -> Tensor:
        """Return images of the network's input [lanes, samples, channels, height, width]."""
        return _channels_last(x.flatten(0, 1))

    @staticmethod
    def convolve(layer: nn.Conv2d, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a layer with each lane's weights."""
        nhwc = image.permute(0, 2, 3, 1).unflatten(0, (len(weight), -1))
        return im2col_conv2d(layer, nhwc, weight, bias).flatten(0, 1).permute(0, 3, 1, 2)

    @staticmethod
    def to_vectors(image: Tensor, lanes: int) -> Tensor:
        """Return images as vectors [lanes, samples, entries]."""
        return image.reshape(lanes, len(image) // lanes, -1)


def stacked(model: Model, form: type[Grouped] | type[Columns], precision: Precision = "fp32") -> Forward:
    """Return the forward pass of many copies of a model.

    In bf16 weights and inputs are float32, and products are computed in bfloat16. A sequence of layers has no norm: all
    of it is in bfloat16. In any other module autocast decides, which keeps norms in float32.
    """
    layers = batched_layers(model, form)
    if layers is None:
        one = patched(model) if form is Columns else model

        def vmapped(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
            with autocast(precision, x):
                if form is Grouped and len(x) == 1:  # a large network on the CPU: the module itself is faster
                    return one.apply({name: tensor[0] for name, tensor in parameters.items()}, x[0])[None]
                return vmap(one.apply)(dict(parameters), x)

        return vmapped

    def forward(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if precision == "bf16":
            x, parameters = x.bfloat16(), {name: tensor.bfloat16() for name, tensor in parameters.items()}
        # Vectors are [lanes, entries, samples]: then the gradient of a layer's weight has the layout of the weight.
        lanes, is_image = len(x), False
        x = x.transpose(1, 2) if x.ndim == 3 else x
        for name, layer in layers:
            if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d) and not is_image:
                x, is_image = form.to_images(x), True
            if isinstance(layer, nn.Conv2d):
                x = form.convolve(layer, x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
            elif isinstance(layer, nn.Flatten):
                if is_image or x.ndim > 3:
                    x, is_image = (form.to_vectors(x, lanes) if is_image else x.flatten(2)).transpose(1, 2), False
            elif isinstance(layer, nn.Linear):
                weight, bias = parameters[f"{name}.weight"], parameters.get(f"{name}.bias")
                x = torch.bmm(weight, x) if bias is None else torch.baddbmm(bias[:, :, None], weight, x)
            else:
                x = layer(x)
        return x.transpose(1, 2)

    return forward


def batched_layers(model: Model, form: type[Grouped] | type[Columns]) -> list[tuple[str, nn.Module]] | None:
    """Return the layers in their order of execution, or None if one of them has no batched form."""
    if type(model.structure) is not nn.Sequential:
        return None
    layers = [one for one in model.structure.named_modules(remove_duplicate=False) if one[0] and "." not in one[0]]
    with_parameters = [layer for _, layer in layers if any(True for _ in layer.parameters())]
    if len(set(with_parameters)) < len(with_parameters):  # shared weights
        return None
    flat = len(model.shape) == 1
    for _, layer in layers:
        # A subclass or a hook may do anything: only the plain layers have a batched form.
        if getattr(layer, "inplace", False) or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            flat = True
        elif type(layer) is nn.Linear:
            if not flat:
                return None
        elif type(layer) is nn.Conv2d:
            simple = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
            if flat or not simple or (form is Columns and not supports_im2col(layer)):
                return None
        elif type(layer) not in (*_ELEMENTWISE, *_POOLS) or (flat and isinstance(layer, _POOLS)):
            return None
    # max(relu(x)) is relu(max(x)), gradients and ties included, and the second has fewer entries to rectify.
    for at in range(len(layers) - 1):
        if isinstance(layers[at][1], nn.ReLU) and isinstance(layers[at + 1][1], nn.MaxPool2d):
            layers[at], layers[at + 1] = layers[at + 1], layers[at]
    return layers
