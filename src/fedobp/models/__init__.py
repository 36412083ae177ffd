"""Models: ordinary modules, each seen by the rest of the library as one flat vector with a layout."""

import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedobp.errors import FedobpError, unknown
from fedobp.models.layout import Inside, Layout
from fedobp.models.nets import NETS, register

__all__ = ["NETS", "Inside", "Layout", "Model", "register"]


class Model:
    """A network for inputs of one shape: its layout, its initial vector, and ordinary modules on demand."""

    def __init__(self, name: str, shape: Sequence[int], classes: int) -> None:
        if name not in NETS:
            raise unknown("model", name, NETS)
        self.name, self.shape, self.classes = name, tuple(shape), classes
        module = self._build(seed=0)
        self._check(module)
        self.structure, self._threads = module, threading.local()
        tensors = dict(module.named_parameters())
        self.layout = Layout(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))

    def _build(self, seed: int) -> nn.Module:
        # Default initialisation draws from torch's global generator: borrow it, and put it back as it was.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return NETS[self.name](self.shape, self.classes)

    def _check(self, module: nn.Module) -> None:
        """Refuse what one flat vector with keyed randomness cannot hold."""
        if not any(Layout.in_head(name) for name, _ in module.named_parameters()):
            raise FedobpError(f"model '{self.name}' has no layer called `classifier`: name its last layer so")
        if any(True for _ in module.buffers()):
            raise FedobpError(f"model '{self.name}' has buffers (BatchNorm?), which are not supported: use GroupNorm")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            try:
                module(torch.zeros(2, *self.shape))
            except RuntimeError as error:
                raise FedobpError(f"model '{self.name}' does not take inputs of shape {self.shape}: {error}") from error
            if not torch.equal(before, torch.get_rng_state()):
                raise FedobpError(f"model '{self.name}' draws random numbers (dropout?), which no run could repeat")

    def initial(self, seed: int) -> Tensor:
        """Return theta^0: torch's default initialisation after seeding with `seed`, in float32."""
        return self.layout.flatten(dict(self._build(seed).named_parameters()))

    def module(self, theta: Tensor | None = None) -> nn.Module:
        """Return a fresh, ordinary module; with a vector, its parameters hold a copy of that vector's values."""
        module = self._build(seed=0)
        if theta is not None:
            module.to(device=theta.device, dtype=theta.dtype)
            self.load(module, theta)
        return module

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of the network whose parameters are `theta`: a pure function, for custom losses."""
        return self.apply(self.layout.views(theta), x)

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return what the classifier sees: the outputs of the base."""
        if not hasattr(self._threads, "base"):
            self._threads.base = deepcopy(self.structure)
            self._threads.base.classifier = nn.Identity()
        base = {name: tensor for name, tensor in self.layout.views(theta).items() if not self.layout.in_head(name)}
        return cast(Tensor, functional_call(self._threads.base, base, (x,)))

    def head(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classifier's weight [..., classes, features] and bias [..., classes]."""
        if not isinstance(layer := self.structure.classifier, nn.Linear) or layer.bias is None:
            raise FedobpError(
                f"this method needs a classifier that is one linear layer with a bias, and that of '{self.name}' is not"
            )
        tensors = self.layout.views(theta)
        return tensors["classifier.weight"], tensors["classifier.bias"]

    def with_head(self, theta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return a vector with another classifier."""
        base, _ = self.layout.split(theta)
        return self.layout.join(base, torch.cat([weight.flatten(-2), bias], dim=-1))

    def apply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the outputs of the network with the given parameters, by name."""
        # torch lends the parameters to a module while it runs: each thread needs one of its own.
        if not hasattr(self._threads, "module"):
            self._threads.module = deepcopy(self.structure)
        return cast(Tensor, functional_call(self._threads.module, dict(tensors), (x,)))

    def load(self, module: nn.Module, theta: Tensor) -> None:
        """Copy a vector's values into a module's parameters."""
        with torch.no_grad():
            for parameter, values in zip(module.parameters(), self.layout.views(theta).values(), strict=True):
                parameter.copy_(values)

    def read(self, module: nn.Module) -> Tensor:
        """Return a module's parameters as a vector."""
        return self.layout.flatten(dict(module.named_parameters()))
