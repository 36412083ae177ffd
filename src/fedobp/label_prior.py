"""Any method, with the client's label distribution in the bias of its head: one number a class.

Where clients differ in their labels only, p_i(x | y) is the same for all, and the best classifier of client i is the
global one with log p_i(y) - log p(y) added to its logits (Saerens et al., 2002; Menon et al., 2021). `label_prior` is a
method again. Label counts do not leave the client, and the server sends and receives what it always does.

- prior=serve: log p_i is added to the bias of the model that the client uses, before local epochs if the method has any
  then. p_i has a pseudo-count of 1/2 for each class (Jeffreys' prior).
- prior=train: also while the client trains, and taken off again before the upload. The loss is plain cross-entropy, so
  the fast path stays; its gradient is that of the balanced softmax (logit adjustment). The anchor of a proximal term is
  shifted, too.
- calibrate: instead of log p_i, biases b are fitted, with a temperature, on the logits z of the client's n training
  samples: one forward pass, and a convex problem in K + 1 numbers,

      min over a, b of  sum_i CE(a z_i + b, y_i)  -  1/2 sum_c log softmax(b)_c  +  K v / 4 (a - 1)^2.

  The second term is the pseudo-count of 1/2 for each class, of samples whose inputs say nothing; the third holds the
  temperature with the same K/2 samples, v being the mean variance of a sample's logits. Only b / a is kept: it gives
  the same labels as a z + b, with K numbers. For uninformative inputs b is log p_i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
from fedobp.models import sample_losses
from fedobp.options import Prior
from fedobp.wrapped import Function, Wrapped, compose, last

_PSEUDO_COUNT = 0.5  # of each class
_SMALLEST_SCALE = 1e-3
_NEWTON_STEPS = 12
_LENGTHS = (1.0, 0.5, 0.2, 0.05, 0.0)  # of a Newton step, of which the best is taken


def label_prior(method: Method, prior: Prior, calibrate: bool) -> Method:
    """Return a method that uses the client's label distribution."""
    if calibrate and prior == "serve":
        raise FedobpError("--calibrate on fits the biases that --prior serve would add: leave out one of them")
    return method if prior == "off" and not calibrate else LabelPrior(method, prior, calibrate)


def log_prior(counts: Tensor) -> Tensor:
    """Return log(K p_i) of label counts [..., K]; it is 0 for a client without samples."""
    filled = counts.double() + _PSEUDO_COUNT
    return (filled / filled.mean(dim=-1, keepdim=True)).log()


