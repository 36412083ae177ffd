"""Rounds whose clients come one after the other, for the modes in which one client's state reaches the next.

Each of them is a cohort by itself, but all start from the model that the round before left. So the server holds, beside
the mean of a round's uploads so far (`theta`, the global model once the round is over), the model that the round began
with (`start`). `download` gives both: clients train from `start` and are served with `theta`.
"""

import torch
from torch import Tensor

from fedobp import method as fl


class SequentialAsPublished:
    """Mixin of methods whose mode `as-published` is sequential: one worker's state goes from client to client."""

    mode: str

    @property
    def sequential(self) -> bool:
        """Only the faithful form trains clients side by side."""
        return self.mode == "as-published"


def server_before(theta: Tensor, weight: Tensor) -> fl.Tensors:
    """Return the server's state before round 1; `weight` is 0, for the whole model or for each entry."""
    return {"theta": theta, "start": theta, "weight": weight, "round": weight.new_zeros((), dtype=torch.int64)}


def round_start(server: fl.Tensors, ctx: fl.RoundContext) -> Tensor:
    """Return the model that this round's clients start from: for its first client, what the last round left."""
    return torch.where(server["round"] == ctx.round, server["start"], server["theta"])


def after_client(server: fl.Tensors, ctx: fl.RoundContext, upload: Tensor, weight: Tensor) -> fl.Tensors:
    """Take an upload into the round's mean with a weight, for the whole model or for each entry; 0 leaves it out."""
    total = torch.where(server["round"] == ctx.round, server["weight"], 0) + weight
    step = torch.where(weight > 0, weight.to(upload.dtype) / total, 0.0)
    theta = torch.lerp(server["theta"], upload, step)
    return {"theta": theta, "start": round_start(server, ctx), "weight": total,
            "round": torch.full_like(server["round"], ctx.round)}  # fmt: skip
