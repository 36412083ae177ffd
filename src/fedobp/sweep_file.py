"""Sweep files: the runs of a sweep or a comparison, and which of them share a launch.

A user writes a grid: lists in `[settings]` and `[methods.NAME]` stand for every combination, and `[[runs]]` adds single
runs. A sweep's folder holds the same format with every run resolved, and `launches`: the last bits of a run depend on
the runs in its launch, so repeating a sweep byte for byte needs them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

from fedobp._version import __version__
from fedobp.algorithms import names
from fedobp.config import TABLES, Config, check_settings, settings
from fedobp.errors import FedobpError, short, unknown
from fedobp.toml import read_toml, toml_key, toml_value

MOST_RUNS = 10_000
_MOST_COMBINATIONS = 1_000_000  # of the lists in [settings] with [methods] and [[runs]]
_VERSION = 2
_LONGEST = 2**26  # bytes of a file, which may hold MOST_RUNS resolved runs
_LONGEST_NAME = 150  # of a run: it becomes a folder
_RUN_NAME = re.compile(f"[A-Za-z0-9_+][A-Za-z0-9._+-]{{0,{_LONGEST_NAME - 1}}}")
_FILE_ENDINGS = (".toml", ".json", ".csv", ".html")  # of the files beside the runs
_KIND = "a sweep file, such as the compare.toml of a comparison"


@dataclass(frozen=True)
class SweepFile:
    """The settings of each run by its name; `Config` checks the values. A file of a user has no launches."""

    runs: Mapping[str, Mapping[str, Any]]
    launches: Sequence[Sequence[str]] | None = None
    memory: float | None = None  # GiB for clients' state, by which launches are planned


def to_toml(configs: Mapping[str, Config], launches: Sequence[Sequence[str]], memory: float) -> str:
    """Return the runs of a sweep as TOML, which `read_sweep_file` reads back."""
    flat = {name: _flat(config) for name, config in configs.items()}
    first = next(iter(flat.values()))
    common = {key: value for key, value in first.items() if all(one.get(key, _flat) == value for one in flat.values())}
    lines = [f"version = {_VERSION}", "", "# GiB for clients' state, by which the launches were planned."]
    lines += [f"memory = {memory!r}", "", "# Runs that train side by side, launch by launch.", "launches = ["]
    lines += [f"    [{', '.join(map(toml_value, launch))}]," for launch in launches]
    lines += ["]", "", "[settings]", *_dotted(common)]
    for name, one in flat.items():
        own = {key: value for key, value in one.items() if key not in common}
        lines += ["", "[[runs]]", f"name = {toml_value(name)}", *_dotted(own)]
    return "\n".join(lines) + "\n"


def _flat(config: Config) -> dict[tuple[str, ...], Any]:
    """Return settings by key; an option's key is that of its table, too."""
    flat: dict[tuple[str, ...], Any] = {(spec.name,): getattr(config, spec.name) for spec in settings()}
    flat |= {(table, name): value for table in TABLES for name, value in getattr(config, table).items()}
    return {key: value for key, value in flat.items() if value is not None}


def _dotted(values: Mapping[tuple[str, ...], Any]) -> list[str]:
    return [f"{'.'.join(map(toml_key, key))} = {toml_value(value)}" for key, value in values.items()]


