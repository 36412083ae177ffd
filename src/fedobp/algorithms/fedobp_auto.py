"""FedOBP-Auto: one shared model, of which each client replaces at most a thousandth before use. Nothing to tune.

Training and traffic are FedAvg's, and no state stays on a client. What a client uses is made of parts that other
methods can have, too (docs/label-prior.md):

1. an average of the global models of the last twentieth of the rounds (`averaged`);
2. with a bias of the last layer that is fitted to the client's labels (`calibration.fit_biases`);
3. and with entries of the last layer that a score test finds to need a value of their own, refitted
   (`calibration.fit_head`). As in FedOBP, few entries are personal, and chosen by importance; but the score is what is
   gained by refitting an entry, n g^2 / F, not how far training has moved it, and its threshold follows from the number
   of entries.

2 and 3 are convex problems on the features of one forward pass.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg
from fedobp.averaged import averaged
from fedobp.label_prior import label_prior

_PARTS = label_prior(averaged(FedAvg(), 0.05), "off", "head")


@dataclass(frozen=True)
class FedOBPAuto(fl.Method):
    """FedAvg's training; for use, an average with a last layer that is fitted to the client."""

    name: ClassVar[str] = "fedobp-auto"
    summary: ClassVar[str] = "FedAvg; before use, the last layer's bias and the few entries that need it are fitted"
    paper: ClassVar[str] = "no paper: docs/beyond.md"
    one_label: ClassVar[bool] = True

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Hold the average and the newest model on the server."""
        return _PARTS.init(model, theta, seed)

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the newest model to train, or the average to use."""
        return _PARTS.download(ctx, server, records)

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train as in FedAvg."""
        return _PARTS.client_update(ctx)

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Eq. 2: average the uploads; then move the average over rounds."""
        return _PARTS.aggregate(ctx, server, records, update)

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Fit the last layer of the average to the client."""
        return _PARTS.personalize(ctx)
