"""FedProx (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020).

FedAvg whose clients are held near the model that they were sent: mu/2 |theta - theta_g|^2 is added to the local loss,
that is mu (theta - theta_g) to the gradient, with theta_g as received and fixed during the visit.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, upload_model


def take_and_hold(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the downloaded model, and keep a copy to be pulled to."""
    received = fl.dense(client.download, "theta")
    return client.set(theta=received, received=received)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    name: ClassVar[str] = "fedprox"
    summary: ClassVar[str] = "FedAvg whose clients are pulled back to the model that they were sent"
    paper: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: float = fl.option(0.01, "strength of the pull; the default of the framework behind the paper's tables", low=0)

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the global model, held near itself."""
        return [take_and_hold, fl.Train(ctx.epochs, pull=("received", "mu")), upload_model]
