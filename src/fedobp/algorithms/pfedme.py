"""pFedMe (T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020).

Two models per client: its copy w_i of the global model w, and a personal theta_i, which minimises the local loss plus
lam/2 |theta - w_i|^2. On each batch theta takes `inner` steps of size eta_p on that, and on mu/2 |theta|^2 as in the
authors' code, starting from its value after the previous batch; then w_i moves towards it:
w_i <- w_i - lr lam (w_i - theta). A round starts with both at w. The server takes w <- (1 - beta) w + beta mean(w_i).
The client uses theta_i.

lam, mu, beta and `inner` are the authors' defaults. The outer step is the common lr (the authors': 0.005). eta_p is the
frameworks' 0.01, not the authors' 0.09. eta_p (lam + mu) must stay below 2, or the proximal term alone diverges;
between 1 and 2 (the authors': 1.35) theta overshoots and still converges. The protocol's momentum and weight decay do
not apply, nor does its schedule to eta_p.

The authors take 20 batches a round, train all clients and average a sample of them; here the sampled clients train, for
the common local epochs, and each batch costs `inner` gradients: counted as extra compute. A client that has never
trained is served theta^0. Their code evaluates w_i, because of an aliasing bug; their paper uses theta_i.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, all_mine


def take_twice(model: fl.Model, client: fl.Client) -> fl.Client:
    """Algorithm 1: start w_i, and theta with it, from the downloaded model."""
    received = fl.dense(client.download, "theta")
    return client.set(theta=received, shared=received)


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep theta_i, upload w_i."""
    return client.remember(theta=client.theta).send(theta=client.scratch["shared"])


def take_personal(model: fl.Model, client: fl.Client) -> fl.Client:
    """Use the personal model of the client's last round."""
    return client.set(theta=client.state["theta"])


@dataclass(frozen=True)
class PFedMe(FedAvg):
    """A global model, and personal ones that it follows."""

    name: ClassVar[str] = "pfedme"
    summary: ClassVar[str] = "each client solves for a personal model near the global one, which follows it"
    paper: ClassVar[str] = "T. Dinh et al., Personalized FL with Moreau Envelopes, NeurIPS 2020"
    keeps_last_model: ClassVar[bool] = True

    inner: int = fl.option(5, "K, the personal model's steps on each batch; 5 is the authors'", low=1)
    lam: float = fl.option(15.0, "weight of the proximal term between the models; 15 is the authors'", low=0)
    eta_p: float = fl.option(0.01, "the personal model's step size; the frameworks' (the authors': 0.09)", low=0)
    mu: float = fl.option(0.001, "weight decay of the personal model; 0.001 is the authors'", low=0)
    beta: float = fl.option(1.0, "how far the global model moves to the clients' mean; 1 is the authors'", low=0)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: the personal model, which starts at theta^0."""
        return fl.InitialState(server={"theta": theta}, record={}, state={"theta": theta})

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train both models on the same batches."""
        return [take_twice, fl.Sweep(self._step, ctx.epochs, smallest=2, passes=self.inner), keep_and_upload]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Algorithm 1, server: w <- (1 - beta) w + beta mean(w_i)."""
        return {"theta": torch.lerp(server["theta"], update.mean("theta"), self.beta)}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the personal model."""
        return [take_personal, all_mine]

    def _step(self, model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
        """Algorithm 1: K steps on theta for the proximal problem of a batch, then a step of w_i towards theta."""
        hparams, shared, theta = client.hparams, client.scratch["shared"], client.theta
        gradient = grad(lambda at: batch.cross_entropy(model.logits(at, batch.x)))
        # theta <- theta - eta_p (gradient + lam (theta - w) + mu theta), in as few passes over the vectors as possible.
        keep, pull = 1 - hparams["eta_p"] * (hparams["lam"] + hparams["mu"]), hparams["eta_p"] * hparams["lam"]
        for _ in range(self.inner):
            theta = torch.addcmul(torch.addcmul(keep * theta, gradient(theta), -hparams["eta_p"]), shared, pull)
        return client.set(theta=theta, shared=shared - hparams["lr"] * hparams["lam"] * (shared - theta))
