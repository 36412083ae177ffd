"""FedSelect (Tamirisa et al., FedSelect: Personalized Federated Learning with Customized Selection, CVPR 2024).

Each client grows a personal subnetwork from the entries that change most. All entries are shared at first. A local
epoch is a pass over the data that trains the personal entries and one that trains the shared ones. Only shared entries
are sent; the server takes the unweighted mean over the clients that sent an entry, and an entry that no client sent
keeps its value. At every third visit of a client (a round that it takes part in) but the first, so at visits 4, 7 and
so on, the quarter of each weight tensor's shared entries that is farthest from a reference becomes personal, unless
more than 80 per cent of the tensor is already; the trained model is the next reference. A new personal entry still
takes the mean at the client's next visit: the server has masks from uploads, so it sends the entries of the client's
last upload. Running statistics of BatchNorm stay on the client.

Growth, cap and interval are the authors' values. They sample a tenth of the clients once, train 15 epochs at a learning
rate of 0.05 and test after training; here visits are counted per client. Ties at the threshold become personal
together, as with the authors, but an entry that has not changed never does.

`as-published` is a reconstruction of the port that was probably behind the FedOBP paper's table; its settings are not
known, so the options here apply. One worker object stood for all clients, so there is one mask and one count of visits;
entries of all tensors compete together; a tensor with any personal entry is wholly private; all personal passes come
before all shared ones; growth uses the last visit's change alone. It soon becomes local-only training. Omitted are the
visits counted while testing, and the port's trimming of the mask, which puts entries at wrong positions and makes a
tensor shared again once all its entries are personal, because it considers only tensors with shared entries. The port's
default is to grow at every 5th visit; with which value it ran is not known. This mode is sequential over clients: its
state is relayed by the server, so its byte counts are meaningless, and at test every client starts from the state of
the last trained one.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.sequential import SequentialAsPublished, after_client, round_start, server_before
from fedobp.models import is_statistic


def take_shared(model: fl.Model, client: fl.Client) -> fl.Client:
    """Take the global values that were sent, and the client's last values elsewhere."""
    sent = client.download["theta"]
    assert isinstance(sent, fl.Sparse)
    return client.set(theta=sent.fill(client.state["theta"]), mine=~sent.keep)


def take_masks(model: fl.Model, client: fl.Client) -> fl.Client:
    """Set the entries that each pass trains, and the reference of their change.

    BatchNorm's running statistics are personal, and both passes change them.
    """
    mine, statistics = client.state["mine"], model.layout.mask(is_statistic, client.theta.device)
    return client.set(personal=mine, shared=~mine | statistics, reference=client.state["reference"])


def _private(model: fl.Model, client: fl.Client, shared: Tensor) -> fl.Client:
    """Use the client's values, once it has trained, in all tensors with a personal entry, and global ones elsewhere.

    That is the port's rule.
    """
    pieces = fl.dense(client.download, "mine").split(list(model.layout.sizes))
    private = torch.cat([piece.any().expand_as(piece) for piece in pieces])
    mine = private & client.state["seen"]
    return client.set(theta=torch.where(mine, client.state["theta"], shared), mine=mine, private=private)


def take_private(model: fl.Model, client: fl.Client) -> fl.Client:
    """As-published: use the worker's mask with the global model."""
    return _private(model, client, fl.dense(client.download, "theta"))


def take_worker(model: fl.Model, client: fl.Client) -> fl.Client:
    """As-published: start from the worker's mask and the model that the round began with."""
    client = _private(model, client, fl.dense(client.download, "start"))
    mine = fl.dense(client.download, "mine")
    return client.set(personal=mine, shared=~mine, reference=client.theta)


