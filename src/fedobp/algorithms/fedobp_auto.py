"""FedOBP-Auto: one shared model, of which each client replaces at most a thousandth before use. Nothing to tune.

Traffic and passes are FedAvg's, and no state stays on a client. It is made of parts that other methods can have, too:

1. server momentum, and clients that start ahead of their own drift (`counterdrift`), for fewer rounds and for clients
   whose data differ; and weight decay, without which the clients' many passes over their few samples overfit;
2. the client's label distribution in the bias of the last layer while it trains (`label_prior`);
3. an average of the global models of the last twentieth of the rounds (`averaged`);
4. before use, a bias of the last layer that is fitted to the client's labels (`calibration.fit_biases`), and entries of
   that layer that a score test finds to need a value of their own, refitted (`calibration.fit_head`). As in FedOBP, few
   entries are personal, and chosen by importance; but the score is what is gained by refitting an entry, n g^2 / F, not
   how far training has moved it, and its threshold follows from the number of entries.

4 is a convex problem on the features of one forward pass. docs/beyond.md says how the constants were chosen.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.counterdrift import CounterDrift
from fedobp.averaged import averaged
from fedobp.label_prior import label_prior

_DECAY = 0.006
_PARTS = label_prior(averaged(CounterDrift(beta=0.7, share=0.7), 0.05), "train", "head")


@dataclass(frozen=True)
class FedOBPAuto(fl.Method):
    """FedAvg without the clients' drift, with a label prior; for use, an average with a fitted last layer."""

    name: ClassVar[str] = "fedobp-auto"
    summary: ClassVar[str] = (
        "nothing to tune: a better global model; few entries of its last layer are fitted before use"
    )
    paper: ClassVar[str] = "no paper: docs/beyond.md"
    one_label: ClassVar[bool] = True

    def hparams(self) -> dict[str, float]:
        """Clients train with weight decay; any `--weight-decay` but the default is refused."""
        return {"weight_decay": _DECAY}

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Hold the average, the newest model, its last move and the clients' rates on the server."""
        return _PARTS.init(model, theta, seed)

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send each client its own start to train, or the average to use."""
        return _PARTS.download(ctx, server, records)

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train as in FedAvg, with the client's label distribution in the bias."""
        return _PARTS.client_update(ctx)

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average the uploads without their drift; keep the move, and move the average over rounds."""
        return _PARTS.aggregate(ctx, server, records, update)

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Fit the last layer of the average to the client."""
        return _PARTS.personalize(ctx)
