"""FedBN (Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021).

FedAvg whose BatchNorm layers stay on the client, weights and running statistics alike; all else is shared and averaged.
On a model without BatchNorm it is FedAvg, and warns. The authors average without weights and let all clients train in
every round; here the mean is weighted by samples, and a client that has never trained is served the BatchNorm layers of
theta^0.
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
        """Share all but the BatchNorm layers."""
        return lambda name: not model.layout.in_norm(name)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Client state: the BatchNorm layers; warn if there are none."""
        start = super().init(model, theta, seed)
        if not start.state["private"].numel():
            warnings.warn(f"'{model.name}' has no BatchNorm, so fedbn is fedavg: use --model cnn-bn", stacklevel=2)
        return start
