"""Masked SGD on a stack of lanes: the one step that everything fast is made of."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedobp.data import FederatedData
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

    def used(self) -> dict[str, Tensor]:
        """Return what the rule has."""
        return {name: values for name, values in vars(self).items() if values is not None}

    @property
    def plain(self) -> bool:
        """Whether this is SGD with a learning rate and nothing else."""
        return list(self.used()) == ["lr"]

    def part(self, lanes: int, where: slice = slice(None), shape: Sequence[int] | None = None) -> "Rule":
        """Return the first lanes' rule for the entries of one tensor, which has that shape."""

        def cut(values: Tensor | None) -> Any:
            if values is None:
                return None
            if values.shape[1] == 1:
                return values[:lanes] if shape is None else values[:lanes].view(lanes, *[1] * len(shape))
            return values[:lanes, where] if shape is None else values[:lanes, where].view(lanes, *shape)

        return Rule(**{name: cut(values) for name, values in vars(self).items()})


def move(theta: Tensor, gradient: Tensor, rule: Rule, awake: Tensor) -> None:
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
    theta.addcmul_(gradient, rule.lr * awake.view_as(rule.lr), value=-1)


# A stack of lanes in training: what they are given, what moves (both trees of tensors [lanes, ...]), and a plan that
# says for every step and lane [steps, lanes, ...] which samples it takes (`ids`), and how many of these are real
# (`counts`): a lane without any stays as it is. A step of the first lanes is made once, taken many times, and changes
# `moving` in place.
Step = Callable[[dict[str, Tensor]], None]
Make = Callable[[Any, Any, int], Step]


def run_steps(given: Any, moving: Any, plan: Mapping[str, Tensor], steps: Sequence[int], make: Make) -> int:
    """Take all steps of a stack, whose lanes have the given numbers of them; return how many batch slots that took."""
    most = plan["ids"].shape[2]
    counts = None if plan["counts"].is_cuda else plan["counts"].tolist()  # there one would wait for it
    step, before, slots = None, 0, 0
    for at, lanes in enumerate(active(steps)):
        if step is None or lanes != before:
            step, before = make(given, moving, lanes), lanes
        width = max(counts[at][:lanes]) if counts else most
        now = {name: values[at, :lanes] for name, values in plan.items()}
        step({**now, "ids": now["ids"][:, :width]})
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


def training(data: FederatedData, learned: Collection[str], layout: Layout, forward: Forward, low: bool) -> Make:
    """Return how steps of SGD with cross-entropy are made.

    Lanes are given `mean`, `std` and a `rule`; `tensors` move, those of them that are learned, and `loss` adds up.
    """

    def make(given: Any, moving: Any, lanes: int) -> Step:
        # All views that a step needs, so that a step makes none.
        tensors = {name: tensor[:lanes].detach() for name, tensor in moving["tensors"].items()}
        weights = [tensor.requires_grad_() for name, tensor in tensors.items() if name in learned]
        rule, total = Rule(**given["rule"]), moving["loss"][:lanes]
        mean, std, lr = given["mean"][:lanes], given["std"][:lanes], rule.lr[:lanes, 0]
        rules = [
            rule.part(lanes, where, shape)
            for (name, where), shape in zip(layout.slices.items(), layout.shapes, strict=True)
            if name in learned and not rule.plain
        ]

        def step(now: Mapping[str, Tensor]) -> None:
            ids, counts = now["ids"], now["counts"]
            x, now_tensors = scaled(data, ids, mean, std), tensors
            if low:  # float32 weights, arithmetic in bfloat16
                x, now_tensors = x.bfloat16(), {name: tensor.bfloat16() for name, tensor in tensors.items()}
            logits = forward(now_tensors, x).to(total.dtype).flatten(0, 1)
            each = functional.cross_entropy(logits, data.y[ids].flatten(), reduction="none").view(ids.shape)
            real = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
            loss = (each * real).sum(dim=1) / counts.clamp(min=1)
            with torch.no_grad():
                total.add_(loss)
            if not weights:  # the base of a network that is all head
                return
            # The gradient of lr * loss is plain SGD's step: one pass over the weights less. Without samples it is 0.
            objective = (loss * lr if rule.plain else loss).sum()
            gradients = torch.autograd.grad(objective, weights, materialize_grads=True)
            with torch.no_grad():
                if rule.plain:
                    torch._foreach_sub_(weights, gradients)
                    return
                awake = (counts > 0).to(total.dtype)
                for tensor, gradient, each_rule in zip(weights, gradients, rules, strict=True):
                    move(tensor, gradient, each_rule, awake)

        return step

    return make


def scaled(data: FederatedData, ids: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the inputs of samples [lanes, batch], each lane's scaled in its own way."""
    x: Tensor = data.x[ids.flatten()].unflatten(0, ids.shape)
    return ((x.to(mean.dtype) / data.unit) - mean) / std
