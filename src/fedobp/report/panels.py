"""The panels of a section: what a figure shows, in pictures and in words. The report and `fedobp plot` draw them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes

from fedobp.report import figures
from fedobp.report.sections import Group, Section
from fedobp.report.tables import format_bytes
from fedobp.report.words import counted, listed

if TYPE_CHECKING:
    from fedobp.saved_runs import SavedRun

_NAMES = {"fedavg": "FedAvg", "local": "Local-Only"}
_MANY = 8  # curves in one panel


@dataclass(frozen=True)
class Panel:
    """One pair of axes: how it is drawn, and what it shows in words."""

    heading: str
    draw: Callable[[Axes], None]
    height: float  # in inches; the width is a column
    alt: str  # what it shows, for who cannot see it
    caption: str = ""
    index: int | None = None  # of the group that it is about, if it is one
    data: Mapping[str, Any] | None = None  # for the page's script


def accuracy_panel(section: Section) -> Panel:
    """Return the accuracy of all groups over the rounds."""
    series, ends = [], []
    for group in section.groups:
        rounds, mean, deviation = figures.accuracy_of(group.runs)
        more = [""] * len(rounds) if deviation is None else [f" ± {one:.2f}" for one in deviation]
        tips = [f"round {at:,}: {one:.2f}{extra}" for at, one, extra in zip(rounds, mean, more, strict=True)]
        series.append({"name": group.label, "tips": tips})
        ends.append(f"{group.label} {mean[-1]:.2f}")

    def draw(ax: Axes) -> None:
        for group in section.groups:
            figures.draw_accuracy(ax, group.label, group.runs, group.index, many=len(section.groups) > _MANY)
        figures.finish_accuracy(ax)

    several = any(len(group.runs) > 1 for group in section.groups)
    band = " Bands are one standard deviation around the mean over seeds." if several else ""
    return Panel(
        section.title,
        draw,
        2.5,
        f"Pooled accuracy over rounds on {section.title}. At the last evaluation: {listed(ends)}.",
        f"Pooled test accuracy of the served models in the evaluated rounds.{band}",
        data={"kind": "points", "series": series},
    )


class Clients:
    """A section's clients: those of one partition, because other seeds have other clients."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self.rows: dict[int, list[dict[str, Any]]] = {}  # of one run each, by the group's index
        self._first: SavedRun | None = None
        for group in section.groups:
            for run in sorted(group.runs, key=lambda run: (run.config.partition_seed or 0, run.config.seed)):
                same = not self._first or run.result.get("partition") == self._first.result.get("partition")
                if same and (rows := run.clients()):
                    self._first = self._first or run
                    self.rows[group.index] = rows
                    break
        self._groups = [group for group in section.groups if group.index in self.rows]
        self._served = {
            index: {row["client"]: row["served"] for row in rows if row["served"] is not None}
            for index, rows in self.rows.items()
        }

    def _references(self, group: Group) -> list[Group]:
        """Return FedAvg and Local-Only, with the settings that are nearest to a group's."""
        found = []
        for method in figures.REFERENCES:
            some = [one for one in self._groups if one.method == method and one is not group]
            config = group.runs[0].config
            found += sorted(some, key=lambda one: len(config.changed(one.runs[0].config)))[:1]
        return found

    @property
    def note(self) -> str:
        """Which clients are shown, and what is missing."""
        if not self._first:
            return "These runs have no clients.csv, so there is nothing to show of single clients."
        present = {group.method for group in self._groups}
        absent = [name for method, name in _NAMES.items() if method not in present]
        left_out = [group.label for group in self._section.groups if group not in self._groups]
        sentences = ["A dot is a client; point at it, or use the arrow keys, for its size and label entropy."]
        keys = {"fedavg": "small dots are FedAvg", "local": "grey squares are Local-Only"}
        if shown := [key for method, key in keys.items() if method in present]:
            sentences.append(f"On the same clients, {listed(shown)}.")
        if self._first.config.eval_clients is not None:
            sentences.append(f"These are the clients that were evaluated: {self._first.config.evaluated}.")
        if len({run.result.get("partition") for run in self._section.runs}) > 1:
            seed = self._first.config.partition_seed
            sentences.append(f"These are the clients of partition seed {seed}; other seeds have other clients.")
        if absent:
            sentences.append(f"No run of {listed(absent)} on these clients is given to compare with.")
        if left_out:
            sentences.append(f"Not recorded on these clients: {listed(left_out)}.")
        return " ".join(sentences)

    @property
    def data(self) -> dict[str, Any] | None:
        """What the page's script tells of a client: sizes, entropy, accuracies."""
        if not self._first:
            return None
        rows = [row for of_run in self.rows.values() for row in of_run]  # other seeds may have evaluated other clients
        return {
            "about": {row["client"]: [row["train"], row["test"], round(row["entropy"] or 0.0, 2)] for row in rows},
            "names": {group.index: group.label for group in self._groups},
            "served": {
                index: {client: round(value, 1) for client, value in found.items()}
                for index, found in self._served.items()
            },
        }

    def panels(self) -> list[Panel]:
        """Return a dot plot for each method that is no reference; for all if there are only references."""
        groups = [group for group in self._groups if self._served[group.index]]
        others = [group for group in groups if group.method not in figures.REFERENCES]
        return [self._panel(group, self._references(group)) for group in others or groups]

    def _panel(self, group: Group, beside: Sequence[Group]) -> Panel:
        own, verdicts = self._served[group.index], []
        for other in beside:
            theirs = self._served[other.index]
            pairs = [(value, theirs[client]) for client, value in own.items() if client in theirs]
            above, below = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
            verdicts.append(f"above {other.label} on {above:,} of {counted(len(pairs), 'client')}, below on {below:,}")
        verdict = "; ".join(verdicts)
        order, values = sorted(own, key=lambda client: (own[client], client)), np.array(list(own.values()))
        return Panel(
            group.label,
            lambda ax: figures.draw_clients(ax, group, beside, order, self._served),
            2.3,
            f"Accuracy of {group.label} on each of {counted(len(own), 'client')}, sorted: from {values.min():.1f} to "
            f"{values.max():.1f}, median {np.median(values):.1f}{verdict and f'; {verdict}'}.",
            _sentence(verdict),
            group.index,
            {"kind": "clients", "order": order, "series": [one.index for one in (group, *beside)]},
        )


