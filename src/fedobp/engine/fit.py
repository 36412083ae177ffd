"""Masked SGD on a stack of lanes: the one step that everything fast is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedobp.engine.stack import Forward
from fedobp.models import Layout


@dataclass(frozen=True)
class Rule:
    """How vectors move, lane by lane. What a phase does not use is None, and costs nothing.

    v <- momentum v + (gradient + pull (theta - anchor) + drift + decay theta), theta <- theta - lr v where it may move.
    Numbers are [lanes, 1], vectors [lanes, N].
    """

    lr: Tensor
    momentum: Tensor | None = None
    decay: Tensor | None = None
    pull: Tensor | None = None
    anchor: Tensor | None = None
    drift: Tensor | None = None
    moving: Tensor | None = None
    velocity: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether this is SGD with a learning rate and nothing else."""
        return all(values is None for name, values in vars(self).items() if name != "lr")

    def part(self, lanes: int, where: slice = slice(None), shape: Sequence[int] | None = None) -> "Rule":
        """Return the first lanes' rule for the entries of one tensor, which has that shape."""

        def cut(values: Tensor | None) -> Any:
            if values is None:
                return None
            if values.shape[1] == 1:
                return values[:lanes] if shape is None else values[:lanes].view(lanes, *[1] * len(shape))
            return values[:lanes, where] if shape is None else values[:lanes, where].view(lanes, *shape)

        return Rule(**{name: cut(values) for name, values in vars(self).items()})


def move(theta: Tensor, gradient: Tensor, rule: Rule, awake: Tensor | None = None) -> None:
    """Take one step in place; lanes that are not awake (0 and not 1) stay as they are."""
    if rule.pull is not None and rule.anchor is not None:
        gradient = torch.addcmul(gradient, theta - rule.anchor, rule.pull)
    if rule.drift is not None:
        gradient = gradient + rule.drift
    if rule.decay is not None:
        gradient = torch.addcmul(gradient, theta, rule.decay)
    if rule.momentum is not None and rule.velocity is not None:
        gradient = rule.velocity.mul_(rule.momentum).add_(gradient)
    if rule.moving is not None:
        gradient = gradient.where(rule.moving, 0.0)
    rate = rule.lr if awake is None else rule.lr * awake.view_as(rule.lr)
    theta.addcmul_(gradient, rate, value=-1)


@dataclass
class Stack:
    """Lanes that train together, longest first: models, data order, and how they move."""

    tensors: dict[str, Tensor]  # [lanes, ...]: they change in place
    rule: Rule
    learned: frozenset[str]  # the tensors that move
    ids: Tensor  # [steps, lanes, batch]: samples
    counts: Tensor  # [steps, lanes]: how many of them are real
    x: Tensor  # all samples, as stored
    y: Tensor
    unit: float
    mean: Tensor  # [lanes, 1, ...]
    std: Tensor
    loss: Tensor = field(init=False)  # [lanes]: the sum over a lane's steps

    def __post_init__(self) -> None:
        self.loss = self.mean.new_zeros(len(self.mean))


class Stepper:
    """Steps of one stack's first lanes: holds the views that a step needs, so that a step makes none."""

    def __init__(self, stack: Stack, lanes: int, layout: Layout, forward: Forward, low: bool) -> None:
        self._stack, self._forward, self._low, self.lanes = stack, forward, low, lanes
        self._tensors = {name: tensor[:lanes].detach() for name, tensor in stack.tensors.items()}
        self._learned = [tensor.requires_grad_() for name, tensor in self._tensors.items() if name in stack.learned]
        self._lr = stack.rule.lr[:lanes, 0]
        self._plain = stack.rule.plain
        self._rules = [
            stack.rule.part(lanes, where, shape)
            for (name, where), shape in zip(layout.slices.items(), layout.shapes, strict=True)
            if name in stack.learned and not self._plain
        ]
        self._mean, self._std, self._loss = stack.mean[:lanes], stack.std[:lanes], stack.loss[:lanes]

    def __call__(self, ids: Tensor, counts: Tensor, idle: bool = False) -> None:
        """Take one step with samples [lanes, batch], of which the first `counts` of each lane are real.

        With `idle`, a lane without any is left as it is; without, there are none such.
        """
        x, y = samples(self._stack, ids, self._mean, self._std)
        tensors: Mapping[str, Tensor] = self._tensors
        if self._low:  # float32 weights, arithmetic in bfloat16
            x, tensors = x.bfloat16(), {name: tensor.bfloat16() for name, tensor in tensors.items()}
        logits = self._forward(tensors, x).to(self._loss.dtype)
        each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(ids.shape)
        real = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
        loss = (each * real).sum(dim=1) / counts.clamp(min=1)
        with torch.no_grad():
            self._loss += loss
        if not self._learned:  # the base of a network that is all head
            return
        # The gradient of lr * loss is the step of plain SGD: one pass over the weights less. Without samples it is 0.
        objective = (loss * self._lr if self._plain else loss).sum()
        gradients = torch.autograd.grad(objective, self._learned, materialize_grads=True)
        with torch.no_grad():
            if self._plain:
                torch._foreach_sub_(self._learned, gradients)
                return
            awake = (counts > 0).to(self._loss.dtype) if idle else None
            for tensor, gradient, rule in zip(self._learned, gradients, self._rules, strict=True):
                move(tensor, gradient, rule, awake)


def samples(stack: Stack, ids: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return scaled inputs [lanes, batch, ...] and labels [lanes, batch]."""
    x = stack.x[ids.flatten()].unflatten(0, ids.shape)
    return ((x.to(mean.dtype) / stack.unit) - mean) / std, stack.y[ids]


def descend(stack: Stack, steps: Sequence[int], layout: Layout, forward: Forward, low: bool) -> int:
    """Run all steps of a stack, whose lanes have the given numbers of them; return how many batch slots that took."""
    counts = stack.counts.tolist()
    stepper, slots = None, 0
    for step, lanes in enumerate(active(steps)):
        width = max(counts[step][:lanes])
        if stepper is None or stepper.lanes != lanes:
            stepper = Stepper(stack, lanes, layout, forward, low)
        stepper(stack.ids[step, :lanes, :width], stack.counts[step, :lanes])
        slots += lanes * width
    return slots


def active(steps: Sequence[int]) -> list[int]:
    """Return, step by step, how many lanes still have one; `steps` falls from lane to lane."""
    found, lanes = [], len(steps)
    for step in range(steps[0]):
        while steps[lanes - 1] <= step:
            lanes -= 1
        found.append(lanes)
    return found
