"""FedSelect (Tamirisa et al., FedSelect: Personalized Federated Learning with Customized Selection, CVPR 2024).

Each client grows a personal subnetwork from the entries that change most. All entries are shared at first. A local
epoch is a pass over the data that trains the personal entries and one that trains the shared ones. Only shared entries
cross the wire; the server takes the plain mean over those who sent an entry, and one that nobody sent keeps its value.
Every third visit of a client but its first (its 4th, 7th and so on), the quarter of each weight tensor's shared entries
that is farthest from a reference becomes personal, unless more than 80 per cent of the tensor is already; the trained
model is the next reference. A new personal entry still takes the mean at the client's next visit: the server knows
masks from uploads, so it sends what the client sent last. Running statistics of BatchNorm stay on the client.

Growth and cap are the authors' own, the interval too. They draw a tenth of the clients once and for all, take 15 epochs
at a learning rate of 0.05 and test after training; here visits are counted client by client. Ties at the threshold
become personal together, as with them, but an entry that has not moved never does.

`as-published` is a reconstruction of the port that was probably behind the FedOBP paper's table, where its settings are
not known (these are the options here). One worker played all clients, so there is one mask and one count of visits;
entries of all tensors compete together; a tensor with any personal entry is wholly private; all personal passes come
before all shared ones; growth looks at the last visit's change alone. It soon becomes training alone. Left out: the
visits counted while testing, and the port's trimming of the mask. That puts entries at wrong positions, and makes a
tensor shared again once all its entries are personal, because only tensors with shared entries are looked at. The
port's own default is to grow at every 5th visit; with which value it ran is not known. This mode is sequential over
clients: its state travels through the server, so its bytes mean nothing, and at test every client starts from what the
last trained one left.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedobp.algorithms.base import (
    Client,
    Method,
    Moment,
    Program,
    Record,
    Sparse,
    Start,
    Tensors,
    Train,
    dense,
    option,
    to_all,
)
from fedobp.algorithms.turns import after_turn, before_turns, round_start
from fedobp.models import Model, is_statistic


def take_shared(model: Model, client: Client) -> Client:
    """Take the global values that were sent, and one's own elsewhere."""
    sent = client.down["theta"]
    assert isinstance(sent, Sparse)
    return client.set(theta=sent.fill(client.own["theta"]), mine=~sent.keep)


def take_masks(model: Model, client: Client) -> Client:
    """Lay out which entries each pass trains, and what their change is counted from.

    BatchNorm's running statistics are the client's own, and both passes move them.
    """
    mine, statistics = client.own["mine"], model.layout.mask(is_statistic, client.theta.device)
    return client.set(personal=mine, shared=~mine | statistics, reference=client.own["reference"])


def _private(model: Model, client: Client, shared: Tensor) -> Client:
    """Take one's own values of tensors with any personal entry, once there are own ones, and the global ones of others.

    That is the port's rule.
    """
    pieces = dense(client.down, "mine").split(list(model.layout.sizes))
    private = torch.cat([piece.any().expand_as(piece) for piece in pieces])
    mine = private & client.own["seen"]
    return client.set(theta=torch.where(mine, client.own["theta"], shared), mine=mine, private=private)


def take_private(model: Model, client: Client) -> Client:
    """As-published: use the worker's mask with the global model."""
    return _private(model, client, dense(client.down, "theta"))


def take_worker(model: Model, client: Client) -> Client:
    """As-published: start from the worker's mask and the model that the round began with."""
    client, mine = _private(model, client, dense(client.down, "start")), dense(client.down, "mine")
    return client.set(personal=mine, shared=~mine, reference=client.theta)


