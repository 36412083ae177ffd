"""APFL (Deng et al., Adaptive Personalized Federated Learning, 2020).

Two models per client: w, shared and averaged as in FedAvg, and a personal v, which stays on the client. The client uses
a mixture of both, a f_v + (1 - a) f_w, with its own weight a. On each batch w takes a step on its loss, then v takes
one on the mixture's loss with w fixed; a can follow its gradient. v starts from theta^0, a from `mix`.

The paper mixes weights; the authors' code (FedTorch) mixes logits, and so does this one. There, a is updated once a
round, after the first batch, and only if `adaptive` is on; the gradient for it is then computed on every batch, and
counted. Both models take the common number of epochs, on the same batches: v's gradients are computed in addition to
the common budget. For use, v is mixed with the current global w.

`as-published` is what ran behind the FedOBP paper's table, the framework's version. There w takes every step twice with
one gradient, because the gradient is not reset before v's step; a is always updated, on every batch of the first epoch;
and the part of its gradient that belongs to w is that of w's loss.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, all_mine

_DECAY = 0.02  # of the mixing weight, in its gradient: as in both codes


def take_both(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the client's v and a, and the shared w."""
    return client.set(theta=client.state["theta"], mix=client.state["mix"], shared=fl.dense(client.download, "theta"))


def reset_momentum(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start both models' momentum at 0."""
    zero = torch.zeros_like(client.theta)
    return client.set(theta_velocity=zero, shared_velocity=zero)


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep v and a, upload w."""
    return client.remember(theta=client.theta, mix=client.scratch["mix"]).send(theta=client.scratch["shared"])


def mixed_logits(model: fl.Model, scratch: fl.Tensors, x: Tensor) -> Tensor:
    """Return a f_v + (1 - a) f_w."""
    return _blend(scratch["mix"], model.logits(scratch["theta"], x), model.logits(scratch["shared"], x))


def _blend(mix: Tensor, personal: Tensor, shared: Tensor) -> Tensor:
    return mix * personal + (1 - mix) * shared


def _sgd_step(client: fl.Client, name: str, gradient: Tensor) -> fl.Client:
    """Take a step of SGD with weight decay and momentum, as `Train` does."""
    scratch, hparams = client.scratch, client.hparams
    decayed = torch.addcmul(gradient, scratch[name], hparams["weight_decay"])
    velocity = torch.addcmul(decayed, scratch[f"{name}_velocity"], hparams["momentum"])
    return client.set(**{name: torch.addcmul(scratch[name], velocity, -hparams["lr"]), f"{name}_velocity": velocity})


@dataclass(frozen=True)
class APFL(FedAvg):
    """A global model and a personal one, mixed."""

    name: ClassVar[str] = "apfl"
    summary: ClassVar[str] = "FedAvg beside a personal model; each client trains and uses a mixture of the two"
    paper: ClassVar[str] = "Deng et al., Adaptive Personalized Federated Learning, 2020"
    keeps_last_model: ClassVar[bool] = True

    mix: float = fl.option(
        0.5, "initial weight of the personal model in the mixture; as in the authors' code", low=0, high=1
    )
    adaptive: str = fl.option(
        "off",
        "whether clients learn that weight; off, as in the authors' code; always on as-published",
        choices=("off", "on"),
    )
    mode: str = fl.mode_option("the authors' code, or the framework's behind the table")

    @property
    def predict(self) -> fl.Predict:
        """Mix the logits."""
        return mixed_logits

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: v, which starts at theta^0, and a."""
        state = {"theta": theta, "mix": theta.new_tensor(self.mix)}
        return fl.InitialState(server={"theta": theta}, record={}, state=state)

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train both models on the same batches."""
        passes = 3 if (self.adaptive, self.mode) == ("on", "faithful") else 2  # gradients that are taken on a batch
        return [take_both, reset_momentum, fl.Sweep(self._step, ctx.epochs, smallest=2, passes=passes), keep_and_upload]

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the client's v and a with the current w."""
        return [take_both, all_mine]

    def _step(self, model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
        """Algorithm 1, local steps on one batch: w on its loss, v on the mixture's, and a when it is due."""
        published, mix = self.mode == "as-published", client.scratch["mix"]
        shared_gradient = grad(lambda w: batch.cross_entropy(model.logits(w, batch.x)))(client.scratch["shared"])
        client = _sgd_step(client, "shared", shared_gradient)

        def loss(personal: Tensor, shared: Tensor) -> Tensor:
            return batch.cross_entropy(_blend(mix, model.logits(personal, batch.x), model.logits(shared, batch.x)))

        models = client.theta, client.scratch["shared"]
        if self.adaptive == "off" or published:
            personal_gradient = grad(loss)(*models)
        else:
            personal_gradient, shared_gradient = grad(loss, argnums=(0, 1))(*models)
        client = _sgd_step(client, "theta", personal_gradient)
        if published:
            client = _sgd_step(client, "shared", shared_gradient)
        elif self.adaptive == "off":
            return client
        mixed_gradient = mix * personal_gradient + (1 - mix) * shared_gradient
        slope = ((client.theta - client.scratch["shared"]) * mixed_gradient).sum() + _DECAY * mix
        updated = (mix - client.hparams["lr"] * slope).clamp(0, 1)
        return client.set(mix=torch.where((batch.epoch if published else batch.step) == 0, updated, mix))
