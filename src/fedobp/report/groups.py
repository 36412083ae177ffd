"""Groups of results that differ in their seeds only, each with a label that tells it from the others."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fedobp.config import TABLES, Config

if TYPE_CHECKING:
    from fedobp.result import Result

_SEEDS = ("seed", "partition_seed")


def settings_of(config: Config) -> dict[str, Any]:
    """Return settings and options (`options.q`) by name; a function or class by its own name."""
    flat = {spec.name: getattr(config, spec.name) for spec in fields(Config) if spec.name not in TABLES}
    flat |= {f"{table}.{name}": value for table in TABLES for name, value in getattr(config, table).items()}
    return {name: getattr(value, "__name__", value) for name, value in flat.items()}


def by_settings(results: "Sequence[Result]") -> "dict[str, list[Result]]":
    """Return results that differ in their seeds only, by label: the method, and what tells it from the other groups."""
    groups: dict[tuple[tuple[str, Any], ...], list[Result]] = {}
    for result in results:
        settings = settings_of(result.config)
        key = tuple((name, value) for name, value in settings.items() if name not in _SEEDS)
        groups.setdefault(key, []).append(result)
    all_settings = list(map(dict, groups))
    varied = _varied(all_settings)
    by_method = {
        method: _varied([one for one in all_settings if one["method"] == method])
        for method in {one["method"] for one in all_settings}
    }
    labels = (_label(one, varied, by_method[one["method"]]) for one in all_settings)
    return dict(zip(labels, groups.values(), strict=True))


def _varied(groups: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of settings that are not the same in all groups."""
    first = groups[0] if groups else {}
    return {name for one in groups for name in {*first, *one} if one.get(name) != first.get(name)}


def _label(settings: Mapping[str, Any], varied: set[str], in_method: set[str]) -> str:
    """Return a group's label; options are those of one method, so they are told apart within it."""
    shown = [
        f"{name.rpartition('.')[2]}={value}"
        for name, value in settings.items()
        if name != "method" and name in (in_method if name.startswith("options.") else varied)
    ]
    return ", ".join([str(settings["method"]), *shown])
