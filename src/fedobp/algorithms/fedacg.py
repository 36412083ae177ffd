"""FedAvg with Nesterov momentum on the server, as in FedACG (Kim et al., CVPR 2024) without its proximal term."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class FedACG(FedAvg):
    """FedAvg whose clients start where the global model is going.

        s_t = theta_t + beta m_t,   theta_(t+1) = mean of the models trained from s_t,   m_(t+1) = theta_(t+1) - theta_t

    One vector down, one up, no state on the client; the server holds two vectors. (m <- beta m + mean - s and
    theta <- theta + m give the same.) theta is served.
    """

    name: ClassVar[str] = "fedacg"
    summary: ClassVar[str] = "FedAvg whose clients start from the global model moved on by the server's momentum"
    paper: ClassVar[str] = "Kim et al., Communication-Efficient FL with Accelerated Client Gradient, CVPR 2024"

    beta: float = fl.option(0.7, "momentum of the server", low=0, high=1)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Hold the global model and its last move, 0."""
        return fl.InitialState(server={"theta": theta, "move": torch.zeros_like(theta)}, record={}, state={})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the global model to use, or that model moved on to train."""
        ahead = server["theta"] if ctx.serving else server["theta"] + self.beta * server["move"]
        return {"theta": fl.broadcast(ahead, ctx)}, records

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Eq. 2: average; the move is the difference from the model before."""
        theta = update.mean("theta")
        return {"theta": theta, "move": theta - server["theta"]}, records
