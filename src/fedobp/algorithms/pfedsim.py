"""pFedSim (Tan et al., Similarity-Aware Model Aggregation Towards Personalized Federated Learning, 2023).

A warm-up by FedAvg takes a share `rho` of the rounds; its model is then the initial model of all clients. From there on
each client of the cohort gets its own head, and its own mean of all clients' bases, weighted by -log(1 - s_ij), where
s_ij is the similarity of the two heads. It trains both, and keeps and uploads the result, which is the model it uses.

The server holds every client's model and all similarities. It updates s_ij when i and j are in one cohort; until then
s_ij is 0, and j does not contribute to the base of i.

The authors' repository could not be obtained; the rest is as in the framework that they maintain, except that the
similarity of two equal heads is not infinite but that of a client with itself, s_ii = 0.9999.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, keep_and_upload, take_global, take_last

_SELF = 0.9999  # similarity of a client with itself; 1 would have infinite weight


def head_similarity(heads: Tensor) -> Tensor:
    """Return s_ij of heads [clients, classes, features]: the mean cosine of their rows, between 0 and s_ii."""
    unit = functional.normalize(heads, dim=-1)
    return torch.einsum("icf,jcf->ij", unit, unit).div(heads.shape[1]).clamp(0, _SELF)


def base_weights(similarity: Tensor) -> Tensor:
    """Return each client's weights of all clients' bases: -log(1 - s_ij), scaled to sum 1 over j."""
    weights = -torch.log1p(-similarity)
    return weights / weights.sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class PFedSim(FedAvg):
    """FedAvg, and then for each client a mean of bases that is weighted by the similarity of heads."""

    name: ClassVar[str] = "pfedsim"
    summary: ClassVar[str] = "FedAvg first; then each client gets a mean of bases weighted by the similarity of heads"
    paper: ClassVar[str] = "Tan et al., pFedSim: Similarity-Aware Model Aggregation Towards Personalized FL, 2023"

    rho: float = fl.option(0.5, "share of the rounds that are FedAvg's warm-up; 0.5 is the paper's", low=0.0, high=1.0)

    def personal(self, ctx: fl.RoundContext) -> bool:
        """Say whether the warm-up is over; in exact decimals, so that 0.29 of 100 rounds are 29."""
        return ctx.round > Fraction(str(self.rho)) * ctx.rounds

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: the last model, kept after the warm-up; then the server holds all clients' models, too."""
        return fl.InitialState(server={"theta": theta}, record={}, state=fl.last_model(theta))

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send each client its mean base with its head; until models are stored, send all clients the same model."""
        if "models" not in server:
            return {"theta": fl.broadcast(server["theta"], ctx)}, records
        layout, cohort = ctx.model.layout, ctx.cohort.to(server["theta"].device)
        (base, _), (bases, heads) = layout.split(server["theta"]), layout.split(server["models"])
        # As differences from the warm-up's model: the plain mean of equal values is not exactly that value.
        mixed = base + base_weights(server["similarity"][cohort]) @ (bases - base)
        return {"theta": layout.join(mixed, heads[cohort])}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the received model, and after the warm-up keep it."""
        if not self.personal(ctx):
            return super().client_update(ctx)
        return [take_global, fl.Train(ctx.epochs), keep_and_upload]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """In the warm-up, average (eq. 2); then store the models, and update the similarities within the cohort."""
        if not self.personal(ctx):
            return super().aggregate(ctx, server, records, update)
        theta, uploads = server["theta"], update.dense("theta")
        cohort = ctx.cohort.to(theta.device)
        models = server.get("models", theta.expand(ctx.clients, -1))
        initial = _SELF * torch.eye(ctx.clients, dtype=theta.dtype, device=theta.device)
        within = head_similarity(ctx.model.head(uploads)[0]).fill_diagonal_(_SELF)
        similarity = server.get("similarity", initial).index_put((cohort[:, None], cohort[None, :]), within)
        return {"theta": theta, "models": models.index_copy(0, cohort, uploads), "similarity": similarity}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the client's last model; without one, and during the warm-up, the global one."""
        return [take_last] if self.personal(ctx) else super().personalize(ctx)
