"""The oracle of partitions with groups: FedAvg within each group of clients whose data the partition changed alike.

Clustered federated learning (IFCA, Ghosh et al., 2020) estimates groups from losses; here they are known. So it is no
method to use, but the accuracy that one model for each group has. Without groups it is FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg, all_mine, take_global
from fedobp.errors import FedobpError
from fedobp.transfer import to_device


def known_groups(ctx: fl.RoundContext) -> Tensor:
    """Return the group of every client."""
    if ctx.groups is None:
        raise FedobpError("group-oracle needs the groups of clients, which only a simulation knows: use another method")
    return ctx.groups


@dataclass(frozen=True)
class GroupOracle(FedAvg):
    """One model for each group."""

    name: ClassVar[str] = "group-oracle"
    summary: ClassVar[str] = "FedAvg within each group of clients, which the partition knows: for simulations only"
    paper: ClassVar[str] = "no paper: what knowing the groups gives; without groups it is FedAvg"

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send each client the model of its group; all groups start from theta^0."""
        groups = known_groups(ctx)
        if "models" not in server:
            return super().download(ctx, server, records)
        models = server["models"]
        return {"theta": models[to_device(groups[ctx.cohort], models.device)]}, records

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Eq. 2 within each group of the cohort; a group without training samples in it keeps its model."""
        mean, records = super().aggregate(ctx, server, records, update)
        groups, theta = known_groups(ctx), server["theta"]
        count = int(groups.max()) + 1
        if count == 1:
            return mean, records
        models = list(server.get("models", theta.expand(count, -1)))
        for group in groups[ctx.cohort].unique().tolist():
            members = to_device((groups[ctx.cohort] == group).nonzero()[:, 0], theta.device)
            uploads, n = update.dense("theta")[members], update.n[members]
            models[group] = torch.where(n.sum() > 0, fl.average(uploads, n), models[group])
        return {**mean, "models": torch.stack(models)}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the group's model without changes; where there are groups, none of its entries is the global model's."""
        return [take_global, all_mine] if known_groups(ctx).any() else [take_global]
