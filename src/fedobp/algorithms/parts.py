"""Methods that share some tensors of the model and leave the others on the client; all are trained together."""

from dataclasses import dataclass

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
    """Base of methods that say by name which tensors are shared."""

    def shares(self, model: Model) -> Inside:
        """Return what says of a tensor's name whether it is shared."""
        raise NotImplementedError

    def split(self, model: Model, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (private, shared) parts of a vector."""
        return model.layout.split(theta, self.shares(model))

    def join(self, model: Model, private: Tensor, shared: Tensor) -> Tensor:
        """Return the vector made of both."""
        return model.layout.join(private, shared, self.shares(model))

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds its private part; the server's model keeps theta^0's."""
        return Start(server={"theta": theta}, row={}, own={"private": self.split(model, theta)[0]})

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send what is shared."""
        return {"shared": to_all(self.split(model, server["theta"])[1], now)}, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Train everything together."""
        return [self.take, Train(now.epochs), self.keep]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Average what is shared."""
        private, _ = self.split(model, server["theta"])
        return {"theta": self.join(model, private, average(dense(up, "shared"), n))}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Use one's own part with what is shared now."""
        return [self.take]

    def take(self, model: Model, client: Client) -> Client:
        """Put one's own part and the downloaded one together."""
        theta = self.join(model, client.own["private"], dense(client.down, "shared"))
        return client.set(theta=theta, mine=~model.layout.mask(self.shares(model), theta.device))

    def keep(self, model: Model, client: Client) -> Client:
        """Keep the private part, send the other."""
        private, shared = self.split(model, client.theta)
        return client.remember(private=private).upload(shared=shared)
