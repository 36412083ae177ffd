"""SCAFFOLD (Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, ICML 2020).

FedAvg corrected for client drift. The server holds a control c, each client one of its own, c_i; local gradients are
g + c - c_i. After K steps from w to y a client's control becomes c_i - c + (w - y) / (K lr) (the paper's option II),
with the true number of steps. Models and changes of the controls are averaged without weights; c moves by the cohort's
share of all clients. A client sends and receives two vectors.

The paper has no momentum. With momentum m a constant gradient moves the model in step k by lr (1 - m^k) / (1 - m) times
that gradient, so (w - y) is divided by lr times the sum of these factors over k = 1..K instead of by K lr. With weight
decay (w - y) contains the decay, and so does the control.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp.algorithms.base import (
    Client,
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
from fedobp.algorithms.fedavg import FedAvg
from fedobp.models import Model


def take_and_correct(model: Model, client: Client) -> Client:
    """Start from the downloaded model, and lay out what is added to every gradient."""
    received, drift = dense(client.down, "theta"), dense(client.down, "control") - client.own["control"]
    return client.set(theta=received, received=received, drift=drift)


def unit_steps(steps: Tensor, momentum: Tensor) -> Tensor:
    """Return the sum over k = 1..K of (1 - m^k) / (1 - m): how many plain steps K steps with momentum m amount to.

    As K - m (1 - m^K) / (1 - m), over 1 - m; in float64, because the difference cancels for m near 1.
    """
    count, m = steps.double(), momentum.double()
    return (count - m * (1 - m**count) / (1 - m)) / (1 - m)


def move_control(model: Model, client: Client) -> Client:
    """Take the mean gradient of the visit as the client's new control; without a step it stays."""
    before, steps = client.own["control"], client.data["steps"]
    length = unit_steps(steps.clamp(min=1), client.hp["momentum"]).to(before.dtype) * client.hp["lr"]
    travelled = (client.work["received"] - client.theta) / length
    control = torch.where(steps > 0, travelled - client.work["drift"], before)
    return client.remember(control=control).upload(theta=client.theta, change=control - before)


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """FedAvg with control variates."""

    name: ClassVar[str] = "scaffold"
    summary: ClassVar[str] = "FedAvg whose gradients are corrected for each client's drift; sends everything twice"
    paper: ClassVar[str] = "Karimireddy et al., SCAFFOLD, ICML 2020"

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """All controls start at 0."""
        zero = torch.zeros_like(theta)
        return Start(server={"theta": theta, "control": zero}, row={}, own={"control": zero})

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send the model and the control."""
        return {name: to_all(server[name], now) for name in ("theta", "control")}, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Train with corrected gradients."""
        return [take_and_correct, Train(now.epochs, drift="drift"), move_control]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Average the models; move the control by the mean change over all clients, of whom most changed nothing."""
        theta, change = average(dense(up, "theta"), torch.ones_like(n)), dense(up, "change")
        return {"theta": theta, "control": server["control"] + change.sum(dim=0) / (now.clients - now.held_out)}, rows