def calibration(logits: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and b of the convex problem above, for logits [n, K]; samples of weight 0 do not count.

    Newton's method: the problem has K + 1 numbers. The best of a few step lengths is taken, so the objective never
    rises.
    """
    z, k = logits.double(), logits.shape[-1]
    z = z - z.mean(dim=-1, keepdim=True)
    w, target = weight.double(), functional.one_hot(y, k).to(z.dtype)
    v = (z.square().mean(dim=-1) * w).sum() / w.sum().clamp(min=1)
    held = _PSEUDO_COUNT * k * v
    # From a scale at which no softmax is saturated, where Newton's steps would be too long.
    a, b = 1 / v.sqrt().clamp(min=1), z.new_zeros(k)

    def objective(a: Tensor, b: Tensor) -> Tensor:
        fit = (sample_losses(a * z + b, y) * w).sum()
        return fit - _PSEUDO_COUNT * b.log_softmax(-1).sum() + held / 2 * (a - 1).square()

    for _ in range(_NEWTON_STEPS):
        p, q = (a * z + b).softmax(-1) * w[:, None], b.softmax(-1)
        rest, mean = p - target * w[:, None], (p * z).sum(dim=-1, keepdim=True)
        slope = torch.cat([rest.sum(0) + _PSEUDO_COUNT * (k * q - 1), ((rest * z).sum() + held * (a - 1))[None]])
        # p has the weight in it once, and weights are 0 or 1: products of two are right.
        of_b = torch.diag(p.sum(0) + _PSEUDO_COUNT * k * q) - p.T @ p - _PSEUDO_COUNT * k * torch.outer(q, q)
        of_both = (p * (z - mean)).sum(0)
        of_a = (p * z * (z - mean)).sum() + held
        # A constant in b changes nothing: 1 / K in all its entries makes the matrix regular, and b sum to 0.
        curvature = torch.cat([
            torch.cat([of_b + 1 / k, of_both[:, None]], dim=1),
            torch.cat([of_both, of_a[None] + 1e-9])[None],
        ])  # fmt: skip
        step = torch.linalg.solve(curvature, slope)
        tried = torch.stack([objective(a - t * step[k], b - t * step[:k]) for t in _LENGTHS])
        length = z.new_tensor(_LENGTHS)[tried.argmin()]
        a, b = a - length * step[k], b - length * step[:k]
    return a, b


def _fit(model: Model, client: Client, batch: Batch) -> Client:
    a, b = calibration(model.logits(client.theta, batch.x), batch.y, batch.weight)
    # Where logits rank labels wrongly, a is not positive, and labels follow b alone.
    return client.set(offset=b / a.clamp(min=_SMALLEST_SCALE))


def _prior_offset(model: Model, client: Client) -> Client:
    return client.set(offset=log_prior(client.data["counts"]))


def _no_offset(model: Model, client: Client) -> Client:
    return client.set(offset=client.theta.new_zeros(model.classes))


def _shifted(model: Model, theta: Tensor, offset: Tensor) -> Tensor:
    """Return a model with an offset added to the bias of its head."""
    weight, bias = model.head(theta)
    return model.with_head(theta, weight, bias + offset.to(bias.dtype))


def _serve(model: Model, client: Client) -> Client:
    """Use the model with the offset in its bias; these entries are the client's own."""
    theta = client.theta
    mine = client.scratch.get("mine", torch.zeros_like(theta, dtype=torch.bool))
    own = model.layout.mask(lambda name: name == "classifier.bias", theta.device)
    return client.set(theta=_shifted(model, theta, client.scratch["offset"]), mine=mine | own)


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
    calibrate: bool

    def __post_init__(self) -> None:
        """With prior=train, the inner method's state holds models without the offset: the last one is kept apart."""
        super().__post_init__()
        object.__setattr__(self, "keeps_last_model", self.inner.keeps_last_model and self.prior != "train")

    def init(self, model: Model, theta: Tensor, seed: int) -> InitialState:
        """Refuse what has no linear head with a bias, or no plain cross-entropy."""
        model.head(theta)
        ctx = RoundContext(model, 1, 2, 1, 1, torch.tensor([0]), seed, torch.zeros_like)
        program: list[Any] = [*self.inner.client_update(ctx), *self.inner.personalize(ctx)]
        custom = [item for item in program if isinstance(item, Sweep) or getattr(item, "loss", None) is not None]
        if custom or self.inner.predict is not None:
            raise FedobpError(
                f"--prior and --calibrate go with methods that train and predict by plain cross-entropy, and "
                f"{self.inner.name} does not: leave them out, or choose another --method"
            )
        return self.inner.init(model, theta, seed)

    def client_update(self, ctx: RoundContext) -> Program:
        """With prior=train, train with log p_i in the bias; the model that was trained last has it, too."""
        program = self.inner.client_update(ctx)
        return program if self.prior != "train" else last(_adjusted(program), _shift(("theta",), 1))

    def personalize(self, ctx: RoundContext) -> Program:
        """Make the model as the inner method does; then put log p_i, or fitted biases, into its bias."""
        program = list(self.inner.personalize(ctx))
        if self.calibrate:
            return [*last(program, _no_offset), Sweep(_fit, whole=True), _serve]
        phases = [at for at, item in enumerate(program) if isinstance(item, Train)]
        start = phases[0] if phases else len(program)
        return [*last(program[:start], compose(_prior_offset, _serve)), *program[start:]]
