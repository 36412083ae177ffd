"""The result of a run."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedobp.config import Config
from fedobp.evaluation import Accuracy, NewClients, Personal, Protocol
from fedobp.storage import ClientModels


@dataclass(frozen=True)
class Traffic:
    """Payload bytes of the whole cohort's messages; evaluation is not in it."""

    down_per_round: float
    up_per_round: float
    down_total: int
    up_total: int


@dataclass(frozen=True)
class Compute:
    """How often clients go through their training data."""

    visit: float  # per round in which a client takes part
    use: float  # before a model is used: fine-tuning and the like, in the last evaluation


@dataclass(frozen=True)
class Result:
    """The result of a run. Accuracies are per cent, chosen by `protocol`."""

    config: Config
    protocol: Protocol
    accuracy: Accuracy  # of the served models
    last: Accuracy  # of each client's own last local model
    finetuned: Accuracy | None  # of the served models after `finetune_epochs` of local training
    validation: Accuracy | None  # of the served models on the validation parts
    new_clients: NewClients | None  # of clients that are held out
    history: list[tuple[int, float, float]]  # (round, pooled, client mean)
    personal: Personal
    bytes: Traffic
    compute: Compute
    seconds: float
    models: ClientModels
    partition: str  # its hash
    out: Path | None
    launch: tuple[Config, ...] = ()  # all runs that trained side by side, in order, this one among them
    notes: tuple[str, ...] = ()  # what the run's folder does not hold, such as data in memory

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return a client's final model, or the global one, as an ordinary state dict."""
        return self.models.state_dict(client)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values: what `fedobp run --json` prints."""
        config = self.config
        head = {"method": config.method, "dataset": config.dataset, "seed": config.seed, "rounds": config.rounds}
        columns = {
            name: asdict(column) if (column := getattr(self, name)) else None
            for name in ("accuracy", "last", "finetuned")
        }
        if self.validation:
            columns["validation"] = asdict(self.validation)
        if self.new_clients:
            columns["new_clients"] = asdict(self.new_clients)
        return {
            **head,
            "protocol": self.protocol.to_json(),
            **columns,
            "history": [list(point) for point in self.history],
            "personal": asdict(self.personal),
            "bytes": asdict(self.bytes),
            "compute": asdict(self.compute),
            "seconds": self.seconds,
            "partition": self.partition,
            "out": str(self.out) if self.out else None,
            **({"notes": list(self.notes)} if self.notes else {}),
        }
