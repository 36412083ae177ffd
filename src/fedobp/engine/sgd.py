"""Masked SGD on a stack of lanes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedobp.data import FederatedData
from fedobp.engine.stack import Forward
from fedobp.models import Layout, sample_losses


@dataclass(frozen=True)
class Rule:
    """The update rule of a stack's vectors. Terms that a phase does not use are None, and cost nothing.

    v <- momentum v + (gradient + pull (theta - anchor) + drift + decay theta), theta <- theta - lr v where `moving`.
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
        """Return the terms that the rule has."""
        return {name: values for name, values in vars(self).items() if values is not None}

    @property
    def plain(self) -> bool:
        """Whether this is SGD with a learning rate and no other term."""
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


def move(theta: Tensor, gradient: Tensor, rule: Rule, is_active: Tensor) -> None:
    """Take one step in place; lanes that are not active (0 instead of 1) do not change."""
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
    theta.addcmul_(gradient, rule.lr * is_active.view_as(rule.lr), value=-1)


# A stack of lanes in training has constants (`given`) and variables (`moving`), both trees of tensors [lanes, ...], and
# a plan of every step and lane [steps, lanes, ...]: the samples of its batch (`ids`), and how many of these are real
# (`counts`); a lane without samples does not change. `Make` makes the step of the first lanes, which is taken many
# times and changes `moving` in place.
Step = Callable[[dict[str, Tensor]], None]
Make = Callable[[Any, Any, int], Step]


def run_steps(given: Any, moving: Any, plan: Mapping[str, Tensor], steps: Sequence[int], make: Make) -> int:
    """Take all steps of a stack, whose lanes have the given numbers of steps; return the number of batch slots."""
    most = plan["ids"].shape[2]
    counts = None if plan["counts"].is_cuda else plan["counts"].tolist()  # on CUDA, reading them would synchronise
    step, before, slots = None, 0, 0
    for at, lanes in enumerate(active(steps)):
        if step is None or lanes != before:
            step, before = make(given, moving, lanes), lanes
        width = max(counts[at][:lanes]) if counts else most
        current = {name: values[at, :lanes] for name, values in plan.items()}
        step({**current, "ids": current["ids"][:, :width]})
        slots += lanes * width
    return slots


def active(steps: Sequence[int]) -> list[int]:
    """Return for each step how many lanes take it; `steps` decreases from lane to lane."""
    found, lanes = [], len(steps)
    for step in range(steps[0]):
        while steps[lanes - 1] <= step:
            lanes -= 1
        found.append(lanes)
    return found


def training(data: FederatedData, learned: Collection[str], layout: Layout, forward: Forward) -> Make:
    """Return what makes steps of SGD with cross-entropy.

    `given` has `mean`, `std` and a `rule`; `moving` has `tensors`, whose learned ones change, and sums of `loss`.
    """

    def make(given: Any, moving: Any, lanes: int) -> Step:
        # All views are made here, once for all steps.
        tensors = {name: tensor[:lanes].detach() for name, tensor in moving["tensors"].items()}
        weights = [tensor.requires_grad_() for name, tensor in tensors.items() if name in learned]
        rule, total = Rule(**given["rule"]), moving["loss"][:lanes]
        mean, std, lr = given["mean"][:lanes], given["std"][:lanes], rule.lr[:lanes, 0]
        rules = [
            rule.part(lanes, where, shape)
            for (name, where), shape in zip(layout.slices.items(), layout.shapes, strict=True)
            if name in learned and not rule.plain
        ]

        def step(current: Mapping[str, Tensor]) -> None:
            ids, counts = current["ids"], current["counts"]
            logits = forward(tensors, scaled(data, ids, mean, std)).to(total.dtype)
            each = sample_losses(logits, data.y[ids], axes=2)
            real = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
            loss = (each * real).sum(dim=1) / counts.clamp(min=1)
            with torch.no_grad():
                total.add_(loss)
            if not weights:  # the base of a network that is all head
                return
            # The gradient of lr * loss is the step of plain SGD, with one pass less over the weights; it is 0 without
            # samples.
            objective = (loss * lr if rule.plain else loss).sum()
            gradients = torch.autograd.grad(objective, weights, materialize_grads=True)
            with torch.no_grad():
                if rule.plain:
                    torch._foreach_sub_(weights, gradients)
                    return
                is_active = (counts > 0).to(total.dtype)
                for tensor, gradient, each_rule in zip(weights, gradients, rules, strict=True):
                    move(tensor, gradient, each_rule, is_active)

        return step

    return make


def scaled(data: FederatedData, ids: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the inputs of samples [lanes, batch], scaled by each lane's constants; tokens are not scaled."""
    x: Tensor = data.x[ids.flatten()].unflatten(0, ids.shape)
    if data.vocabulary:
        return x.long()
    return ((x.to(mean.dtype) / data.unit) - mean) / std