@dataclass(frozen=True)
class FedSelect(SequentialAsPublished, fl.Method):
    """Personal subnetworks that grow from the entries that change most."""

    name: ClassVar[str] = "fedselect"
    summary: ClassVar[str] = "each client grows a personal subnetwork from the entries that change most"
    paper: ClassVar[str] = "Tamirisa et al., FedSelect: Personalized FL with Customized Selection, CVPR 2024"
    keeps_last_model: ClassVar[bool] = True

    grow: float = fl.option(0.25, "share of the shared entries that becomes personal; the authors'", low=0, high=1)
    every: int = fl.option(3, "visits (rounds of the client) between two growths; the authors'", low=1, high=10**6)
    cap: float = fl.option(0.8, "personal share of a tensor above which it does not grow; the authors'", low=0, high=1)
    mode: str = fl.mode_option("a mask for each client, or (as-published, reconstructed) one for all, of whole tensors")

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Nothing is personal but BatchNorm's running statistics; the reference is theta^0."""
        nothing, none = torch.zeros_like(theta, dtype=torch.bool), theta.new_zeros((), dtype=torch.int64)
        if not self.sequential:
            mine = model.layout.mask(is_statistic, theta.device)
            state = {"theta": theta, "reference": theta, "mine": mine, "visits": none}
            return fl.InitialState(server={"theta": theta}, record={"mine": mine}, state=state)
        sequence = server_before(theta, weight=nothing.long())
        return fl.InitialState({**sequence, "mine": nothing, "visits": none}, {}, {"theta": theta, "seen": none.bool()})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the entries of the client's last upload."""
        theta = fl.broadcast(server["theta"], ctx)
        if not self.sequential:
            return {"theta": fl.Sparse(theta, ~records["mine"])}, records
        leaked = {"mine": fl.broadcast(server["mine"], ctx), "visits": server["visits"].expand(len(ctx.cohort))}
        return {"theta": theta, "start": fl.broadcast(round_start(server, ctx), ctx), **leaked}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Each epoch, train the personal entries and then the shared ones; then grow."""
        if self.sequential:
            personal, shared = (fl.Train(ctx.epochs, mask=mask) for mask in ("personal", "shared"))
            return [take_worker, personal, shared, self._pass_on]
        passes = [fl.Train(1, mask="personal"), fl.Train(1, mask="shared")] * ctx.epochs
        return [take_shared, take_masks, *passes, self._keep]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Take the mean over the clients that sent an entry, and keep entries that none sent; record the masks."""
        theta, sent = server["theta"], update.upload["theta"]
        assert isinstance(sent, fl.Sparse)
        if self.sequential:
            sequence = after_client(server, ctx, sent.fill(theta)[0], sent.keep[0].long())
            return {**sequence, "mine": update.dense("mine")[0], "visits": update.dense("visits")[0]}, records
        change = (sent.fill(theta) - theta).sum(dim=0) / sent.keep.sum(dim=0).clamp(min=1)
        return {"theta": theta + change}, {"mine": ~sent.keep}

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the shared entries with the client's personal ones."""
        return [take_private if self.sequential else take_shared]

    def _keep(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Upload the shared entries, and grow the mask for the next visit."""
        personal, visits, theta = client.scratch["personal"], client.state["visits"], client.theta
        due = self._due(visits)
        mine = torch.where(due, self._grown(model, client), personal)
        reference = torch.where(due, theta, client.scratch["reference"])
        client = client.remember(theta=theta, reference=reference, mine=mine, visits=visits + 1)
        return client.send(theta=fl.Sparse(theta, ~personal))

    def _pass_on(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """As-published: upload the shared tensors, and pass on the worker's grown mask and its count."""
        personal, visits, theta = client.scratch["personal"], fl.dense(client.download, "visits"), client.theta
        mine = torch.where(self._due(visits), self._grown(model, client), personal)
        client = client.remember(theta=theta, seen=torch.ones_like(client.state["seen"]))
        return client.send(theta=fl.Sparse(theta, ~client.scratch["private"]), mine=mine, visits=visits + 1)

    def _due(self, visits: Tensor) -> Tensor:
        return (visits > 0) & (visits % self.every == 0)

    def _grown(self, model: fl.Model, client: fl.Client) -> Tensor:
        """Return the mask with the shared entries that changed most: in each weight tensor, or (port) in the model."""
        layout, change = model.layout, (client.theta - client.scratch["reference"]).abs()
        if self.sequential:
            return layout.among_learned(partial(self._grow, client), change, client.scratch["personal"])
        pieces = (vector.split(list(layout.sizes)) for vector in (change, client.scratch["personal"]))
        return torch.cat(
            [
                self._grow(client, changes, mine) if name.endswith("weight") else mine
                for name, changes, mine in zip(layout.names, *pieces, strict=True)
            ]
        )

    def _grow(self, client: fl.Client, change: Tensor, mine: Tensor) -> Tensor:
        """Add the `grow` share of the shared entries, by change, unless the personal share is above the cap."""
        size, shared = mine.shape[0], (~mine).sum()
        count = shared - ((1 - client.hparams["grow"]) * shared).round().long()
        ordered = torch.where(mine, -1.0, change).sort(descending=True).values
        threshold = ordered.gather(0, (count - 1).clamp(min=0)[None])
        grows = (count > 0) & (mine.sum() <= client.hparams["cap"] * size)
        return mine | ((change >= threshold) & (change > 0) & grows)
