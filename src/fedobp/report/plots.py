"""Single figures of runs as files: the panels of the report, for a paper."""

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from fedobp.errors import FedobpError, unknown
from fedobp.files import write
from fedobp.report.figures import COLUMN, STYLE, Column
from fedobp.report.panels import (
    Clients,
    Panel,
    accuracy_panel,
    bytes_panel,
    kept_panels,
    layer_panels,
    time_panel,
)
from fedobp.report.sections import Section, sections_of, without_repeats

if TYPE_CHECKING:
    from fedobp.saved_runs import SavedRun

FORMATS = (".png", ".pdf", ".svg")
MARK = "fedobp plot"  # in the metadata of a file, by which it is known as ours
_LEGEND_ROW, _TITLE_LINE = 0.17, 0.14  # inches
_TITLE = 38  # characters that fit above a panel


def _time(section: Section) -> list[Panel]:
    panel = time_panel(section)
    return [panel] if panel else []


# The panels of a section by the figure's name, and what is missing where there are none.
FIGURES: dict[str, tuple[Callable[[Section], list[Panel]], str]] = {
    "accuracy": (lambda section: [accuracy_panel(section)], ""),
    "clients": (lambda section: Clients(section).panels(), "none of these runs has a clients.csv"),
    "layers": (
        lambda section: [*layer_panels(section)[0], *kept_panels(section, Clients(section))],
        "in none of these runs do personal parameters change over rounds, or differ between clients",
    ),
    "bytes": (lambda section: [bytes_panel(section)], ""),
    "time": (_time, "none of these runs has a timings.jsonl"),
}


def plot_runs(runs: "Sequence[SavedRun]", figure: str = "accuracy") -> Figure:
    """Draw a figure of some finished runs: accuracy, clients, layers, bytes or time."""
    if figure not in FIGURES:
        raise unknown("figure", figure, FIGURES)
    make, missing = FIGURES[figure]
    with rc_context(STYLE):
        sections = sections_of(without_repeats(runs))
        found = [(section, panel) for section in sections for panel in make(section)]
        if not found:
            raise FedobpError(f"there is nothing to plot, because {missing}: choose another --figure")
        several = len(sections) > 1
        titles = [
            f"{section.title}, {panel.heading}" if several and panel.heading != section.title else panel.heading
            for section, panel in found
        ]
        return _drawn([panel for _, panel in found], titles, keys=figure in ("accuracy", "clients"))


def _drawn(panels: Sequence[Panel], titles: Sequence[str], keys: bool) -> Figure:
    """Draw panels, one or two beside each other, with one legend below them if `keys`."""
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    titles = [fill(title, _TITLE) for title in titles]
    lines = [title.count("\n") for title in titles]  # beyond the first
    heights = [
        max(one.height + _TITLE_LINE * more for one, more in zip(panels[at:end], lines[at:end], strict=True))
        for at, end in ((row * columns, (row + 1) * columns) for row in range(rows))
    ]
    figure = Column(layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    entries = {}
    for ax, panel, title in zip(axes, panels, titles, strict=False):
        panel.draw(ax)
        ax.set_title(title, fontsize=8.5, loc="left")
        entries.update({text: key for key, text in zip(*ax.get_legend_handles_labels(), strict=True)})
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    legend = 0.0
    if keys and len(entries) > 1:
        widest = max(map(len, entries))
        beside = int(np.clip(columns * COLUMN / (0.062 * widest + 0.5), 1, len(entries)))
        legend = -(-len(entries) // beside) * _LEGEND_ROW + 0.1
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=beside, frameon=False, fontsize=7.5,
            borderpad=0.2, columnspacing=1.2, handletextpad=0.5,
        )  # fmt: skip
    figure.set_size_inches(columns * COLUMN, sum(heights) + 0.2 * rows + legend)
    return figure


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, PDF or SVG; the same figure gives the same bytes."""
    suffix, content = path.suffix.lower().removeprefix("."), io.BytesIO()
    about = {"png": {"Software": MARK}, "pdf": {"Creator": MARK, "CreationDate": None}}
    metadata = about.get(suffix, {"Creator": MARK, "Date": None})
    with rc_context({**STYLE, "svg.hashsalt": "fedobp"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(content, format=suffix, dpi=300, metadata=metadata)
    write(path, content.getvalue())
