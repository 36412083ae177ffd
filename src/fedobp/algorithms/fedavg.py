"""FedAvg (McMahan et al., AISTATS 2017), and the two simple personal baselines that follow from it.

FedAvg: every client of the cohort trains the global model, the server takes the sample-weighted mean, and all clients
are served that mean. FedAvg-FT fine-tunes it on the client's data before use (Yu et al., 2020; Cheng et al., 2021);
nothing is stored. FedAvg-Last serves each client the model that it trained last, which costs no computation and no
traffic, only the memory for a whole model on each client.
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
    """Upload the trained model."""
    return client.send(theta=client.theta)


@dataclass(frozen=True)
class FedAvg(fl.Method):
    """One model for all clients."""

    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "one global model for all clients: the sample-weighted mean of their models"
    paper: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Hold the global model on the server, and no other state."""
        return fl.InitialState(server={"theta": theta}, record={}, state={})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the global model to all clients."""
        return {"theta": fl.broadcast(server["theta"], ctx)}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the global model and upload it."""
        return [take_global, fl.Train(ctx.epochs), upload_model]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Eq. 2: average."""
        return {"theta": update.mean("theta")}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the global model without changes."""
        return [take_global]


def all_mine(model: fl.Model, client: fl.Client) -> fl.Client:
    """Mark every entry as personal."""
    return client.set(mine=torch.ones_like(client.theta, dtype=torch.bool))


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg, fine-tuned before use."""

    name: ClassVar[str] = "fedavg-ft"
    summary: ClassVar[str] = "FedAvg whose global model each client fine-tunes on its own data before use"
    paper: ClassVar[str] = "Yu et al., Salvaging Federated Learning by Local Adaptation, 2020"

    finetune: int = fl.option(5, "epochs of fine-tuning before use; 5 is the protocol's local budget", low=0)

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Fine-tune the global model; the result is not stored."""
        return [take_global, fl.Train(self.finetune), all_mine]


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep the trained model in the client state, and upload it."""
    return upload_model(model, client.remember(theta=client.theta, seen=torch.ones_like(client.state["seen"])))


def take_last(model: fl.Model, client: fl.Client) -> fl.Client:
    """Use the model that the client trained last; a client that has never trained uses the global one."""
    seen, shared = client.state["seen"], fl.dense(client.download, "theta")
    return client.set(theta=torch.where(seen, client.state["theta"], shared), mine=seen.expand_as(shared))


@dataclass(frozen=True)
class FedAvgLast(FedAvg):
    """FedAvg, with each client's last local model for use."""

    name: ClassVar[str] = "fedavg-last"
    summary: ClassVar[str] = "FedAvg in which each client uses the model that it trained last"
    paper: ClassVar[str] = "no paper: a baseline without extra cost, missing from most comparisons"
    keeps_last_model: ClassVar[bool] = True

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: the last model, and whether there is one."""
        return fl.InitialState(server={"theta": theta}, record={}, state=fl.last_model(theta))

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train as in FedAvg, and keep the result."""
        return [take_global, fl.Train(ctx.epochs), keep_and_upload]

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the last local model."""
        return [take_last]
