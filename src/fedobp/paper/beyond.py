"""Beyond the paper: tables and curves of the study in docs/beyond.md, from the tidy files of its sweeps.

A cell is a setting: dataset, partition, participation, rounds. In each, every method is a row, and so are what its
clients' own last models and fine-tuned models give, where these are baselines of their own.
"""

import statistics
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedobp.paper.figures import legend, panels, style, whole_numbers
from fedobp.paper.published import title
from fedobp.paper.rows import Row, by_seed, mean_of, option, where
from fedobp.paper.stats import paired, probability, ranks
from fedobp.paper.tables import Cell as TableCell
from fedobp.paper.tables import Table
from fedobp.report.tidy import read_tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "fedobp-auto"
# Other models of a method's clients that are rows of their own: they train as that method does.
_MODELS = {("fedavg", "last"): "fedavg-last", ("fedavg", "finetuned"): "fedavg-ft",
           ("scaffold", "finetuned"): "scaffold-ft",
           (OURS, "last"): f"{OURS}'s last", (OURS, "finetuned"): f"{OURS}-ft"}  # fmt: skip
_SHOWN = (OURS, "fedavg", "fedobp", "fedper", "fedpac", "scaffold-prior", "fedacg-prior, averaged")  # in curves
FINETUNING = 5  # epochs, in all sweeps of the study
_RULES = {"rms": "rms rule", "statistic": "score statistic"}
HEADER = ["method", "pooled", "client mean", "worst tenth", "numbers a client keeps", "MB a round, down + up",
          "passes in a visit, before use", "seeds", f"{OURS} minus it"]  # fmt: skip


class Cell(NamedTuple):
    """A setting of the study."""

    dataset: str
    network: str
    partition: str
    shift: str  # options of the partition
    alpha: float
    clients: int
    participation: float
    rounds: int

    @property
    def words(self) -> str:
        """The setting in words; alpha says something only where labels are drawn by a Dirichlet."""
        options = dict(pair.split("=", 1) for pair in self.shift.split(";") if pair)
        drawn = self.partition.startswith("dirichlet") or options.get("labels") == "dirichlet"
        shift = (
            "" if self.partition.startswith("dirichlet") else f"{self.partition} shift ({options.get('change', '')})"
        )
        labels = f"Dirichlet({self.alpha:g})" if drawn else "equal label shares"
        return (
            f"{title(self.dataset)}, {', '.join(filter(None, (shift, labels)))}, "
            f"{self.participation:.0%} of {self.clients} clients a round, {self.rounds} rounds, `{self.network}`"
        )


def cell_of(row: Row) -> Cell:
    """Return the setting of a row."""
    names = ("dataset", "network", "partition", "partition_options", "alpha", "clients", "participation", "rounds")
    dataset, network, partition, shift, *numbers = (row.get(name) for name in names)
    return Cell(str(dataset), str(network), str(partition), shift or "", *numbers)  # type: ignore[arg-type]


def label(row: Row, shared: Container[str] = ()) -> str | None:
    """Return the name of a row's method with its parts; None for a model that is no baseline.

    Settings of local training that all rows of a cell share are not named.
    """
    parts = dict(pair.split("=", 1) for pair in _pairs(row, "parts"))
    name, training = str(row["method"]), [pair for pair in _pairs(row, "training") if pair not in shared]
    if row.get("model", "served") != "served":
        return None if parts or training else _MODELS.get((name, row["model"]))
    if "prior" in parts:
        name += "-prior" + (" (served)" if parts["prior"] == "serve" else "")
    if "calibrate" in parts:
        name += f", {parts['calibrate']} fitted"
    if "average" in parts:
        name += ", averaged"
    if {"compress_down", "compress_up"} & parts.keys():
        name += ", compressed"
    name = ", ".join([name, *training])
    return name + (f", {_RULES[rule]}" if (rule := option(row, "rule")) in _RULES else "")