def read_sweep_file(path: Path) -> SweepFile:
    """Read a sweep file."""
    _, given = read_toml(path, _KIND, _LONGEST)
    where, keys = short(path, 200), ("version", "memory", "launches", "settings", "methods", "runs")
    version = given.get("version", _VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or version < _VERSION:
        raise FedobpError(f"{where} is of an older version of fedobp, which this one cannot read: start it anew")
    if version > _VERSION:
        raise FedobpError(
            f"{where} is of version {version}, and fedobp {__version__} reads version {_VERSION}: use a newer fedobp"
        )
    for name in given:
        if name not in keys:
            raise unknown(f"key in {where}", name, keys)
    memory = given.get("memory")
    if memory is not None and (not isinstance(memory, int | float) or isinstance(memory, bool) or not 0 < memory < inf):
        raise FedobpError(f"`memory` in {where} must be a number of GiB, not '{short(memory)}'")
    runs = expand(given, path)
    return SweepFile(runs, _launches(given["launches"], runs, where) if "launches" in given else None, memory)


def expand(given: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of every run by name: all combinations of the lists; `path` is for errors."""
    where, known = short(path, 200), [spec.name for spec in fields(Config)]
    common, methods, single = given.get("settings", {}), given.get("methods", {}), given.get("runs", [])
    if not isinstance(common, dict):
        raise FedobpError(f"`settings` in {where} must be a table: write [settings]")
    if not isinstance(methods, dict) or not all(isinstance(options, dict) for options in methods.values()):
        raise FedobpError(f"`methods` in {where} must hold a table of options for each method: write [methods.NAME]")
    if not isinstance(single, list) or not all(isinstance(one, dict) for one in single):
        raise FedobpError(f"`runs` in {where} must be tables of settings: write [[runs]]")
    if "method" in common and methods:
        raise FedobpError(f"{where} names methods in [settings] and in [methods]: leave out one of them")
    for name in methods:
        if name not in names():
            raise unknown(f"method in {where}", name, names())
    for table in (common, *single):
        check_settings(table, path, [*known, "name"] if table is not common else known)
    templates = [{"method": name, "options": options} for name, options in methods.items()] + single
    for table in (common, *templates):
        for key, value in _flat_table(table).items():
            if value == []:
                raise FedobpError(f"`{key[-1]}` in {where} lists no value: give it one, or leave it out")
    # Combinations that a template replaces make no run, so the number of runs does not bound them.
    if prod(map(len, _lists(common).values())) * len(templates or [{}]) > _MOST_COMBINATIONS:
        raise FedobpError(f"{where} has more than {_MOST_COMBINATIONS:,} combinations: use several sweeps")
    runs: dict[str, dict[str, Any]] = {}
    for outer in _combinations(common):
        for template in templates or [{}]:
            own = {key: value for key, value in template.items() if key != "name"}
            replaced = outer.listed.keys() & _flat_table(own).keys()  # a list that the template replaces counts once
            if not replaced <= outer.first:
                continue
            kept = {key: value for key, value in outer.listed.items() if key not in replaced}
            for inner in _combinations(own):
                options = {name: {**outer.settings.get(name, {}), **inner.settings.get(name, {})} for name in TABLES}
                run = {**outer.settings, **inner.settings, **{name: table for name, table in options.items() if table}}
                made = _name(run, {**inner.listed, **kept}) if "name" not in template else template["name"]
                _add(runs, made, run, where)
    return runs


_Key = tuple[str, ...]  # of a setting, or of an option: its table's name and its own


class _Combination(NamedTuple):
    """One combination of a table's lists."""

    settings: dict[str, Any]
    listed: dict[_Key, Any]  # the values that the lists have here
    first: set[_Key]  # lists that have their first value here


def _flat_table(table: Mapping[str, Any]) -> dict[_Key, Any]:
    """Return settings and options by key."""
    flat: dict[_Key, Any] = {(key,): value for key, value in table.items() if key not in TABLES}
    return flat | {(name, key): value for name in TABLES for key, value in table.get(name, {}).items()}


def _lists(table: Mapping[str, Any]) -> dict[_Key, list[Any]]:
    return {key: value for key, value in _flat_table(table).items() if isinstance(value, list)}


def _combinations(table: Mapping[str, Any]) -> Iterable[_Combination]:
    """Yield every combination of a table's lists."""
    flat, lists = _flat_table(table), _lists(table)
    for places in product(*(range(len(values)) for values in lists.values())):
        listed = {key: lists[key][at] for key, at in zip(lists, places, strict=True)}
        chosen = {**flat, **listed}
        made: dict[str, Any] = {key[0]: value for key, value in chosen.items() if len(key) == 1}
        for name in TABLES:
            if name in table:
                made[name] = {key[1]: value for key, value in chosen.items() if key[0] == name and len(key) > 1}
        yield _Combination(made, listed, {key for key, at in zip(lists, places, strict=True) if at == 0})


def _name(run: Mapping[str, Any], listed: Mapping[_Key, Any]) -> str:
    """Return a run's name: the method, the values that it has of lists, and the seed."""
    parts = [f"{key[-1]}{value}" for key, value in listed.items() if key not in (("method",), ("seed",))]
    text = "-".join([str(run.get("method", Config.method)), *parts, f"seed{run.get('seed', Config.seed)}"])
    return re.sub(r"[^A-Za-z0-9._+-]", "_", text)


def _add(runs: dict[str, dict[str, Any]], name: Any, run: dict[str, Any], where: str) -> None:
    check_name(name, where)
    if name in runs:
        raise FedobpError(
            f"{where} has two runs that are called {name}: give each [[runs]] a `name` of its own and single values, "
            "and list no value twice"
        )
    check_count(len(runs) + 1, where)
    runs[name] = run


def check_count(runs: int, where: str) -> None:
    """Refuse a sweep with more runs than its plan can be read with."""
    if runs > MOST_RUNS:
        raise FedobpError(f"{where} has more than {MOST_RUNS:,} runs: use several sweeps")


def check_name(name: Any, where: str) -> None:
    """Refuse a run's name that can be no folder."""
    if not isinstance(name, str) or not re.fullmatch(_RUN_NAME, name) or name.endswith(_FILE_ENDINGS):
        raise FedobpError(
            f"'{short(name)}' in {where} is no name of a run: use letters, digits and . _ + -, at most "
            f"{_LONGEST_NAME}, and no ending of a file such as .csv"
        )


def _launches(given: object, runs: Mapping[str, Any], where: str) -> list[list[str]]:
    if not isinstance(given, list) or not all(isinstance(launch, list) and launch for launch in given):
        raise FedobpError(
            f"`launches` in {where} must be a list of launches, each a list of runs such as fedavg-seed42"
        )
    seen: set[str] = set()
    for run in (run for launch in given for run in launch):
        if not isinstance(run, str) or run not in runs:
            raise FedobpError(
                f"`launches` in {where} names '{short(run)}', which is none of its runs: add it to [[runs]]"
            )
        if run in seen:
            raise FedobpError(f"`launches` in {where} names {run} twice: a run belongs to one launch")
        seen.add(run)
    if missing := [name for name in runs if name not in seen]:
        raise FedobpError(f"no launch in {where} has the run {missing[0]}: add it to one, or leave out `launches`")
    return given
