"""SeqFedEDT (IEEE Transactions on Mobile Computing, 2025, by FedOBP's authors): FedOBP's rule in sequential training.

One model passes from client to client: the clients of a round train it in their sampled order, and the next round's
first client receives it from the last one. Nothing is averaged. Each client keeps its last values where the score of
the received model is above the q-quantile (FedOBP's eq. 7 to 9), trains all entries, and passes all on.

The default score is that of the authors' ablation, |theta_i (theta - theta_i)|. Their released code, public as
tian0920/SeqFedEDT, scores (theta - theta_i)^2, which is `squared`; |theta - theta_i|, their third score, chooses the
same entries. A client without training samples passes on the model that it received, which is what a mean weighted by
samples would give. The server relays the model and records every client's last one, so it scores, as in FedOBP.

Sequential over clients: each client of a round is a cohort by itself. At test every client starts from the model of the
last trained one.
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
        "product: |(last - received) * last|, as in their ablation; squared: (last - received)^2, as in their code",
        choices=tuple(SCORES),
    )

    @property
    def sequential(self) -> bool:
        """A client starts from the model of the one before it."""
        return True

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Take the one client's model for the next client, and record it."""
        [upload] = update.dense("theta")
        records = {**records, "theta": upload[None], "seen": torch.ones_like(records["seen"])}
        return {"theta": upload}, records
