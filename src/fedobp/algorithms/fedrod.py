"""FedRoD (Chen and Chao, On Bridging Generic and Personalized Federated Learning, ICLR 2022).

Two heads on one shared base. The generic head G is shared and averaged with the base; both are trained by a balanced
softmax, which adds gamma log(class counts) to the logits, so that they do not fit a client's class frequencies. The
personal head P stays on the client and learns, by the ordinary cross-entropy of G + P, what G leaves out; its gradient
reaches neither G nor the base. The client uses G + P, which is linear in the features, hence one ordinary model.

gamma = 1 is the paper's value. The authors' repository (hongyouc/Fed-RoD) holds no code; P starts from the head of
theta^0, as in PFLlib. The paper's other form, in which a hypernetwork makes P from the class counts, is omitted, and so
are its other balanced losses.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg


def take_both(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the shared model, which ends in G, and the client's head P."""
    return client.set(theta=fl.dense(client.download, "theta"), head=client.state["head"])


def two_losses(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """Return the balanced softmax loss of G(z) plus the cross-entropy of sg[G(z)] + P(sg[z]); sg stops gradients."""
    features, (weight, bias) = model.features(client.theta, batch.x), model.head(client.theta)
    personal_weight, personal_bias = client.scratch["head"].split([weight.numel(), bias.numel()])
    generic = functional.linear(features, weight, bias)
    personal = functional.linear(features.detach(), personal_weight.view_as(weight), personal_bias)
    # gamma log(counts), and 0 where gamma is 0: a class that the client does not have would give 0 times infinity.
    shift = torch.special.xlogy(client.hparams["gamma"], client.data["counts"].to(client.theta.dtype))
    balanced = fl.sample_losses(generic + shift, batch.y)
    joint = fl.sample_losses(generic.detach() + personal, batch.y)
    # Padding can be of a class that the client does not have: its loss is infinite, and a weight of 0 gives NaN.
    return batch.mean(torch.where(batch.weight > 0, balanced + joint, 0))


def add_heads(model: fl.Model, client: fl.Client) -> fl.Client:
    """Join both heads into the one model that predicts G(z) + P(z)."""
    base, generic = model.layout.split(client.theta)
    theta = model.layout.join(base, generic + client.scratch["head"])
    return client.set(theta=theta, mine=model.layout.is_head(theta.device))


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep P, upload base and G; the client's last local model is the one with both heads."""
    return add_heads(model, client.remember(head=client.scratch["head"]).send(theta=client.theta))


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """A shared model that is trained with a class-balanced loss, and a private head beside the shared one."""

    name: ClassVar[str] = "fedrod"
    summary: ClassVar[str] = "shared base and balanced head, and a private head that is added to it"
    paper: ClassVar[str] = "Chen and Chao, On Bridging Generic and Personalized FL for Image Classification, ICLR 2022"

    gamma: float = fl.option(
        1.0, "weight of the class counts in the shared head's logits in training; 1 is the paper's, 0 is off", low=0
    )

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: the private head, which starts as that of theta^0."""
        return fl.InitialState(server={"theta": theta}, record={}, state={"head": model.layout.split(theta)[1]})

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train base and both heads on the same batches."""
        return [take_both, fl.Train(ctx.epochs, learn=("theta", "head"), loss=two_losses), keep_and_upload]

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the current base and G with the client's P."""
        return [take_both, add_heads]
