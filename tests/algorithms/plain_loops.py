"""Parts of plain loops that re-implement methods: batches as engines draw them, SGD, and a check of both engines."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedobp import Config, Federation, Result
from fedobp.engine.batch_order import batches as positions
from fedobp.keys import Purpose, fold
from fedobp.sampling import cohorts

# Settings of every plain loop. Client 1 usually has 211 samples: a last batch of one, which is skipped.
RATES: dict[str, dict[str, Any]] = {
    "one batch": {"batch_size": 2000},
    "batches, momentum and decay": {"batch_size": 105, "momentum": 0.8, "weight_decay": 0.02},
}

SIZES = (16 * 8, 8, 8 * 10, 10)  # of the network's four tensors

Data = Iterator[tuple[Tensor, Tensor]]


def narrow(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network that is quick to train.

    After pooling, no pixel is the same in all images: weights of such pixels would change equally, and their scores
    would tie except for rounding.
    """
    layers = {"pool": nn.AvgPool2d(2), "flatten": nn.Flatten(), "fc": nn.Linear(16, 8), "tanh": nn.Tanh()}
    return nn.Sequential(OrderedDict(layers, classifier=nn.Linear(8, classes)))


def small_federation(method: str, rates: str, options: Mapping[str, Any] | None = None, **settings: Any) -> Federation:
    """Return a small federation on the digits. Cohorts are (1, 0), (3, 1) and (3, 1): client 2 never trains."""
    usual = {"clients": 4, "participation": 0.5, "rounds": 3, "epochs": 2, "lr": 0.1, "alpha": 0.5, "model": "narrow",
             "precision": "fp64", "device": "cpu", "seed": 1, "eval_every": 3}  # fmt: skip
    return Federation(Config(method=method, options=options or {}, **{**usual, **RATES[rates], **settings}))


def theta_0(federation: Federation) -> list[Tensor]:
    """Return the tensors of theta^0."""
    theta = federation.model.initial(federation.config.seed).double()
    return list(federation.model.layout.views(theta).values())


def each_round(federation: Federation) -> Iterator[tuple[int, list[int]]]:
    """Yield each round's number and cohort."""
    return enumerate((cohort.tolist() for cohort in cohorts(federation.config)), start=1)


def phase_key(federation: Federation, client: int, round: int, phase: int, purpose: Purpose = Purpose.TRAIN) -> Tensor:
    """Return the random key of a phase of a client's program; a phase is numbered by its position there."""
    return fold(fold(federation.config.seed, round, client, purpose), phase)


def samples(federation: Federation, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's training samples."""
    return federation.data.inputs(client, "train"), federation.data.targets(client, "train")


def batches(federation: Federation, client: int, round: int, phase: int, epochs: int) -> Data:
    """Yield a client's batches in a phase of its program."""
    x, y = samples(federation, client)
    drawn = phase_key(federation, client, round, phase)
    for epoch in range(epochs):
        for picked in positions(fold(drawn, epoch), len(y), federation.config.batch_size):
            yield x[picked], y[picked]


def hidden(values: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the network's features; its first two tensors are their weight and bias."""
    return torch.tanh(functional.avg_pool2d(x, 2).flatten(1) @ values[0].T + values[1])


def network_loss(values: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the network's cross-entropy."""
    return functional.cross_entropy(hidden(values, x) @ values[2].T + values[3], y)


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
    rates = {"momentum": config.momentum, "weight_decay": config.weight_decay}
    optimizer = torch.optim.SGD(trained, config.lr if lr is None else lr, **rates)
    for x, y in data:
        optimizer.zero_grad()
        loss(trained, x, y).backward()
        before = [value.detach().clone() for value in trained]
        optimizer.step()
        with torch.no_grad():
            for value, old, free in zip(trained, before, moving or [True] * len(trained), strict=True):
                value.copy_(torch.where(torch.as_tensor(free), value, old))
    return [value.detach() for value in trained]


def mean(federation: Federation, clients: Sequence[int], models: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean of clients' tensors, weighted by their training samples."""
    sizes = [federation.data.size(client, "train") for client in clients]
    return [sum(n * one for n, one in zip(sizes, many, strict=True)) / sum(sizes) for many in zip(*models, strict=True)]


def flat(values: Iterable[Tensor]) -> Tensor:
    """Return tensors as one vector."""
    return torch.cat([value.flatten() for value in values])


def both_engines(
    federation: Federation, theta: Sequence[Tensor], served: Mapping[int, Sequence[Tensor]], atol: float = 1e-10
) -> list[Result]:
    """Run both engines, compare the global model and the served models, and return the results."""
    results = []
    for engine in ("serial", "lanes"):
        result = Federation(replace(federation.config, engine=engine), beside=federation).run()
        for client, expected in {None: theta, **served}.items():
            found = flat(result.state_dict(client).values())
            torch.testing.assert_close(
                found, flat(expected), rtol=0, atol=atol, msg=lambda why, at=(engine, client): f"{at}: {why}"
            )
        results.append(result)
    return results
