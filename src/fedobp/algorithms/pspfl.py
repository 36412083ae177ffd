"""PSPFL (IEEE 10472079), a reconstruction: its text could not be obtained.

Rebuilt from the FedOBP paper's sentence and from the public port of that paper's authors (tian0920/SFL,
`src/client/pspfl.py`; hfut701/PSPFL is another method of that name). When a client receives the global model, it keeps
its own last value wherever |theta_i - theta_g| is above the `keep` quantile; after training it sends what changed
little: entries whose local change |before - after| is at most the `share` quantile. Where nobody sent an entry the
global value stays; elsewhere senders are averaged by their samples, all others counting as the old global value. A
client that has never trained takes the global model whole; in the port theta^0 counts as its last model. Scores are
computed on the client, because it uploads only a part of its model.

What changed most is never sent, so the global model learns little, and what is far from it is kept: in effect a client
trains alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp.algorithms.base import (
    Client,
    Moment,
    Program,
    Record,
    Sparse,
    Start,
    Tensors,
    Train,
    average,
    dense,
    option,
)
from fedobp.algorithms.fedavg import FedAvg
from fedobp.importance import above
from fedobp.models import Model


@dataclass(frozen=True)
class PSPFL(FedAvg):
    """Entries far from the global model stay personal, entries that move far are not sent."""

    name: ClassVar[str] = "pspfl"
    summary: ClassVar[str] = "a reconstruction: keeps what is far from the global model, sends what changed little"
    paper: ClassVar[str] = "IEEE 10472079; reconstructed, its text could not be obtained"

    keep: float = option(
        0.5, "quantile above which a client keeps its own value; swept over .1 to .9 there", low=0, high=1
    )
    share: float = option(0.5, "quantile up to which trained values are sent; swept over .1 to .9 there", low=0, high=1)

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Each client holds its last model, once it has one."""
        never = theta.new_zeros((), dtype=torch.bool)
        return Start(server={"theta": theta}, row={}, own={"theta": theta, "seen": never})

    def local(self, model: Model, now: Moment) -> Program:
        """Merge, train everything, send what changed little."""
        return [self._merge, Train(now.epochs), self._send_back]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Average; what a client did not send is the old global value."""
        sent = up["theta"]
        assert isinstance(sent, Sparse)
        return {"theta": average(sent.fill(server["theta"]), n)}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Use the merged model."""
        return [self._merge]

    def _merge(self, model: Model, client: Client) -> Client:
        shared, own, seen = dense(client.down, "theta"), client.own["theta"], client.own["seen"]
        mine = model.layout.among_learned(lambda far: above(far, self.keep), (own - shared).abs()) & seen
        merged = torch.where(mine, own, shared)
        return client.set(theta=merged, begun=merged, mine=mine)

    def _send_back(self, model: Model, client: Client) -> Client:
        change = (client.theta - client.work["begun"]).abs()
        still = ~model.layout.among_learned(lambda far: above(far, self.share), change)
        client = client.remember(theta=client.theta, seen=torch.ones_like(client.own["seen"]))
        return client.upload(theta=Sparse(client.theta, still))
