"""A method whose clients train one after the other, and all of them in one of its rounds."""

from dataclasses import dataclass
from typing import ClassVar

from fedobp.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Relay(FedAvg):
    """Each client continues from the model of the one before it; in round 2 all clients train before the sampled."""

    name: ClassVar[str] = "relay"
    summary: ClassVar[str] = "a relay"
    paper: ClassVar[str] = "none"

    @property
    def sequential(self):
        return True

    def cohorts(self, round, rounds):
        return ("all", "sampled") if round == 2 else ("sampled",)

    def aggregate(self, ctx, server, records, update):
        assert len(ctx.cohort) == len(update.n) == 1
        return {"theta": update.upload["theta"][0]}, records