@dataclass(frozen=True)
class FedSelect(Method):
    """Personal subnetworks that grow from the entries that change most."""

    name: ClassVar[str] = "fedselect"
    summary: ClassVar[str] = "each client grows a personal subnetwork from the entries that change most"
    paper: ClassVar[str] = "Tamirisa et al., FedSelect: Personalized FL with Customized Selection, CVPR 2024"

    grow: float = option(0.25, "share of what is still shared that becomes personal; the authors' own", low=0, high=1)
    every: int = option(3, "visits from one growth to the next; the authors' own", low=1, high=10**6)
    cap: float = option(0.8, "personal share of a tensor above which it stays; the authors' own", low=0, high=1)
    mode: str = option(
        "faithful",
        "a mask for each client, or (as-published, reconstructed) one for all, of whole tensors",
        choices=("faithful", "as-published"),
    )

    @property
    def together(self) -> bool:
        """The worker's mask goes from client to client."""
        return self.mode == "faithful"

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Nothing is personal but BatchNorm's running statistics; the reference is theta^0."""
        nothing, none = torch.zeros_like(theta, dtype=torch.bool), theta.new_zeros((), dtype=torch.int64)
        if self.together:
            mine = model.layout.mask(is_statistic, theta.device)
            own = {"theta": theta, "reference": theta, "mine": mine, "visits": none}
            return Start(server={"theta": theta}, row={"mine": mine}, own=own)
        turns = before_turns(theta, weight=nothing.long())
        return Start({**turns, "mine": nothing, "visits": none}, {}, {"theta": theta, "seen": none.bool()})

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Send the entries that the client shared when it was here last."""
        theta = to_all(server["theta"], now)
        if self.together:
            return {"theta": Sparse(theta, ~rows["mine"])}, rows
        leaked = {"mine": to_all(server["mine"], now), "visits": server["visits"].expand(len(now.cohort))}
        return {"theta": theta, "start": to_all(round_start(server, now), now), **leaked}, rows

    def local(self, model: Model, now: Moment) -> Program:
        """Each epoch, train the personal entries and then the shared ones; then grow."""
        if not self.together:
            return [take_worker, Train(now.epochs, mask="personal"), Train(now.epochs, mask="shared"), self._pass_on]
        passes = [Train(1, mask="personal"), Train(1, mask="shared")] * now.epochs
        return [take_shared, take_masks, *passes, self._keep]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Take the mean of those who sent an entry, and keep it where nobody did; remember who did."""
        theta, sent = server["theta"], up["theta"]
        assert isinstance(sent, Sparse)
        if not self.together:
            turn = after_turn(server, now, sent.fill(theta)[0], sent.keep[0].long())
            return {**turn, "mine": dense(up, "mine")[0], "visits": dense(up, "visits")[0]}, rows
        change = (sent.fill(theta) - theta).sum(dim=0) / sent.keep.sum(dim=0).clamp(min=1)
        return {"theta": theta + change}, {"mine": ~sent.keep}

    def serve(self, model: Model, now: Moment) -> Program:
        """Use the shared entries with one's own."""
        return [take_shared if self.together else take_private]

    def _keep(self, model: Model, client: Client) -> Client:
        """Send what is shared, and grow the mask for the next visit."""
        personal, visits, theta = client.work["personal"], client.own["visits"], client.theta
        due = self._due(visits)
        mine = torch.where(due, self._grown(model, client), personal)
        reference = torch.where(due, theta, client.work["reference"])
        client = client.remember(theta=theta, reference=reference, mine=mine, visits=visits + 1)
        return client.upload(theta=Sparse(theta, ~personal))

    def _pass_on(self, model: Model, client: Client) -> Client:
        """As-published: send the tensors that are shared, and pass on the worker's grown mask and its count."""
        personal, visits, theta = client.work["personal"], dense(client.down, "visits"), client.theta
        mine = torch.where(self._due(visits), self._grown(model, client), personal)
        client = client.remember(theta=theta, seen=torch.ones_like(client.own["seen"]))
        return client.upload(theta=Sparse(theta, ~client.work["private"]), mine=mine, visits=visits + 1)

    def _due(self, visits: Tensor) -> Tensor:
        return (visits > 0) & (visits % self.every == 0)

    def _grown(self, model: Model, client: Client) -> Tensor:
        """Return the mask with the shared entries added that moved most: in each weight tensor, or (port) in all."""
        layout, change = model.layout, (client.theta - client.work["reference"]).abs()
        if not self.together:
            return layout.among_learned(partial(self._more, client), change, client.work["personal"])
        pieces = (vector.split(list(layout.sizes)) for vector in (change, client.work["personal"]))
        return torch.cat(
            [
                self._more(client, moved, mine) if name.endswith("weight") else mine
                for name, moved, mine in zip(layout.names, *pieces, strict=True)
            ]
        )

    def _more(self, client: Client, moved: Tensor, mine: Tensor) -> Tensor:
        """Add the `grow` share of what is still shared, by change, unless the personal share is above the cap."""
        size, shared = mine.shape[0], (~mine).sum()
        count = shared - ((1 - client.hp["grow"]) * shared).round().long()
        ordered = torch.where(mine, -1.0, moved).sort(descending=True).values
        least = ordered.gather(0, (count - 1).clamp(min=0)[None])
        open_to = (count > 0) & (mine.sum() <= client.hp["cap"] * size)
        return mine | ((moved >= least) & (moved > 0) & open_to)
