"""pFedSim (Tan et al., Similarity-Aware Model Aggregation Towards Personalized Federated Learning, 2023).

First FedAvg for a share `rho` of the rounds. Its model is then everyone's own, and from there on nobody averages for
all: a client of the cohort gets the mean of all clients' bases, each weighted by -log(1 - s_ij), where s_ij is how much
the two heads are alike, and its own head. It trains both, and keeps and uploads the result, which is the model it uses.

The server holds every client's model and all similarities. It can only compare those who are there, so it refreshes
s_ij when i and j are in one cohort; it is 0, and j has no say, until then.

Its own repository could not be obtained; the rest is what the framework by its authors does, with one guard: two equal
heads are not infinitely alike but as much as a client is to itself, s_ii = 0.9999.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, keep_and_upload, take_global, take_last

_SELF = 0.9999  # how much a client is like itself; 1 would be infinitely much


def alikeness(heads: Tensor) -> Tensor:
    """Return s_ij of heads [clients, classes, features]: the mean cosine of their rows, between 0 and s_ii."""
    records = functional.normalize(heads, dim=-1)
    return torch.einsum("icf,jcf->ij", records, records).div(heads.shape[1]).clamp(0, _SELF)


def shares(alike: Tensor) -> Tensor:
    """Return each client's weights of all others, -log(1 - s_ij), which add up to 1 in a row."""
    weights = -torch.log1p(-alike)
    return weights / weights.sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class PFedSim(FedAvg):
    """FedAvg, and then for each client a mean of its own over those whose heads are like its own."""

    name: ClassVar[str] = "pfedsim"
    summary: ClassVar[str] = "FedAvg first; then each client gets a mean of bases weighted by how alike the heads are"
    paper: ClassVar[str] = "Tan et al., pFedSim: Similarity-Aware Model Aggregation Towards Personalized FL, 2023"

    rho: float = fl.option(0.5, "share of the rounds that are FedAvg's; 0.5 is the paper's", low=0.0, high=1.0)

    def personal(self, ctx: fl.RoundContext) -> bool:
        """Say whether the warm-up is over; in exact decimals, so that 0.29 of 100 rounds are 29."""
        return ctx.round > Fraction(str(self.rho)) * ctx.rounds

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Each client will keep its model; the server makes room for all of them when the warm-up is over."""
        return fl.InitialState(server={"theta": theta}, record={}, state=fl.last_model(theta))

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send each client the mean base over those like it, with its own head; at first all have the same model."""
        if "models" not in server:
            return {"theta": fl.broadcast(server["theta"], ctx)}, records
        cohort, start = ctx.cohort.to(server["theta"].device), server["theta"]
        (base, _), (bases, heads) = (ctx.model.layout.split(vector) for vector in (start, server["models"]))
        # As differences from the warm-up's model: the plain mean of equal values is not that value.
        mixed = base + shares(server["alike"][cohort]) @ (bases - base)
        return {"theta": ctx.model.layout.join(mixed, heads[cohort])}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train what was sent, and after the warm-up keep it."""
        return (
            [take_global, fl.Train(ctx.epochs), keep_and_upload] if self.personal(ctx) else super().client_update(ctx)
        )

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """In the warm-up, average (eq. 2); then store the models, and see how alike the cohort's heads are."""
        if not self.personal(ctx):
            return super().aggregate(ctx, server, records, update)
        theta, uploads = server["theta"], update.dense("theta")
        cohort = ctx.cohort.to(theta.device)
        models = server.get("models", theta.expand(ctx.clients, -1))
        alike = server.get("alike", _SELF * torch.eye(ctx.clients, dtype=theta.dtype, device=theta.device))
        found = alikeness(ctx.model.head(uploads)[0]).fill_diagonal_(_SELF)
        alike = alike.index_put((cohort[:, None], cohort[None, :]), found)
        return {"theta": theta, "models": models.index_copy(0, cohort, uploads), "alike": alike}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the stored model; without one, that of the warm-up."""
        return [take_last] if self.personal(ctx) else super().personalize(ctx)
