"""The clients of one run on this machine: their data, state and last local models."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedobp.data import FederatedData
from fedobp.engine.protocol import ClientJob
from fedobp.engine.store import Budget, Store
from fedobp.records import Tensors


class ClientSnapshot(NamedTuple):
    """What one client keeps between rounds: all that a node has to store."""

    state: Tensors
    last: Tensor | None  # the model that it trained last; None: it has not trained yet


class ClientPool:
    """Clients with their data and state, and the seed of their random draws.

    Where a method keeps the last local model in its state (`keeps_last_model`), it is not stored a second time.
    """

    def __init__(
        self,
        data: FederatedData,
        state: Tensors,
        theta: Tensor,
        seed: int,
        budget: Budget,
        *,
        keeps_last_model: bool = False,
    ) -> None:
        self.data, self.seed = data, seed
        self._initial, self._keeps_last_model = (state, theta), keeps_last_model
        self.state = Store(state, data.clients, budget)
        self._last = Store({} if keeps_last_model else {"theta": theta}, data.clients, budget)

    def assign(self, job: ClientJob) -> "PoolJob":
        """Return a job for clients of this pool."""
        return PoolJob(**vars(job), clients=self)

    def keep(self, clients: Sequence[int], state: Tensors, theta: Tensor) -> None:
        """Keep the new state and the trained models of clients; all with a leading axis."""
        self.state.scatter(clients, state)
        self._last.scatter(clients, {} if self._keeps_last_model else {"theta": theta})

    def untouched_copy(self) -> "ClientPool":
        """Return the same clients before their first round; their training changes nothing here."""
        kept = self._keeps_last_model
        return ClientPool(self.data, *self._initial, self.seed, Budget(), keeps_last_model=kept)

    def last(self, client: int) -> Tensor | None:
        """Return the model that a client trained last, or None if it has not trained yet."""
        if client not in self._last:
            return None
        return (self.state if self._keeps_last_model else self._last)[client]["theta"]

    def last_models(self, cohort: Tensor, otherwise: Tensor) -> Tensor:
        """Return each client's last local model, and `otherwise` for a client that has never trained."""
        found = [self.last(client) for client in cohort.tolist()]
        return torch.stack([otherwise if theta is None else theta for theta in found])

    @property
    def stores(self) -> dict[str, Store]:
        """What the clients keep between rounds, for a checkpoint."""
        return {"state": self.state, "last": self._last}

    def dump(self, client: int) -> ClientSnapshot:
        """Return all that a client keeps."""
        return ClientSnapshot(self.state[client], self.last(client))

    def load(self, client: int, snapshot: ClientSnapshot) -> None:
        """Give a client the state of a snapshot."""
        self.state[client] = snapshot.state
        if snapshot.last is not None:
            self._last[client] = {} if self._keeps_last_model else {"theta": snapshot.last}


@dataclass(frozen=True, kw_only=True)
class PoolJob(ClientJob):
    """A job and its clients: what an engine runs."""

    clients: ClientPool

    @cached_property
    def data(self) -> FederatedData:
        """The samples of the cohort, in memory as long as the job is."""
        return self.clients.data.of(self.ctx.cohort)
