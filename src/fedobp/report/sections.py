"""Runs of a report: sections that share data and clients, and in each the groups that differ in their seeds only."""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedobp.config import PARTITION_SETTINGS, Config
from fedobp.plugins import label
from fedobp.report.groups import by_settings_in, settings_of

if TYPE_CHECKING:
    from fedobp.saved_runs import SavedRun

# Settings that say which clients hold which data. Numbers of runs that differ in them are not compared in one table.
_DATA = ("dataset", "normalize", "partition_file", *(name for name in PARTITION_SETTINGS if name != "partition_seed"))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds only; `index` gives their colour, the same in all figures of a report."""

    label: str
    runs: "list[SavedRun]"
    index: int

    @property
    def method(self) -> str:
        """The method of its runs."""
        return self.runs[0].config.method

    def spread(self, value: "Callable[[SavedRun], float | None]") -> tuple[float | None, float | None]:
        """Return mean and standard deviation (n - 1; None for one run) of a number over the runs that have it."""
        found = [number for run in self.runs if (number := value(run)) is not None]
        mean = statistics.fmean(found) if found else None
        return mean, statistics.stdev(found) if len(found) > 1 else None


@dataclass(frozen=True)
class Section:
    """Runs on one dataset with one partition, in groups."""

    title: str
    groups: list[Group]

    @property
    def runs(self) -> "list[SavedRun]":
        """All its runs."""
        return [run for group in self.groups for run in group.runs]


def without_repeats(runs: "Sequence[SavedRun]") -> "list[SavedRun]":
    """Return runs without those that repeat another: the same settings and seeds are one sample, not two."""
    found: dict[str, SavedRun] = {}
    for run in runs:
        found.setdefault(repr(sorted(settings_of(run.config).items(), key=lambda item: item[0])), run)
    return list(found.values())


def sections_of(runs: "Sequence[SavedRun]") -> list[Section]:
    """Return the sections and their groups, sorted by title and label; a label has one index in all of them."""
    by_data: dict[str, list[SavedRun]] = {}
    for run in sorted(runs, key=lambda run: (run.config.seed, run.config.partition_seed or 0)):
        by_data.setdefault(repr([_plain(getattr(run.config, name)) for name in _DATA]), []).append(run)
    titles = _titles([found[0].config for found in by_data.values()])
    grouped = dict(zip(titles, by_settings_in(list(by_data.values())), strict=True))
    labels = sorted({name for groups in grouped.values() for name in groups}, key=_natural)
    return [
        Section(
            title,
            [Group(name, grouped[title][name], at) for at, name in enumerate(labels) if name in grouped[title]],
        )
        for title in sorted(grouped, key=_natural)
    ]


def _natural(text: str) -> list[tuple[float, str]]:
    """Return what sorts texts by the numbers in them, such as 9 before 10."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(part), "") if at % 2 else (-1.0, part) for at, part in enumerate(parts)]


def _plain(value: Any) -> Any:
    return label(value) if callable(value) else sorted(value.items()) if isinstance(value, dict) else value


def partition_words(config: Config) -> str:
    """Return the kind of a partition, with its parameters."""
    if config.partition_file:
        return f"partition {config.partition_file}"
    kind = label(config.partition)
    if kind in ("dirichlet", "dirichlet-equal"):
        return f"{kind.capitalize()}({config.alpha:g})"
    kind = {"iid": "IID"}.get(kind, kind)
    return kind + "".join(f", {name} {value}" for name, value in config.partition_options.items())


def _titles(configs: Sequence[Config]) -> list[str]:
    """Return a title for each section: dataset, partition, clients, and what else tells it from another."""
    heads = [f"{config.dataset}, {partition_words(config)}, {config.clients:,} clients" for config in configs]
    titles = []
    for head, config in zip(heads, configs, strict=True):
        same = [other for other, title in zip(configs, heads, strict=True) if title == head]
        varied = [name for name in _DATA if len({repr(_plain(getattr(other, name))) for other in same}) > 1]
        titles.append(head + "".join(f", {name.replace('_', ' ')} {_plain(getattr(config, name))}" for name in varied))
    return titles
