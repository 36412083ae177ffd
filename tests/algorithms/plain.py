"""For methods coded again as plain loops: the batches that engines draw, and plain SGD on lists of tensors."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedobp import Federation
from fedobp.engine.schedule import batches as positions
from fedobp.keys import Purpose, fold

# Settings that every plain loop is tried with.
RATES = {
    "one batch": {"batch_size": 2000},
    "batches, momentum and decay": {"batch_size": 48, "momentum": 0.8, "weight_decay": 0.02},
}


Data = Iterator[tuple[Tensor, Tensor]]


def batches(federation: Federation, client: int, round: int, phase: int, epochs: int) -> Data:
    """Yield a client's batches in a phase of its visit, which is named by its position in the client's program."""
    config, data = federation.config, federation.data
    x, y = data.inputs(client, "train"), data.targets(client, "train")
    key = fold(fold(config.seed, round, client, Purpose.TRAIN), phase)
    for epoch in range(epochs):
        for picked in positions(fold(key, epoch), len(y), config.batch_size):
            yield x[picked], y[picked]


def sgd(
    federation: Federation,
    values: Sequence[Tensor],
    loss: Callable[[list[Tensor], Tensor, Tensor], Tensor],
    data: Data,
    *,
    lr: float | None = None,
    moving: Sequence[Tensor | bool] | None = None,
) -> list[Tensor]:
    """Return tensors after a phase of training; `moving` says which of them, or which of their entries, may change."""
    config = federation.config
    trained = [value.detach().clone().requires_grad_() for value in values]
    rates = {"lr": lr or config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
    optimizer = torch.optim.SGD(trained, **rates)
    for x, y in data:
        optimizer.zero_grad()
        loss(trained, x, y).backward()
        before = [value.detach().clone() for value in trained]
        optimizer.step()
        with torch.no_grad():
            for value, old, free in zip(trained, before, moving or [True] * len(trained), strict=True):
                value.copy_(torch.where(torch.as_tensor(free), value, old))
    return [value.detach() for value in trained]