def by_cell(rows: Sequence[Row]) -> dict[Cell, dict[str, list[Row]]]:
    """Return the rows of each cell by label, in the order in which they occur."""
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        cells.setdefault(cell_of(row), []).append(row)
    found: dict[Cell, dict[str, list[Row]]] = {}
    for cell, of_cell in cells.items():
        shared = set.intersection(*(set(_pairs(row, "training")) for row in of_cell))
        for row in of_cell:
            if name := label(row, shared):
                found.setdefault(cell, {}).setdefault(name, []).append(row)
    return found


def _pairs(row: Row, column: str) -> list[str]:
    return [pair for pair in (row.get(column) or "").split(";") if pair]


def cell_table(cell: Cell, by_name: Mapping[str, list[Row]]) -> Table:
    """Return all methods of a cell, the best first, with the paired test of ours against each."""
    table = Table(cell.words[0].upper() + cell.words[1:], HEADER)
    pooled = {name: found for name, rows in by_name.items() if (found := mean_of(rows))}
    best, ours = ranks({name: one.mean for name, one in pooled.items()}), by_seed(by_name.get(OURS, []))
    for name in sorted(pooled, key=lambda name: -pooled[name].mean):
        rows = by_name[name]
        first, test = rows[0], paired(ours, by_seed(rows)) if name != OURS else None
        kept = f"{statistics.fmean(row['personal_mean'] for row in rows):,.0f}" if _is_served(first) else "all"
        before = {"last": 0, "finetuned": first["use_passes"] + FINETUNING}  # a last model is used as it is
        use = before.get(str(first["model"]), first["use_passes"])
        traffic = statistics.fmean((row["bytes_down"] + row["bytes_up"]) / row["rounds"] / 1e6 for row in rows)
        shown = f" ({probability(test.p)})" if test and test.p is not None else ""
        table.add(
            name,
            TableCell(str(pooled[name]), best.get(name, 0)),
            str(mean_of(rows, "client_mean")),
            str(mean_of(rows, "worst_decile")),
            kept,
            f"{traffic:.2f}",
            f"{first['visit_passes']:.1f}, {use:.1f}",
            str(pooled[name].n),
            f"{test.difference:+.2f}{shown}" if test else "",
        )
    return table


def _is_served(row: Row) -> bool:
    return str(row["model"]) == "served"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table for each cell."""
    return [cell_table(cell, by_name) for cell, by_name in by_cell(rows).items()]


def curves(rows: Sequence[Row], history: Sequence[Row]) -> "Figure":
    """Draw pooled accuracy over the rounds, as served, a panel for each cell."""
    cells = by_cell(rows)
    names = [name for name in _SHOWN if any(name in by_name for by_name in cells.values())]
    columns = min(3, max(1, len(cells)))
    figure, axes = panels(-(-len(cells) // columns), columns, height=2.0)
    for at, (cell, by_name) in enumerate(cells.items()):
        ax = axes[at // columns][at % columns]
        for place, name in enumerate(names):
            runs = {row["run"] for row in by_name.get(name, [])}
            points = [row for row in history if row["run"] in runs]
            rounds = sorted({row["round"] for row in points})
            if rounds:
                means = [statistics.fmean(row["pooled"] for row in where(points, round=number)) for number in rounds]
                ax.plot(rounds, means, label=name, **{**style(place), "markevery": max(1, len(rounds) // 5)})
        words = cell.words.replace(", equal label shares", "").split(", ")
        ax.set_title(f"{', '.join(words[:-3])}\n{words[-3]}, {cell.network}", fontsize="small")
        ax.set(xlabel="round", ylabel="accuracy, per cent" if at % columns == 0 else None)
        whole_numbers(ax)
    for at in range(len(cells), -(-len(cells) // columns) * columns):
        axes[at // columns][at % columns].set_axis_off()
    legend(figure, axes, 4)
    return figure


def read_study(folder: Path) -> tuple[list[Row], list[Row]]:
    """Return the rows of results and of histories in the folders of a study; a run is known by folder and name."""
    results: list[Row] = []
    history: list[Row] = []
    for path in sorted(folder.glob("*/results.csv")):
        for file, found in ((path, results), (path.with_name("history.csv"), history)):
            found += [{**row, "run": f"{path.parent.name}/{row['run']}"} for row in read_tidy(file)]
    return results, history
