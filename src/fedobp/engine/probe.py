"""Whether a model can be run for many clients at once, found out by trying."""

import warnings

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedobp.engine.stack import Grouped, batched_layers, stacked
from fedobp.errors import described, short
from fedobp.models import Model


def vectorises(model: Model) -> str | None:
    """Return that and why a model cannot be run for many clients at once, without a full stop; None: it can.

    It takes the steps that the lanes engine would take, of two lanes on two zeros each. A sequence of common layers is
    not tried, because each layer has a batched form.
    """
    if batched_layers(model, Grouped) is not None:
        return None
    has_statistics = model.layout.learned < model.layout.size
    theta = torch.zeros(2, model.layout.size)

    def inputs() -> Tensor:  # new ones: a module may change them
        return model.zeros(2, 2)

    def loss(theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, seen = model.trained(theta, x, theta.new_ones(2)) if has_statistics else (model.logits(theta, x), theta)
        return logits.sum(), seen

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that something is slow is said where it is used
            vmap(grad(loss, has_aux=True))(theta, inputs())
            tensors = {name: tensor.requires_grad_() for name, tensor in model.layout.views(theta).items()}
            logits = stacked(model, Grouped)(tensors, inputs())
            torch.autograd.grad(logits.sum(), list(tensors.values()), allow_unused=True)
    except Exception as error:  # whatever the module's code raises
        reason = short(described(error).partition(". ")[0].rstrip("."), 240)
        return f"model '{model.name}' cannot be run for many clients at once ({reason})"
    return None
