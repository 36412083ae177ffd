"""The gradient over all clients' data, which a simulation can compute and a real federation cannot."""

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from fedobp.data import FederatedData
from fedobp.engine.failures import refuse_batch_norm
from fedobp.engine.precision import deterministic
from fedobp.models import Model
from fedobp.options import Precision

_ROWS, _SAMPLES = 10, 256  # at once


def global_gradient(model: Model, data: FederatedData, precision: Precision, theta: Tensor) -> Tensor:
    """Return the gradient of the mean loss over all clients' training samples, at each row of [rows, N]."""
    refuse_batch_norm(model)
    ids = data.pooled_ids("train")

    def total(one: Tensor, x: Tensor, y: Tensor) -> Tensor:
        logits, positions = model.logits(one, x), y[0].numel()
        return functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum") / positions

    slope = vmap(grad(total), in_dims=(0, None, None))
    gradient = torch.zeros_like(theta)
    with deterministic(precision):
        for some in torch.arange(len(theta), device=theta.device).split(_ROWS):
            for part in ids.split(_SAMPLES):
                gradient[some] += slope(theta[some], data.samples(part), data.y[part])
    return gradient / max(1, len(ids))
