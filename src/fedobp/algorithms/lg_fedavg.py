"""LG-FedAvg (Liang et al., Think Locally, Act Globally: FL with Local and Global Representations, 2020).

FedPer turned round: the lower layers stay on the client, the upper ones are shared and averaged; all are trained
together. Its authors start from a trained FedAvg model, average without weights, and for their CIFAR network share the
convolutions. Here the head is what is shared, as their text and later comparisons have it, from theta^0 and within the
common budget.

`as-published` is what ran behind the FedOBP paper's table: the framework's `num_global_layers` of 1 shares the first
layer instead (0.28 per cent of the CNN), so that it is nearly Local-Only.
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
    option,
    to_all,
)
from fedobp.models import Inside, Model


@dataclass(frozen=True)
class LGFedAvg(Method):
    """Local representations, a global head."""

    name: ClassVar[str] = "lg-fedavg"
    summary: ClassVar[str] = "private lower layers, shared head, trained together"
    paper: ClassVar[str] = "Liang et al., Think Locally, Act Globally, 2020"

    mode: str = option(
        "faithful", "what is shared: the head, or (as-published) the first layer", choices=("faithful", "as-published")
    )

    def shared(self, model: Model, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (private, shared) parts of a vector."""
        return model.layout.split(theta, self._inside(model))

    def whole(self, model: Model, private: Tensor, shared: Tensor) -> Tensor:
        """Return the vector made of both."""
        return model.layout.join(private, shared, self._inside(model))

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds its lower layers; the server's model keeps theta^0's."""
        return Start(server={"theta": theta}, row={}, own={"private": self.shared(model, theta)[0]})

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send what is shared."""
        return {"shared": to_all(self.shared(model, server["theta"])[1], now)}, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Train everything together."""
        return [self._join, Train(now.epochs), self._keep]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Average what is shared."""
        private, _ = self.shared(model, server["theta"])
        return {"theta": self.whole(model, private, average(dense(up, "shared"), n))}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Use one's own lower layers under what is shared now."""
        return [self._join]

    def _inside(self, model: Model) -> Inside:
        first = model.layout.names[0].rpartition(".")[0] + "."
        return model.layout.in_head if self.mode == "faithful" else lambda name: name.startswith(first)

    def _join(self, model: Model, client: Client) -> Client:
        theta = self.whole(model, client.own["private"], dense(client.down, "shared"))
        return client.set(theta=theta, mine=~model.layout.mask(self._inside(model), theta.device))

    def _keep(self, model: Model, client: Client) -> Client:
        private, shared = self.shared(model, client.theta)
        return client.remember(private=private).upload(shared=shared)
