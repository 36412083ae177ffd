"""Failures of runs as values, and the errors for models that cannot be trained further."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fedobp.errors import FedobpError, Stopped
from fedobp.method import CohortUpdate, Method, Model, RoundContext, Sweep, Train
from fedobp.wrapped import inner_of

T = TypeVar("T")


def caught(function: Callable[[], T]) -> T | BaseException:
    """Return what a function returns, or the exception that it raises; only interrupts are raised."""
    try:
        return function()
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # also SystemExit
        return error


def without_failures(updates: Sequence[CohortUpdate | BaseException]) -> list[CohortUpdate]:
    """Return updates, or raise the first exception among them."""
    for update in updates:
        if isinstance(update, BaseException):
            raise update
    return [update for update in updates if isinstance(update, CohortUpdate)]


def refuse_batch_norm(model: Model, cause: str = "this method") -> None:
    """Refuse a model with BatchNorm where a method, or what is the cause, computes logits itself."""
    if model.layout.learned < model.layout.size:
        raise FedobpError(
            f"{cause} computes logits by itself, which is not made for BatchNorm ('{model.name}'): choose a --model "
            "without BatchNorm (fedobp models lists them)"
        )


def refuse_programs(method: Method, ctx: RoundContext) -> None:
    """Refuse before round 1 what an engine refuses when it gets there: the first evaluation may be many rounds away."""
    if ctx.model.layout.learned == ctx.model.layout.size:
        return
    for one, cause in ((inner_of(method), f"--method {method.name}"), (method, "--calibrate")):
        program = [*one.client_update(ctx), *one.personalize(ctx)]
        if any(isinstance(item, Sweep) or (isinstance(item, Train) and item.loss is not None) for item in program):
            refuse_batch_norm(ctx.model, cause)


def diverged(ctx: RoundContext, finite: Tensor, hparams: Mapping[str, float], method: Method) -> FedobpError:
    """Return the error for clients whose loss or weights are no longer finite; `finite` is False for those.

    A penalty of strength s, such as weight decay, moves a weight by lr s of its distance in a step: with momentum m
    that alone diverges where lr s is above 2 (1 + m). Where no number is that large, the learning rate is named, with
    the momentum and all options above their defaults.
    """
    client = int(ctx.cohort[~finite.cpu()][0])
    lr, momentum = hparams["lr"], hparams["momentum"]
    unbounded: dict[str, Any] = {spec.name: spec.default for spec in method.options() if spec.metadata["high"] is None}
    options = {name: hparams[name] for name in unbounded if name in hparams}
    penalties = {"weight_decay": hparams["weight_decay"], **options}
    causes = {name: value for name, value in penalties.items() if lr <= 1 and lr * value > 2 * (1 + momentum)}
    if not causes:
        raised = {name: value for name, value in options.items() if value > unbounded[name]}
        causes = {"lr": lr, **({"momentum": momentum} if momentum else {}), **raised}
    flags = {"lr": "--lr", "momentum": "--momentum", "weight_decay": "--weight-decay"}
    smaller = " or ".join(f"{flags.get(name, f'--set {name}')} (it is {value:g})" for name, value in causes.items())
    return FedobpError(
        f"round {ctx.round}, client {client}: the loss or the weights are no longer finite; use a smaller {smaller}"
    )
