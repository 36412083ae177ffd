"""Ditto (Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021).

Two models a client: the global one, trained and averaged as in FedAvg, and its own v, which never leaves it and
minimises the local loss plus lam/2 |v - w|^2, with w the global model as it was received. v is what is used.

Its authors step both models in turn on the same batches, as often as each other; here, as in the frameworks, v is
trained after w, for epochs of its own, which are computed in addition to the common budget. A client that has never
trained is served theta^0, as with the authors.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, all_mine


def take_both(model: fl.Model, client: fl.Client) -> fl.Client:
    """Lay out the global model, a copy of it to be pulled to, and the client's own."""
    received = fl.dense(client.download, "theta")
    return client.set(theta=received, received=received, personal=client.state["personal"])


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep the personal model, send the other."""
    return client.remember(personal=client.scratch["personal"]).send(theta=client.theta)


def take_personal(model: fl.Model, client: fl.Client) -> fl.Client:
    """Use the personal model."""
    return client.set(theta=client.state["personal"])


@dataclass(frozen=True)
class Ditto(FedAvg):
    """A global model, and a personal one held near it."""

    name: ClassVar[str] = "ditto"
    summary: ClassVar[str] = "FedAvg beside a personal model that each client trains near the global one"
    paper: ClassVar[str] = "Li et al., Ditto: Fair and Robust FL Through Personalization, ICML 2021"

    lam: float = fl.option(1.0, "strength of the pull to the global model; 1 is the authors' scripts'", low=0)
    personal_epochs: int = fl.option(
        1, "epochs of the personal model, beside the local epochs; the frameworks' 1", low=0
    )

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Each client holds a personal model, which starts at theta^0."""
        return fl.InitialState(server={"theta": theta}, record={}, state={"personal": theta})

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the global model, then the personal one."""
        personal = fl.Train(self.personal_epochs, learn=("personal",), pull=("received", "lam"))
        return [take_both, fl.Train(ctx.epochs), personal, keep_and_upload]

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the personal model."""
        return [take_personal, all_mine]
