"""Methods that share some tensors of the model and leave the others on the client; all are trained together.

`as-published`, where a method has that mode, is what the framework behind the FedOBP paper's tables does: the whole
model is sent and averaged, private tensors too. A client uses the average of private tensors until it has trained once,
and its own from then on; faithfully it would start from theta^0. Bytes are FedAvg's.
"""

from dataclasses import dataclass

import torch
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
from fedobp.models import Inside, Model


@dataclass(frozen=True)
class Parted(Method):
    """Base of methods that say by name which tensors are shared; unless they do, it is all but the head."""

    def shares(self, model: Model) -> Inside:
        """Return what says of a tensor's name whether it is shared."""
        return lambda name: not model.layout.in_head(name)

    @property
    def sends_all(self) -> bool:
        """Whether private tensors are sent and averaged too, for clients that have not trained yet."""
        return False

    def split(self, model: Model, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (private, shared) parts of a vector."""
        return model.layout.split(theta, self.shares(model))

    def join(self, model: Model, private: Tensor, shared: Tensor) -> Tensor:
        """Return the vector made of both."""
        return model.layout.join(private, shared, self.shares(model))

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds its private part; the server's model keeps theta^0's, unless all is sent."""
        own = {"private": self.split(model, theta)[0]}
        if self.sends_all:
            own["seen"] = theta.new_zeros((), dtype=torch.bool)
        return Start(server={"theta": theta}, row={}, own=own)

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send what is shared, or all."""
        if self.sends_all:
            return {"theta": to_all(server["theta"], now)}, rows
        return {"shared": to_all(self.split(model, server["theta"])[1], now)}, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Train everything together."""
        return [self.take, Train(now.epochs), self.keep]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Average what is shared, or all."""
        if self.sends_all:
            return {"theta": average(dense(up, "theta"), n)}, rows
        private, _ = self.split(model, server["theta"])
        return {"theta": self.join(model, private, average(dense(up, "shared"), n))}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Use one's own part with what is shared now."""
        return [self.take]

    def take(self, model: Model, client: Client) -> Client:
        """Put one's own part and the downloaded one together."""
        private = client.own["private"]
        mine = ~model.layout.mask(self.shares(model), private.device)
        if self.sends_all:
            averaged, shared = self.split(model, dense(client.down, "theta"))
            private, mine = torch.where(client.own["seen"], private, averaged), mine & client.own["seen"]
        else:
            shared = dense(client.down, "shared")
        return client.set(theta=self.join(model, private, shared), mine=mine)

    def keep(self, model: Model, client: Client) -> Client:
        """Keep the private part; send the other, or all."""
        client = self.remember(model, client)
        if self.sends_all:
            return client.upload(theta=client.theta)
        return client.upload(shared=self.split(model, client.theta)[1])

    def remember(self, model: Model, client: Client) -> Client:
        """Keep the private part."""
        client = client.remember(private=self.split(model, client.theta)[0])
        return client.remember(seen=torch.ones_like(client.own["seen"])) if self.sends_all else client
