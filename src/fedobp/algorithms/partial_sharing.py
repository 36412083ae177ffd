"""Methods that share some tensors of the model and keep the others on the client; all are trained together.

`as-published`, where a method has that mode, is what the framework behind the FedOBP paper's tables does: the whole
model is sent and averaged, private tensors too. A client uses the average of the private tensors until it has trained
once, and its own tensors from then on; `faithful` starts them from theta^0. The traffic is that of FedAvg.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.models import Inside


@dataclass(frozen=True)
class PartialSharing(fl.Method):
    """Base of methods that choose the shared tensors by name; the default is all but the head."""

    def shares(self, model: fl.Model) -> Inside:
        """Return a function that says of a tensor's name whether it is shared."""
        return lambda name: not model.layout.in_head(name)

    @property
    def sends_all(self) -> bool:
        """Whether private tensors are sent and averaged too, for clients that have not trained yet."""
        return False

    def split(self, model: fl.Model, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (private, shared) parts of a vector."""
        return model.layout.split(theta, self.shares(model))

    def join(self, model: fl.Model, private: Tensor, shared: Tensor) -> Tensor:
        """Return the vector made of both."""
        return model.layout.join(private, shared, self.shares(model))

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: the private part. In the server's model it stays at theta^0, unless all tensors are sent."""
        state = {"private": self.split(model, theta)[0]}
        if self.sends_all:
            state["seen"] = theta.new_zeros((), dtype=torch.bool)
        return fl.InitialState(server={"theta": theta}, record={}, state=state)

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the shared part, or all."""
        if self.sends_all:
            return {"theta": fl.broadcast(server["theta"], ctx)}, records
        return {"shared": fl.broadcast(self.split(ctx.model, server["theta"])[1], ctx)}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train both parts together."""
        return [self.take, fl.Train(ctx.epochs), self.keep]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average the shared part, or all."""
        if self.sends_all:
            return {"theta": update.mean("theta")}, records
        private, _ = self.split(ctx.model, server["theta"])
        return {"theta": self.join(ctx.model, private, update.mean("shared"))}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the private part with the current shared part."""
        return [self.take]

    def take(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Join the private part and the downloaded one."""
        private = client.state["private"]
        mine = ~model.layout.mask(self.shares(model), private.device)
        if self.sends_all:
            averaged, shared = self.split(model, fl.dense(client.download, "theta"))
            private, mine = torch.where(client.state["seen"], private, averaged), mine & client.state["seen"]
        else:
            shared = fl.dense(client.download, "shared")
        return client.set(theta=self.join(model, private, shared), mine=mine)

    def keep(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Keep the private part; upload the shared part, or all."""
        client = self.remember(model, client)
        if self.sends_all:
            return client.send(theta=client.theta)
        return client.send(shared=self.split(model, client.theta)[1])

    def remember(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Keep the private part."""
        client = client.remember(private=self.split(model, client.theta)[0])
        return client.remember(seen=torch.ones_like(client.state["seen"])) if self.sends_all else client
