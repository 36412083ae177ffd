"""FedAvg with server momentum, whose clients start ahead of their own drift; the server knows each client's last move.

Local training moves client i from its start towards its own data, at a rate r_i for each of its k_i steps. What the
global model needs is the common part; the rest is drift. SCAFFOLD (Karimireddy et al., 2020) subtracts the drift from
every gradient, for twice the traffic and a vector on the client. Here the server takes it off the client's model, a
share before the training and the rest after it:

    d_i    = k_i (mean r - r_i)            minus the drift of i's last training; 0 for a client that was not seen yet
    s_i    = theta + beta m + share d_i    what client i receives; it trains from s_i to y_i
    theta' = mean of y_i + (1 - share) d_i over the cohort,   m' = theta' - theta,   r_i' = (y_i - s_i) / k_i

With share = 1/2 the client's path is centred on the global model, as SCAFFOLD's is. A larger share moves the start up
the client's own loss, by what its last training had descended: the gradients are those of points nearby whose loss is
higher, as in sharpness-aware minimisation, but for no additional pass. If training undoes a displacement a times
(a < 2 where SGD is stable), d_i grows up to 1 / (1 - a share) times, and without bound if a share > 1.

Clients count equally, as in SCAFFOLD: with means weighted by samples training diverged (docs/methods/counterdrift.md).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedacg import FedACG
from fedobp.algorithms.fedavg import take_global, upload_model


def upload_model_and_steps(model: fl.Model, client: fl.Client) -> fl.Client:
    """Upload the trained model, and in how many steps it was trained."""
    return upload_model(model, client).send(steps=client.data["steps"])


@dataclass(frozen=True)
class CounterDrift(FedACG):
    """FedACG with each client's drift taken off by the server.

    One vector down, which is the client's own, one vector and a number up; no state on the client. The server holds a
    vector a client, as FedOBP's does, and three of its own.
    """

    name: ClassVar[str] = "counterdrift"
    summary: ClassVar[str] = "FedAvg with server momentum, whose clients start ahead of their own drift"
    paper: ClassVar[str] = "no paper: docs/methods/counterdrift.md"

    share: float = fl.option(0.7, "share of a client's drift taken off before it trains; the rest after", low=0, high=1)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """No client has been seen: its number of steps is 0."""
        server, _, state = super().init(model, theta, seed)
        zero = torch.zeros_like(theta)
        none = zero.new_zeros(())
        return fl.InitialState({**server, "rates": zero, "seen": none}, {"rate": zero, "steps": none}, state)

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train as in FedAvg; also say in how many steps."""
        return [take_global, fl.Train(ctx.epochs), upload_model_and_steps]

    def _drift(self, server: fl.Tensors, records: fl.Tensors) -> Tensor:
        """Return d_i of each client of the cohort."""
        mean = server["rates"] / server["seen"].clamp(min=1)
        return records["steps"][:, None] * (mean - records["rate"])

    def _start(self, server: fl.Tensors, drift: Tensor) -> Tensor:
        """Return s_i of each client of the cohort."""
        return server["theta"] + self.beta * server["move"] + self.share * drift

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the global model to use, or each client's own start to train."""
        if ctx.serving:
            return super().download(ctx, server, records)
        return {"theta": self._start(server, self._drift(server, records))}, records

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average what is left after the drift; keep each client's rate, and the sum of all.

        A client that took no step, because it has a single sample, counts in the average, but its rate is not known.
        """
        drift, trained = self._drift(server, records), update.dense("theta")
        steps = torch.minimum(update.dense("steps"), update.n * ctx.epochs).to(trained.dtype)  # whatever a node says
        new = steps > 0
        rate = (trained - self._start(server, drift)) / steps.clamp(min=1)[:, None]
        rate, steps = torch.where(new[:, None], rate, records["rate"]), torch.where(new, steps, records["steps"])
        theta = fl.average(trained + (1 - self.share) * drift, update.n.sign())
        server = {
            "theta": theta,
            "move": theta - server["theta"],
            "rates": server["rates"] + (rate - records["rate"]).sum(dim=0),
            "seen": server["seen"] + (steps.sign() - records["steps"].sign()).sum(),
        }
        return server, {"rate": rate, "steps": steps}
