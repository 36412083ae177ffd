"""FLUTE (Liu, Shen and Yang, Federated Representation Learning in the Under-Parameterized Regime, ICML 2024).

A shared base and one head per client, as in FedRep, with terms that push heads towards neural collapse: the rows of a
head's weight W that belong to the client's K labels should form a simplex equiangular tight frame. A client trains its
head, then all entries for one epoch; the server averages the bases and takes one gradient step on the sampled heads. So
heads are stored on the server, in the clients' records.

All numbers are the authors' values (except 10 local epochs, batches of 10 and momentum 0.5: here it is the common
budget, 4 head epochs and 1 of all). Their last round, in which all clients train a head, is an option, and replaces the
last round instead of following it; their server's step is behind a flag, which their instructions set.

`as-published` is what ran behind the FedOBP paper's table: there the features were detached from the gradient, so the
base was never updated, and all epochs train a linear head on the features of theta^0. Not reproduced: there a client
that has not trained yet uses the average of all heads.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from fedobp import method as fl


def collapse(weight: Tensor, present: Tensor) -> Tensor:
    """R(W) = | WW'/|WW'| - (K-1)^(-1/2) (I - 11'/K) o uu' |, in Frobenius norms, u being 1 at the client's labels.

    Takes any leading axes: weight is [..., K, features], present [..., K].
    """
    classes, u = weight.shape[-2], present.to(weight.dtype)
    gram = weight @ weight.mT
    identity = torch.eye(classes, dtype=weight.dtype, device=weight.device)
    frame = (identity - 1 / classes) / math.sqrt(classes - 1)
    gap = gram / torch.linalg.matrix_norm(gram, keepdim=True) - frame * u[..., :, None] * u[..., None, :]
    distance: Tensor = torch.linalg.matrix_norm(gap)
    return distance


def _loss(model: fl.Model, client: fl.Client, batch: fl.Batch, features: Tensor) -> Tensor:
    """Return the cross-entropy, l1 R(W) and l2 |W|^2."""
    weight, bias = model.head(client.theta)
    fit = batch.cross_entropy(functional.linear(features, weight, bias))
    shape = collapse(weight, client.data["counts"] > 0)
    return fit + client.hparams["simplex"] * shape + client.hparams["weights"] * weight.square().sum()


def head_loss(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """Return the head's loss; features are constants in it."""
    return _loss(model, client, batch, model.features(client.theta, batch.x).detach())


def joint_loss(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """Return the loss of all entries: the head's, and l3 |F|^2 of the batch's features (a sum, as in their code)."""
    features = model.features(client.theta, batch.x)
    spread = (features.square().sum(dim=-1) * batch.weight).sum()
    return _loss(model, client, batch, features) + client.hparams["features"] * spread


def join_parts(model: fl.Model, client: fl.Client) -> fl.Client:
    """Join the downloaded base and head."""
    theta = model.layout.join(fl.dense(client.download, "base"), fl.dense(client.download, "head"))
    return client.set(theta=theta, mine=model.layout.is_head(theta.device))


def upload_head(model: fl.Model, client: fl.Client) -> fl.Client:
    """Upload the trained head."""
    return client.send(head=model.layout.split(client.theta)[1])


def upload_base(model: fl.Model, client: fl.Client) -> fl.Client:
    """Upload the trained base, and the client's labels, which the server's step on its head uses."""
    return client.send(base=model.layout.split(client.theta)[0], present=client.data["counts"] > 0)


@dataclass(frozen=True)
class Flute(fl.Method):
    """A shared base and one head per client on the server, regularised towards neural collapse."""

    name: ClassVar[str] = "flute"
    summary: ClassVar[str] = "shared base and one head per client, which client and server push towards neural collapse"
    paper: ClassVar[str] = "Liu et al., Federated Representation Learning in the Under-Parameterized Regime, ICML 2024"
    one_label: ClassVar[bool] = True

    simplex: float = fl.option(0.25, "weight of R(W), the head's distance from a simplex frame; the authors'", low=0)
    weights: float = fl.option(0.0025, "weight of the head's squared weights; the authors'", low=0)
    features: float = fl.option(0.0005, "weight of a batch's squared features; the authors'", low=0)
    joint_epochs: int = fl.option(1, "local epochs of all entries, after the head's; 1 is the authors'", low=0)
    server_lr: float = fl.option(0.5, "the server's step on the sampled heads; the authors', 0: none", low=0)
    final_epochs: int = fl.option(0, "head epochs in a last round over all clients; the authors use 10", low=0)
    mode: str = fl.mode_option("whether the base is trained, or (as-published) never")

    def cohorts(self, round: int, rounds: int) -> tuple[fl.CohortKind, ...]:
        """With `final_epochs`, all clients tune their heads in the last round."""
        return ("all",) if self.final_epochs > 0 and round == rounds else ("sampled",)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Hold each client's head in its record; the server's model keeps that of theta^0."""
        return fl.InitialState(server={"theta": theta}, record={"head": model.layout.split(theta)[1]}, state={})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the base, and each client its head."""
        base, _ = ctx.model.layout.split(server["theta"])
        return {"base": fl.broadcast(base, ctx), "head": records["head"]}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the head, then all entries."""
        if ctx.full_participation:
            return [join_parts, fl.Train(self.final_epochs, part="head", loss=head_loss), upload_head]
        joint = min(self.joint_epochs, ctx.epochs) if self.mode == "faithful" else 0
        head = fl.Train(ctx.epochs - joint, part="head", loss=head_loss)
        return [join_parts, head, fl.Train(joint, loss=joint_loss), upload_head, upload_base]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average the bases; take one gradient step on the mean of R over the sampled heads (their weights alone)."""
        layout, heads = ctx.model.layout, update.dense("head")
        if "base" not in update.upload:  # the last round trains heads only, and the server takes no step
            return server, {"head": heads}
        base, head = layout.split(server["theta"])

        def mean_collapse(heads: Tensor) -> Tensor:
            weight, _ = ctx.model.head(layout.join(base.expand(len(heads), -1), heads))
            return collapse(weight, update.dense("present")).mean()

        stepped = heads - self.server_lr * grad(mean_collapse)(heads)
        return {"theta": layout.join(update.mean("base"), head)}, {"head": stepped}

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the current base with the client's head."""
        return [join_parts]
