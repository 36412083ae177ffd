"""One record per client; a client that was never written has the common start record and costs nothing."""

from collections.abc import Iterable

import torch

from fedobp.algorithms import Tensors


class Store:
    """Client records by id."""

    def __init__(self, start: Tensors) -> None:
        self._start = start
        self._kept: dict[int, Tensors] = {}

    def __getitem__(self, client: int) -> Tensors:
        return self._kept.get(client, self._start)

    def __setitem__(self, client: int, record: Tensors) -> None:
        self._kept[client] = record

    def gather(self, clients: Iterable[int]) -> Tensors:
        """Return the records of several clients, stacked."""
        records = [self[client] for client in clients]
        return {name: torch.stack([record[name] for record in records]) for name in self._start}

    def scatter(self, clients: Iterable[int], rows: Tensors) -> None:
        """Write stacked records back. Each is copied, so that it does not hold the whole stack in memory."""
        for position, client in enumerate(clients):
            self[client] = {name: values[position].clone() for name, values in rows.items()}
