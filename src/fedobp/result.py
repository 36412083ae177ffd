"""The result of a run, and the results of several: as plain values, a DataFrame, curves, a table in a notebook."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, TypeVar, overload

from torch import Tensor

from fedobp.config import Config
from fedobp.errors import short
from fedobp.evaluation import Accuracy, Metrics, NewClients, Personal, Protocol, metrics_of, metrics_to_json
from fedobp.storage import ClientModels, load_state_dict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


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


@dataclass(frozen=True, repr=False)
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
    models: ClientModels | None  # None: this result was read from a folder, which may hold them
    parameters: int  # of one model
    partition: str  # its hash
    out: Path | None
    launch: tuple[Config, ...] = ()  # all runs that trained side by side, in order, this one among them
    labels: tuple[str | int, ...] = ()  # the names of label 0, 1, ...
    notes: tuple[str, ...] = ()  # what the run's folder does not hold, such as data in memory
    clients: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)  # a row a client: the rows of clients.csv
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what the numbers may depend on

    @property
    def metrics(self) -> dict[str, Metrics]:
        """The metrics that `Config.metrics` asks for, of the same predictions as the accuracies.

        By column (served, last, finetuned, validation, new_clients_served, ...) and by name.
        """
        columns = {"served": self.accuracy, "last": self.last, "finetuned": self.finetuned}
        return metrics_of({**columns, "validation": self.validation}, self.new_clients)

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return a client's final model, or the global one, as an ordinary state dict."""
        if self.models is not None:
            return self.models.state_dict(client)
        assert self.out is not None, "what was read comes from a folder"
        return load_state_dict(self.out, client)

    def __repr__(self) -> str:
        config, found = self.config, self.accuracy
        numbers = f"{found.pooled:.2f} pooled, {found.client_mean:.2f} client mean, {self.protocol.reported}"
        return f"Result({config.method} on {config.dataset}, seed {config.seed}: {numbers})"

    def to_pandas(self, *, history: bool = False) -> "DataFrame":
        """Return a DataFrame of one row; with `history`, of one row an evaluation. See `Results.to_pandas`."""
        return Results([self]).to_pandas(history=history)

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw the pooled accuracy over the rounds, into `ax` or a new figure, and return the figure."""
        return Results([self]).plot(ax)

    def _repr_html_(self) -> str:
        from fedobp.report.tables import run_table

        return run_table(self)._repr_html_()

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values: what `fedobp run --json` prints."""
        config = self.config
        head = {"method": config.method, "dataset": config.dataset, "seed": config.seed, "rounds": config.rounds}
        columns = {
            name: column.to_json() if (column := getattr(self, name)) else None
            for name in ("accuracy", "last", "finetuned")
        }
        if self.validation:
            columns["validation"] = self.validation.to_json()
        if self.new_clients:
            columns["new_clients"] = self.new_clients.to_json()
        if self.metrics:
            columns["metrics"] = metrics_to_json(self.metrics, per_client=True)
            if "confusion" in self.accuracy.metrics:
                columns["labels"] = list(self.labels)
        return {
            **head,
            "protocol": self.protocol.to_json(),
            **columns,
            "history": [list(point) for point in self.history],
            "personal": asdict(self.personal),
            "bytes": asdict(self.bytes),
            "compute": asdict(self.compute),
            "seconds": self.seconds,
            "parameters": self.parameters,
            "partition": self.partition,
            "out": str(self.out) if self.out else None,
            "provenance": dict(self.provenance),
            **({"notes": list(self.notes)} if self.notes else {}),
        }


@dataclass(frozen=True)
class Failure:
    """A run that failed, and why, in one sentence."""

    method: str
    seed: int | None  # None: a method of which no run could be planned
    error: str
    config: Config | None = field(default=None, repr=False)  # None: there is no valid one
    exception: BaseException | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"Failure({self.method}, seed {self.seed}: {short(self.error, 200)})"

    def to_json(self) -> dict[str, Any]:
        """Return the failure as plain values."""
        return {"method": self.method, "seed": self.seed, "error": self.error}


Run = TypeVar("Run", bound=Result | Failure)


class Results(list[Run], Generic[Run]):
    """The results of several runs, in order: a list that gives a DataFrame, curves, and a table in a notebook."""

    @overload
    def __getitem__(self, at: SupportsIndex) -> Run: ...
    @overload
    def __getitem__(self, at: slice) -> "Results[Run]": ...
    def __getitem__(self, at: SupportsIndex | slice) -> "Run | Results[Run]":
        return Results(super().__getitem__(at)) if isinstance(at, slice) else super().__getitem__(at)

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]"

    @property
    def finished(self) -> "Results[Result]":
        """The results without failures."""
        return Results(one for one in self if isinstance(one, Result))

    @property
    def failed(self) -> list[Failure]:
        """The failures."""
        return [one for one in self if isinstance(one, Failure)]

    def to_pandas(self, *, history: bool = False) -> "DataFrame":
        """Return a DataFrame of one row a run; with `history`, of one row an evaluation of a finished run.

        Columns are the settings (`options.q` is an option) and the numbers by their names in JSON, such as
        `accuracy.pooled`. A failure has its settings and an `error`.
        """
        from fedobp.report.frames import failure_row, frame, history_rows, result_row

        if history:
            runs = [(at, one) for at, one in enumerate(self) if isinstance(one, Result)]
            return frame([row for at, one in runs for row in history_rows(at, one)])
        return frame([result_row(one) if isinstance(one, Result) else failure_row(one) for one in self])

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw the pooled accuracy over the rounds, into `ax` or a new figure, and return the figure.

        Runs that differ in their seeds only are one curve: their mean, in a band of one standard deviation (n - 1).
        """
        from fedobp.report.curves import plot_curves

        return plot_curves(self.finished, ax)

    def _repr_html_(self) -> str:
        from fedobp.report.tables import results_html

        return results_html(self.finished, self.failed)
