"""FedOBP's scheme with interchangeable importance scores, and quantiles over all entries or within each tensor.

The paper compares three scores, I_G (eq. 5), I_F (eq. 6) and its own I_O (eq. 19), but chooses entries by a quantile
within each tensor for the first two and over all entries for the third. Here all but the score is the same, and `pool`
is a separate option. With score=squared and pool=global this is `fedobp`, bit for bit.

The server computes the scores that follow from its records: squared, product, magnitude, random, and I_G,
|before - after| of a client's last local training (the server has both, as it sends the model that the client starts
from). The Fisher scores need the client's samples: then the client is sent the whole global model and scores its last
local model before it merges, at test too. I_F is printed as the squared gradient of the mean loss (fisher-batch) and
coded as the mean of squared gradients of single samples (fisher). obd is classical OBD (eq. 12 and 13), the cost of
setting an entry to 0: H_kk theta_k^2 / 2, with the diagonal of the Fisher information for H.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from fedobp import method as fl
from fedobp.algorithms.fedavg import keep_and_upload
from fedobp.algorithms.fedobp import FedOBP
from fedobp.errors import FedobpError
from fedobp.importance import above, smooth, squared_gradients
from fedobp.keys import Purpose, fold, uniform


def random_scores(ctx: fl.RoundContext, like: Tensor) -> Tensor:
    """Return a random score for every entry of [clients, N], uniform between -1 and 0.

    Floats are finest near 0: there, where the threshold is, hardly any two entries of a model tie.
    """
    keys = fold(ctx.seed, ctx.round, ctx.cohort, Purpose.SCORE).to(like.device)
    return -uniform(keys[:, None], like.shape[1]).to(like.dtype)


def take_last(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the client's last model, which is scored."""
    return client.set(theta=client.state["theta"], score=torch.zeros_like(client.state["theta"]))


def add_squares(model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
    """Eq. 6 as its authors' code has it: add the squared gradients of single samples."""
    return client.set(score=client.scratch["score"] + squared_gradients(model, client.theta, batch))


def add_gradient(model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
    """Eq. 6 as printed: add the gradients of single samples; the square comes last."""

    def loss(theta: Tensor) -> Tensor:
        each = fl.sample_losses(model.logits(theta, batch.x), batch.y)
        return (each * batch.weight).sum()

    return client.set(score=client.scratch["score"] + grad(loss)(client.theta))


STEPS = {"fisher": add_squares, "fisher-batch": add_gradient, "obd": add_squares}  # scores that need samples


@dataclass(frozen=True)
class Decoupled(FedOBP):
    """FedOBP with a choice of scores and pools."""

    name: ClassVar[str] = "decoupled"
    summary: ClassVar[str] = "FedOBP's scheme with other importance scores, and quantiles over all entries or by tensor"
    paper: ClassVar[str] = "FedOBP's comparison of importance scores, with everything but the score the same"

    score: str = fl.option(
        "squared",
        "squared (eq. 19), product, gradient (eq. 5), fisher, fisher-batch (eq. 6), obd (eq. 13), taylor (eq. 16), "
        "magnitude, random",
        choices=("squared", "product", "gradient", *STEPS, "taylor", "magnitude", "random"),
    )
    pool: str = fl.option(
        "global",
        "one quantile over all entries, which is FedOBP's, or one in each tensor",
        choices=("global", "tensor"),
    )

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.score == "gradient" and self.start == "literal":
            raise FedobpError(
                "score=gradient does not go with start=literal: a client that has never trained has no change to "
                "score, so use start=global"
            )

    @property
    def at_client(self) -> bool:
        """Whether a score needs the client's samples."""
        return self.score in STEPS

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Scores and last models are kept where scores are computed: in the records, as in FedOBP, or on the client."""
        initial = super().init(model, theta, seed)
        if self.at_client:
            return fl.InitialState(initial.server, record={}, state=initial.record)
        change = {"change": torch.zeros_like(theta)} if self.score == "gradient" else {}
        return fl.InitialState(initial.server, {**initial.record, **change}, initial.state)

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Eq. 7 and 8: send the shared entries; all of them where the client scores."""
        if self.at_client:
            return {"theta": fl.broadcast(server["theta"], ctx)}, records
        download, records = super().download(ctx, server, records)
        if self.score == "gradient":
            shared = download["theta"]
            assert isinstance(shared, fl.Sparse)
            records = {**records, "start": shared.fill(records["theta"])}  # until `aggregate`
        return download, records

    def scores(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> Tensor:
        """Return the scores that the server computes: eq. 5, eq. 19, and those to compare them with."""
        if self.score == "gradient":
            return records["change"]
        if self.score == "magnitude":
            return records["theta"].abs()
        if self.score == "taylor":
            if ctx.global_gradient is None:
                raise FedobpError(
                    "score=taylor needs the data of all clients, which only a simulation has: use another score"
                )
            return (ctx.global_gradient(records["theta"]) * (server["theta"] - records["theta"])).abs()
        return random_scores(ctx, records["theta"]) if self.score == "random" else super().scores(ctx, server, records)

    def _above(self, score: Tensor, sizes: Sequence[int]) -> Tensor:
        if self.pool == "global":
            return super()._above(score, sizes)
        pieces = self._normalised(score, sizes).split(list(sizes), dim=-1)
        return torch.cat([above(piece, self.q) for piece in pieces], dim=-1)

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Eq. 9 and 10: merge, train every entry, upload every entry."""
        if self.at_client:
            return [*self.personalize(ctx), fl.Train(ctx.epochs), keep_and_upload]
        return super().client_update(ctx)

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Eq. 11: average; for eq. 5, record the change of each entry."""
        if self.at_client:
            return {"theta": update.mean("theta")}, records
        server, records = super().aggregate(ctx, server, records, update)
        if self.score == "gradient":
            records["change"] = (records.pop("start") - records["theta"]).abs()
        return server, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Eq. 9: use the merged model, after scoring the last one where the client scores."""
        if not self.at_client:
            return super().personalize(ctx)
        return [take_last, fl.Sweep(STEPS[self.score], per_sample=self.score != "fisher-batch"), self._merge]

    def _merge(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Eq. 7 and 9 on the client; without samples all scores are 0, and no entry is personal."""
        state, score = client.state, client.scratch["score"] / client.data["n"].clamp(min=1)
        if self.score == "fisher-batch":
            score = score.square()
        elif self.score == "obd":
            score = score * state["theta"].square() / 2
        has_model = state["seen"] if self.start == "global" else torch.ones_like(state["seen"])
        if self.ema > 0:
            score = smooth(score, state["score"], state["scored"], self.ema)
            client = client.remember(score=score, scored=has_model)
        mine = self.personal(model, score) & has_model
        return client.set(theta=torch.where(mine, state["theta"], fl.dense(client.download, "theta")), mine=mine)
