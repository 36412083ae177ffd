"""Fits the last layer of a global model to one client: biases, and the few entries whose score says that they need it.

Pure functions on one client's n samples with weights w (0 for padding, else 1). All problems are convex, and need the
features of one forward pass only.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PSEUDO_COUNT = 0.5  # of each class: Jeffreys' prior
_NEWTON_STEPS = 20
_HEAD_STEPS, _CG_STEPS = 8, 12  # for the head: Newton steps, and conjugate gradients in each
_DAMPINGS = (1e-9, 1e-3, 0.1, 10.0, 1e3)  # of a Newton step, of which the best is taken
_LENGTHS = (1.0, 0.5, 0.2, 0.05)  # of a step with many numbers
_SMALLEST_SCALE = 0.1
_HELD = 0.1  # samples, with whose weight an entry of the head is held at the global value

Pair = tuple[Tensor, Tensor]


def log_prior(counts: Tensor) -> Tensor:
    """Return log(K p) of label counts [..., K], with the pseudo-count; it is 0 without samples."""
    filled = counts.double() + PSEUDO_COUNT
    return (filled / filled.mean(dim=-1, keepdim=True)).log()


def fit_biases(logits: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale a and the biases b that fit logits [n, K] best.

        min over a, b of  sum_i CE(a z_i + b, y_i)  -  1/2 sum_c log softmax(b)_c  +  K v / 4 (a - 1)^2

    The second term is half a sample of each class whose input says nothing; the third holds a near 1 with the weight of
    the same K/2 samples, v being the mean variance of a sample's logits. Newton's method in K + 1 numbers, with several
    dampings, of which the best is taken, or no step: the objective never rises.
    """
    z, k = logits.double(), logits.shape[-1]
    z = z - z.mean(dim=-1, keepdim=True)
    w, target = w.double(), functional.one_hot(y, k).to(z.dtype)
    size = ((z.square().mean(dim=-1) * w).sum() / w.sum().clamp(min=1)).sqrt()
    # In units of the logits' own size, so that all numbers are of one order: x is z / size, and here a is a * size.
    one = torch.where(size > 1e-12, size, 1.0)
    x, held = z / one, PSEUDO_COUNT * k

    def objective(points: Tensor) -> Tensor:
        """Of several points [P, K + 1] at once: a step of Newton's method is bound by the number of calls."""
        a, b = points[:, k], points[:, :k]
        fit = _cross_entropy(a[:, None, None] * x + b[:, None], target, w)
        return fit - PSEUDO_COUNT * b.log_softmax(-1).sum(-1) + held / 2 * (a - one).square()

    starts = torch.stack([torch.cat([z.new_zeros(k), a[None]]) for a in (one, one.clamp(max=1))])
    at = starts[_smallest(objective(starts))]
    damping = z.new_tensor(_DAMPINGS)[:, None, None] * torch.eye(k + 1, dtype=z.dtype, device=z.device)
    for _ in range(_NEWTON_STEPS):
        a, b = at[k], at[:k]
        p, q = (a * x + b).softmax(-1) * w[:, None], b.softmax(-1)
        rest, mean = p - target * w[:, None], (p * x).sum(dim=-1, keepdim=True)
        slope = torch.cat([rest.sum(0) + PSEUDO_COUNT * (k * q - 1), ((rest * x).sum() + held * (a - one))[None]])
        # p has the weight in it once, and weights are 0 or 1: products of two are right.
        of_b = torch.diag(p.sum(0) + PSEUDO_COUNT * k * q) - p.T @ p - PSEUDO_COUNT * k * torch.outer(q, q)
        of_both = (p * (x - mean)).sum(0)
        of_a = (p * x * (x - mean)).sum() + held
        # A constant in b changes nothing: 1 / K in all its entries makes the matrix regular, and b sum to 0.
        curvature = torch.cat([
            torch.cat([of_b + 1 / k, of_both[:, None]], dim=1),
            torch.cat([of_both, of_a[None]])[None],
        ])  # fmt: skip
        steps = torch.linalg.solve_ex(curvature + damping, slope.expand(len(_DAMPINGS), -1))[0]
        points = torch.cat([at[None], at - steps])
        at = points[_smallest(objective(points))]
    return at[k] / one, at[:k]


def _cross_entropy(logits: Tensor, target: Tensor, w: Tensor) -> Tensor:
    """Return the sum over samples for each of several points: [P, n, K] to [P]."""
    return -(logits.log_softmax(-1) * target).sum(-1) @ w


def _smallest(objectives: Tensor) -> Tensor:
    """Return the position of the smallest objective; what is not finite is never the smallest."""
    return torch.where(objectives.isfinite(), objectives, torch.inf).argmin()


def offset_of(a: Tensor, b: Tensor) -> Tensor:
    """Return b / a: it gives the labels of a z + b. Where logits rank labels wrongly (a <= 0), b decides alone."""
    return b / a.clamp(min=_SMALLEST_SCALE)


class HeadFit(NamedTuple):
    """What is added to a linear classifier, and which entries of its weight are changed."""

    weight: Tensor  # [K, D], 0 where an entry is not chosen
    bias: Tensor  # [K]
    chosen: Tensor  # bool [K, D]


