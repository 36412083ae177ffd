"""FedALA (Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023).

FedAvg with an adaptive start: in the top tensors of the model, each entry is local + (global - local) W, where local is
the client's last trained value and W, in [0, 1], is learned before training on a share of the client's data:
W <- clip(W - eta gradient (global - local), 0, 1). A client's first adaptation continues until the loss has converged,
later ones take one epoch. Below the top is the global model. Then all entries are trained and uploaded. Served is the
mixed model before training; for use W is learned in the same way, and not kept.

eta, the two tensors, the 80 per cent of the data and the criterion of convergence are the authors': after more than 10
epochs, once the standard deviation of the last 10 losses is below 0.1, each being the loss of an epoch's last batch.
They set no bound; here it is 100 epochs. They take a slice of the data, here it is a random draw; and they adapt all
clients in every round, here a client is adapted when it trains or is tested. Only the top of the last model is kept.

`as-published` is what ran behind the FedOBP paper's table. One worker object stood for all clients, so local is the
model that the previous client trained, and all clients share W; the very first client spends the long first adaptation
on equal models, where W cannot change, and all others take one epoch. This mode is sequential over clients: the leaked
state and the round's mean are relayed by the server, so its byte counts are meaningless, and at test every client
starts from the state of the last trained one.
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
_MOST = 100  # epochs of a client's first adaptation
_LOOK_BACK = 10  # epochs whose losses are compared
_CONVERGED = 0.1  # below this standard deviation of these losses


def take_start(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the global model at the beginning of the round."""
    return client.set(theta=fl.dense(client.download, "start"))


def needs_epoch(model: fl.Model, client: fl.Client) -> Tensor:
    """Algorithm 1: learn W until the loss has converged the first time, for one epoch later; not on equal models."""
    scratch = client.scratch
    converged = (scratch["epochs"] > _LOOK_BACK) & (scratch["losses"].std(correction=0) < _CONVERGED)
    differ = (scratch["top"] != scratch["shared"]).any()
    return differ & torch.where(scratch["started"], scratch["epochs"] < 1, ~converged)


@dataclass(frozen=True)
class FedALA(SequentialAsPublished, FedAvg):
    """FedAvg that mixes the global top tensors with the client's, entry by entry, before training."""

    name: ClassVar[str] = "fedala"
    summary: ClassVar[str] = "FedAvg whose clients learn how to mix global and local values in the top tensors"
    paper: ClassVar[str] = "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized FL, AAAI 2023"

    eta: float = fl.option(1.0, "step size of the mixing weights; 1 is the authors'", low=0)
    tensors: int = fl.option(2, "p, how many of the last tensors are mixed; 2, the classifier, is the authors'", low=1)
    mode: str = fl.mode_option("each client's last model and weights, or (as-published) the previous client's")

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """W starts at 1, which is the global model; the local top at theta^0."""
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
        """Learn W and mix, then train all entries."""
        take = take_start if self.sequential else take_global
        return [take, self._mix, self._learning(), fl.Train(ctx.epochs), self._keep]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average; in the sequential mode, add the one upload to the round's mean."""
        if not self.sequential:
            return super().aggregate(ctx, server, records, update)
        [theta], [mixing] = update.dense("theta"), update.dense("mixing")
        leaked = {"top": self._split(ctx.model, theta)[1], "mixing": mixing}
        return {**after_client(server, ctx, theta, update.n.sum()), **leaked}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Learn W, and use the mixed model."""
        return [take_global, self._mix, self._learning(), self._mark]

    def _learning(self) -> fl.Sweep:
        return fl.Sweep(self._learn, _MOST, needs_epoch, fraction=_SHARE)

    def _split(self, model: fl.Model, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (below, top) of a vector: the other tensors, and the last ones, which are mixed."""
        below = sum(model.layout.sizes[: -self.tensors])
        return theta[..., :below], theta[..., below:]

    def _mix(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Initialise as in the paper: the global model, and in its top the mixture with the current weights."""
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
        """Update W as in the paper: step along the gradient of the mixed top, clip, mix again; record the loss."""
        scratch, layout, last = client.scratch, model.layout, slice(-self.tensors, None)
        names, sizes, shapes = layout.names[last], layout.sizes[last], layout.shapes[last]
        below, mixed = self._split(model, client.theta)

        def loss_of(top: Tensor) -> Tensor:
            # Tensor by tensor: through a concatenation of below and top, the gradient of all entries would be taken.
            pieces = zip(names, top.split(sizes), shapes, strict=True)
            tensors = {**layout.views(client.theta), **{name: piece.view(shape) for name, piece, shape in pieces}}
            return batch.cross_entropy(model.apply(tensors, batch.x))

        gradient, loss = grad_and_value(loss_of)(mixed)
        top, shared = scratch["top"], scratch["shared"]
        mixing = (scratch["mixing"] - client.hparams["eta"] * gradient * (shared - top)).clamp(0, 1)
        # A ring buffer of one loss per epoch: that of the last batch.
        slot = torch.arange(_LOOK_BACK, device=loss.device) == batch.epoch % _LOOK_BACK
        return client.set(
            theta=torch.cat([below, torch.lerp(top, shared, mixing)]),
            mixing=mixing,
            losses=torch.where(slot, loss.to(mixing.dtype), scratch["losses"]),
            epochs=batch.epoch + 1,
        )

    def _keep(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Keep the trained top and W, upload the trained model."""
        mixing = client.scratch["mixing"]
        if self.sequential:
            return client.send(theta=client.theta, mixing=mixing)
        started = client.state["started"] | (client.scratch["epochs"] > 0)
        _, top = self._split(model, client.theta)
        return client.remember(top=top, mixing=mixing, started=started).send(theta=client.theta)

    def _mark(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Mark the top as personal."""
        below, top = self._split(model, client.theta)
        return client.set(mine=torch.cat([torch.zeros_like(below), torch.ones_like(top)]).bool())
