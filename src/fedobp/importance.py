"""Which entries of a client's model are its own: scores, normalisation, threshold.

Pure functions on flat vectors. Every vector may carry leading axes (`[..., N]`, usually `[clients, N]`); each row is
treated by itself. Equation numbers are the FedOBP paper's.

Degenerate cases are defined, not left to 0/0: normalising scores that are all equal gives zeros, and entries that tie
at the threshold are shared, so a client whose model equals the global one keeps nothing to itself.
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
    """Eq. 19: (theta_i - theta_g)^2, the first-order Taylor term with the gradient read off the aggregation."""
    return (theta_i - theta_g).square()


def product(theta_i: Tensor, theta_g: Tensor) -> Tensor:
    """|(theta_i - theta_g) * theta_i|, the score in the code that the paper links to."""
    return ((theta_i - theta_g) * theta_i).abs()


_BLOCK = 512  # entries; a device's small top-k is fastest on some thousands

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"squared": squared, "product": product}


class Samples(Protocol):
    """A batch, of which some may be padding."""

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

    Gradients are those of the tensors: through views of one vector, each of them would be as long as the vector. Linear
    layers have most entries, and need none: their squares are (outputs' gradients)^2 times (inputs)^2.
    """
    tensors = model.layout.views(theta)
    others = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in model.linear}
    offsets = {name: torch.zeros_like(tensors[f"{name}.weight"][:, 0]) for name in model.linear}

    def loss(others: Tensors, offsets: Tensors, x: Tensor, y: Tensor) -> tuple[Tensor, Tensors]:
        logits, layer_inputs = model.probed({**tensors, **others}, offsets, x[None])
        return functional.cross_entropy(logits, y[None]), {name: inputs[0] for name, inputs in layer_inputs.items()}

    per_sample = vmap(grad(loss, argnums=(0, 1), has_aux=True), in_dims=(None, None, 0, 0))
    (grads, output_grads), layer_inputs = per_sample(others, offsets, batch.x, batch.y)

    def total(gradients: Tensor) -> Tensor:
        weight = batch.weight.view(-1, *[1] * (gradients.ndim - 1))
        return (gradients.square() * weight).sum(dim=0)

    squares = {name: total(one) for name, one in grads.items()}
    for name in model.linear:
        squares[f"{name}.bias"] = total(output_grads[name])
        # Sample by sample, and no matrix product: that one breaks ties, on which thresholds depend.
        weight = torch.zeros_like(tensors[f"{name}.weight"])
        pairs = output_grads[name].square() * batch.weight[:, None], layer_inputs[name].to(weight.dtype).square()
        for outputs, inputs in zip(*(values.unbind() for values in pairs), strict=True):
            weight = torch.addcmul(weight, outputs[:, None], inputs[None])
        squares[f"{name}.weight"] = weight
    return model.layout.flatten({name: squares[name] for name in model.layout.names})


def smooth(score: Tensor, previous: Tensor, has_previous: Tensor, ema: float) -> Tensor:
    """Average a score over a client's visits: (1 - ema) * score + ema * before; its first value is the score itself.

    `known` (bool, without the last axis) says which clients have a value from before.
    """
    return torch.where(has_previous[..., None], (1 - ema) * score + ema * previous, score)


def scale_global(score: Tensor) -> Tensor:
    """GlobalNorm: min-max over all entries; equal scores become 0. Monotone, so only ties can change the mask."""
    low, high = score.aminmax(dim=-1, keepdim=True)
    spread = high - low
    return torch.where(spread > 0, (score - low) / spread, 0.0)


def scale_layers(score: Tensor, sizes: Sequence[int]) -> Tensor:
    """LayerNorm: min-max within each tensor (weight and bias apart); a constant tensor becomes 0."""
    return torch.cat([scale_global(piece) for piece in score.split(list(sizes), dim=-1)], dim=-1)


def count_above(n: int, q: float) -> int:
    """Return how many of n distinct scores lie strictly above their linearly interpolated q-quantile.

    That is n - 1 - floor(q (n - 1)). The product is taken in exact decimals, so that q = 0.29 of 101 scores means
    position 29 and not 28.999999999999996.
    """
    return n - 1 - math.floor(Fraction(str(q)) * (n - 1))


def candidates(score: Tensor, count: int) -> Tensor:
    """Return entries of each row among which are its `count` largest: all of them, or far fewer where that is easy.

    A row is cut into blocks. If an entry's block is not among the `count` with the largest maxima, then as many blocks
    have one that is at least as large as that entry, so leaving it out changes no value among the `count` largest.
    """
    blocks = score.shape[-1] // _BLOCK
    if 4 * count > blocks:
        return score
    whole = blocks * _BLOCK
    cut = score[..., :whole].unflatten(-1, (blocks, _BLOCK))
    best = cut.amax(dim=-1).topk(count, dim=-1, sorted=False).indices
    chosen = cut.gather(-2, best[..., None].expand(*best.shape, _BLOCK))
    return torch.cat([chosen.flatten(-2), score[..., whole:]], dim=-1)


def above(score: Tensor, q: float) -> Tensor:
    """Eq. 7: the personal set, entries strictly above the q-quantile of their row (bool, of score's shape).

    The interpolated quantile lies in [a, b) between two neighbours a <= b in the sorted row, and no score lies between
    them: "above the quantile" is "above a", ties included. So a, the (count + 1)-th largest, is all that is needed;
    it comes from a top-k over the shorter side of the row, which has no limit on the row's length.
    """
    n = score.shape[-1]
    count = count_above(n, q)
    if count + 1 <= n - count:
        few = candidates(score, count + 1)
        lower = few.topk(count + 1, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    else:
        lower = score.topk(n - count, dim=-1, largest=False, sorted=False).values.amax(dim=-1, keepdim=True)
    return score > lower