def layer_panels(section: Section) -> tuple[list[Panel], list[str]]:
    """Return stacks of personal parameters by layer over rounds; of groups where they do not change, sentences."""
    panels, sentences = [], []
    for group in section.groups:
        rounds, layers = figures.layers_over_rounds(group.runs)
        totals = [sum(values) for values in zip(*layers.values(), strict=True)]
        ends = ", ".join(
            f"{name} {_few(layers[name][-1])}" for name in figures.shown_layers(layers) if layers[name][-1]
        )
        if not layers:
            sentences.append(f"{group.label}: not recorded.")
        elif not any(totals):
            sentences.append(f"{group.label}: none.")
        elif max(totals) - min(totals) < 0.5:
            sentences.append(f"{group.label}: {_few(totals[-1])} in every evaluated round ({ends}).")
        else:
            end = f"at the end {_few(totals[-1])} on average: {ends}"
            alt = f"Personal parameters of a client of {group.label} by layer over rounds; {end}."
            draw = partial(figures.draw_layers, rounds=rounds, layers=layers)
            panels.append(Panel(group.label, draw, 2.3, alt, _sentence(end), group.index))
    return panels, sentences


def kept_panels(section: Section, clients: Clients) -> list[Panel]:
    """Return heat maps of which layers' parameters clients keep; of groups whose clients differ."""
    panels = []
    for group in section.groups:
        layers, ids, counts = figures.kept_by_clients(clients.rows.get(group.index, ()))
        if not counts.size or (counts == counts[:, :1]).all():
            continue
        sums = counts.sum(axis=0)
        text = f"{sums.min():,} to {sums.max():,} a client, median {np.median(sums):,.0f}"
        if sums.min() == sums.max():
            text = f"{sums[0]:,} a client"
        alt = f"Personal parameters of {group.label} by client and layer: {text}."
        draw = partial(figures.draw_kept, layers=layers, counts=counts)
        data = {"kind": "cells", "clients": ids, "layers": layers, "counts": counts.tolist()}
        panels.append(
            Panel(group.label, draw, 1.0 + min(0.17 * len(layers), 8.0), alt, _sentence(text), group.index, data)
        )
    return panels


def bytes_panel(section: Section) -> Panel:
    """Return the bytes of all groups per round, down and up."""
    groups = section.groups
    sizes = [
        [group.spread(lambda run, way=way: run.result["bytes"][f"{way}_per_round"])[0] or 0.0 for way in ("down", "up")]  # type: ignore[misc]
        for group in groups
    ]
    words = [(f"down {format_bytes(down)}", f"up {format_bytes(up)}") for down, up in sizes]
    told = listed(f"{group.label} {down}, {up}" for group, (down, up) in zip(groups, words, strict=True))
    return Panel(
        "Bytes down and up",
        lambda ax: figures.draw_bytes(ax, groups, sizes, words),
        0.25 + 0.34 * len(groups),
        f"Bytes per round: {told}.",
        "Payload of a round, all its clients together: down in full colour, up in weaker colour.",
    )


def time_panel(section: Section) -> Panel | None:
    """Return the time of all groups per round; None if no run has recorded it."""
    groups, times, most = [], [], 1
    for group in section.groups:
        recorded = [lines for run in group.runs if (lines := run.timings())]
        if recorded:
            shares = [[_share(lines, name) for lines in recorded] for name in ("train", "all")]
            train, whole = (sum(values) / len(values) for values in shares)
            groups.append(group)
            times.append((min(train, whole), whole))
            most = max(most, *(line["runs"] for lines in recorded for line in lines))
    if not groups:
        return None
    words = [f"{whole * 1000:.3g} ms" if whole < 1 else f"{whole:.3g} s" for _, whole in times]
    told = listed(f"{group.label} {text}" for group, text in zip(groups, words, strict=True))
    share = f" Up to {most} runs trained side by side; each has an equal share of their time." if most > 1 else ""
    return Panel(
        "Time per round",
        lambda ax: figures.draw_time(ax, groups, times, words),
        0.25 + 0.34 * len(groups),
        f"Time per round: {told}.",
        f"Training in full colour, evaluation and all else in weaker colour; mean over rounds.{share}",
    )


def _share(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return a run's mean seconds per round; the runs of a launch share a round's time."""
    return float(sum(line[name] / line["runs"] for line in lines) / len(lines))


def _few(value: float) -> str:
    """Return a number of parameters; of few, which may be a mean, with a decimal."""
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.1f}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
