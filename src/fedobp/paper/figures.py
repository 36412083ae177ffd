"""Figures for a paper's column: colour-blind-safe colours, each line also told by its style, as PDF and PNG."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedobp.files import write

# Okabe and Ito's colours without yellow, which is too light for lines; black comes first, for FedOBP.
COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COLUMN, PAGE = 3.4, 7.0  # inches: one column, and the width of a page of two
_RC: Any = {
    "font.size": 7.5, "axes.titlesize": 8, "axes.labelsize": 7.5, "legend.fontsize": 7, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "axes.linewidth": 0.6, "lines.linewidth": 1.1, "lines.markersize": 3.2, "pdf.fonttype": 42,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e6e6e6", "grid.linewidth": 0.5, "legend.frameon": False,
}  # fmt: skip


def drawing() -> AbstractContextManager[None]:
    """Set the sizes and colours of figures that are made inside."""
    return rc_context(_RC)


def style(at: int) -> dict[str, Any]:
    """Return colour, line style and marker of the `at`-th line: 28 lines can be told apart."""
    colour, turn = COLOURS[at % len(COLOURS)], at // len(COLOURS)
    return {"color": colour, "linestyle": STYLES[turn % len(STYLES)], "marker": MARKERS[(at + turn) % len(MARKERS)]}


def panels(rows: int, columns: int, *, width: float = PAGE, height: float = 1.9, **more: Any) -> tuple[Figure, Any]:
    """Return a figure with a grid of axes (always two-dimensional); `height` is that of a row in inches."""
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def cell_panels(
    datasets: int, alphas: int, *, width: float = PAGE, height: float = 1.9, most: int = 4, **more: Any
) -> tuple[Figure, Any, list[Axes]]:
    """Return a figure with a panel for each dataset and alpha, its axes, and those of the pairs, dataset by dataset.

    A row is an alpha, and goes on below after `most` datasets.
    """
    columns = min(datasets, most)
    deep = -(-datasets // columns)
    figure, axes = panels(alphas * deep, columns, width=width, height=height, **more)
    used = [axes[of * deep + at // columns][at % columns] for at in range(datasets) for of in range(alphas)]
    return figure, axes, used


def legend(figure: Figure, axes: Any, columns: int) -> None:
    """Put one legend for all panels below them, with each label once."""
    shown: dict[str, Any] = {}
    for ax in axes.flat:
        handles, labels = ax.get_legend_handles_labels()
        shown |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in shown}
    if shown:
        handles, labels = list(shown.values()), list(shown)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.6)


def whole_numbers(axes: Axes) -> None:
    """Label the horizontal axis with whole numbers: rounds, steps, clients."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))


def quantile_axis(axes: Axes, grid: Sequence[float]) -> None:
    """Label evenly spaced positions with quantiles; of many, every second or third one."""
    step = -(-len(grid) // 14)
    axes.set_xticks(range(0, len(grid), step), [f"{q:g}" for q in grid[::step]], rotation=90, fontsize=6)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PDF and PNG, with the same bytes each time; panels without data say so.

    A panel without a title is there because the grid has more places than are used: nothing is shown of it.
    """
    paths = []
    for axes in figure.axes:
        if not axes.has_data() and not axes.get_title():
            axes.set_axis_off()
        elif not axes.has_data():
            axes.tick_params(bottom=False, left=False, labelbottom=False, labelleft=False)  # others may share them
            axes.text(0.5, 0.5, "not measured", ha="center", color="#777777", transform=axes.transAxes)
    for kind, metadata in (("pdf", {"CreationDate": None}), ("png", {"Software": None})):
        content = BytesIO()
        figure.savefig(content, format=kind, dpi=300, metadata=metadata)
        paths.append(folder / f"{name}.{kind}")
        write(paths[-1], content.getvalue())
    return paths
