"""pFedMe (T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020).

Two models a client: its copy w_i of the global model w, and its own theta_i, which minimises the local loss plus
lam/2 |theta - w_i|^2. On each batch theta takes `inner` steps of size eta_p on that, and on mu/2 |theta|^2 as in the
authors' code, starting where the last batch left it; then w_i moves towards it: w_i <- w_i - lr lam (w_i - theta). A
visit starts with both at w. The server takes w <- (1 - beta) w + beta mean(w_i). theta_i is what is used.

lam, mu, beta and `inner` are the authors' defaults. The outer step is the common lr (theirs is 0.005). eta_p is the
frameworks' 0.01, not the authors' 0.09. eta_p (lam + mu) must stay below 2, or the pull alone diverges; between 1 and 2
(the authors' is 1.35) theta overshoots and still converges. The protocol's momentum and weight decay do not apply, nor
does its schedule to eta_p.

Its authors take 20 batches a round, train all clients and average a sample of them; here the sampled clients train, for
the common local epochs, and each batch costs `inner` gradients: counted as extra compute. A client that has never
trained is served theta^0. Their code evaluates w_i, by an aliasing slip; theta_i is what their paper uses.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from fedobp.algorithms.base import (
    Batch,
    Client,
    Moment,
    Program,
    Record,
    Start,
    Sweep,
    Tensors,
    average,
    dense,
    option,
)
from fedobp.algorithms.fedavg import FedAvg, all_mine
from fedobp.models import Model


def take_twice(model: Model, client: Client) -> Client:
    """Algorithm 1: start w_i, and theta with it, from the downloaded model."""
    received = dense(client.down, "theta")
    return client.set(theta=received, shared=received)


def keep_and_upload(model: Model, client: Client) -> Client:
    """Keep theta_i, send w_i."""
    return client.remember(theta=client.theta).upload(theta=client.work["shared"])


def take_personal(model: Model, client: Client) -> Client:
    """Use the personal model of the last visit."""
    return client.set(theta=client.own["theta"])


@dataclass(frozen=True)
class PFedMe(FedAvg):
    """A global model, and personal ones that pull it along."""

    name: ClassVar[str] = "pfedme"
    summary: ClassVar[str] = "each client solves for a personal model near the global one, which follows it"
    paper: ClassVar[str] = "T. Dinh et al., Personalized FL with Moreau Envelopes, NeurIPS 2020"

    inner: int = option(5, "K, the personal model's steps on each batch; 5 is the authors'", low=1)
    lam: float = option(15.0, "strength of the pull between the models; 15 is the authors'", low=0)
    eta_p: float = option(0.01, "the personal model's step size; the frameworks' (the authors': 0.09)", low=0)
    mu: float = option(0.001, "weight decay of the personal model; 0.001 is the authors'", low=0)
    beta: float = option(1.0, "how far the global model moves to the clients' mean; 1 is the authors'", low=0)

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds a personal model, which starts at theta^0."""
        return Start(server={"theta": theta}, row={}, own={"theta": theta})

    def local(self, model: Model, now: Moment) -> Program:
        """Train both models on the same batches."""
        return [take_twice, Sweep(self._step, now.epochs, smallest=2, passes=self.inner), keep_and_upload]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Algorithm 1, on the server: w <- (1 - beta) w + beta mean(w_i)."""
        return {"theta": torch.lerp(server["theta"], average(dense(up, "theta"), n), self.beta)}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Use the personal model."""
        return [take_personal, all_mine]

    def _step(self, model: Model, client: Client, batch: Batch) -> Client:
        """Algorithm 1: K steps on theta for the proximal problem of a batch, then a step of w_i towards theta."""
        hp, shared, theta = client.hp, client.work["shared"], client.theta
        gradient = grad(
            lambda at: batch.mean(functional.cross_entropy(model.logits(at, batch.x), batch.y, reduction="none"))
        )
        # theta <- theta - eta_p (gradient + lam (theta - w) + mu theta), in as few passes over the vectors as it takes.
        keep, pull = 1 - hp["eta_p"] * (hp["lam"] + hp["mu"]), hp["eta_p"] * hp["lam"]
        for _ in range(self.inner):
            theta = torch.addcmul(torch.addcmul(keep * theta, gradient(theta), -hp["eta_p"]), shared, pull)
        return client.set(theta=theta, shared=shared - hp["lr"] * hp["lam"] * (shared - theta))
