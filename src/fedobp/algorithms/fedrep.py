"""FedRep (Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021).

FedPer with the two parts trained one after the other: first the private head with the base frozen, then the shared
base with the head frozen. The authors train 10 head epochs and 1 base epoch (CIFAR), batches of 10, momentum 0.5, and
let every client tune its head in one more round at the end (`final_epochs`); here both parts share the common budget of
local epochs, 4 and 1 of 5.

`as-published` is that of FedPer: heads are averaged too, and a client's first round starts from that average.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedobp import method as fl
from fedobp.algorithms.fedper import FedPer


@dataclass(frozen=True)
class FedRep(FedPer):
    """A shared base, a private head, trained one after the other."""

    name: ClassVar[str] = "fedrep"
    summary: ClassVar[str] = "shared base, private head: first the head is trained, then the base"
    paper: ClassVar[str] = "Collins et al., Exploiting Shared Representations for Personalized FL, ICML 2021"

    base_epochs: int = fl.option(1, "local epochs for the base, after the head's; 1 is the authors' value", low=0)
    final_epochs: int = fl.option(0, "head epochs of all clients after the last round; the authors: 10 or more", low=0)

    def cohorts(self, round: int, rounds: int) -> tuple[fl.CohortKind, ...]:
        """With `final_epochs`, all clients tune their heads after the last round."""
        return ("sampled", "all") if self.final_epochs > 0 and round == rounds else ("sampled",)

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Spend the local epochs on the head, and the last of them on the base."""
        if ctx.full_participation:
            return [self.take, fl.Train(self.final_epochs, part="head"), self.keep_head]
        base = min(self.base_epochs, ctx.epochs)
        return [self.take, fl.Train(ctx.epochs - base, part="head"), fl.Train(base, part="base"), self.keep]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average the uploads; where only heads are trained, there are none."""
        return super().aggregate(ctx, server, records, update) if update.upload else (server, records)

    def keep_head(self, model: fl.Model, client: fl.Client) -> fl.Client:
        """Keep the head; the base has not changed."""
        return self.remember(model, client)
