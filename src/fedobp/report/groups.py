"""Groups of runs that differ in their seeds only, each with a label that tells it from the others."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from fedobp import plugins
from fedobp.config import TABLES, Config

_SEEDS = ("seed", "partition_seed")


class Configured(Protocol):
    """What has a configuration: a result, or a run that was saved."""

    @property
    def config(self) -> Config: ...  # noqa: D102


Run = TypeVar("Run", bound=Configured)


def settings_of(config: Config) -> dict[str, Any]:
    """Return settings and options (`options.q`) by name; a function is a reference to it."""
    return {name: plugins.label(value) if callable(value) else value for name, value in _flat(config).items()}


def _flat(config: Config) -> dict[str, Any]:
    flat = {spec.name: getattr(config, spec.name) for spec in fields(Config) if spec.name not in TABLES}
    return flat | {f"{table}.{name}": value for table in TABLES for name, value in getattr(config, table).items()}


def by_settings(results: Sequence[Run]) -> dict[str, list[Run]]:
    """Return runs that differ in their seeds only, by label: the method, and what tells it from the other groups."""
    return by_settings_in([results])[0]


def by_settings_in(parts: Sequence[Sequence[Run]]) -> list[dict[str, list[Run]]]:
    """Return the groups of each part, by label; what differs within one part is in the labels of all of them."""
    grouped: list[dict[tuple[tuple[str, Any], ...], list[Run]]] = []
    varied: set[str] = set()
    by_method: dict[str, set[str]] = {}
    for part in parts:
        groups: dict[tuple[tuple[str, Any], ...], list[Run]] = {}
        for run in part:
            key = tuple((name, value) for name, value in _flat(run.config).items() if name not in _SEEDS)
            groups.setdefault(key, []).append(run)
        grouped.append(groups)
        settings = list(map(dict, groups))
        varied |= _varied(settings)
        for method in {one["method"] for one in settings}:
            found = _varied([one for one in settings if one["method"] == method])
            by_method[method] = by_method.get(method, set()) | found
    return [_labelled(groups, varied, by_method) for groups in grouped]


def _labelled(
    groups: dict[tuple[tuple[str, Any], ...], list[Run]], varied: set[str], by_method: Mapping[str, set[str]]
) -> dict[str, list[Run]]:
    labelled: dict[str, list[Run]] = {}
    for settings, runs in groups.items():
        one = dict(settings)
        label = _label(one, varied, by_method[one["method"]])
        # Two functions may have one name.
        same = sum(known == label or known.startswith(f"{label} (") for known in labelled)
        labelled[f"{label} ({same + 1})" if same else label] = runs
    return labelled


def _varied(groups: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of settings that are not the same in all groups."""
    first = groups[0] if groups else {}
    return {name for one in groups for name in {*first, *one} if one.get(name) != first.get(name)}


def _label(settings: Mapping[str, Any], varied: set[str], in_method: set[str]) -> str:
    """Return a group's label; options are those of one method, so they are told apart within it."""
    shown = [
        f"{name.rpartition('.')[2]}={plugins.label(value) if callable(value) else value}"
        for name, value in settings.items()
        if name != "method" and name in (in_method if name.startswith("options.") else varied)
    ]
    return ", ".join([str(settings["method"]), *shown])
