"""FedDPA (Yang et al., Dynamic Personalized Federated Learning with Adaptive Differential Privacy, NeurIPS 2023).

A client keeps its last local values where its Fisher information is high, and takes the global ones elsewhere. The
information is the mean over its training samples of the squared gradient of log p(y | x) at its last local model,
scaled to [0, 1] within each tensor; above the threshold an entry is personal. Then the personal entries are trained
with a term that keeps them near the global model, and after them the shared ones with a term that keeps them at the
distance `bound` from it. All entries are uploaded and averaged. For use the information is computed again, and the two
models are merged.

Threshold, strengths and bound are the authors' values, and so is the number of epochs, all local epochs in each of the
two phases: a round takes twice the common budget, and is counted so. They use Adam, batches of 16 and 2 epochs; here it
is the common SGD. The clipping and the noise that make it differentially private are omitted (their `no_clip` and
`no_noise`). A client without a last model uses the global one instead: in round 1, in which all of the authors' clients
train, that is theta^0.

`as-published` is what ran behind the FedOBP paper's table: one phase of plain training; personal are the entries above
the `threshold` quantile of each tensor; and one worker object stood for all clients, so the information is that of the
model which the previous client trained. A client without a last model keeps values of theta^0. This mode is sequential
over clients: the worker's model and the round's mean are relayed by the server, so its byte counts are meaningless, and
at test every client starts from the state of the last trained one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, keep_and_upload
from fedobp.algorithms.sequential import SequentialAsPublished, after_client, round_start, server_before
from fedobp.importance import above, scale_layers, squared_gradients


def take_current(model: fl.Model, client: fl.Client) -> fl.Client:
    """Receive the global model."""
    return client.set(received=fl.dense(client.download, "theta"))


def take_start(model: fl.Model, client: fl.Client) -> fl.Client:
    """Receive the global model at the beginning of the round."""
    return client.set(received=fl.dense(client.download, "start"))


def take_last(model: fl.Model, client: fl.Client) -> fl.Client:
    """Set the client's last model, which is merged, as the one whose Fisher information is computed."""
    last = torch.where(client.state["seen"], client.state["theta"], client.scratch["received"])
    return client.set(theta=last, last=last, fisher=torch.zeros_like(last))


def take_worker(model: fl.Model, client: fl.Client) -> fl.Client:
    """Set the client's last model, which is merged, and the worker's, whose Fisher information is computed."""
    last = client.state["theta"]
    return client.set(theta=fl.dense(client.download, "worker"), last=last, fisher=torch.zeros_like(last))


def add_fisher(model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
    """Add a batch to the diagonal of the Fisher information; once it is scaled, sum and mean are the same."""
    return client.set(fisher=client.scratch["fisher"] + squared_gradients(model, client.theta, batch))


def _fit(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    return batch.cross_entropy(model.logits(client.theta, batch.x))


def _distance(model: fl.Model, client: fl.Client) -> Tensor:
    """Return the sum over tensors of the norm of the difference between the model and the global one."""
    difference = client.theta - client.scratch["received"]
    return torch.stack([piece.norm() for piece in difference.split(list(model.layout.sizes))]).sum()


def personal_loss(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """R1: the cross-entropy and lambda_1 / 2 times the distance from the global model."""
    return _fit(model, client, batch) + client.hparams["near"] / 2 * _distance(model, client)


def shared_loss(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """R2: the cross-entropy and lambda_2 / 2 times the difference between that distance and the bound C."""
    excess = (_distance(model, client) - client.hparams["bound"]).abs()
    return _fit(model, client, batch) + client.hparams["level"] / 2 * excess


FISHER = fl.Sweep(add_fisher, per_sample=True)


@dataclass(frozen=True)
class FedDPA(SequentialAsPublished, FedAvg):
    """A shared model, of which each client keeps the entries with the highest Fisher information."""

    name: ClassVar[str] = "feddpa"
    summary: ClassVar[str] = "clients keep entries of high Fisher information; these and the others are trained in turn"
    paper: ClassVar[str] = "Yang et al., Dynamic Personalized FL with Adaptive Differential Privacy, NeurIPS 2023"
    keeps_last_model: ClassVar[bool] = True

    threshold: float = fl.option(
        0.4, "scaled information above which an entry is personal, the authors'; a quantile as-published", low=0, high=1
    )
    near: float = fl.option(0.1, "lambda_1, weight of the distance in the personal phase; the authors'", low=0)
    level: float = fl.option(0.05, "lambda_2, weight of |distance - bound| in the shared phase; the authors'", low=0)
    bound: float = fl.option(0.5, "C, the desired distance from the global model; the authors'", low=0)
    mode: str = fl.mode_option("two phases and each client's Fisher information, or one and the previous client's")

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: the last model, and whether there is one."""
        state = fl.last_model(theta)
        if not self.sequential:
            return fl.InitialState(server={"theta": theta}, record={}, state=state)
        sequence = server_before(theta, weight=theta.new_zeros((), dtype=torch.int64))
        return fl.InitialState(server={**sequence, "worker": theta}, record={}, state=state)

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the global model."""
        download, records = super().download(ctx, server, records)
        if self.sequential:
            download["start"] = fl.broadcast(round_start(server, ctx), ctx)
            download["worker"] = fl.broadcast(server["worker"], ctx)
        return download, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Compute the information, merge, train the personal entries and then the shared ones; upload all."""
        if self.sequential:
            return [take_start, take_worker, FISHER, self._merge, fl.Train(ctx.epochs), keep_and_upload]
        personal = fl.Train(ctx.epochs, mask="personal", loss=personal_loss)
        shared = fl.Train(ctx.epochs, mask="shared", loss=shared_loss)
        return [take_current, take_last, FISHER, self._merge, personal, shared, keep_and_upload]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average; in the sequential mode, add the one upload to the round's mean: the worker keeps it."""
        if not self.sequential:
            return super().aggregate(ctx, server, records, update)
        [theta], [samples] = update.dense("theta"), update.n
        return {**after_client(server, ctx, theta, samples), "worker": theta}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Compute the information and merge."""
        return [take_current, take_worker if self.sequential else take_last, FISHER, self._merge]

    def _merge(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Keep the client's last values where the information is high; without samples it is 0."""
        sizes = model.layout.sizes
        fisher, last, received = (client.scratch[name] for name in ("fisher", "last", "received"))
        if not self.sequential:
            personal = scale_layers(fisher, sizes) > client.hparams["threshold"]
        else:
            personal = torch.cat([above(piece, self.threshold) for piece in fisher.split(list(sizes))])
        mine = personal if self.sequential else personal & client.state["seen"]
        return client.set(theta=torch.where(personal, last, received), mine=mine, personal=personal, shared=~personal)
