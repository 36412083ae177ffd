"""LG-FedAvg (Liang et al., Think Locally, Act Globally: FL with Local and Global Representations, 2020).

The inverse of FedPer: the lower layers stay on the client, the upper ones are shared and averaged; all are trained
together. The authors start from a trained FedAvg model, average without weights, and for their CIFAR network share the
convolutions. Here the head is shared, as in their text and in later comparisons, starting from theta^0 and within the
common budget.

`as-published` is what ran behind the FedOBP paper's table: the framework's `num_global_layers` of 1 shares the first
layer instead (0.28 per cent of the CNN). It also averages all other layers, and a client uses that average until it has
trained once. So it is nearly Local-Only, except for the clients' starting point.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedobp import method as fl
from fedobp.algorithms.partial_sharing import PartialSharing
from fedobp.models import Inside


@dataclass(frozen=True)
class LGFedAvg(PartialSharing):
    """Local representations, a global head."""

    name: ClassVar[str] = "lg-fedavg"
    summary: ClassVar[str] = "private lower layers, shared head, trained together"
    paper: ClassVar[str] = "Liang et al., Think Locally, Act Globally, 2020"

    mode: str = fl.mode_option(
        "what is shared: the head, or (as-published) the first layer, and a new client starts from the average of all"
    )

    @property
    def sends_all(self) -> bool:
        """As-published, all layers are averaged."""
        return self.mode == "as-published"

    def shares(self, model: fl.Model) -> Inside:
        """Share the head, or the first layer."""
        first = model.layout.names[0].rpartition(".")[0] + "."
        return model.layout.in_head if self.mode == "faithful" else lambda name: name.startswith(first)
