"""FedOBP's scheme with interchangeable importance scores and threshold rules, over all entries or within each tensor.

The paper compares three scores, I_G (eq. 5), I_F (eq. 6) and its own I_O (eq. 19), but chooses entries by a quantile
within each tensor for the first two and over all entries for the third. Here all but the score is the same, and `pool`
is a separate option. With its default options this is `fedobp`, bit for bit.

The server computes the scores that follow from its records: squared, product, magnitude, random, and I_G,
|before - after| of a client's last local training (the server has both, as it sends the model that the client starts
from). The Fisher scores need the client's samples: then the client is sent the whole global model and scores its last
local model before it merges, at test too. I_F is printed as the squared gradient of the mean loss (fisher-batch) and
coded as the mean of squared gradients of single samples (fisher). obd is classical OBD (eq. 12 and 13), the cost of
setting an entry to 0: H_kk theta_k^2 / 2, with the diagonal of the Fisher information for H.

Rules: an entry is personal if its score is above the q-quantile (eq. 7), or above c^2 times the mean score (rms: for
`squared`, |d| > c rms(d) with d = theta_i - theta_g). The third, `statistic`, is Optimal Brain Surgeon's view: what is
gained if the entry is refitted, not what its last value is worth. On the client's n samples, at the global model, with
the sum g of their gradients and the sum f of their squares, entry by entry:

    z_k = g_k / sqrt(f_k),    personal: z_k^2 > 2 ln N,    s_k = -z_k if personal, else 0,    theta = theta_g + alpha s

z_k^2 is n (mean gradient)^2 / F_kk with F_kk = f_k / n: chi-squared with one degree of freedom if the entry needs no
personal value, and the largest of N such values is about 2 ln N. Newton's step of one entry is -g_k / f_k; with f from
gradients at the observed labels it is as large as 1 / g_k where all gradients are tiny, while |z_k| is at most sqrt(n).
Entries are correlated, so alpha minimises the quadratic model of the loss along s with the whole Fisher information G
(importance.curvature), and no constant:

    alpha = -g.s / s^T G s,    both summed over the samples

Training starts from the global model then: refitted values hold nothing that training on the same samples would not
find, and starting from them was unstable.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from fedobp import method as fl
from fedobp.algorithms.fedavg import keep_and_upload
from fedobp.algorithms.fedobp import FedOBP
from fedobp.errors import FedobpError
from fedobp.importance import (
    SCORES,
    curvature,
    quantile_threshold,
    rms_threshold,
    smooth,
    soft_mask,
    squared_gradients,
)
from fedobp.keys import Purpose, fold, uniform


def random_scores(ctx: fl.RoundContext, like: Tensor) -> Tensor:
    """Return a random score for every entry of [clients, N], uniform between -1 and 0.

    Floats are finest near 0: there, where the threshold is, hardly any two entries of a model tie.
    """
    keys = fold(ctx.seed, ctx.round, ctx.cohort, Purpose.SCORE).to(like.device)
    return -uniform(keys[:, None], like.shape[1]).to(like.dtype)


def magnitude(theta_i: Tensor, theta_g: Tensor) -> Tensor:
    """|theta_i|, whatever the global model is."""
    return theta_i.abs()


def take_last(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the client's last model, which is scored."""
    return client.set(theta=client.state["theta"], score=torch.zeros_like(client.state["theta"]))


