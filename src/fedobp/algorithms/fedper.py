"""FedPer (Arivazhagan et al., Federated Learning with Personalization Layers, 2019).

The base is shared and averaged as in FedAvg; the head (the layer called `classifier`) stays on the client and never
crosses the wire. Base and head are trained together. Everyone's head starts from theta^0.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp.algorithms.base import (
    Client,
    Method,
    Moment,
    Program,
    Record,
    Start,
    Tensors,
    Train,
    average,
    dense,
    to_all,
)
from fedobp.models import Model


def join_parts(model: Model, client: Client) -> Client:
    """Put the downloaded base and the client's own head together."""
    theta = model.layout.join(dense(client.down, "base"), client.own["head"])
    return client.set(theta=theta, mine=model.layout.is_head(theta.device))


def keep_head(model: Model, client: Client) -> Client:
    """Keep the trained head, send the trained base."""
    base, head = model.layout.split(client.theta)
    return client.remember(head=head).upload(base=base)


@dataclass(frozen=True)
class FedPer(Method):
    """A shared base, a private head."""

    name: ClassVar[str] = "fedper"
    summary: ClassVar[str] = "shared base, private head, trained together; the head never leaves the client"
    paper: ClassVar[str] = "Arivazhagan et al., Federated Learning with Personalization Layers, 2019"

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds a head; the server's model keeps theta^0's."""
        return Start(server={"theta": theta}, row={}, own={"head": model.layout.split(theta)[1]})

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send the base."""
        return {"base": to_all(model.layout.split(server["theta"])[0], now)}, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Train base and head together."""
        return [join_parts, Train(now.epochs), keep_head]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Average the bases."""
        _, head = model.layout.split(server["theta"])
        return {"theta": model.layout.join(average(dense(up, "base"), n), head)}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Use the current base with one's own head."""
        return [join_parts]