def fit_head(features: Tensor, y: Tensor, w: Tensor, weight: Tensor, bias: Tensor, most: int) -> HeadFit:
    """Fit biases, choose entries of the weight by their score statistic, and fit these with the biases again.

    With the fitted biases in place, entry (c, j) has the gradient g = sum_i r_ic f_ij of the loss, r = p - y, and the
    statistic g^2 / sum_i (r_ic f_ij)^2, which is chi-squared with one degree of freedom if the entry needs no value of
    its own. Chosen are entries above 2 ln(K D), the largest that K D of them would have by chance, at most `most`. Then

        min over d, e of  sum_i CE(a (z_i + d f_i + o + e), y_i) - 1/2 sum_c log softmax(a (o + e))_c + a^2 s / 2 |d|^2

    with a and o = b / a from the fitted biases, and s the mean square of a feature, times h: each entry is held at the
    global value with the weight of h samples.
    """
    f, w, k = features.double(), w.double(), len(bias)
    z = f @ weight.double().T + bias.double()
    a, b = fit_biases(z, y, w)
    o, a, target = offset_of(a, b), a.clamp(min=_SMALLEST_SCALE), functional.one_hot(y, k).to(f.dtype)
    rest = ((a * (z + o)).softmax(-1) - target) * w[:, None]
    statistic = (rest.T @ f).square() / (rest.square().T @ f.square()).clamp(min=1e-30)
    largest = statistic.flatten().topk(min(most, statistic.numel())).indices
    allowed = torch.zeros_like(statistic, dtype=torch.bool).flatten().scatter(0, largest, True).view_as(statistic)
    chosen = allowed & (statistic > 2 * math.log(statistic.numel()))
    held = _HELD * a.square() * (f.square().mean(dim=-1) * w).sum() / w.sum().clamp(min=1)
    d, e = torch.zeros_like(statistic), torch.zeros_like(o)
    # Of the curvature: p (1 - p) is at most 1/4.
    bounds = (
        (a.square() / 4 * (w @ f.square()) + held).clamp(min=1e-30).expand_as(d),
        (a.square() / 4 * (w.sum() + PSEUDO_COUNT * k)).expand_as(e),
    )
    # Points to try, as multiples of two steps: none, and all lengths of each.
    lengths, none = f.new_tensor(_LENGTHS)[:, None], f.new_zeros(len(_LENGTHS), 1)
    tried = torch.cat([none.new_zeros(1, 2), torch.cat([lengths, none], dim=1), torch.cat([none, lengths], dim=1)])

    for _ in range(_HEAD_STEPS):
        now = z + f @ d.T + o + e
        p, q = (a * now).softmax(-1), (a * (o + e)).softmax(-1)
        rest = (p - target) * w[:, None]
        slope_d = torch.where(chosen, a * rest.T @ f + held * d, 0)
        slope_e = a * (rest.sum(0) + PSEUDO_COUNT * (k * q - 1))

        def curvature(u: Tensor, v: Tensor, p: Tensor = p, q: Tensor = q) -> tuple[Tensor, Tensor]:
            change = a * (f @ u.T + v)
            moved = p * (change - (p * change).sum(dim=-1, keepdim=True)) * w[:, None]
            pseudo = PSEUDO_COUNT * k * a.square() * q * (v - (q * v).sum())
            of_d = torch.where(chosen, a * moved.T @ f + held * u, 0)
            return of_d, a * moved.sum(0) + pseudo + v.mean()  # the mean: a constant in e changes nothing

        spread = p * (1 - p) * w[:, None]
        scales = (
            (a.square() * spread.T @ f.square() + held).clamp(min=1e-30),
            a.square() * (spread.sum(0) + PSEUDO_COUNT * k * q * (1 - q)) + 1 / k,
        )
        newton = _solve(curvature, (slope_d, slope_e), scales)
        # Where the softmax is saturated, Newton's step is too long at any length: there, a step along the gradient.
        steps_d = torch.stack([newton[0], slope_d / bounds[0]]).nan_to_num(0.0, 0.0, 0.0)
        steps_e = torch.stack([newton[1], slope_e / bounds[1]]).nan_to_num(0.0, 0.0, 0.0)
        # The points [P, K, D] and [P, K]; the logits are linear in them.
        ds, es = d - torch.einsum("ps,skd->pkd", tried, steps_d), e - tried @ steps_e
        moves = f @ steps_d.transpose(-1, -2) + steps_e[:, None]
        fit = _cross_entropy(a * (now - torch.einsum("ps,snk->pnk", tried, moves)), target, w)
        pseudo = PSEUDO_COUNT * (a * (o + es)).log_softmax(-1).sum(-1)
        best = _smallest(fit - pseudo + held / 2 * ds.square().sum((-1, -2)))
        d, e = ds[best], es[best]
    return HeadFit(d, o + e, chosen & (d != 0))


def _solve(curvature: Callable[[Tensor, Tensor], Pair], slope: Pair, scales: Pair) -> Pair:
    """Return an approximate solution x of curvature(x) = slope: conjugate gradients, scaled by the diagonal."""

    def dot(one: Pair, other: Pair) -> Tensor:
        return sum(((u * v).sum() for u, v in zip(one, other, strict=True)), slope[1].new_zeros(()))

    def moved(one: Pair, by: Tensor, other: Pair) -> Pair:
        return one[0] + by * other[0], one[1] + by * other[1]

    x: Pair = (torch.zeros_like(slope[0]), torch.zeros_like(slope[1]))
    rest = slope
    scaled: Pair = (rest[0] / scales[0], rest[1] / scales[1])
    direction, size = scaled, dot(rest, scaled)
    for _ in range(_CG_STEPS):
        bent = curvature(*direction)
        length = size / dot(direction, bent).clamp(min=1e-300)
        x, rest = moved(x, length, direction), moved(rest, -length, bent)
        scaled = (rest[0] / scales[0], rest[1] / scales[1])
        before, size = size, dot(rest, scaled)
        direction = moved(scaled, size / before.clamp(min=1e-300), direction)
    return x
