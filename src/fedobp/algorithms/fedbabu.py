"""FedBABU (Oh et al., FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022).

Only the base is trained and averaged; the head stays at its random start, the same for everyone, during the whole
federation. A client fine-tunes the model on its own data before use; nothing of that is stored.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

from fedobp.algorithms.base import Moment, Part, Program, Train, option
from fedobp.algorithms.fedavg import all_mine
from fedobp.algorithms.parts import Parted
from fedobp.models import Model


@dataclass(frozen=True)
class FedBABU(Parted):
    """A shared base under a head that is frozen until use."""

    name: ClassVar[str] = "fedbabu"
    summary: ClassVar[str] = "only the base is trained and shared; each client fine-tunes the model before use"
    paper: ClassVar[str] = "Oh et al., FedBABU, ICLR 2022"

    finetune: int = option(5, "epochs of fine-tuning before use; 5 is the authors' default", low=0)
    tune: str = option("all", "what is fine-tuned", choices=("all", "head", "base"))

    def local(self, model: Model, now: Moment) -> Program:
        """Train the base alone."""
        return [self.take, Train(now.epochs, part="base"), self.keep]

    def serve(self, model: Model, now: Moment) -> Program:
        """Fine-tune, and use what comes of it."""
        return [self.take, Train(self.finetune, part=cast(Part, self.tune)), all_mine]
