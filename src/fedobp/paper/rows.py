"""Tidy rows: which are meant, and what they are called in tables."""

import math
from collections.abc import Sequence
from typing import Any

from fedobp.paper.published import NAMES
from fedobp.paper.stats import Spread, spread

Row = dict[str, Any]
EXTRA = {"last": "FedAvg-Last", "finetuned": "FedAvg-FT"}  # FedAvg's runs, with another model of each client
AS_PUBLISHED = ", as published"


def label(row: Row) -> str | None:
    """Return a row's name in the tables of accuracies; None for a model that they do not show.

    They show what each method serves, and of FedAvg also what its clients' last models and fine-tuned ones give:
    these are the two baselines that the paper leaves out, and they train as FedAvg does.
    """
    name = str(NAMES.get(row["method"], row["method"])) + (AS_PUBLISHED if row.get("mode") == "as-published" else "")
    if row["model"] == "served":
        return name
    return EXTRA.get(row["model"]) if row["method"] == "fedavg" else None


def option(row: Row, name: str) -> str:
    """Return an option of a row's method, as text; "" if it has none of that name."""
    options = dict(pair.split("=", 1) for pair in (row.get("options") or "").split(";") if "=" in pair)
    return options.get(name, "")


def number(row: Row, name: str) -> float | None:
    """Return an option of a row's method as a number; None if it has none of that name, or one that is no number."""
    try:
        value = float(option(row, name))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def quantile(row: Row) -> float | None:
    """Return a row's q; None if it has none."""
    return number(row, "q")


def where(rows: Sequence[Row], **columns: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in columns.items())]


def by_seed(rows: Sequence[Row], column: str = "pooled") -> dict[int, float]:
    """Return a column's values by seed."""
    return {row["seed"]: row[column] for row in rows if row.get(column) is not None}


def mean_of(rows: Sequence[Row], column: str = "pooled") -> Spread | None:
    """Return mean and deviation of a column over seeds."""
    return spread(list(by_seed(rows, column).values()))


def labelled(rows: Sequence[Row], dataset: str, alpha: float) -> dict[str, list[Row]]:
    """Return the rows of a dataset and alpha by their names in tables, in the order in which they occur."""
    found: dict[str, list[Row]] = {}
    for row in where(rows, dataset=dataset, alpha=alpha):
        if name := label(row):
            found.setdefault(name, []).append(row)
    return found
