"""A method's functions with tiny models and made-up training, so that every number can be computed by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedobp.method import Batch, Client, CohortUpdate, RoundContext, Sweep, Train
from fedobp.records import stack


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def context(*cohort: int, model: Any = None, round: int = 1, epochs: int = 5, clients: int = 2) -> RoundContext:
    """Return the context of a round of 9; most methods do not look at the model."""
    return RoundContext(model, round, rounds=9, clients=clients, epochs=epochs, cohort=torch.tensor(cohort))


def run_program(
    model, program, state, download, steps: Sequence[Tensor] = (), data: Mapping[str, Tensor] = {}
) -> tuple[Client, list[Train]]:
    """Run one client's program; the k-th `Train` adds steps[k] to learn[0]. Return the client and these phases."""
    client, phases = Client(state=state, download=download, scratch={}, upload={}, hparams={}, data=dict(data)), []
    for item in program:
        if isinstance(item, Train):
            name = item.learn[0]
            client = client.set(**{name: client.scratch[name] + steps[len(phases)]})
            phases.append(item)
        else:
            client = item(model, client)
    return client, phases


def update_of(clients: Sequence[Client], *n: int) -> CohortUpdate:
    """Return what the server receives from these clients, with n training samples each."""
    return CohortUpdate(stack([client.upload for client in clients]), torch.tensor(n), sum(n))


# Programs with sweeps


def hyper_parameters(**values: float) -> dict[str, Tensor]:
    usual = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in {**usual, **values}.items()}


def draw_batches(seed, sizes, classes=3, features=4):
    """Return batches (x, y) of the given sizes."""
    stream = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, features, generator=stream, dtype=torch.float64),
            torch.randint(classes, (size,), generator=stream),
        )
        for size in sizes
    ]


def run_sweeps(model, program, state, download, hparams, batches, step=0.0):
    """Run one client's program on `batches(epoch)`, padded; training adds `step`.

    Return the client and the number of epochs of each sweep.
    """
    n = torch.tensor(sum(len(y) for _, y in batches(0)))
    client, epochs = Client(state, download, {}, {}, hparams, {"n": n}), []
    for item in program:
        if isinstance(item, Train):
            client = client.set(**{name: client.scratch[name] + step for name in item.learn})
        elif isinstance(item, Sweep):
            taken = count = 0
            while taken < item.epochs and (item.more is None or item.more(model, client)):
                for x, y in batches(taken):
                    if len(y) >= item.smallest:
                        after = item.step(model, client, padded_batch(x, y, count, taken))
                        assert after == replace(client, scratch=after.scratch)
                        client, count = after, count + 1
                taken += 1
                if not batches(0):
                    break
            epochs.append(taken)
        else:
            client = item(model, client)
    return client, epochs


def padded_batch(x, y, step, epoch):
    """Return a batch with two more samples, which must not count."""
    more = torch.full((2, *x.shape[1:]), 50.0, dtype=x.dtype)
    weight = torch.cat([torch.ones(len(y)), torch.zeros(2)]).to(x.dtype)
    when = torch.tensor(step), torch.tensor(epoch)
    return Batch(torch.cat([x, more]), torch.cat([y, y.new_zeros(2)]), weight, torch.tensor(0), *when)
