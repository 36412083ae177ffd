"""Rounds whose clients train one after the other, for the modes in which one client's state reaches the next client.

Each client is a cohort by itself, but all clients of a round start from the global model after the previous round. So
the server holds two models: `theta`, the mean of the round's uploads so far (the global model once the round is over),
and `start`, the model at the beginning of the round. `download` sends both: clients train from `start` and are served
`theta`.
"""

import torch
from torch import Tensor

from fedobp import method as fl


class SequentialAsPublished:
    """Mixin of methods whose mode `as-published` is sequential: one worker's state passes from client to client."""

    mode: str

    @property
    def sequential(self) -> bool:
        """Only the faithful mode trains a cohort's clients side by side."""
        return self.mode == "as-published"


def server_before(theta: Tensor, weight: Tensor) -> fl.Tensors:
    """Return the server's state before round 1; `weight` is 0, for the whole model or for each entry."""
    return {"theta": theta, "start": theta, "weight": weight, "round": weight.new_zeros((), dtype=torch.int64)}


def round_start(server: fl.Tensors, ctx: fl.RoundContext) -> Tensor:
    """Return the model that this round's clients start from: for the first client, the previous round's result."""
    return torch.where(server["round"] == ctx.round, server["start"], server["theta"])


def after_client(server: fl.Tensors, ctx: fl.RoundContext, upload: Tensor, weight: Tensor) -> fl.Tensors:
    """Add an upload to the round's mean, with one weight or one for each entry; a weight of 0 leaves it out."""
    total = torch.where(server["round"] == ctx.round, server["weight"], 0) + weight
    step = torch.where(weight > 0, weight.to(upload.dtype) / total, 0.0)
    theta = torch.lerp(server["theta"], upload, step)
    return {"theta": theta, "start": round_start(server, ctx), "weight": total,
            "round": torch.full_like(server["round"], ctx.round)}  # fmt: skip
