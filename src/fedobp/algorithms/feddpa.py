"""FedDPA (Yang et al., Dynamic Personalized Federated Learning with Adaptive Differential Privacy, NeurIPS 2023).

A client keeps its own last values where its Fisher information is high, and takes the global ones elsewhere. The
information is the mean over its training samples of the squared gradient of log p(y | x) at its own last model, scaled
to [0, 1] within each tensor; above the threshold an entry is personal. Then the personal entries are trained, held near
the global model, and after them the shared ones, held at a distance of `bound` from it. All entries are uploaded and
averaged. At use the information is computed again, and the two models are merged.

Threshold, strengths and bound are the authors' own, and so are all local epochs in each of the two phases: a visit
takes twice the common budget, and is counted so. They take Adam, batches of 16 and 2 epochs; here it is the common SGD.
The clipping and the noise that make it differentially private are left out (their `no_clip` and `no_noise`). A client
without a model of its own takes the global one for it: in round 1, when all of theirs begin, that is theta^0.

`as-published` is what ran behind the FedOBP paper's table: one phase of plain training; personal are the entries above
the `threshold` quantile of each tensor; and one worker played all clients, so that the information is that of the
model which the client before has trained. A client without a model keeps values of theta^0. This mode is sequential
over clients: the worker's model and the round's books travel through the server, so its bytes mean nothing, and at test
every client starts from what the last trained one left.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, keep_and_upload
from fedobp.algorithms.sequential import SequentialAsPublished, after_client, round_start, server_before
from fedobp.importance import above, scale_layers, squared_gradients


def take_theta(model: fl.Model, client: fl.Client) -> fl.Client:
    """Lay out the global model."""
    return client.set(received=fl.dense(client.download, "theta"))


def take_start(model: fl.Model, client: fl.Client) -> fl.Client:
    """Lay out the global model as it was when the round began."""
    return client.set(received=fl.dense(client.download, "start"))


def take_own(model: fl.Model, client: fl.Client) -> fl.Client:
    """Lay out the client's last model, which is to be kept in part, and measured."""
    received = client.scratch["received"]
    last = torch.where(client.state["seen"], client.state["theta"], received)
    return client.set(theta=last, last=last, fisher=torch.zeros_like(last))


def take_workers(model: fl.Model, client: fl.Client) -> fl.Client:
    """Lay out the client's last model, which is to be kept in part, and the worker's, which is measured."""
    last = client.state["theta"]
    return client.set(theta=fl.dense(client.download, "worker"), last=last, fisher=torch.zeros_like(last))


def measure(model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
    """Add a batch to the Fisher information's diagonal; its mean is its sum, once it is scaled."""
    return client.set(fisher=client.scratch["fisher"] + squared_gradients(model, client.theta, batch))


def _fit(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    return batch.cross_entropy(model.logits(client.theta, batch.x))


def _distance(model: fl.Model, client: fl.Client) -> Tensor:
    """Return the sum over tensors of the norm of what lies between the model and the global one."""
    apart = client.theta - client.scratch["received"]
    return torch.stack([piece.norm() for piece in apart.split(list(model.layout.sizes))]).sum()


def personal_loss(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """R1: the cross-entropy and lambda_1 / 2 times the distance from the global model."""
    return _fit(model, client, batch) + client.hparams["near"] / 2 * _distance(model, client)


def shared_loss(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """R2: the cross-entropy and lambda_2 / 2 times how far that distance is from the bound C."""
    apart = (_distance(model, client) - client.hparams["bound"]).abs()
    return _fit(model, client, batch) + client.hparams["level"] / 2 * apart


FISHER = fl.Sweep(measure, per_sample=True)


@dataclass(frozen=True)
class FedDPA(SequentialAsPublished, FedAvg):
    """A shared model, of which each client keeps the entries that its data know most about."""

    name: ClassVar[str] = "feddpa"
    summary: ClassVar[str] = "clients keep entries of high Fisher information and train the two kinds in turn"
    paper: ClassVar[str] = "Yang et al., Dynamic Personalized FL with Adaptive Differential Privacy, NeurIPS 2023"
    keeps_last_model: ClassVar[bool] = True

    threshold: float = fl.option(
        0.4, "scaled information above which an entry is personal, the authors'; a quantile as-published", low=0, high=1
    )
    near: float = fl.option(0.1, "lambda_1, pull to the global model in the personal phase; the authors' own", low=0)
    level: float = fl.option(0.05, "lambda_2, pull to the bound in the shared phase; the authors' own", low=0)
    bound: float = fl.option(0.5, "C, the distance from the global model that is aimed at; the authors' own", low=0)
    mode: str = fl.mode_option("two phases by own information, or (as-published) one, by that of the client before")

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Each client holds its last model."""
        state = fl.last_model(theta)
        if not self.sequential:
            return fl.InitialState(server={"theta": theta}, record={}, state=state)
        sequence = server_before(theta, weight=theta.new_zeros((), dtype=torch.int64))
        return fl.InitialState(server={**sequence, "worker": theta}, record={}, state=state)

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the global model."""
        download, records = super().download(ctx, server, records)
        if self.sequential:
            download |= {
                "start": fl.broadcast(round_start(server, ctx), ctx),
                "worker": fl.broadcast(server["worker"], ctx),
            }
        return download, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Measure, merge, train the personal entries and then the shared ones; send all."""
        if self.sequential:
            return [take_start, take_workers, FISHER, self._merge, fl.Train(ctx.epochs), keep_and_upload]
        phases = (
            fl.Train(ctx.epochs, mask="personal", loss=personal_loss),
            fl.Train(ctx.epochs, mask="shared", loss=shared_loss),
        )
        return [take_theta, take_own, FISHER, self._merge, *phases, keep_and_upload]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average; where clients take turns, the mean grows with each, and the worker keeps what it has trained."""
        if not self.sequential:
            return super().aggregate(ctx, server, records, update)
        [theta], [samples] = update.dense("theta"), update.n
        return {**after_client(server, ctx, theta, samples), "worker": theta}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Measure and merge."""
        return [take_theta, take_workers if self.sequential else take_own, FISHER, self._merge]

    def _merge(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Keep one's own values where the information is high; without samples there is none."""
        sizes = model.layout.sizes
        fisher, last, received = (client.scratch[name] for name in ("fisher", "last", "received"))
        if not self.sequential:
            personal = scale_layers(fisher, sizes) > client.hparams["threshold"]
        else:
            personal = torch.cat([above(piece, self.threshold) for piece in fisher.split(list(sizes))])
        mine = personal if self.sequential else personal & client.state["seen"]
        return client.set(theta=torch.where(personal, last, received), mine=mine, personal=personal, shared=~personal)
