"""SeqFedEDT (IEEE Transactions on Mobile Computing, 2025, by FedOBP's authors): FedOBP's rule in sequential training.

There is one model, and it walks: the clients of a round take it over in their sampled order, and the next round's first
client takes it from the last one. Nothing is averaged. Each client keeps its own last values where the score of the
arriving model is above the q-quantile (FedOBP's eq. 7 to 9), trains everything, and passes everything on.

The default score is that of its authors' ablation, |theta_i (theta - theta_i)|. Their released code, public as
tian0920/SeqFedEDT, scores (theta - theta_i)^2, which is `squared`; |theta - theta_i|, their third score, chooses the
same entries. A client without training samples passes on what it was given, as a mean by samples would have it. The
server relays the model and knows everyone's last one, so it scores, as in FedOBP.

Sequential over clients: a round takes as many turns as it has clients. At test every client starts from what the last
trained one left.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedobp import method as fl
from fedobp.algorithms.fedobp import FedOBP
from fedobp.importance import SCORES


@dataclass(frozen=True)
class SeqFedEDT(FedOBP):
    """One model that passes from client to client, of which each keeps its most important entries."""

    name: ClassVar[str] = "seqfededt"
    summary: ClassVar[str] = "sequential FedOBP: one model passes from client to client, each keeping a few entries"
    paper: ClassVar[str] = "SeqFedEDT, IEEE Transactions on Mobile Computing, 2025"

    score: str = fl.option(
        "product",
        "product: |(own - passing) * own|, as in its ablation; squared: (own - passing)^2, as in the released code",
        choices=tuple(SCORES),
    )

    @property
    def sequential(self) -> bool:
        """A client starts from the model of the one before it."""
        return True

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Take the one client's model as it is, for the next one; remember it as that client's."""
        [upload] = update.dense("theta")
        records = {**records, "theta": upload[None], "seen": torch.ones_like(records["seen"])}
        return {"theta": upload}, records
