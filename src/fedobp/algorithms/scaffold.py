"""SCAFFOLD (Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, ICML 2020).

FedAvg corrected for client drift. The server holds a control variate c, each client a control variate c_i; local
gradients are g + c - c_i. After K steps from w to y a client's control becomes c_i - c + (w - y) / (K lr) (the paper's
option II), with the true number of steps. Models and changes of the controls are averaged without weights; c changes by
the cohort's share of all clients. A client sends and receives two vectors.

The paper has no momentum. With momentum m a constant gradient moves the model in step k by lr (1 - m^k) / (1 - m) times
that gradient, so (w - y) is divided by lr times the sum of these factors over k = 1..K instead of by K lr. With weight
decay (w - y) contains the decay, and so does the control.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg


def take_and_correct(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the downloaded model, and compute the correction that is added to every gradient."""
    received = fl.dense(client.download, "theta")
    drift = fl.dense(client.download, "control") - client.state["control"]
    return client.set(theta=received, received=received, drift=drift)


def unit_steps(steps: Tensor, momentum: Tensor) -> Tensor:
    """Return the sum over k = 1..K of (1 - m^k) / (1 - m): how many plain steps K steps with momentum m amount to.

    As K - m (1 - m^K) / (1 - m), over 1 - m; in float64, because the difference cancels for m near 1.
    """
    count, m = steps.double(), momentum.double()
    return (count - m * (1 - m**count) / (1 - m)) / (1 - m)


def update_control(model: fl.Model, client: fl.Client) -> fl.Client:
    """Set the client's control to the mean gradient of its local steps; without a step it stays."""
    before, steps = client.state["control"], client.data["steps"]
    length = unit_steps(steps.clamp(min=1), client.hparams["momentum"]).to(before.dtype) * client.hparams["lr"]
    gradient = (client.scratch["received"] - client.theta) / length
    control = torch.where(steps > 0, gradient - client.scratch["drift"], before)
    return client.remember(control=control).send(theta=client.theta, change=control - before)


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg with control variates."""

    name: ClassVar[str] = "scaffold"
    summary: ClassVar[str] = "FedAvg whose gradients are corrected for each client's drift; twice the traffic"
    paper: ClassVar[str] = "Karimireddy et al., SCAFFOLD, ICML 2020"

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """All controls start at 0."""
        zero = torch.zeros_like(theta)
        return fl.InitialState(server={"theta": theta, "control": zero}, record={}, state={"control": zero})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the model and the control."""
        return {name: fl.broadcast(server[name], ctx) for name in ("theta", "control")}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train with corrected gradients."""
        return [take_and_correct, fl.Train(ctx.epochs, drift="drift"), update_control]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average the models; add to the control the mean change over all clients, 0 for those not in the cohort."""
        theta = fl.average(update.dense("theta"), torch.ones_like(update.n))
        change = update.dense("change").sum(dim=0) / (ctx.clients - ctx.held_out)
        return {"theta": theta, "control": server["control"] + change}, records
