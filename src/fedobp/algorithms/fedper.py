"""FedPer (Arivazhagan et al., Federated Learning with Personalization Layers, 2019).

The base is shared and averaged as in FedAvg; the head (the layer called `classifier`) stays on the client and never
crosses the wire. Base and head are trained together. Everyone's head starts from theta^0.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedobp.algorithms.parts import Parted
from fedobp.models import Inside, Model


@dataclass(frozen=True)
class FedPer(Parted):
    """A shared base, a private head."""

    name: ClassVar[str] = "fedper"
    summary: ClassVar[str] = "shared base, private head, trained together; the head never leaves the client"
    paper: ClassVar[str] = "Arivazhagan et al., Federated Learning with Personalization Layers, 2019"

    def shares(self, model: Model) -> Inside:
        """Share all but the head."""
        return lambda name: not model.layout.in_head(name)
