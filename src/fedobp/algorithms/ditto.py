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

from fedobp.algorithms.base import Client, Moment, Program, Start, Train, dense, option
from fedobp.algorithms.fedavg import FedAvg, all_mine
from fedobp.models import Model


def take_both(model: Model, client: Client) -> Client:
    """Lay out the global model, a copy of it to be pulled to, and the client's own."""
    received = dense(client.down, "theta")
    return client.set(theta=received, received=received, personal=client.own["personal"])


def keep_and_upload(model: Model, client: Client) -> Client:
    """Keep the personal model, send the other."""
    return client.remember(personal=client.work["personal"]).upload(theta=client.theta)


def take_personal(model: Model, client: Client) -> Client:
    """Use the personal model."""
    return client.set(theta=client.own["personal"])


@dataclass(frozen=True)
class Ditto(FedAvg):
    """A global model, and a personal one held near it."""

    name: ClassVar[str] = "ditto"
    summary: ClassVar[str] = "FedAvg beside a personal model that each client trains near the global one"
    paper: ClassVar[str] = "Li et al., Ditto: Fair and Robust FL Through Personalization, ICML 2021"

    lam: float = option(1.0, "strength of the pull to the global model; 1 is the authors' scripts'", low=0)
    personal_epochs: int = option(1, "epochs of the personal model, beside the local epochs; the frameworks' 1", low=0)

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds a personal model, which starts at theta^0."""
        return Start(server={"theta": theta}, row={}, own={"personal": theta})

    def local(self, model: Model, now: Moment) -> Program:
        """Train the global model, then the personal one."""
        personal = Train(self.personal_epochs, learn=("personal",), pull=("received", "lam"))
        return [take_both, Train(now.epochs), personal, keep_and_upload]

    def serve(self, model: Model, now: Moment) -> Program:
        """Use the personal model."""
        return [take_personal, all_mine]
