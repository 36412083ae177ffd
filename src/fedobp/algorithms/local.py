"""Local-Only: no federation. Every client trains its own copy of theta^0, in the rounds in which it is sampled.

The baseline of every personalised-FL table: the accuracy that a client reaches without other clients.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import all_mine


def take_local(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the model in the client state."""
    return client.set(theta=client.state["theta"])


def keep_local(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep the trained model; nothing is uploaded."""
    return client.remember(theta=client.theta)


@dataclass(frozen=True)
class LocalOnly(fl.Method):
    """Local training only."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "no federation: every client trains its own model, nothing is sent"
    paper: ClassVar[str] = "the usual lower baseline; no paper"
    keeps_last_model: ClassVar[bool] = True

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: a model. The server's model stays at theta^0."""
        return fl.InitialState(server={"theta": theta}, record={}, state={"theta": theta})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send nothing."""
        return {}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the client's model."""
        return [take_local, fl.Train(ctx.epochs), keep_local]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Change nothing."""
        return server, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the client's model."""
        return [take_local, all_mine]
