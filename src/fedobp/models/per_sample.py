"""Per-sample gradients of linear layers, from their inputs and the gradients of their outputs.

The gradient of a layer's weight for one sample is the outer product of the gradient of its output and its input. So the
sum of squared gradients is a product of squares, and no weight-sized gradient is stored for each sample.
"""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional


class RecordingLinear(nn.Module):
    """A linear layer with the same tensors that records its last inputs.

    `offset` (zero by default) is added to its output: the gradient of the offset is the gradient of the output.
    """

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.inputs = like.weight, like.bias, torch.zeros(0)
        self.offset: Tensor
        self.register_buffer("offset", torch.zeros(like.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        self.inputs = x
        return functional.linear(x, self.weight, self.bias) + self.offset


def with_recording(module: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Replace the named linear layers of a module by `RecordingLinear`, in place, and return the module."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        setattr(module.get_submodule(parent), leaf, RecordingLinear(layer))
    return module


def linear_layers(module: nn.Module, x: Tensor) -> tuple[str, ...]:
    """Return the names of linear layers that are applied once, to one vector per sample, and share no tensor."""
    calls: list[nn.Module] = []
    owners = Counter(id(tensor) for layer in module.modules() for tensor in layer.parameters(recurse=False))

    def count(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls.extend([layer] * (1 if inputs[0].ndim == 2 else 2))

    layers = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear and name}
    hooks = [layer.register_forward_pre_hook(count) for layer in layers.values()]
    with torch.no_grad():
        module(x)
    for hook in hooks:
        hook.remove()
    return tuple(
        name
        for name, layer in layers.items()
        if calls.count(layer) == 1 and all(owners[id(tensor)] == 1 for tensor in layer.parameters())
    )
