"""Curves of results: accuracy over the rounds."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedobp.errors import FedobpError
from fedobp.report.groups import by_settings

if TYPE_CHECKING:
    from fedobp.result import Result

_STYLES = ("-", "--", ":", "-.")  # for ten curves each, as matplotlib has ten colours
_MOST_POINTS = 30  # evaluations that are marked one by one


class Curves(Figure):
    """A figure that a notebook shows without pyplot, so none stays open and no backend is chosen."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=110)
        return content.getvalue()


def plot_curves(results: "Sequence[Result]", ax: Axes | None = None) -> Figure:
    """Draw the pooled accuracy over the rounds, a curve for each group of runs that differ in their seeds only."""
    if not results:
        raise FedobpError("there is no finished run to plot: look at the errors of those that failed")
    figure = Curves(figsize=(7, 4.2), layout="constrained") if ax is None else cast(Figure, ax.figure)
    ax = figure.subplots() if ax is None else ax
    for label, runs in by_settings(results).items():
        rounds = [point[0] for point in runs[0].history]
        pooled = np.array([[point[1] for point in run.history] for run in runs])
        mean = pooled.mean(axis=0)
        marker, style = "o" if len(rounds) <= _MOST_POINTS else "", _STYLES[len(ax.lines) // 10 % len(_STYLES)]
        name = label if len(runs) == 1 else f"{label} ({len(runs)} runs)"
        [line] = ax.plot(rounds, mean, style, marker=marker, markersize=3, linewidth=1.6, label=name)
        if len(runs) > 1:
            spread = pooled.std(axis=0, ddof=1)
            ax.fill_between(rounds, mean - spread, mean + spread, color=line.get_color(), alpha=0.15, linewidth=0)
    _decorate(ax, results)
    return figure


def _decorate(ax: Axes, results: "Sequence[Result]") -> None:
    ax.set(xlabel="round", ylabel="pooled accuracy (%)")
    datasets = list(dict.fromkeys(result.config.dataset for result in results))
    if len(datasets) == 1:
        ax.set_title(datasets[0], parse_math=False)  # dollar signs in names are no formulas
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(color="#eeeeee")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    many = len(ax.get_legend_handles_labels()[1]) > 6
    place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if many else {"loc": "best"}
    for text in ax.legend(frameon=False, fontsize="small", **place).get_texts():
        text.set_parse_math(False)
