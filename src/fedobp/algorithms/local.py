"""Local-Only: no federation. Every client trains its own copy of theta^0, in the rounds in which it is sampled.

The baseline of every personalised-FL table: what a client can reach without anybody's help.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp.algorithms.base import Client, Method, Moment, Program, Record, Start, Tensors, Train
from fedobp.algorithms.fedavg import all_mine
from fedobp.models import Model


def take_own(model: Model, client: Client) -> Client:
    """Start from the client's own model."""
    return client.set(theta=client.own["theta"])


def keep_own(model: Model, client: Client) -> Client:
    """Keep the trained model; nothing is sent."""
    return client.remember(theta=client.theta)


@dataclass(frozen=True)
class LocalOnly(Method):
    """Everyone alone."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "no federation: every client trains a model of its own, nothing is sent"
    paper: ClassVar[str] = "the usual lower baseline; no paper"

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds a model; the server's stays at theta^0."""
        return Start(server={"theta": theta}, row={}, own={"theta": theta})

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send nothing."""
        return {}, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Train one's own model."""
        return [take_own, Train(now.epochs), keep_own]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Receive nothing."""
        return server, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Use one's own model."""
        return [take_own, all_mine]
