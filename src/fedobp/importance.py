"""Which entries of a client's model are personal: scores, normalisation, threshold.

Pure functions on flat vectors. Every vector may have leading axes (`[..., N]`, usually `[clients, N]`); each vector is
processed independently. Equation numbers are the FedOBP paper's.

Degenerate cases are defined: normalising scores that are all equal gives zeros (not 0/0), and entries that tie at the
threshold are shared, so a client whose model equals the global one has no personal entries.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from fedobp.models import Model

Tensors = dict[str, Tensor]


def squared(theta_i: Tensor, theta_g: Tensor) -> Tensor:
    """Eq. 19: (theta_i - theta_g)^2, the first-order Taylor term with theta_i - theta_g for the gradient."""
    return (theta_i - theta_g).square()


def product(theta_i: Tensor, theta_g: Tensor) -> Tensor:
    """|(theta_i - theta_g) * theta_i|, the score in the paper's published code."""
    return ((theta_i - theta_g) * theta_i).abs()


_BLOCK = 512  # entries; on a device, a small top-k is fastest on a few thousand entries

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"squared": squared, "product": product}


class Samples(Protocol):
    """A batch that may contain padding."""

    @property
    def x(self) -> Tensor:
        """Inputs."""

    @property
    def y(self) -> Tensor:
        """Labels."""

    @property
    def weight(self) -> Tensor:
        """1 for a sample, 0 for padding."""


