"""FedRep (Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021).

FedPer whose two parts are trained one after the other: first the private head with the base frozen, then the shared
base with the head frozen. Its authors train 10 head epochs and 1 base epoch (CIFAR), batches of 10, momentum 0.5, and
let every client tune its head in one more round at the end (`final_epochs`); here both parts share the common budget of
local epochs, 4 and 1 of 5.

`as-published` is FedPer's: heads are averaged too, and a client's first visit starts from that average.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp.algorithms.base import Client, Moment, Program, Record, Tensors, Train, Turn, option
from fedobp.algorithms.fedper import FedPer
from fedobp.models import Model


@dataclass(frozen=True)
class FedRep(FedPer):
    """A shared base, a private head, trained one after the other."""

    name: ClassVar[str] = "fedrep"
    summary: ClassVar[str] = "shared base, private head: first the head is trained, then the base"
    paper: ClassVar[str] = "Collins et al., Exploiting Shared Representations for Personalized FL, ICML 2021"

    base_epochs: int = option(1, "local epochs for the base, after the head's; 1 is the authors' own", low=0)

    final_epochs: int = option(0, "head epochs of all clients after the last round; the authors take 10 or more", low=0)

    def turns(self, round: int, rounds: int) -> tuple[Turn, ...]:
        """After the last round all clients tune their heads, if they are to."""
        return ("cohort", "everyone") if self.final_epochs > 0 and round == rounds else ("cohort",)

    def local(self, model: Model, now: Moment) -> Program:
        """Spend the local epochs on the head, and the last of them on the base."""
        if now.everyone:
            return [self.take, Train(self.final_epochs, part="head"), self.keep_head]
        base = min(self.base_epochs, now.epochs)
        return [self.take, Train(now.epochs - base, part="head"), Train(base, part="base"), self.keep]

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Average the uploads; when heads alone are trained there are none."""
        return super().receive(model, now, server, rows, up, n) if up else (server, rows)

    def keep_head(self, model: Model, client: Client) -> Client:
        """Keep the head; the base is the one that was sent."""
        return self.remember(model, client)
