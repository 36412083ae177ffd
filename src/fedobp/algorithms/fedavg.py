"""FedAvg (McMahan et al., AISTATS 2017), and the two simple personal baselines that follow from it.

FedAvg: every client trains the global model, the server takes the sample-weighted mean, and everyone is served that
mean. FedAvg-FT fine-tunes it on the client's own data before use (Yu et al., 2020; Cheng et al., 2021); nothing is
stored. FedAvg-Last serves each client the model that it last trained, which costs no computation and no traffic, only
a whole model's memory on each client.
"""

from dataclasses import dataclass
from typing import ClassVar

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
    option,
    to_all,
)
from fedobp.models import Model


def take_global(model: Model, client: Client) -> Client:
    """Start from the downloaded model."""
    return client.set(theta=dense(client.down, "theta"))


def upload_model(model: Model, client: Client) -> Client:
    """Send the trained model."""
    return client.upload(theta=client.theta)


@dataclass(frozen=True)
class FedAvg(Method):
    """One model for everyone."""

    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "one global model for everyone: the sample-weighted mean of the clients' models"
    paper: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Only the global model exists."""
        return Start(server={"theta": theta}, row={}, own={})

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send the global model to everyone."""
        return {"theta": to_all(server["theta"], now)}, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Train the global model and send it back."""
        return [take_global, Train(now.epochs), upload_model]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Eq. 2: average."""
        return {"theta": average(dense(up, "theta"), n)}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Use the global model as it is."""
        return [take_global]


def all_mine(model: Model, client: Client) -> Client:
    """Mark every entry as the client's own."""
    return client.set(mine=torch.ones_like(client.theta, dtype=torch.bool))


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg, fine-tuned before use."""

    name: ClassVar[str] = "fedavg-ft"
    summary: ClassVar[str] = "FedAvg whose global model each client fine-tunes on its own data before use"
    paper: ClassVar[str] = "Yu et al., Salvaging Federated Learning by Local Adaptation, 2020"

    finetune: int = option(5, "epochs of fine-tuning before use; 5 is the protocol's local budget", low=0)

    def serve(self, model: Model, now: Moment) -> Program:
        """Train the global model a little; the result is not stored."""
        return [take_global, Train(self.finetune), all_mine]


def keep_and_upload(model: Model, client: Client) -> Client:
    """Keep the trained model, and send it."""
    return upload_model(model, client.remember(theta=client.theta, seen=torch.ones_like(client.own["seen"])))


def take_last(model: Model, client: Client) -> Client:
    """Use the model of the last visit; a client that was never selected uses the global one."""
    seen, shared = client.own["seen"], dense(client.down, "theta")
    return client.set(theta=torch.where(seen, client.own["theta"], shared), mine=seen.expand_as(shared))


@dataclass(frozen=True)
class FedAvgLast(FedAvg):
    """FedAvg, each client using its own last local model."""

    name: ClassVar[str] = "fedavg-last"
    summary: ClassVar[str] = "FedAvg in which each client uses the model that it last trained itself"
    paper: ClassVar[str] = "no paper: the baseline that costs nothing, and that comparisons leave out"

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds its last model, once it has one."""
        never = theta.new_zeros((), dtype=torch.bool)
        return Start(server={"theta": theta}, row={}, own={"theta": theta, "seen": never})

    def local(self, model: Model, now: Moment) -> Program:
        """As FedAvg, and keep the result."""
        return [take_global, Train(now.epochs), keep_and_upload]

    def serve(self, model: Model, now: Moment) -> Program:
        """Use the last local model."""
        return [take_last]
