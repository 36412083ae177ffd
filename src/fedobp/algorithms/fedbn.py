"""FedBN (Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021).

FedAvg whose BatchNorm layers stay on the client, weights and running statistics alike; all else is shared and averaged.
On a model without BatchNorm it is FedAvg, and says so. Its authors average without weights and let all clients train in
every round; here the mean is weighted by samples, and a client that has never trained is served theta^0's norms.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedobp import method as fl
from fedobp.algorithms.partial_sharing import PartialSharing
from fedobp.models import Inside


@dataclass(frozen=True)
class FedBN(PartialSharing):
    """FedAvg with private BatchNorm layers."""

    name: ClassVar[str] = "fedbn"
    summary: ClassVar[str] = "FedAvg whose BatchNorm layers stay on the client; on a model without any it is FedAvg"
    paper: ClassVar[str] = "Li et al., FedBN, ICLR 2021"

    def shares(self, model: fl.Model) -> Inside:
        """Share all but the norms."""
        return lambda name: not model.layout.in_norm(name)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Each client holds its norms; if there are none, say so."""
        start = super().init(model, theta, seed)
        if not start.state["private"].numel():
            warnings.warn(f"'{model.name}' has no BatchNorm, so fedbn is fedavg: use --model cnn-bn", stacklevel=2)
        return start
