"""Linear layers that show what the gradients of single samples are made of.

A sample's gradient of a layer's weight is the outer product of what its output is pushed by and what it is fed. So the
sum of squared gradients is a product of squares, and no gradient as large as the layer is made for each sample.
"""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional


class Probe(nn.Module):
    """A linear layer with the same tensors, `push` added to its output, and what it was last fed."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.fed = like.weight, like.bias, torch.zeros(0)
        self.push: Tensor
        self.register_buffer("push", torch.zeros(like.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        self.fed = x
        return functional.linear(x, self.weight, self.bias) + self.push


def probed(module: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Return a module, in place, with `Probe` for the linear layers of these names."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        setattr(module.get_submodule(parent), leaf, Probe(layer))
    return module


def linear_layers(module: nn.Module, x: Tensor) -> tuple[str, ...]:
    """Return the names of linear layers that see one vector a sample, once, and whose tensors are theirs alone."""
    fed: list[nn.Module] = []
    holders = Counter(id(tensor) for layer in module.modules() for tensor in layer.parameters(recurse=False))

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        fed.extend([layer] * (1 if inputs[0].ndim == 2 else 2))

    layers = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear and name}
    hooks = [layer.register_forward_pre_hook(look) for layer in layers.values()]
    with torch.no_grad():
        module(x)
    for hook in hooks:
        hook.remove()
    return tuple(
        name
        for name, layer in layers.items()
        if fed.count(layer) == 1 and all(holders[id(tensor)] == 1 for tensor in layer.parameters())
    )
