"""Local-Only: no federation. Every client trains its own copy of theta^0, in the rounds in which it is sampled.

The baseline of every personalised-FL table: what a client can reach without anybody's help.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import all_mine


def take_own(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the client's own model."""
    return client.set(theta=client.state["theta"])


def keep_own(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep the trained model; nothing is sent."""
    return client.remember(theta=client.theta)


@dataclass(frozen=True)
class LocalOnly(fl.Method):
    """Everyone alone."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "no federation: every client trains a model of its own, nothing is sent"
    paper: ClassVar[str] = "the usual lower baseline; no paper"
    keeps_last_model: ClassVar[bool] = True

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Each client holds a model; the server's stays at theta^0."""
        return fl.InitialState(server={"theta": theta}, record={}, state={"theta": theta})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send nothing."""
        return {}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train one's own model."""
        return [take_own, fl.Train(ctx.epochs), keep_own]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Receive nothing."""
        return server, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use one's own model."""
        return [take_own, all_mine]
