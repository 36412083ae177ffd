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

from fedobp import method as fl


def take_global(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the downloaded model."""
    return client.set(theta=fl.dense(client.download, "theta"))


def upload_model(model: fl.Model, client: fl.Client) -> fl.Client:
    """Send the trained model."""
    return client.send(theta=client.theta)


@dataclass(frozen=True)
class FedAvg(fl.Method):
    """One model for everyone."""

    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "one global model for everyone: the sample-weighted mean of the clients' models"
    paper: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Only the global model exists."""
        return fl.InitialState(server={"theta": theta}, record={}, state={})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the global model to everyone."""
        return {"theta": fl.broadcast(server["theta"], ctx)}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the global model and send it back."""
        return [take_global, fl.Train(ctx.epochs), upload_model]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Eq. 2: average."""
        return {"theta": update.mean("theta")}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the global model as it is."""
        return [take_global]


def all_mine(model: fl.Model, client: fl.Client) -> fl.Client:
    """Mark every entry as the client's own."""
    return client.set(mine=torch.ones_like(client.theta, dtype=torch.bool))


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg, fine-tuned before use."""

    name: ClassVar[str] = "fedavg-ft"
    summary: ClassVar[str] = "FedAvg whose global model each client fine-tunes on its own data before use"
    paper: ClassVar[str] = "Yu et al., Salvaging Federated Learning by Local Adaptation, 2020"

    finetune: int = fl.option(5, "epochs of fine-tuning before use; 5 is the protocol's local budget", low=0)

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the global model a little; the result is not stored."""
        return [take_global, fl.Train(self.finetune), all_mine]


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep the trained model, and send it."""
    return upload_model(model, client.remember(theta=client.theta, seen=torch.ones_like(client.state["seen"])))


def take_last(model: fl.Model, client: fl.Client) -> fl.Client:
    """Use the model of the last visit; a client that was never selected uses the global one."""
    seen, shared = client.state["seen"], fl.dense(client.download, "theta")
    return client.set(theta=torch.where(seen, client.state["theta"], shared), mine=seen.expand_as(shared))


@dataclass(frozen=True)
class FedAvgLast(FedAvg):
    """FedAvg, each client using its own last local model."""

    name: ClassVar[str] = "fedavg-last"
    summary: ClassVar[str] = "FedAvg in which each client uses the model that it last trained itself"
    paper: ClassVar[str] = "no paper: the baseline that costs nothing, and that comparisons leave out"
    keeps_last_model: ClassVar[bool] = True

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Each client holds its last model, once it has one."""
        return fl.InitialState(server={"theta": theta}, record={}, state=fl.last_model(theta))

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """As FedAvg, and keep the result."""
        return [take_global, fl.Train(ctx.epochs), keep_and_upload]

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the last local model."""
        return [take_last]