def squared_gradients(model: Model, theta: Tensor, batch: Samples) -> Tensor:
    """Eq. 6 before its mean: the sum over real samples of the squared gradient of log p(y | x), entry by entry.

    Gradients are taken with respect to the tensors: through views of the vector, each would be as long as the vector.
    Linear layers have most entries, and need no weight gradients: their squares are (output gradients)^2 * (inputs)^2.
    """
    tensors = model.layout.views(theta)
    others = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in model.linear}
    offsets = {name: torch.zeros_like(tensors[f"{name}.weight"][:, 0]) for name in model.linear}

    def loss(others: Tensors, offsets: Tensors, x: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
        logits, layer_inputs = model.probed({**tensors, **others}, offsets, x[None])
        mean = functional.cross_entropy(logits.flatten(0, -2), y[None].flatten())  # over positions, if there are any
        return mean, {name: inputs[0] for name, inputs in layer_inputs.items()}

    per_sample = vmap(grad(loss, argnums=(0, 1), has_aux=True), in_dims=(None, None, 0, 0))
    (grads, output_grads), layer_inputs = per_sample(others, offsets, batch.x, batch.y)

    def total(gradients: Tensor) -> Tensor:
        weight = batch.weight.view(-1, *[1] * (gradients.ndim - 1))
        return (gradients.square() * weight).sum(dim=0)

    squares = {name: total(one) for name, one in grads.items()}
    for name in model.linear:
        squares[f"{name}.bias"] = total(output_grads[name])
        # Sample by sample: the rounding of a matrix product would break ties, on which thresholds depend.
        weight = torch.zeros_like(tensors[f"{name}.weight"])
        pairs = output_grads[name].square() * batch.weight[:, None], layer_inputs[name].to(weight.dtype).square()
        for outputs, inputs in zip(*(values.unbind() for values in pairs), strict=True):
            weight = torch.addcmul(weight, outputs[:, None], inputs[None])
        squares[f"{name}.weight"] = weight
    return model.layout.flatten({name: squares[name] for name in model.layout.names})


def smooth(score: Tensor, previous: Tensor, has_previous: Tensor, ema: float) -> Tensor:
    """Average a score over a client's rounds: (1 - ema) * score + ema * previous; the first value is the score itself.

    `has_previous` (bool, without the last axis) marks the clients that have a previous value.
    """
    return torch.where(has_previous[..., None], (1 - ema) * score + ema * previous, score)


def scale_global(score: Tensor) -> Tensor:
    """GlobalNorm: min-max over all entries; equal scores become 0. Monotone, so it changes the mask only by ties."""
    low, high = score.aminmax(dim=-1, keepdim=True)
    spread = high - low
    return torch.where(spread > 0, (score - low) / spread, 0.0)


def scale_layers(score: Tensor, sizes: Sequence[int]) -> Tensor:
    """LayerNorm: min-max within each tensor (weight and bias separately); a constant tensor becomes 0."""
    return torch.cat([scale_global(piece) for piece in score.split(list(sizes), dim=-1)], dim=-1)


def count_above(n: int, q: float) -> int:
    """Return how many of n distinct scores lie strictly above their linearly interpolated q-quantile.

    That is n - 1 - floor(q (n - 1)). The product is taken in exact decimals, so that q = 0.29 of 101 scores means
    position 29 and not 28.999999999999996.
    """
    return n - 1 - math.floor(Fraction(str(q)) * (n - 1))


def candidates(score: Tensor, count: int) -> Tensor:
    """Return a subset of each vector that contains its `count` largest entries: all entries, or far fewer.

    A vector is split into blocks. If an entry's block is not among the `count` blocks with the largest maxima, then
    `count` other blocks have an entry that is at least as large, so dropping it changes no value among the `count`
    largest.
    """
    blocks = score.shape[-1] // _BLOCK
    if 4 * count > blocks:
        return score
    whole = blocks * _BLOCK
    cut = score[..., :whole].unflatten(-1, (blocks, _BLOCK))
    best = cut.amax(dim=-1).topk(count, dim=-1, sorted=False).indices
    chosen = cut.gather(-2, best[..., None].expand(*best.shape, _BLOCK))
    return torch.cat([chosen.flatten(-2), score[..., whole:]], dim=-1)


def quantile_threshold(score: Tensor, q: float) -> Tensor:
    """Return the largest score that is not above the q-quantile of its vector: [..., 1].

    The interpolated quantile lies in [a, b) between two neighbours a <= b in sorted order, and no score lies between
    them: "above the quantile" is "above a", ties included. So only a, the (count + 1)-th largest score, is needed. It
    comes from a top-k from the nearer end, which, unlike `torch.quantile`, has no limit on the length.
    """
    n = score.shape[-1]
    count = count_above(n, q)
    if count + 1 <= n - count:
        few = candidates(score, count + 1)
        return few.topk(count + 1, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    return score.topk(n - count, dim=-1, largest=False, sorted=False).values.amax(dim=-1, keepdim=True)


def above(score: Tensor, q: float) -> Tensor:
    """Eq. 7: the mask of personal entries, those strictly above the q-quantile of their vector (bool, its shape)."""
    return score > quantile_threshold(score, q)


def rms_threshold(score: Tensor, c: float) -> Tensor:
    """Return c^2 mean(score), [..., 1]: for score d^2, "above" is |d| > c rms(d), whatever the scale of d."""
    return c**2 * score.mean(dim=-1, keepdim=True)


def soft_mask(score: Tensor, threshold: Tensor, temperature: float) -> Tensor:
    """Return weights 1 - (threshold / score)^(1 / temperature) above the threshold, and 0 elsewhere.

    They rise from 0 at the threshold towards 1. For temperature -> 0 this is the mask `score > threshold`; for scores
    d^2 it is the non-negative garrote at temperature 1, and at 2 soft thresholding: |d| becomes |d| - sqrt(threshold).
    """
    return torch.where(score > threshold, 1 - (threshold / score) ** (1 / temperature), 0.0)


def curvature(model: Model, theta: Tensor, direction: Tensor, batch: Samples) -> Tensor:
    """Return the sum over real samples of s^T G s for the direction s, with G = J^T (diag(p) - p p^T) J.

    J is the derivative of the logits and p their softmax, so G is the Fisher information of the model (Gauss-Newton).
    That is the variance of J s under p; of a sequence it is the mean over its positions.
    """

    # J^T u is linear in u, and its derivative there is J: in reverse mode twice, as not all that torch computes has a
    # forward mode.
    def along(u: Tensor) -> Tensor:
        transposed: Tensor = grad(lambda at: (model.logits(at, batch.x) * u).sum())(theta)
        return (transposed * direction).sum()

    logits = model.logits(theta, batch.x)
    change: Tensor = grad(along)(torch.zeros_like(logits))
    p = logits.softmax(dim=-1)
    mean = (p * change).sum(dim=-1, keepdim=True)
    each = (p * (change - mean).square()).sum(dim=-1)
    total: Tensor = ((each if each.ndim == 1 else each.mean(dim=-1)) * batch.weight).sum()
    return total
