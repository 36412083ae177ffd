"""FedBN (Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021).

FedAvg whose BatchNorm layers stay on the client, weights and running statistics alike; all else is shared and averaged.
On a model without BatchNorm it is FedAvg, and says so.
"""

import warnings
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


def join_norms(model: Model, client: Client) -> Client:
    """Put the downloaded layers and the client's own BatchNorm together."""
    inside = model.layout.in_norm
    theta = model.layout.join(dense(client.down, "shared"), client.own["norms"], inside)
    return client.set(theta=theta, mine=model.layout.mask(inside, theta.device))


def keep_norms(model: Model, client: Client) -> Client:
    """Keep the BatchNorm layers, send the others."""
    shared, norms = model.layout.split(client.theta, model.layout.in_norm)
    return client.remember(norms=norms).upload(shared=shared)


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg with private BatchNorm layers."""

    name: ClassVar[str] = "fedbn"
    summary: ClassVar[str] = "FedAvg whose BatchNorm layers stay on the client; on a model without any it is FedAvg"
    paper: ClassVar[str] = "Li et al., FedBN, ICLR 2021"

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds its norms; the server's model keeps theta^0's."""
        _, norms = model.layout.split(theta, model.layout.in_norm)
        if not norms.numel():
            warnings.warn(f"'{model.name}' has no BatchNorm, so fedbn is fedavg: use --model cnn-bn", stacklevel=2)
        return Start(server={"theta": theta}, row={}, own={"norms": norms})

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send all but the norms."""
        return {"shared": to_all(model.layout.split(server["theta"], model.layout.in_norm)[0], now)}, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Train everything together."""
        return [join_norms, Train(now.epochs), keep_norms]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Average all but the norms."""
        inside = model.layout.in_norm
        _, norms = model.layout.split(server["theta"], inside)
        return {"theta": model.layout.join(average(dense(up, "shared"), n), norms, inside)}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Use the current layers with one's own norms."""
        return [join_norms]
