"""FedRoD (Chen and Chao, On Bridging Generic and Personalized Federated Learning, ICLR 2022).

Two heads on one shared base. The generic head G is shared and averaged with the base; both learn from a balanced
softmax, whose logits are raised by gamma log(class counts), so that they do not pick up a client's own mix of classes.
The personal head P never leaves the client and learns, by the ordinary cross-entropy of G + P, what G leaves out; its
gradient reaches neither G nor the base. G + P is used: it is linear in the features, hence one ordinary model.

gamma = 1 is the paper's. Its authors' repository (hongyouc/Fed-RoD) holds no code; P starts from theta^0's head, as in
PFLlib. The paper's other form, in which a hypernetwork makes P from the class counts, is left out, and so are its other
balanced losses.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg


def take_both(model: fl.Model, client: fl.Client) -> fl.Client:
    """Lay out the shared model, which ends in G, and the client's own head P."""
    return client.set(theta=fl.dense(client.download, "theta"), head=client.state["head"])


def two_losses(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """Return the balanced softmax loss of G(z) plus the cross-entropy of sg[G(z)] + P(sg[z]); sg stops gradients."""
    features, (weight, bias) = model.features(client.theta, batch.x), model.head(client.theta)
    own_weight, own_bias = client.scratch["head"].split([weight.numel(), bias.numel()])
    generic = functional.linear(features, weight, bias)
    personal = functional.linear(features.detach(), own_weight.view_as(weight), own_bias)
    # gamma log(counts), and 0 where gamma is 0: a class that the client does not have would give 0 times infinity.
    raised = torch.special.xlogy(client.hparams["gamma"], client.data["counts"].to(client.theta.dtype))
    balanced = functional.cross_entropy(generic + raised, batch.y, reduction="none")
    joint = functional.cross_entropy(generic.detach() + personal, batch.y, reduction="none")
    # Padding may be of a class that the client does not have: its loss is infinite, and no weight of 0 helps.
    return batch.mean(torch.where(batch.weight > 0, balanced + joint, 0))


def add_heads(model: fl.Model, client: fl.Client) -> fl.Client:
    """Make the one model that predicts G(z) + P(z)."""
    base, generic = model.layout.split(client.theta)
    theta = model.layout.join(base, generic + client.scratch["head"])
    return client.set(theta=theta, mine=model.layout.is_head(theta.device))


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep P, send base and G; the client's last local model is the one that uses both heads."""
    return add_heads(model, client.remember(head=client.scratch["head"]).send(theta=client.theta))


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """A shared model that is trained to be fair to all classes, and a private head beside its own."""

    name: ClassVar[str] = "fedrod"
    summary: ClassVar[str] = "shared base and balanced head, and a private head that is added to it"
    paper: ClassVar[str] = "Chen and Chao, On Bridging Generic and Personalized FL for Image Classification, ICLR 2022"

    gamma: float = fl.option(
        1.0, "how far class counts raise the shared head's logits in training; 1 is the paper's, 0 is off", low=0
    )

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Each client holds a head of its own, which starts as theta^0's."""
        return fl.InitialState(server={"theta": theta}, record={}, state={"head": model.layout.split(theta)[1]})

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train base and both heads on the same batches."""
        return [take_both, fl.Train(ctx.epochs, learn=("theta", "head"), loss=two_losses), keep_and_upload]

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the current base and G with one's own P."""
        return [take_both, add_heads]
