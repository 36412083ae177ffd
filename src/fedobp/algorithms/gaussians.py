"""Class Gaussians with one covariance (pFedFDA): estimates, their linear discriminant, and the search for beta."""

from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-4  # the authors', in all three places
_DAMPING = 1e-3  # the smallest: a slope below the authors' tolerance of 1e-3 changes beta little
_MARGIN = 1e-6


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def estimate(features: Tensor, labels: Tensor, otherwise: Tensor, few: int = 0) -> tuple[Tensor, Tensor]:
    """Estimate class means and the common covariance, to which the authors add I, and EPS in every entry.

    `labels` [..., samples, classes] are one-hot, and 0 for samples that do not count; leading axes hold several
    estimates. A class of at most `few` samples has the mean of `otherwise`.
    """
    counts = labels.sum(dim=-2)
    mean = torch.where(counts[..., None] > few, labels.mT @ features / counts.clamp(min=1)[..., None], otherwise)
    centred = (features - labels @ mean) * labels.sum(dim=-1, keepdim=True)
    covariance = centred.mT @ centred / (counts.sum(dim=-1) - 1).clamp(min=1)[..., None, None]
    return mean, covariance + _eye(covariance) + EPS


def shrunk(covariance: Tensor) -> Tensor:
    """Shrink a covariance towards a multiple of the identity; this is linear, so it can precede an interpolation."""
    level = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    return (1 - EPS) * covariance + EPS * level * _eye(covariance)


def discriminant(mean: Tensor, covariance: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis: W = mu S^-1, b = log pi - mu.W / 2."""
    factor = torch.linalg.cholesky_ex(shrunk(covariance))[0]
    weight = torch.cholesky_solve(mean.mT, factor).mT
    return weight, log_prior - (mean * weight).sum(dim=-1) / 2


class CrossValidation(NamedTuple):
    """The samples that each fold holds out, and the Gaussians at beta 0 with their change up to beta 1."""

    features: Tensor  # [samples, features]
    labels: Tensor  # [folds, samples, classes]: one-hot, 0 where a sample is not held out
    log_prior: Tensor
    mean: Tensor
    covariance: Tensor  # shrunk
    mean_change: Tensor  # [folds, classes, features]
    covariance_change: Tensor  # [folds, features, features]

    def curve(self, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of the folds' mean cross-entropies, its slope in beta, and its Gauss-Newton curvature."""
        mean = self.mean + beta[0] * self.mean_change
        factor = torch.linalg.cholesky_ex(self.covariance + beta[1] * self.covariance_change)[0]
        weight = torch.cholesky_solve(mean.mT, factor).mT
        by_mean = torch.cholesky_solve(self.mean_change.mT, factor).mT
        by_covariance = -torch.cholesky_solve((weight @ self.covariance_change).mT, factor).mT
        logits = self.features @ weight.mT + (self.log_prior - (mean * weight).sum(dim=-1) / 2)[:, None]
        of_mean = self.features @ by_mean.mT - (mean * by_mean).sum(dim=-1)[:, None]
        of_covariance = self.features @ by_covariance.mT - (mean * by_covariance).sum(dim=-1)[:, None] / 2
        change, logs = torch.stack([of_mean, of_covariance]), logits.log_softmax(dim=-1)
        held = self.labels.sum(dim=-1, keepdim=True)
        share = held / held.sum(dim=-2, keepdim=True).clamp(min=1)  # of a fold's mean
        labels, chance = self.labels * share, logs.exp() * share
        slope = (change * (chance - labels)).flatten(1).sum(dim=1)
        deviation = change - (change * logs.exp()).sum(dim=-1, keepdim=True)
        return -(labels * logs).sum(), slope, (deviation * chance).flatten(1) @ deviation.flatten(1).T


def best_beta(validation: CrossValidation, steps: int, tied: bool) -> Tensor:
    """Minimise the held-out cross-entropy over both betas in [0, 1] (`tied`: as one number), from 0.5.

    Gauss-Newton steps with a damping that grows until a step helps, clipped to [0, 1]; a number at a bound whose slope
    points outwards is fixed. Every client takes every step, so that clients can be batched.
    """
    basis = validation.mean.new_ones(2, 1) if tied else _eye(validation.mean.new_zeros(2, 2))
    beta, damping = basis.new_full((basis.shape[1],), 0.5), basis.new_full((), 10 * _DAMPING)
    current = validation.curve(basis @ beta)
    for _ in range(steps):
        slope, curvature = current[1] @ basis, basis.T @ current[2] @ basis
        free = ~(((beta <= 0) & (slope > 0)) | ((beta >= 1) & (slope < 0)))
        damped = torch.where(free[:, None] & free, curvature + damping * _eye(curvature), _eye(curvature))
        step = torch.cholesky_solve((slope * free)[:, None], torch.linalg.cholesky_ex(damped)[0])[:, 0]
        candidate = (beta - step).clamp(0, 1)
        after = validation.curve(basis @ candidate)
        # A quarter of the decrease that the slope predicts (Armijo's rule); the margin is larger than rounding.
        helps = current[0] - after[0] >= slope @ (beta - candidate) / 4 - _MARGIN
        beta = torch.where(helps, candidate, beta)
        loss, slope, curvature = (torch.where(helps, new, old) for new, old in zip(after, current, strict=True))
        current = loss, slope, curvature
        damping = torch.where(helps, (damping / 2).clamp(min=_DAMPING), damping * 8)
    return basis @ beta
