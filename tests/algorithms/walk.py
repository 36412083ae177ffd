"""Two clients with tiny models, walked through a method by hand: training adds what the test says."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedobp.method import Client, RoundContext, Train


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def moment(*cohort: int, round: int = 1, epochs: int = 5) -> RoundContext:
    return RoundContext(model=None, round=round, rounds=9, clients=2, epochs=epochs, cohort=torch.tensor(cohort))


def walk(model, program, own, download, steps: Sequence[Tensor]) -> tuple[Client, list[Train]]:
    """Run one client's program; the k-th `Train` adds steps[k] to what it learns."""
    client, phases = Client(state=own, download=download, scratch={}, upload={}, hparams={}), []
    for item in program:
        if isinstance(item, Train):
            name = item.learn[0]
            client = client.set(**{name: client.scratch[name] + steps[len(phases)]})
            phases.append(item)
        else:
            client = item(model, client)
    return client, phases


def row(record, at: int):
    return {name: value[at] for name, value in record.items()}
