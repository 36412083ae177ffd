"""Ditto (Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021).

Two models per client: the global one, trained and averaged as in FedAvg, and a personal v, which stays on the client
and minimises the local loss plus lam/2 |v - w|^2, with w the global model as received. The client uses v.

The authors step both models in turn on the same batches, equally often; here, as in the frameworks, v is trained after
w, for separate epochs, which are computed in addition to the common budget. A client that has never trained is served
theta^0, as with the authors.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, all_mine


def take_both(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the global model, which is also the anchor of the proximal term, and the personal model."""
    received = fl.dense(client.download, "theta")
    return client.set(theta=received, received=received, personal=client.state["personal"])


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep the personal model, upload the other one."""
    return client.remember(personal=client.scratch["personal"]).send(theta=client.theta)


def take_personal(model: fl.Model, client: fl.Client) -> fl.Client:
    """Use the personal model."""
    return client.set(theta=client.state["personal"])


@dataclass(frozen=True)
class Ditto(FedAvg):
    """A global model, and a personal one with a proximal term towards it."""

    name: ClassVar[str] = "ditto"
    summary: ClassVar[str] = "FedAvg beside a personal model that each client trains near the global one"
    paper: ClassVar[str] = "Li et al., Ditto: Fair and Robust FL Through Personalization, ICML 2021"

    lam: float = fl.option(1.0, "weight of the proximal term; 1, as in the authors' scripts", low=0)
    personal_epochs: int = fl.option(1, "additional epochs of the personal model; the frameworks' 1", low=0)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: the personal model, which starts at theta^0."""
        return fl.InitialState(server={"theta": theta}, record={}, state={"personal": theta})

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the global model, then the personal one."""
        personal = fl.Train(self.personal_epochs, learn=("personal",), pull=("received", "lam"))
        return [take_both, fl.Train(ctx.epochs), personal, keep_and_upload]

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the personal model."""
        return [take_personal, all_mine]
