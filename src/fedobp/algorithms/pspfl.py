"""PSPFL (IEEE 10472079), a reconstruction: its text could not be obtained.

Rebuilt from the FedOBP paper's sentence and from the public port of that paper's authors (tian0920/SFL,
`src/client/pspfl.py`; hfut701/PSPFL is another method of that name). When a client receives the global model, it keeps
its last value wherever |theta_i - theta_g| is above the `keep` quantile; after training it uploads what changed little:
entries whose local change |before - after| is at most the `share` quantile. Where no client sent an entry the global
value stays; elsewhere uploads are averaged by samples, and clients that did not send the entry count as the old global
value. A client that has never trained takes the global model whole; in the port theta^0 counts as its last model.
Scores are computed on the client, because it uploads only a part of its model.

The entries that changed most are never sent, so the global model learns little, and those far from it are kept: in
effect each client trains alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg
from fedobp.importance import above


@dataclass(frozen=True)
class PSPFL(FedAvg):
    """Entries far from the global model stay personal, entries that move far are not sent."""

    name: ClassVar[str] = "pspfl"
    summary: ClassVar[str] = "a reconstruction: keeps what is far from the global model, sends what changed little"
    paper: ClassVar[str] = "IEEE 10472079; reconstructed, its text could not be obtained"
    keeps_last_model: ClassVar[bool] = True

    keep: float = fl.option(0.5, "quantile above which values are kept; the port sweeps .1 to .9", low=0, high=1)
    share: float = fl.option(0.5, "quantile up to which values are uploaded; the port sweeps .1 to .9", low=0, high=1)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: the last model, and whether there is one."""
        return fl.InitialState(server={"theta": theta}, record={}, state=fl.last_model(theta))

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Merge, train all entries, upload what changed little."""
        return [self._merge, fl.Train(ctx.epochs), self._upload]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average; entries that a client did not send count as the old global value."""
        sent = update.upload["theta"]
        assert isinstance(sent, fl.Sparse)
        return {"theta": fl.average(sent.fill(server["theta"]), update.n)}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the merged model."""
        return [self._merge]

    def _merge(self, model: fl.Model, client: fl.Client) -> fl.Client:
        shared, last, seen = fl.dense(client.download, "theta"), client.state["theta"], client.state["seen"]
        mine = model.layout.among_learned(lambda far: above(far, self.keep), (last - shared).abs()) & seen
        merged = torch.where(mine, last, shared)
        return client.set(theta=merged, start=merged, mine=mine)

    def _upload(self, model: fl.Model, client: fl.Client) -> fl.Client:
        change = (client.theta - client.scratch["start"]).abs()
        still = ~model.layout.among_learned(lambda far: above(far, self.share), change)
        client = client.remember(theta=client.theta, seen=torch.ones_like(client.state["seen"]))
        return client.send(theta=fl.Sparse(client.theta, still))
