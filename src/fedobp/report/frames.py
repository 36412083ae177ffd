"""Results as DataFrames, and nested values as flat ones."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedobp.config import Config
from fedobp.errors import FedobpError
from fedobp.report.groups import settings_of

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedobp.result import Failure, Result

_FIRST = ("method", "dataset", "seed")


def flat(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Return nested values by joined names; lists, and what is None, are left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{inner}": one for inner, one in flat(value, separator).items()}
        elif value is not None and not isinstance(value, list | tuple):
            found[name] = value
    return found


def numbers_of(values: Mapping[str, Any], separator: str = ".") -> dict[str, float]:
    """Return the numbers of a round or a result, without those that identify it."""
    told = {
        name: value
        for name, value in values.items()
        if name not in (*_FIRST, "round", "rounds", "protocol", "provenance")
    }
    return {name: value for name, value in flat(told, separator).items() if isinstance(value, int | float)}


def result_row(result: "Result") -> dict[str, Any]:
    """Return a run's row: what it is, its numbers, and its settings."""
    text = {"partition_hash": result.partition, **({"out": str(result.out)} if result.out else {})}
    origin = flat({"provenance": result.provenance})
    return {
        **_head(result.config),
        **numbers_of(result.to_json()),
        **text,
        **flat(settings_of(result.config)),
        **origin,
    }


def failure_row(failure: "Failure") -> dict[str, Any]:
    """Return the row of a run that failed: what it is, its error, and its settings."""
    found = {"method": failure.method, "seed": failure.seed, "error": failure.error}
    return found | {**_head(failure.config), **flat(settings_of(failure.config))} if failure.config else found


def history_rows(run: int, result: "Result") -> list[dict[str, Any]]:
    """Return a row for each evaluation of a run; `run` is its position."""
    head = {"run": run, **_head(result.config)}
    return [
        {**head, "round": number, "pooled": pooled, "client_mean": client_mean}
        for number, pooled, client_mean in result.history
    ]


def _head(config: Config) -> dict[str, Any]:
    """Return what a run is called: method, dataset, seed, and the method's options."""
    settings = settings_of(config)
    return {name: value for name, value in settings.items() if name in _FIRST or name.startswith("options.")}


def frame(rows: Sequence[Mapping[str, Any]]) -> "DataFrame":
    """Return rows as a DataFrame: what runs are called, what failed, then all else in the order of the rows."""
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise FedobpError("a DataFrame needs pandas: pip install 'fedobp[pandas]'") from error
    names = dict.fromkeys(name for row in rows for name in row)
    return DataFrame(list(rows), columns=sorted(names, key=_rank))


def _rank(column: str) -> int:
    return 0 if column in ("run", *_FIRST) else 1 if column.startswith("options.") else 2 if column == "error" else 3
