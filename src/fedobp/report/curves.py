"""Curves of results: accuracy over the rounds."""

from collections.abc import Sequence
from typing import cast

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedobp.errors import FedobpError
from fedobp.report.figures import STYLE, Column, Curve, draw_accuracy, finish_accuracy
from fedobp.report.groups import by_settings


def plot_curves(runs: Sequence[Curve], ax: Axes | None = None) -> Figure:
    """Draw the pooled accuracy over the rounds, a curve for each group of runs that differ in their seeds only."""
    if not runs:
        raise FedobpError("there is no finished run to plot: look at the errors of those that failed")
    with rc_context(STYLE):
        figure = Column(figsize=(7, 4.2), layout="constrained") if ax is None else cast(Figure, ax.figure)
        ax = figure.subplots() if ax is None else ax
        for label, group in by_settings(runs).items():
            draw_accuracy(ax, label, group, len(ax.lines))
        finish_accuracy(ax)
        datasets = list(dict.fromkeys(run.config.dataset for run in runs))
        if len(datasets) == 1:
            ax.set_title(datasets[0])
        many = len(ax.lines) > 6
        ax.legend(frameon=False, **({"loc": "center left", "bbox_to_anchor": (1, 0.5)} if many else {"loc": "best"}))
    return figure
