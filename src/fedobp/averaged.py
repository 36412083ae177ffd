"""Any method, with an average of its global models over the rounds for use: clients go on training the newest one.

The average is exponential, A_t = (1 - d) sum_k d^(t-k) theta_k / (1 - d^t), so it starts at theta_1 and not at theta_0.
It costs one vector on the server, and no traffic: a client gets the newest model to train, and the average to use.
`server["theta"]`, the global model of a run, is the average; the newest model is `server["newest"]`.
"""

from dataclasses import dataclass

from torch import Tensor

from fedobp.method import CohortUpdate, InitialState, Method, Model, Record, RoundContext, Tensors
from fedobp.wrapped import Wrapped

_NEWEST, _WEIGHT = "newest", "newest.weight"  # in the server's state


def averaged(method: Method, decay: float) -> Method:
    """Return a method that serves the average of its global models; a decay of 0 leaves it as it is."""
    return Averaged(method, decay) if decay else method


@dataclass(frozen=True)
class Averaged(Wrapped):
    """A method that serves an average of its global models."""

    decay: float

    def init(self, model: Model, theta: Tensor, seed: int) -> InitialState:
        """Before round 1 the average is theta^0, with weight 0."""
        server, record, state = self.inner.init(model, theta, seed)
        more = {_NEWEST: server["theta"], _WEIGHT: theta.new_zeros(())}
        return InitialState({**server, **more}, record, state)

    def download(self, ctx: RoundContext, server: Tensors, records: Tensors) -> tuple[Record, Tensors]:
        """Send the average for use, and the newest model to train."""
        return self.inner.download(ctx, _with(server, server["theta" if ctx.serving else _NEWEST]), records)

    def aggregate(
        self, ctx: RoundContext, server: Tensors, records: Tensors, update: CohortUpdate
    ) -> tuple[Tensors, Tensors]:
        """Aggregate as the inner method; then move the average by (1 - d) / (1 - d^t) of the way to the new model."""
        after, records = self.inner.aggregate(ctx, _with(server, server[_NEWEST]), records, update)
        weight = self.decay * server[_WEIGHT] + (1 - self.decay)  # 1 - d^t
        average = server["theta"] + (1 - self.decay) / weight * (after["theta"] - server["theta"])
        return {**after, "theta": average, _NEWEST: after["theta"], _WEIGHT: weight}, records


def _with(server: Tensors, theta: Tensor) -> Tensors:
    """Return the inner method's server state, with a global model."""
    return {**{name: value for name, value in server.items() if name not in (_NEWEST, _WEIGHT)}, "theta": theta}
