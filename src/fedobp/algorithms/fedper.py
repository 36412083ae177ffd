"""FedPer (Arivazhagan et al., Federated Learning with Personalization Layers, 2019).

The base is shared and averaged as in FedAvg; the head (the layer called `classifier`) stays on the client and is never
sent. Base and head are trained together. All heads start from theta^0.

`as-published` is what ran behind the FedOBP paper's table: heads are sent and averaged too, and a client uses the
average until it has trained once.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedobp import method as fl
from fedobp.algorithms.partial_sharing import PartialSharing


@dataclass(frozen=True)
class FedPer(PartialSharing):
    """A shared base, a private head."""

    name: ClassVar[str] = "fedper"
    summary: ClassVar[str] = "shared base, private head, trained together; the head never leaves the client"
    paper: ClassVar[str] = "Arivazhagan et al., Federated Learning with Personalization Layers, 2019"

    mode: str = fl.mode_option(
        "a new client's head: theta^0's, or (as-published) the average of all heads, which are sent for that"
    )

    @property
    def sends_all(self) -> bool:
        """As-published, heads are averaged too."""
        return self.mode == "as-published"
