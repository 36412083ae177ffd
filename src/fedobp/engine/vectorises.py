"""Whether a network can be run for many clients at once."""

import torch

from fedobp.engine.stack import Grouped, stacked
from fedobp.errors import first_line
from fedobp.models import Model


def vectorises(model: Model) -> str | None:
    """Return why a network cannot be vectorised, in a few words, or None if it can."""
    tensors = {
        name: value[None].expand(2, *value.shape).clone().requires_grad_()
        for name, value in model.layout.views(model.initial(0)).items()
    }
    try:
        logits = stacked(model, Grouped)(tensors, model.zeros(2, 2))
        torch.autograd.grad(logits.sum(), list(tensors.values()), materialize_grads=True)
    except RuntimeError as error:
        return first_line(error)
    return None
