"""The cost of a client's training step, measured: operations by torch's counter, memory by the saved tensors."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedobp.engine.stack import Forward
from fedobp.models import Model, sample_losses


class Cost(NamedTuple):
    """The cost of one step of one client."""

    flops: float  # multiplications and additions of matrix products and convolutions, forward and backward
    fixed_bytes: float  # weights, gradients and other tensors of the model's size
    batch_bytes: float  # activations


def cost(model: Model, forward: Forward, batch: int, dtype: torch.dtype) -> Cost:
    """Measure one step of one lane on zeros."""
    tensors = {
        name: torch.zeros(1, *shape, dtype=dtype, requires_grad=True)
        for name, shape in zip(model.layout.names, model.layout.shapes, strict=True)
    }
    x = model.zeros(1, batch, dtype=dtype)
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    counter = FlopCounterMode(display=False)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor), counter:
        logits = forward(tensors, x)
        loss = sample_losses(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64), axes=2).mean()
        torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True)
    itemsize = loss.element_size()
    # Model-sized: weights, gradients, momentum, and a mask or anchor. Activations: the saved tensors, and as much
    # again for their gradients.
    return Cost(counter.get_total_flops(), 4.0 * itemsize * model.layout.size, 2.0 * sum(saved.values()))
