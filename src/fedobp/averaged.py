"""Any method, with an average of its global models over the last rounds for use: clients go on training the newest one.

After round t the average moves towards the new model theta_t by

    A_t = A_(t-1) + (theta_t - A_(t-1)) / (1 + s (t - 1)),

so that it reaches back about t s rounds, a share s of all that were (polynomial-decay averaging, Shamir & Zhang, 2013):
A_1 = theta_1, and s = 1 is the plain mean. It costs one vector on the server, and no traffic: a client gets the newest
model to train, and the average to use. `server["theta"]`, the global model of a run, is the average; the newest model
is `server["newest"]`.
"""

from dataclasses import dataclass

from torch import Tensor

from fedobp.errors import FedobpError
from fedobp.method import CohortUpdate, InitialState, Method, Model, Record, RoundContext, Tensors
from fedobp.wrapped import Wrapped

_NEWEST = "newest"  # in the server's state


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
        return InitialState({**server, _NEWEST: server["theta"]}, record, state)

    def download(self, ctx: RoundContext, server: Tensors, records: Tensors) -> tuple[Record, Tensors]:
        """Send the average for use, and the newest model to train."""
        return self.inner.download(ctx, _with(server, server["theta" if ctx.serving else _NEWEST]), records)

    def aggregate(
        self, ctx: RoundContext, server: Tensors, records: Tensors, update: CohortUpdate
    ) -> tuple[Tensors, Tensors]:
        """Aggregate as the inner method; then move the average."""
        after, records = self.inner.aggregate(ctx, _with(server, server[_NEWEST]), records, update)
        average = server["theta"] + (after["theta"] - server["theta"]) / (1 + self.share * (ctx.round - 1))
        return {**after, "theta": average, _NEWEST: after["theta"]}, records


def _with(server: Tensors, theta: Tensor) -> Tensors:
    """Return the inner method's server state, with a global model."""
    return {**{name: value for name, value in server.items() if name != _NEWEST}, "theta": theta}
