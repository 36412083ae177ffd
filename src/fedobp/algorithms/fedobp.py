"""FedOBP: Federated Optimal Brain Personalization through Cloud-Edge Element-wise Decoupling.

Algorithm 1. The server keeps each client's last upload theta_i beside the global model theta_g. When it sends to
client i, it scores every entry by (theta_i - theta_g)^2 (eq. 19), and entries whose score is strictly above the
q-quantile are personal (eq. 7); only the others, the shared set (eq. 8), are sent. The client puts the two together
(eq. 9), trains all of it (eq. 10) and uploads all of it; the server averages all of it (eq. 11).

Score and mask are the server's work, so that they exist once, for the whole cohort, and on equal terms for a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    average,
    dense,
    option,
    to_all,
)
from fedobp.importance import SCORES, above, scale_global, scale_layers, smooth
from fedobp.models import Model, is_statistic


def merge(model: Model, client: Client) -> Client:
    """Eq. 9: the shared values where they were sent, the client's own last local values elsewhere."""
    shared = client.down["theta"]
    assert isinstance(shared, Sparse)
    return client.set(theta=shared.fill(client.own["theta"]), mine=~shared.keep)


def keep_and_upload(model: Model, client: Client) -> Client:
    """Keep the trained model, and send all of it."""
    return client.remember(theta=client.theta).upload(theta=client.theta)


@dataclass(frozen=True)
class FedOBP(Method):
    """A shared model with a few personal entries per client, chosen by importance."""

    name: ClassVar[str] = "fedobp"
    summary: ClassVar[str] = "a shared model, of which each client keeps the few entries that moved furthest from it"
    paper: ClassVar[str] = "FedOBP: Federated Optimal Brain Personalization through Cloud-Edge Element-wise Decoupling"

    q: float = option(
        0.999, "share of entries below the threshold; the paper's value for its datasets with `cnn`", low=0.0, high=1.0
    )
    score: str = option(
        "squared", "squared: eq. 19; product: |(own - global) * own|, as in the released code", choices=tuple(SCORES)
    )
    norm: str = option(
        "none", "min-max over all entries (global) or within each tensor (layer)", choices=("none", "layer", "global")
    )
    scope: str = option(
        "all", "which entries compete: all, or those of the classifier alone", choices=("all", "classifier")
    )
    ema: float = option(0.0, "weight of a client's earlier scores; 0, the paper's, is off", low=0.0, high=1.0)
    start: str = option(
        "global",
        "a client without an upload uses the global model (global), or counts theta^0 as its last model (literal)",
        choices=("global", "literal"),
    )

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Row and own hold the same last model: the server scores what the client will merge."""
        never = theta.new_zeros((), dtype=torch.bool)
        row = {"theta": theta, "seen": never}
        if self.ema > 0:
            row |= {"score": torch.zeros_like(theta), "scored": never}
        return Start(server={"theta": theta}, row=row, own={"theta": theta})

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Eq. 19, 7 and 8: score, choose the personal set, send the rest."""
        score = self.scores(now, server, rows)
        has_model = rows["seen"] if self.start == "global" else torch.ones_like(rows["seen"])
        if self.ema > 0:
            score = smooth(score, rows["score"], rows["scored"], self.ema)
            rows = {**rows, "score": score, "scored": has_model}
        personal = self.personal(model, score) & has_model[:, None]
        return {"theta": Sparse(to_all(server["theta"], now), ~personal)}, rows

    def scores(self, now: Moment, server: Tensors, rows: Tensors) -> Tensor:
        """Eq. 19, or the released code's: how important each entry of a client's last upload is."""
        return SCORES[self.score](rows["theta"], server["theta"])

    def personal(self, model: Model, score: Tensor) -> Tensor:
        """Return each row's personal set: the scope's pool, normalised, above its own quantile."""
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

    def local(self, model: Model, now: Moment) -> Program:
        """Eq. 9 and 10: merge, train every entry, upload every entry."""
        return [merge, Train(now.epochs), keep_and_upload]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Eq. 11: average the full models, personal entries included; remember each upload."""
        uploads = dense(up, "theta")
        rows = {**rows, "theta": uploads, "seen": torch.ones_like(rows["seen"])}
        return {"theta": average(uploads, n)}, rows

    def serve(self, model: Model, now: Moment) -> Program:
        """Eq. 9: use the merged model."""
        return [merge]
