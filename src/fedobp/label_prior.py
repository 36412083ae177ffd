"""Any method, with the client's label distribution in the bias of its head: one number a class.

Where clients differ in their labels only, p_i(x | y) is the same for all, and the best classifier of client i is the
global one with log p_i(y) - log p(y) added to its logits (Saerens et al., 2002; Menon et al., 2021). `label_prior` is a
method again. Label counts do not leave the client, and the server sends and receives what it always does.

- prior=serve: log p_i is added to the bias of the model that the client uses, before local epochs if the method has any
  then. p_i has a pseudo-count of 1/2 for each class (Jeffreys' prior).
- prior=train: also while the client trains, and taken off again before the upload. The loss is plain cross-entropy, so
  the fast path stays; its gradient is that of the balanced softmax (logit adjustment). The anchor of a proximal term is
  shifted, too.
- calibrate=bias: instead of log p_i, biases b are fitted with a scale a on the logits of the client's training samples
  (`calibration.fit_biases`): one forward pass, and a convex problem. Only b / a is kept: it gives the same labels as
  a z + b, with K numbers. For uninformative inputs b is log p_i.
- calibrate=head: then entries of the head's weight that a score test finds to need a value of their own are fitted, too
  (`calibration.fit_head`), so that a client keeps at most a thousandth of the model. Where clients differ in their
  labels alone, the test finds few.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fedobp.calibration import fit_biases, fit_head, log_prior, offset_of
from fedobp.errors import FedobpError
from fedobp.method import (
    Batch,
    Client,
    InitialState,
    Method,
    Model,
    Program,
    RoundContext,
    Sweep,
    Train,
)
from fedobp.options import Calibrate, Prior
from fedobp.wrapped import Function, Wrapped, compose, first_context, last

_LARGEST_SHARE = 1000  # a client keeps at most one entry in so many


def label_prior(method: Method, prior: Prior, calibrate: Calibrate) -> Method:
    """Return a method that uses the client's label distribution."""
    if calibrate != "off" and prior == "serve":
        raise FedobpError(
            f"--calibrate {calibrate} fits the biases that --prior serve would add: leave out one of them"
        )
    return method if (prior, calibrate) == ("off", "off") else LabelPrior(method, prior, calibrate)


def _fit_biases(model: Model, client: Client, batch: Batch) -> Client:
    offset = offset_of(*fit_biases(model.logits(client.theta, batch.x), batch.y, batch.weight))
    return client.set(offset=offset.to(client.theta.dtype))


def _fit_head(model: Model, client: Client, batch: Batch) -> Client:
    weight, bias = model.head(client.theta)
    most = max(0, len(client.theta) // _LARGEST_SHARE - len(bias))
    fit = fit_head(model.features(client.theta, batch.x), batch.y, batch.weight, weight, bias, most)
    dtype = client.theta.dtype
    return client.set(offset=fit.bias.to(dtype), change=fit.weight.to(dtype), chosen=fit.chosen)


def _no_fit(model: Model, client: Client) -> Client:
    """Start from the model as it is: a client without samples stays there."""
    weight, bias = model.head(client.theta)
    chosen = torch.zeros_like(weight, dtype=torch.bool)
    return client.set(offset=torch.zeros_like(bias), change=torch.zeros_like(weight), chosen=chosen)


FITS = {"bias": _fit_biases, "head": _fit_head}


def _prior_offset(model: Model, client: Client) -> Client:
    return client.set(offset=log_prior(client.data["counts"]).to(client.theta.dtype))


def _shifted(model: Model, theta: Tensor, offset: Tensor) -> Tensor:
    """Return a model with an offset added to the bias of its head."""
    weight, bias = model.head(theta)
    return model.with_head(theta, weight, bias + offset.to(bias.dtype))


def _serve(model: Model, client: Client) -> Client:
    """Use the model with the offset in its bias, and with fitted entries; these entries are the client's own."""
    theta, scratch = client.theta, client.scratch
    weight, bias = model.head(theta)
    chosen = scratch.get("chosen", torch.zeros_like(weight, dtype=torch.bool))
    mine = scratch.get("mine", torch.zeros_like(theta, dtype=torch.bool))
    own = model.with_head(torch.zeros_like(theta, dtype=torch.bool), chosen, torch.ones_like(bias, dtype=torch.bool))
    weight = weight + scratch["change"] if "change" in scratch else weight
    return client.set(theta=model.with_head(theta, weight, bias + scratch["offset"]), mine=mine | own)


def _shift(names: Sequence[str], sign: int) -> Function:
    """Return a function that adds log p_i to the bias of models in `scratch`, or takes it off."""

    def shift(model: Model, client: Client) -> Client:
        offset = sign * log_prior(client.data["counts"])
        return client.set(**{name: _shifted(model, client.scratch[name], offset) for name in names})

    return shift


def _adjusted(program: Program) -> Program:
    """Return a program whose training phases, and those that follow each other, have log p_i in the bias.

    Positions of phases stay, wherever a function stands before and after them: it is joined with that.
    """
    found: list[Any] = []
    for is_training, items in groupby(program, key=lambda item: isinstance(item, Train)):
        some: list[Any] = list(items)
        if not is_training:
            found[-1:] = last(found[-1:], some[0]) if found else some[:1]
            found += some[1:]
            continue
        pulls = [item.pull[0] for item in some if item.pull]
        names = tuple(dict.fromkeys([*(item.learn[0] for item in some), *pulls]))
        found[-1:] = last(found[-1:], _shift(names, 1))
        found += [*some, _shift(names, -1)]
    return found


@dataclass(frozen=True)
class LabelPrior(Wrapped):
    """A method that uses each client's label distribution."""

    prior: Prior
    calibrate: Calibrate

    def __post_init__(self) -> None:
        """With prior=train, the inner method's state holds models without the offset: the last one is kept apart."""
        super().__post_init__()
        object.__setattr__(self, "keeps_last_model", self.inner.keeps_last_model and self.prior != "train")

    def init(self, model: Model, theta: Tensor, seed: int) -> InitialState:
        """Refuse what has no linear head with a bias, or no plain cross-entropy."""
        if not model.has_linear_head:
            raise FedobpError(
                f"--prior and --calibrate need a last layer that is linear and has a bias, and that of '{model.name}' "
                "is not: leave them out, or choose another --model"
            )
        ctx = first_context(model, seed)
        program: list[Any] = [*self.inner.client_update(ctx), *self.inner.personalize(ctx)]
        custom = [item for item in program if isinstance(item, Sweep) or getattr(item, "loss", None) is not None]
        if custom or self.inner.predict is not None:
            raise FedobpError(
                f"--prior and --calibrate go with methods that train and predict by plain cross-entropy, without a fit "
                f"of their own, and {self.inner.name} does not: leave them out, or choose another --method"
            )
        return self.inner.init(model, theta, seed)

    def client_update(self, ctx: RoundContext) -> Program:
        """With prior=train, train with log p_i in the bias; the model that was trained last has it, too."""
        program = self.inner.client_update(ctx)
        return program if self.prior != "train" else last(_adjusted(program), _shift(("theta",), 1))

    def personalize(self, ctx: RoundContext) -> Program:
        """Make the model as the inner method does; then put log p_i, or fitted biases, into its bias."""
        program = list(self.inner.personalize(ctx))
        if self.calibrate != "off":
            return [*last(program, _no_fit), Sweep(FITS[self.calibrate], whole=True), _serve]
        phases = [at for at, item in enumerate(program) if isinstance(item, Train)]
        start = phases[0] if phases else len(program)
        return [*last(program[:start], compose(_prior_offset, _serve)), *program[start:]]
