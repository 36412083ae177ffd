"""What no federation can know, and a simulation can: the gradient over everybody's data."""

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from fedobp.data import FederatedData
from fedobp.engine.arithmetic import Precision, steady
from fedobp.engine.serial import without_norms
from fedobp.models import Model

_ROWS, _SAMPLES = 10, 256  # at once


def pooled_gradient(model: Model, data: FederatedData, precision: Precision, theta: Tensor) -> Tensor:
    """Return the gradient of the mean loss over all clients' training samples, at each of [rows, N]."""
    without_norms(model)
    ids = data.pooled_ids("train")

    def total(one: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model.logits(one, x), y, reduction="sum")

    slope = vmap(grad(total), in_dims=(0, None, None))
    gradient = torch.zeros_like(theta)
    with steady(precision):
        for some in torch.arange(len(theta), device=theta.device).split(_ROWS):
            for part in ids.split(_SAMPLES):
                gradient[some] += slope(theta[some], data.samples(part), data.y[part])
    return gradient / max(1, len(ids))
