"""FedProx (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020).

FedAvg with a proximal term that keeps clients near the received model: mu/2 |theta - theta_g|^2 is added to the local
loss, that is mu (theta - theta_g) to the gradient, with theta_g as received and fixed during local training.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, upload_model


def take_with_anchor(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the downloaded model, which is also the anchor of the proximal term."""
    received = fl.dense(client.download, "theta")
    return client.set(theta=received, received=received)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    name: ClassVar[str] = "fedprox"
    summary: ClassVar[str] = "FedAvg with a proximal term that keeps clients near the global model"
    paper: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: float = fl.option(0.01, "weight of the proximal term; as in the framework behind the paper's tables", low=0)

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the global model with the proximal term."""
        return [take_with_anchor, fl.Train(ctx.epochs, pull=("received", "mu")), upload_model]
