"""FedALA (Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023).

FedAvg whose clients do not start from the global model alone: in its top tensors, each entry is
local + (global - local) W, where local is what the client trained last and W, in [0, 1], is learned before training on
a share of the client's data: W <- clip(W - eta gradient (global - local), 0, 1). A client's first time goes on until
the loss has settled, later ones take an epoch. All below the top is the global model. Then everything is trained and
sent. What is used is the mixed model before training; at use W is learned as before a visit, and not kept.

eta, the two tensors and the 80 per cent of the data are the authors' own, as is when a loss has settled: after more
than 10 epochs, once the standard deviation of the last 10 is below 0.1, each being the loss of an epoch's last batch.
They set no bound; here 100 epochs are one. They take a slice of the data, here it is drawn; and they adapt all clients
in every round, here a client is adapted when it trains or is tested. Only the top of the last model need be kept.

`as-published` is what ran behind the FedOBP paper's table. One worker played all clients, so local is the model that
the client before has trained, and W is everyone's; the very first client spends the long first time on equal models,
where W cannot move, and everyone else takes one epoch. This mode is sequential over clients: the leaked state and the
round's books travel through the server, so its bytes mean nothing, and at test every client starts from what the last
trained one left.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, take_global
from fedobp.algorithms.sequential import SequentialAsPublished, after_client, round_start, server_before

_SHARE = 0.8  # of the data, to learn W
_MOST = 100  # epochs of a client's first time
_LOOK_BACK = 10  # epochs whose losses must agree
_SETTLED = 0.1  # the standard deviation at which they do


def take_start(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the global model as it was when the round began, whoever has trained since."""
    return client.set(theta=fl.dense(client.download, "start"))


def goes_on(model: fl.Model, client: fl.Client) -> Tensor:
    """Algorithm 1: learn W until the loss has settled the first time, for an epoch later; not on equal models."""
    scratch = client.scratch
    settled = (scratch["epochs"] > _LOOK_BACK) & (scratch["losses"].std(correction=0) < _SETTLED)
    apart = (scratch["top"] != scratch["shared"]).any()
    return apart & torch.where(scratch["started"], scratch["epochs"] < 1, ~settled)


@dataclass(frozen=True)
class FedALA(SequentialAsPublished, FedAvg):
    """FedAvg that mixes the global top with the client's own, entry by entry, before training."""

    name: ClassVar[str] = "fedala"
    summary: ClassVar[str] = "FedAvg whose clients learn how far to take over each entry of the top tensors"
    paper: ClassVar[str] = "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized FL, AAAI 2023"

    eta: float = fl.option(1.0, "step size of the mixing weights; 1 is the authors'", low=0)
    tensors: int = fl.option(2, "p, how many of the last tensors are mixed; 2, the classifier, is the authors'", low=1)
    mode: str = fl.mode_option("own models and weights, or (as-published) those of the client before")

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """W starts at 1, which is the global model; the local one at theta^0."""
        _, top = self._split(model, theta)
        if not self.sequential:
            never = theta.new_zeros((), dtype=torch.bool)
            return fl.InitialState({"theta": theta}, {}, {"top": top, "mixing": torch.ones_like(top), "started": never})
        sequence = server_before(theta, theta.new_zeros((), dtype=torch.int64))
        return fl.InitialState({**sequence, "top": top, "mixing": torch.ones_like(top)}, {}, {})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the global model."""
        download, records = super().download(ctx, server, records)
        if not self.sequential:
            return download, records
        leaked = {"start": round_start(server, ctx), "top": server["top"], "mixing": server["mixing"]}
        return {**download, **{name: fl.broadcast(vector, ctx) for name, vector in leaked.items()}}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Mix, learning how, then train everything."""
        take = take_start if self.sequential else take_global
        return [take, self._mix, self._learning(), fl.Train(ctx.epochs), self._keep]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average; where clients take turns, the mean grows with each of them."""
        if not self.sequential:
            return super().aggregate(ctx, server, records, update)
        [theta], [mixing] = update.dense("theta"), update.dense("mixing")
        leaked = {"top": self._split(ctx.model, theta)[1], "mixing": mixing}
        return {**after_client(server, ctx, theta, update.n.sum()), **leaked}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Mix, learning how, and use that."""
        return [take_global, self._mix, self._learning(), self._mark]

    def _learning(self) -> fl.Sweep:
        return fl.Sweep(self._learn, _MOST, goes_on, fraction=_SHARE)

    def _split(self, model: fl.Model, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (what lies below, top) of a vector."""
        below = sum(model.layout.sizes[: -self.tensors])
        return theta[..., :below], theta[..., below:]

    def _mix(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Initialise as the paper does: the global model, and in its top the mixture with the weights so far."""
        below, shared = self._split(model, client.theta)
        held: fl.Record = client.download if self.sequential else {**client.state}
        top, mixing = fl.dense(held, "top"), fl.dense(held, "mixing")
        return client.set(
            theta=torch.cat([below, torch.lerp(top, shared, mixing)]),
            shared=shared,
            top=top,
            mixing=mixing,
            started=client.state.get("started", torch.ones_like(shared[0], dtype=torch.bool)),
            losses=shared.new_zeros(_LOOK_BACK),
            epochs=torch.zeros_like(client.data["n"]),
        )

    def _learn(self, model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
        """Step W along the gradient of the mixed top, clip it, mix anew (the paper's update of W); note the loss."""
        scratch, (below, mixed), layout = client.scratch, self._split(model, client.theta), model.layout
        names, sizes = layout.names[-self.tensors :], layout.sizes[-self.tensors :]
        shapes = layout.shapes[-self.tensors :]

        def loss_of(top: Tensor) -> Tensor:
            # Tensor by tensor: of a vector made of below and top, the gradient would be taken of all.
            pieces = zip(names, top.split(sizes), shapes, strict=True)
            tensors = {**layout.views(client.theta), **{name: piece.view(shape) for name, piece, shape in pieces}}
            logits = model.apply(tensors, batch.x)
            return batch.cross_entropy(logits)

        gradient, loss = grad_and_value(loss_of)(mixed)
        mixing = (scratch["mixing"] - client.hparams["eta"] * gradient * (scratch["shared"] - scratch["top"])).clamp(
            0, 1
        )
        # An epoch's later batches write over its earlier ones, and an eleventh epoch over the first.
        here = torch.arange(_LOOK_BACK, device=loss.device) == batch.epoch % _LOOK_BACK
        return client.set(
            theta=torch.cat([below, torch.lerp(scratch["top"], scratch["shared"], mixing)]),
            mixing=mixing,
            losses=torch.where(here, loss.to(mixing.dtype), scratch["losses"]),
            epochs=batch.epoch + 1,
        )

    def _keep(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Keep the trained top and W, send the trained model."""
        mixing = client.scratch["mixing"]
        if self.sequential:
            return client.send(theta=client.theta, mixing=mixing)
        started = client.state["started"] | (client.scratch["epochs"] > 0)
        _, top = self._split(model, client.theta)
        return client.remember(top=top, mixing=mixing, started=started).send(theta=client.theta)

    def _mark(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Mark the top as the client's own."""
        below, top = self._split(model, client.theta)
        return client.set(mine=torch.cat([torch.zeros_like(below), torch.ones_like(top)]).bool())
