"""FedBABU (Oh et al., FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022).

Only the base is trained and averaged; the head stays at its random start, the same for all clients, during the whole
training. A client fine-tunes the model on its data before use; the result is not stored.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

from fedobp import method as fl
from fedobp.algorithms.fedavg import all_mine
from fedobp.algorithms.partial_sharing import PartialSharing


@dataclass(frozen=True)
class FedBABU(PartialSharing):
    """A shared base under a head that is frozen until use."""

    name: ClassVar[str] = "fedbabu"
    summary: ClassVar[str] = "only the base is trained and shared; each client fine-tunes the model before use"
    paper: ClassVar[str] = "Oh et al., FedBABU, ICLR 2022"

    finetune: int = fl.option(5, "epochs of fine-tuning before use; 5 is the authors' default", low=0)
    tune: str = fl.option("all", "what is fine-tuned", choices=("all", "head", "base"))

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the base alone."""
        return [self.take, fl.Train(ctx.epochs, part="base"), self.keep]

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Fine-tune, and use the result."""
        return [self.take, fl.Train(self.finetune, part=cast(fl.Part, self.tune)), all_mine]
