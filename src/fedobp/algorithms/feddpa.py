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
from torch.nn import functional

from fedobp.algorithms.base import (
    Batch,
    Client,
    Moment,
    Program,
    Record,
    Start,
    Sweep,
    Tensors,
    Train,
    dense,
    option,
    to_all,
)
from fedobp.algorithms.fedavg import FedAvg, keep_and_upload
from fedobp.algorithms.turns import after_turn, before_turns, round_start
from fedobp.importance import above, scale_layers, squared_gradients
from fedobp.models import Model


def take_theta(model: Model, client: Client) -> Client:
    """Lay out the global model."""
    return client.set(received=dense(client.down, "theta"))


def take_start(model: Model, client: Client) -> Client:
    """Lay out the global model as it was when the round began."""
    return client.set(received=dense(client.down, "start"))


def take_own(model: Model, client: Client) -> Client:
    """Lay out the client's last model, which is to be kept in part, and measured."""
    received = client.work["received"]
    last = torch.where(client.own["seen"], client.own["theta"], received)
    return client.set(theta=last, last=last, fisher=torch.zeros_like(last))


def take_workers(model: Model, client: Client) -> Client:
    """Lay out the client's last model, which is to be kept in part, and the worker's, which is measured."""
    last = client.own["theta"]
    return client.set(theta=dense(client.down, "worker"), last=last, fisher=torch.zeros_like(last))


def measure(model: Model, client: Client, batch: Batch) -> Client:
    """Add a batch to the Fisher information's diagonal; its mean is its sum, once it is scaled."""
    return client.set(fisher=client.work["fisher"] + squared_gradients(model, client.theta, batch))


def _fit(model: Model, client: Client, batch: Batch) -> Tensor:
    return batch.mean(functional.cross_entropy(model.logits(client.theta, batch.x), batch.y, reduction="none"))


def _distance(model: Model, client: Client) -> Tensor:
    """Return the sum over tensors of the norm of what lies between the model and the global one."""
    apart = client.theta - client.work["received"]
    return torch.stack([piece.norm() for piece in apart.split(list(model.layout.sizes))]).sum()


def personal_loss(model: Model, client: Client, batch: Batch) -> Tensor:
    """R1: the cross-entropy and lambda_1 / 2 times the distance from the global model."""
    return _fit(model, client, batch) + client.hp["near"] / 2 * _distance(model, client)


def shared_loss(model: Model, client: Client, batch: Batch) -> Tensor:
    """R2: the cross-entropy and lambda_2 / 2 times how far that distance is from the bound C."""
    apart = (_distance(model, client) - client.hp["bound"]).abs()
    return _fit(model, client, batch) + client.hp["level"] / 2 * apart


FISHER = Sweep(measure, per_sample=True)


@dataclass(frozen=True)
class FedDPA(FedAvg):
    """A shared model, of which each client keeps the entries that its data know most about."""

    name: ClassVar[str] = "feddpa"
    summary: ClassVar[str] = "clients keep entries of high Fisher information and train the two kinds in turn"
    paper: ClassVar[str] = "Yang et al., Dynamic Personalized FL with Adaptive Differential Privacy, NeurIPS 2023"

    threshold: float = option(
        0.4, "scaled information above which an entry is personal, the authors'; a quantile as-published", low=0, high=1
    )
    near: float = option(0.1, "lambda_1, pull to the global model in the personal phase; the authors' own", low=0)
    level: float = option(0.05, "lambda_2, pull to the bound in the shared phase; the authors' own", low=0)
    bound: float = option(0.5, "C, the distance from the global model that is aimed at; the authors' own", low=0)
    mode: str = option(
        "faithful",
        "two phases by own information, or (as-published) one, by that of the client before",
        choices=("faithful", "as-published"),
    )

    @property
    def together(self) -> bool:
        """The worker's model goes from client to client."""
        return self.mode == "faithful"

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds its last model."""
        own = {"theta": theta, "seen": theta.new_zeros((), dtype=torch.bool)}
        if self.together:
            return Start(server={"theta": theta}, row={}, own=own)
        turns = before_turns(theta, weight=theta.new_zeros((), dtype=torch.int64))
        return Start(server={**turns, "worker": theta}, row={}, own=own)

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send the global model."""
        down, rows = super().send(model, now, server, rows)
        if not self.together:
            down |= {"start": to_all(round_start(server, now), now), "worker": to_all(server["worker"], now)}
        return down, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Measure, merge, train the personal entries and then the shared ones; send all."""
        if not self.together:
            return [take_start, take_workers, FISHER, self._merge, Train(now.epochs), keep_and_upload]
        phases = (
            Train(now.epochs, mask="personal", loss=personal_loss),
            Train(now.epochs, mask="shared", loss=shared_loss),
        )
        return [take_theta, take_own, FISHER, self._merge, *phases, keep_and_upload]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Average; where clients take turns, the mean grows with each, and the worker keeps what it has trained."""
        if self.together:
            return super().receive(model, now, server, rows, up, n)
        [theta], [samples] = dense(up, "theta"), n
        return {**after_turn(server, now, theta, samples), "worker": theta}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Measure and merge."""
        return [take_theta, take_own if self.together else take_workers, FISHER, self._merge]

    def _merge(self, model: Model, client: Client) -> Client:
        """Keep one's own values where the information is high; without samples there is none."""
        sizes = model.layout.sizes
        fisher, last, received = (client.work[name] for name in ("fisher", "last", "received"))
        if self.together:
            personal = scale_layers(fisher, sizes) > client.hp["threshold"]
        else:
            personal = torch.cat([above(piece, self.threshold) for piece in fisher.split(list(sizes))])
        mine = personal & client.own["seen"] if self.together else personal
        return client.set(theta=torch.where(personal, last, received), mine=mine, personal=personal, shared=~personal)
