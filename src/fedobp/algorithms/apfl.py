"""APFL (Deng et al., Adaptive Personalized Federated Learning, 2020).

Two models a client: w, shared and averaged as in FedAvg, and its own v, which never leaves it. What is used is a
mixture of both, a f_v + (1 - a) f_w, with a weight a of the client's own. On each batch w takes a step on its own loss,
then v takes one on the mixture's with w held fixed; a may follow its gradient. v starts from theta^0, a from `mix`.

The paper mixes weights; its authors' code (FedTorch) mixes logits, and so does this one. There, a moves once a visit,
after the first batch, and only if asked to; the gradient that this takes is then computed on every batch, and counted.
Both models take the common number of epochs, on the same batches: v's gradients are computed in addition to the common
budget. At use, v is mixed with the current global w.

`as-published` is what ran behind the FedOBP paper's table, the framework's own version. There w takes every step twice
with one gradient, because nobody resets it before v's step; a always moves, on every batch of the first epoch; and the
part of its gradient that belongs to w is that of w's own loss.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, all_mine

_DECAY = 0.02  # of the mixing weight, in its gradient: both codes have it


def take_both(model: fl.Model, client: fl.Client) -> fl.Client:
    """Lay out the client's own v and a, and the shared w."""
    return client.set(theta=client.state["theta"], mix=client.state["mix"], shared=fl.dense(client.download, "theta"))


def stand_still(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start both models' momentum at 0."""
    still = torch.zeros_like(client.theta)
    return client.set(theta_velocity=still, shared_velocity=still)


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep v and a, send w."""
    return client.remember(theta=client.theta, mix=client.scratch["mix"]).send(theta=client.scratch["shared"])


def mixed_logits(model: fl.Model, scratch: fl.Tensors, x: Tensor) -> Tensor:
    """Return a f_v + (1 - a) f_w."""
    return _blend(scratch["mix"], model.logits(scratch["theta"], x), model.logits(scratch["shared"], x))


def _blend(mix: Tensor, own: Tensor, shared: Tensor) -> Tensor:
    return mix * own + (1 - mix) * shared


def _loss(logits: Tensor, batch: fl.Batch) -> Tensor:
    return batch.cross_entropy(logits)


def _sgd_step(client: fl.Client, name: str, gradient: Tensor) -> fl.Client:
    """Take a step of SGD with weight decay and momentum, as training elsewhere does."""
    scratch, hparams = client.scratch, client.hparams
    decayed = torch.addcmul(gradient, scratch[name], hparams["weight_decay"])
    velocity = torch.addcmul(decayed, scratch[f"{name}_velocity"], hparams["momentum"])
    return client.set(**{name: torch.addcmul(scratch[name], velocity, -hparams["lr"]), f"{name}_velocity": velocity})


@dataclass(frozen=True)
class APFL(FedAvg):
    """A global model and a personal one, mixed."""

    name: ClassVar[str] = "apfl"
    summary: ClassVar[str] = "FedAvg beside a personal model; each client uses a mixture of the two, trained as such"
    paper: ClassVar[str] = "Deng et al., Adaptive Personalized Federated Learning, 2020"
    keeps_last_model: ClassVar[bool] = True

    mix: float = fl.option(
        0.5, "the personal model's weight in the mixture at first; the authors' code's", low=0, high=1
    )
    adaptive: str = fl.option(
        "off",
        "whether clients learn that weight; off in the authors' code, always on as-published",
        choices=("off", "on"),
    )
    mode: str = fl.mode_option("the authors' code, or the framework's behind the table")

    @property
    def predict(self) -> fl.Predict:
        """Mix the logits."""
        return mixed_logits

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Each client holds v, which starts at theta^0, and a."""
        return fl.InitialState(
            server={"theta": theta}, record={}, state={"theta": theta, "mix": theta.new_tensor(self.mix)}
        )

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train both models on the same batches."""
        passes = 3 if (self.adaptive, self.mode) == ("on", "faithful") else 2  # gradients that a batch is taken for
        return [take_both, stand_still, fl.Sweep(self._step, ctx.epochs, smallest=2, passes=passes), keep_and_upload]

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use one's own v and a with the current w."""
        return [take_both, all_mine]

    def _step(self, model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
        """Algorithm 1's local steps on one batch: w on its own loss, v on the mixture's, and a if it is time."""
        published, mix = self.mode == "as-published", client.scratch["mix"]
        shared_gradient = grad(lambda w: _loss(model.logits(w, batch.x), batch))(client.scratch["shared"])
        client = _sgd_step(client, "shared", shared_gradient)

        def loss(own: Tensor, shared: Tensor) -> Tensor:
            return _loss(_blend(mix, model.logits(own, batch.x), model.logits(shared, batch.x)), batch)

        models = client.theta, client.scratch["shared"]
        if self.adaptive == "off" or published:
            own_gradient = grad(loss)(*models)
        else:
            own_gradient, shared_gradient = grad(loss, argnums=(0, 1))(*models)
        client = _sgd_step(client, "theta", own_gradient)
        if published:
            client = _sgd_step(client, "shared", shared_gradient)
        elif self.adaptive == "off":
            return client
        towards = mix * own_gradient + (1 - mix) * shared_gradient
        slope = ((client.theta - client.scratch["shared"]) * towards).sum() + _DECAY * mix
        moved = (mix - client.hparams["lr"] * slope).clamp(0, 1)
        return client.set(mix=torch.where((batch.epoch if published else batch.step) == 0, moved, mix))
