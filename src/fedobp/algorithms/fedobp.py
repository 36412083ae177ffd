"""FedOBP: Federated Optimal Brain Personalization through Cloud-Edge Element-wise Decoupling.

Algorithm 1. The server keeps each client's last upload theta_i beside the global model theta_g. Before it sends to
client i, it scores every entry by (theta_i - theta_g)^2 (eq. 19), and entries whose score is strictly above the
q-quantile are personal (eq. 7); only the others, the shared set (eq. 8), are sent. The client merges the received
entries with its personal ones (eq. 9), trains all entries (eq. 10) and uploads all; the server averages all (eq. 11).

The server computes scores and masks: once for the whole cohort, and in the same way for a simulated client and a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.importance import SCORES, above, scale_global, scale_layers, smooth
from fedobp.models import is_statistic


def merge(model: fl.Model, client: fl.Client) -> fl.Client:
    """Eq. 9: the shared values where they were sent, the client's last local values elsewhere."""
    shared = client.download["theta"]
    assert isinstance(shared, fl.Sparse)
    return client.set(theta=shared.fill(client.state["theta"]), mine=~shared.keep)


def keep_and_upload(model: fl.Model, client: fl.Client) -> fl.Client:
    """Keep the trained model in the client state, and upload all of it."""
    return client.remember(theta=client.theta).send(theta=client.theta)


@dataclass(frozen=True)
class FedOBP(fl.Method):
    """A shared model with a few personal entries per client, chosen by importance."""

    name: ClassVar[str] = "fedobp"
    summary: ClassVar[str] = "a shared model; each client keeps the few entries in which its own model differs most"
    paper: ClassVar[str] = "FedOBP: Federated Optimal Brain Personalization through Cloud-Edge Element-wise Decoupling"
    keeps_last_model: ClassVar[bool] = True

    q: float = fl.option(
        0.999, "share of entries below the threshold; the paper's value for its datasets with `cnn`", low=0.0, high=1.0
    )
    score: str = fl.option(
        "squared",
        "squared: eq. 19; product: |(local - global) * local|, as in the released code",
        choices=tuple(SCORES),
    )
    norm: str = fl.option(
        "none", "min-max over all entries (global) or within each tensor (layer)", choices=("none", "layer", "global")
    )
    scope: str = fl.option(
        "all", "which entries compete: all, or those of the classifier alone", choices=("all", "classifier")
    )
    ema: float = fl.option(0.0, "weight of a client's earlier scores; 0, the paper's, is off", low=0.0, high=1.0)
    start: str = fl.option(
        "global",
        "for a client without an upload: the global model (global), or theta^0 as its last model (literal)",
        choices=("global", "literal"),
    )

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Record and client state hold the same last model: the server scores what the client will merge."""
        record = fl.last_model(theta)
        if self.ema > 0:
            record |= {"score": torch.zeros_like(theta), "scored": record["seen"]}
        return fl.InitialState(server={"theta": theta}, record=record, state={"theta": theta})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Eq. 19, 7 and 8: score, choose the personal set, send the rest."""
        score = self.scores(ctx, server, records)
        has_model = records["seen"] if self.start == "global" else torch.ones_like(records["seen"])
        if self.ema > 0:
            score = smooth(score, records["score"], records["scored"], self.ema)
            records = {**records, "score": score, "scored": has_model}
        personal = self.personal(ctx.model, score) & has_model[:, None]
        return {"theta": fl.Sparse(fl.broadcast(server["theta"], ctx), ~personal)}, records

    def scores(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> Tensor:
        """Eq. 19, or the released code's: how important each entry of a client's last upload is."""
        return SCORES[self.score](records["theta"], server["theta"])

    def personal(self, model: fl.Model, score: Tensor) -> Tensor:
        """Return the personal set of each client: of the competing entries, normalised, those above their quantile."""
        layout = model.layout
        if self.scope == "classifier":
            base, head = layout.split(score)
            sizes = [size for name, size in zip(layout.names, layout.sizes, strict=True) if layout.in_head(name)]
            return layout.join(torch.zeros_like(base, dtype=torch.bool), self._above(head, sizes))
        sizes = [size for name, size in zip(layout.names, layout.sizes, strict=True) if not is_statistic(name)]
        return layout.among_learned(lambda competing: self._above(competing, sizes), score)

    def _above(self, score: Tensor, sizes: Sequence[int]) -> Tensor:
        return above(self._normalised(score, sizes), self.q)

    def _normalised(self, score: Tensor, sizes: Sequence[int]) -> Tensor:
        if self.norm == "layer":
            return scale_layers(score, sizes)
        return scale_global(score) if self.norm == "global" else score

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Eq. 9 and 10: merge, train every entry, upload every entry."""
        return [merge, fl.Train(ctx.epochs), keep_and_upload]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Eq. 11: average the full models, personal entries included; record each upload."""
        uploads = update.dense("theta")
        records = {**records, "theta": uploads, "seen": torch.ones_like(records["seen"])}
        return {"theta": fl.average(uploads, update.n)}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Eq. 9: use the merged model."""
        return [merge]
