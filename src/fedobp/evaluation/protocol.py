"""The evaluation protocol: which rounds, models, clients and average are reported. It is printed with every result."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fedobp.errors import FedobpError
from fedobp.evaluation.metrics import Accuracy


@dataclass(frozen=True)
class Protocol:
    """Which rounds are reported and how one of them is chosen; on the test parts of all clients or of a sample."""

    name: str
    average: str
    rounds: tuple[int, ...]
    pick: str  # "last", or "best" by pooled accuracy
    model: str = "as served, before local training"
    clients: str = "all"  # or of how many: "100 of 10,000", drawn by the seed
    split: str = "test"

    @property
    def reported(self) -> str:
        """Which rounds are reported, in words."""
        if self.pick == "best":
            return "best of rounds " + ", ".join(map(str, self.rounds))
        return f"round {self.rounds[-1]}"

    @property
    def test_parts(self) -> str:
        """Whose samples accuracies are on, in words."""
        sample = f"the test parts of {self.clients} clients, drawn by the seed"
        return "all clients' test parts" if self.clients == "all" else sample

    def to_json(self) -> dict[str, object]:
        """Return the protocol as plain values."""
        return {**asdict(self), "rounds": list(self.rounds)}

    def choose(self, reported: Sequence[Accuracy]) -> Accuracy | None:
        """Return the accuracy to report out of those at `rounds`, the first of equals; None if there are none."""
        if not reported:
            return None
        return reported[-1] if self.pick == "last" else max(reported, key=lambda column: column.pooled)


PAPER_ROUNDS = (100, 200, 300, 400)


def make_protocol(name: str, rounds: int, clients: str = "all") -> Protocol:
    """Return the protocol `default` (the last round) or `paper` (the best of rounds 100, 200, 300 and 400)."""
    if name == "default":
        return Protocol("default", "pooled and client mean", (rounds,), "last", clients=clients)
    reached = tuple(r for r in PAPER_ROUNDS if r <= rounds)
    if not reached:
        raise FedobpError(
            f"--protocol paper reports the best of rounds 100, 200, 300 and 400, and --rounds {rounds} reaches none of "
            "them: use at least 100 rounds, or --protocol default"
        )
    return Protocol("paper", "pooled", reached, "best", clients=clients)
