"""A model: an ordinary module, seen by the rest of the library as one flat vector with a layout."""

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedobp.errors import FedobpError, first_line
from fedobp.models.batch_norm import (
    PureBatchNorm,
    batch_norm_layers,
    is_statistic,
    updated_statistics,
    with_pure_batch_norm,
)
from fedobp.models.layout import Layout
from fedobp.models.per_sample import RecordingLinear, linear_layers, with_recording
from fedobp.models.registry import Network, network, network_options, token_arguments
from fedobp.options import Option
from fedobp.plugins import attributing_errors, is_ours, label

_ROUNDING = 1e-4  # relative to the largest number, in float32


class Model:
    """A network for inputs of one shape: its layout, its initial vector, and ordinary modules on demand.

    `given` is the name of a network, a reference to a function, or that function. Inputs with a `vocabulary` are tokens
    below it; with `every_position`, the network predicts a label for each of them.
    """

    def __init__(
        self,
        given: str | Network,
        shape: Sequence[int],
        classes: int,
        options: Mapping[str, Option] | None = None,
        *,
        vocabulary: int = 0,
        every_position: bool = False,
    ) -> None:
        self.name, self.build, self.shape, self.classes = label(given), network(given), tuple(shape), classes
        self.vocabulary, self.every_position = vocabulary, every_position
        self._arguments = network_options(given).check_options(options or {})
        self._arguments |= token_arguments(given, vocabulary, every_position)
        try:
            module = self._build(seed=0)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            size = "x".join(map(str, self.shape))
            raise FedobpError(
                f"model '{self.name}' for inputs of shape {size} needs more memory than there is: choose another "
                "--model, or import smaller inputs"
            ) from error
        self._check(module)
        if not is_ours(self.build):
            self._check_pure(module)
        self.linear = linear_layers(module, self.zeros(2))
        self.structure, self._threads = with_pure_batch_norm(module), threading.local()
        tensors = _tensors(module)
        self.layout = Layout(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))
        # Whether the classifier is one linear layer with a bias, and its outputs are the logits.
        self.has_linear_head = isinstance(layer := module.classifier, nn.Linear) and layer.bias is not None
        if self.has_linear_head and not is_ours(self.build):
            self.has_linear_head = self._head_gives_logits(self.read(module))

    def _build(self, seed: int) -> nn.Module:
        # Default initialisation draws from torch's global generator: seed it, and restore its state afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            with attributing_errors("model", self.name, self.build):
                return self.build(self.shape, self.classes, **self._arguments)

    def zeros(self, *leading: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return inputs of the network that are zero; tokens are whole numbers, whatever the type."""
        return torch.zeros(*leading, *self.shape, dtype=torch.int64 if self.vocabulary else dtype)

    def _check(self, module: nn.Module) -> None:
        """Raise an error for modules that a flat vector with keyed randomness cannot represent."""
        if not isinstance(module, nn.Module):
            raise FedobpError(f"model '{self.name}' returns no torch module, but a {type(module).__name__}")
        if not any(Layout.in_head(name) for name, _ in module.named_parameters()):
            raise FedobpError(f"model '{self.name}' has no layer called `classifier`: name its last layer so")
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                raise FedobpError(
                    f"model '{self.name}' has a parameter '{name}' that does not learn (requires_grad=False), which is "
                    "not supported: make it learn, or leave it out"
                )
        norms = dict(batch_norm_layers(module))
        if any(name.rpartition(".")[0] not in norms for name, _ in module.named_buffers()):
            raise FedobpError(f"model '{self.name}' has buffers other than BatchNorm's, which are not supported")
        if any(layer.momentum is None or not layer.track_running_stats for layer in norms.values()):
            raise FedobpError(
                f"model '{self.name}' has a BatchNorm without running statistics or without a fixed momentum"
            )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            self._check_shape(module.train(), 2, "two inputs")
            self._check_shape(module.eval(), 1, "one input")  # BatchNorm learns from no batch of one
            module.train()
            if not torch.equal(before, torch.get_rng_state()):
                raise FedobpError(f"model '{self.name}' draws random numbers (dropout?), which no run could repeat")

    def _check_shape(self, module: nn.Module, count: int, given: str) -> None:
        """Raise an error where some inputs are not taken, or their logits have another shape."""
        with attributing_errors("model", self.name, self.build):
            try:
                logits = module(self.zeros(count))
            except RuntimeError as error:
                raise FedobpError(
                    f"model '{self.name}' does not take {given} of shape {self.shape}: {first_line(error)}"
                ) from error
        wanted = (count, *(self.shape if self.every_position else ()), self.classes)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != wanted:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise FedobpError(f"model '{self.name}' returns {got} for {given}, and not logits of shape {wanted}")

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"Model({self.name} for inputs of {size}, {self.classes} classes, {self.layout.size:,} parameters)"

    def _check_pure(self, module: nn.Module) -> None:
        """Refuse a function that returns one module twice, other weights for one seed, or modules with two modes."""
        again = self._build(seed=0)
        if again is module:
            raise FedobpError(f"model '{self.name}' returns the same module twice: return a new one in every call")
        if not all(map(torch.equal, module.parameters(), again.parameters())):
            raise FedobpError(
                f"model '{self.name}' has other weights in every call: draw them with torch, whose generator is seeded"
            )
        again = with_pure_batch_norm(again)  # which does the same in both modes
        x = self.zeros(2)
        x = x if self.vocabulary else torch.linspace(-1, 1, x.numel()).view_as(x)
        with torch.no_grad(), attributing_errors("model", self.name, self.build):
            trained, used = again.train()(x.clone()), again.eval()(x.clone())  # a module may change its inputs
        if not torch.equal(trained, used):
            raise FedobpError(
                f"model '{self.name}' computes something else in evaluation than in training (`self.training`), "
                "which is not supported"
            )

    def initial(self, seed: int) -> Tensor:
        """Return theta^0: torch's default initialisation after seeding with `seed`, in float32."""
        return self.layout.flatten(_tensors(self._build(seed)))

    def module(self, theta: Tensor | None = None) -> nn.Module:
        """Return a fresh, ordinary module; with a vector, its parameters hold a copy of that vector's values."""
        module = self._build(seed=0)
        if theta is not None:
            module.to(device=theta.device, dtype=theta.dtype)
            self.load(module, theta)
        return module

    def like(self, change: Callable[[nn.Module], nn.Module]) -> "Model":
        """Return a model with the same layout, whose module is `change` of a copy of this one's."""
        other = copy(self)
        other.structure, other._threads = change(deepcopy(self.structure)), threading.local()
        return other

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the logits of the network with parameters `theta`: a pure function, for custom losses."""
        return self.apply(self.layout.views(theta), x)

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the inputs of the classifier: the outputs of the base."""
        if not hasattr(self._threads, "base"):
            self._threads.base = deepcopy(self.structure)
            self._threads.base.classifier = nn.Identity()
        base = {name: tensor for name, tensor in self.layout.views(theta).items() if not self.layout.in_head(name)}
        return cast(Tensor, functional_call(self._threads.base, base, (x,)))

    def probed(
        self, tensors: Mapping[str, Tensor], offsets: Mapping[str, Tensor], x: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits with offsets added to the outputs of the layers in `linear`, and these layers' inputs."""
        if not hasattr(self._threads, "probed"):
            self._threads.probed = with_recording(deepcopy(self.structure), self.linear)
        module = self._threads.probed
        given = {**tensors, **{f"{name}.offset": offset for name, offset in offsets.items()}}
        layers = {name: cast(RecordingLinear, module.get_submodule(name)) for name in self.linear}
        try:
            logits = cast(Tensor, functional_call(module, given, (x,)))
            return logits, {name: layer.inputs for name, layer in layers.items()}
        finally:
            for layer in layers.values():
                layer.inputs = torch.zeros(0)

    def _head_gives_logits(self, theta: Tensor) -> bool:
        """Return whether the features, the classifier's weight and its bias give the logits.

        They do not if the weight is that of another layer, or if the network changes the classifier's outputs. A
        learned scale starts at 1, so parameters are moved away from where they start; a network that limits its logits
        shows it with large weights.
        """
        if not {"classifier.weight", "classifier.bias"} <= set(self.layout.names):
            return False
        generator, shape = torch.Generator().manual_seed(0), (4, *self.shape)
        learned = theta[: self.layout.learned]
        learned += (0.1 * learned.abs() + 0.01) * torch.randn(learned.shape, generator=generator)
        if self.vocabulary:
            x = torch.randint(self.vocabulary, shape, generator=generator)
        else:
            x = torch.randn(shape, generator=generator)
        weight, bias = self.head(theta)
        bias = torch.randn(bias.shape, generator=generator)
        try:
            for size in (1, 100):
                theta = self.with_head(theta, size * weight, size * bias)
                with torch.no_grad():
                    logits = self.logits(theta, x.clone())  # a network may change its inputs
                    given = self.features(theta, x.clone()) @ (size * weight).T + size * bias
                if logits.shape != given.shape or not (logits - given).abs().max() <= _ROUNDING * logits.abs().max():
                    return False
        except Exception:  # from code of the user, which need not work without its classifier
            return False
        return True

    def head(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classifier's weight [..., classes, features] and bias [..., classes]."""
        if not self.has_linear_head:
            raise FedobpError(
                f"this method needs a classifier that is one linear layer with a bias, and that of '{self.name}' is not"
            )
        tensors = self.layout.views(theta)
        return tensors["classifier.weight"], tensors["classifier.bias"]

    def with_head(self, theta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return a vector with the classifier replaced."""
        base, _ = self.layout.split(theta)
        return self.layout.join(base, torch.cat([weight.flatten(-2), bias], dim=-1))

    def trained(self, theta: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits in training mode, with BatchNorm over the batch, and the new running statistics.

        `weight` is 1 for a sample and 0 for padding.
        """
        module = self._thread_module()
        norms = [layer for layer in module.modules() if isinstance(layer, PureBatchNorm)]
        try:
            for layer in norms:
                layer.sample_weight = weight
            logits = functional_call(module, self.layout.views(theta), (x,))
            return cast(Tensor, logits), updated_statistics(module)
        finally:
            for layer in norms:
                layer.sample_weight, layer.updated = None, ()

    def _thread_module(self) -> nn.Module:
        # `functional_call` swaps a module's parameters while it runs: each thread needs its own copy.
        if not hasattr(self._threads, "module"):
            self._threads.module = deepcopy(self.structure)
        return cast(nn.Module, self._threads.module)

    def apply(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits of the network with the given parameters, by name."""
        return cast(Tensor, functional_call(self._thread_module(), dict(tensors), (x,)))

    def load(self, module: nn.Module, theta: Tensor) -> None:
        """Copy a vector's values into a module's parameters and statistics."""
        with torch.no_grad():
            for tensor, values in zip(_tensors(module).values(), self.layout.views(theta).values(), strict=True):
                tensor.copy_(values)

    def read(self, module: nn.Module) -> Tensor:
        """Return a module's parameters and statistics as a vector."""
        return self.layout.flatten(_tensors(module))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's vector: all parameters, and after them BatchNorm's running statistics."""
    statistics = {name: buffer for name, buffer in module.named_buffers() if is_statistic(name)}
    return {**dict(module.named_parameters()), **statistics}
