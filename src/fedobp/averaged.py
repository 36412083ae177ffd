"""Any method, with an average of its global models over the last rounds for use: clients go on training the newest one.

After round t the average moves towards the new model theta_t by

    A_t = A_(t-1) + (theta_t - A_(t-1)) / (1 + s (t - 1)),

so that it reaches back about t s rounds, a share s of all that were (polynomial-decay averaging, Shamir & Zhang, 2013):
A_1 = theta_1, and s = 1 is the plain mean. t counts the rounds that had an aggregation; where a round has several, as
in sequential methods, theta_t is the model after the last. It costs two vectors on the server, and no traffic: a client
gets the newest model to train, and the average to use. `server["theta"]`, the global model of a run, is the average;
the newest model is `server["newest"]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedobp.errors import FedobpError
from fedobp.method import CohortUpdate, InitialState, Method, Model, Record, RoundContext, Tensors
from fedobp.wrapped import Wrapped

# In the server's state: the newest model, A_(t-1), t, and the number of the round that is t.
_NEWEST, _BEFORE, _COUNT, _ROUND = "newest", "average.before", "average.count", "average.round"


def averaged(method: Method, share: float) -> Method:
    """Return a method that serves the average of its last global models; a share of 0 leaves it as it is."""
    return Averaged(method, share) if share else method


@dataclass(frozen=True)
class Averaged(Wrapped):
    """A method that serves an average of its last global models."""

    share: float

    def init(self, model: Model, theta: Tensor, seed: int) -> InitialState:
        """Before round 1 the average is theta^0."""
        server, record, state = self.inner.init(model, theta, seed)
        if _NEWEST in server:
            raise FedobpError(f"{self.inner.name} serves an average of its own: leave out --average")
        zero = theta.new_zeros((), dtype=torch.int64)
        own = {_NEWEST: server["theta"], _BEFORE: server["theta"], _COUNT: zero, _ROUND: zero}
        return InitialState({**server, **own}, record, state)

    def download(self, ctx: RoundContext, server: Tensors, records: Tensors) -> tuple[Record, Tensors]:
        """Send the average for use, and the newest model to train."""
        return self.inner.download(ctx, _with(server, server["theta" if ctx.serving else _NEWEST]), records)

    def aggregate(
        self, ctx: RoundContext, server: Tensors, records: Tensors, update: CohortUpdate
    ) -> tuple[Tensors, Tensors]:
        """Aggregate as the inner method; then move the average."""
        after, records = self.inner.aggregate(ctx, _with(server, server[_NEWEST]), records, update)
        again = server[_ROUND] == ctx.round
        before = torch.where(again, server[_BEFORE], server["theta"])
        count = server[_COUNT] + (~again).long()
        average = before + (after["theta"] - before) / (1 + self.share * (count - 1)).to(before.dtype)
        own = {_BEFORE: before, _COUNT: count, _ROUND: torch.full_like(count, ctx.round)}
        return {**after, "theta": average, _NEWEST: after["theta"], **own}, records


def _with(server: Tensors, theta: Tensor) -> Tensors:
    """Return the inner method's server state, with a global model."""
    own = (_NEWEST, _BEFORE, _COUNT, _ROUND)
    return {**{name: value for name, value in server.items() if name not in own}, "theta": theta}