def add_squares(model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
    """Eq. 6 as its authors' code has it: add the squared gradients of single samples."""
    return client.set(score=client.scratch["score"] + squared_gradients(model, client.theta, batch))


def gradient_sum(model: fl.Model, theta: Tensor, batch: fl.Batch) -> Tensor:
    """Return the sum of the gradients of single samples."""

    def loss(theta: Tensor) -> Tensor:
        each = fl.sample_losses(model.logits(theta, batch.x), batch.y)
        return (each * batch.weight).sum()

    found: Tensor = grad(loss)(theta)
    return found


def add_gradient(model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
    """Eq. 6 as printed: add the gradients of single samples; the square comes last."""
    return client.set(score=client.scratch["score"] + gradient_sum(model, client.theta, batch))


STEPS = {"fisher": add_squares, "fisher-batch": add_gradient, "obd": add_squares}  # scores that need samples
WITH_MODELS = {**SCORES, "magnitude": magnitude}  # scores that need the two models alone
_START = 0.9  # of q with `warmup`
_NOISE = 1e3  # a gradient below this many roundings of the largest one is noise: in bf16 it was up to 420, else 0.03


# The statistic


def take_global(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the global model, which is tested."""
    theta = fl.dense(client.download, "theta")
    return client.set(theta=theta, gradient=torch.zeros_like(theta), squares=torch.zeros_like(theta))


def add_both(model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
    """Add the gradients of single samples, and their squares."""
    return client.set(
        gradient=client.scratch["gradient"] + gradient_sum(model, client.theta, batch),
        squares=client.scratch["squares"] + squared_gradients(model, client.theta, batch),
    )


def add_curvature(model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
    """Add s^T G s of single samples."""
    more = curvature(model, client.theta, client.scratch["step"], batch)
    return client.set(curvature=client.scratch["curvature"] + more)


def refit(model: fl.Model, client: fl.Client) -> fl.Client:
    """Take the step, at the length that minimises the quadratic model along it; none without a curvature.

    A curvature below the rounding of J s, squared, is none: f s^2 is the square of an entry's part in J s.
    """
    step, curved = client.scratch["step"], client.scratch["curvature"]
    gain = -(client.scratch["gradient"] * step).sum()
    rounding = torch.finfo(step.dtype).eps ** 2 * (client.scratch["squares"] * step.square()).sum()
    length = torch.where(curved > rounding, gain / curved, 0.0)
    theta = client.theta + length * step
    return client.set(theta=theta, mine=theta != client.theta)


@dataclass(frozen=True)
class Decoupled(FedOBP):
    """FedOBP with a choice of scores, rules and pools."""

    name: ClassVar[str] = "decoupled"
    summary: ClassVar[str] = "FedOBP's scheme with other importance scores and threshold rules"
    paper: ClassVar[str] = "FedOBP's comparison of importance scores, with everything but the score the same"

    score: str = fl.option(
        "squared",
        "squared (eq. 19), product, gradient (eq. 5), fisher, fisher-batch (eq. 6), obd (eq. 13), taylor (eq. 16), "
        "magnitude, random",
        choices=("squared", "product", "gradient", *STEPS, "taylor", "magnitude", "random"),
    )
    pool: str = fl.option(
        "global",
        "one threshold over all entries, which is FedOBP's, or one in each tensor",
        choices=("global", "tensor"),
    )
    rule: str = fl.option(
        "quantile",
        "above the q-quantile (eq. 7); above c^2 times the mean score (rms); or by a test of the global model on the "
        "client's samples, with refitted values (statistic)",
        choices=("quantile", "rms", "statistic"),
    )
    c: float = fl.option(20.0, "of rule=rms: personal is |local - global| > c rms(local - global)", low=0.0)
    warmup: int = fl.option(0, f"rounds in which q rises from {_START}, geometrically in 1 - q; 0 is off", low=0)
    soft: float = fl.option(
        0.0, "temperature: a personal entry has the weight 1 - (threshold / score)^(1 / soft); 0: the mask", low=0.0
    )

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.score == "gradient" and self.start == "literal":
            raise FedobpError(
                "score=gradient does not go with start=literal: a client that has never trained has no change to "
                "score, so use start=global"
            )
        if self.rule == "rms" and self.score == "random":
            raise FedobpError("rule=rms does not go with score=random: these scores are negative, so use rule=quantile")
        given = self.score, self.norm, self.ema, self.start
        if self.rule == "statistic" and given != ("squared", "none", 0.0, "global"):
            raise FedobpError(
                "rule=statistic computes its own score at the global model: leave out score, norm, ema and start"
            )
        if self.rule == "statistic" and self.soft > 0:
            raise FedobpError("soft mixes a client's last values, which rule=statistic does not use: leave it out")
        if self.warmup and self.rule != "quantile":
            raise FedobpError(f"warmup raises q, which rule={self.rule} does not use: leave it out")
        if self.soft > 0 and self.score not in {**WITH_MODELS, **STEPS}:
            raise FedobpError(
                f"soft does not go with score={self.score}: clients compute the weights, and cannot compute this score"
            )

    @property
    def at_client(self) -> bool:
        """Whether the client scores: the score needs its samples, or it mixes its values with the global ones."""
        return self.score in STEPS or self.rule == "statistic" or self.soft > 0

    def in_round(self, round: int) -> "Decoupled":
        """Return the method with the q of a round: 1 - q falls from 0.1 in round 1 by the same factor each round."""
        if round > self.warmup or self.q <= _START:
            return replace(self, warmup=0)
        done = (round - 1) / self.warmup
        return replace(self, q=1 - (1 - _START) ** (1 - done) * (1 - self.q) ** done, warmup=0)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Scores and last models are kept where scores are computed: in the records, as in FedOBP, or on the client."""
        initial = super().init(model, theta, seed)
        if self.at_client:
            return fl.InitialState(initial.server, record={}, state=initial.record)
        change = {"change": torch.zeros_like(theta)} if self.score == "gradient" else {}
        return fl.InitialState(initial.server, {**initial.record, **change}, initial.state)

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Eq. 7 and 8: send the shared entries; all of them where the client scores."""
        if self.warmup:
            return self.in_round(ctx.round).download(ctx, server, records)
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
        if self.score == "taylor":
            if ctx.global_gradient is None:
                raise FedobpError(
                    "score=taylor needs the data of all clients, which only a simulation has: use another score"
                )
            return (ctx.global_gradient(records["theta"]) * (server["theta"] - records["theta"])).abs()
        if self.score == "random":
            return random_scores(ctx, records["theta"])
        return WITH_MODELS[self.score](records["theta"], server["theta"])

    def _above(self, score: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the mask of personal entries, or with `soft` their weights."""
        score = self._normalised(score, sizes)
        pieces = score.split(list(sizes), dim=-1) if self.pool == "tensor" else [score]
        return torch.cat([self._chosen(piece) for piece in pieces], dim=-1)

    def _chosen(self, score: Tensor) -> Tensor:
        if self.rule == "rms":
            threshold = rms_threshold(score, self.c)
        elif self.rule == "statistic":
            threshold = torch.full_like(score[..., :1], 2 * math.log(score.shape[-1]))
        else:
            threshold = quantile_threshold(score, self.q)
        return soft_mask(score, threshold, self.soft) if self.soft > 0 else score > threshold

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Eq. 9 and 10: merge, train every entry, upload every entry."""
        if self.rule == "statistic":
            return [take_global, fl.Train(ctx.epochs), keep_and_upload]
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
        """Eq. 9: use the merged model, after scoring where the client scores."""
        if self.rule == "statistic":
            test = fl.Sweep(add_both, per_sample=True, passes=2)
            return [take_global, test, self._choose_step, fl.Sweep(add_curvature, passes=2), refit]
        if not self.at_client:
            return super().personalize(ctx)
        merge = self.in_round(ctx.round)._merge
        if self.score not in STEPS:
            return [merge]
        return [take_last, fl.Sweep(STEPS[self.score], per_sample=self.score != "fisher-batch"), merge]

    def _merge(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Eq. 7 and 9 on the client; without samples all Fisher scores are 0, and no entry is personal."""
        state, shared = client.state, fl.dense(client.download, "theta")
        score = self._score(client, shared)
        has_model = state["seen"] if self.start == "global" else torch.ones_like(state["seen"])
        if self.ema > 0:
            score = smooth(score, state["score"], state["scored"], self.ema)
            client = client.remember(score=score, scored=has_model)
        weight = self.personal(model, score)
        mine = (weight > 0) & has_model
        own = torch.lerp(shared, state["theta"], weight) if self.soft > 0 else state["theta"]
        return client.set(theta=torch.where(mine, own, shared), mine=mine)

    def _score(self, client: fl.Client, shared: Tensor) -> Tensor:
        last = client.state["theta"]
        if self.score in WITH_MODELS:
            return WITH_MODELS[self.score](last, shared)
        score = client.scratch["score"] / client.data["n"].clamp(min=1)
        if self.score == "fisher-batch":
            return score.square()
        return score * last.square() / 2 if self.score == "obd" else score

    def _choose_step(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Test every entry; the step is that of the personal ones. An entry without a gradient is never personal.

        Such an entry may have rounding noise for a gradient: attention's key bias does, which changes no softmax.
        """
        gradient, squares = client.scratch["gradient"], client.scratch["squares"]
        noise = (_NOISE * torch.finfo(squares.dtype).eps) ** 2 * squares.amax()
        root = torch.where(squares > noise, gradient / squares.sqrt(), 0.0)
        chosen = self.personal(model, root.square())
        return client.set(step=chosen * -root, curvature=root.new_zeros(()))
