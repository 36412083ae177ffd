"""Figures of runs, drawn into matplotlib axes: for results in Python, single files, and the report.

A figure is as wide as a column of a paper, and its text is legible at that width and on a phone. Colours are told apart
by colour-blind readers (Okabe and Ito's, with enough contrast on white); curves also differ in markers and line styles.
"""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedobp.config import Config
from fedobp.errors import short

if TYPE_CHECKING:
    from fedobp.report.sections import Group
    from fedobp.saved_runs import SavedRun

COLUMN = 3.5  # inches: a column of a paper; on a phone of 390 pixels the text has 11
INK, MUTED, PALE, GRID, CELL = "#20262d", "#5b6570", "#8b96a2", "#e3e7eb", "#eff2f5"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c2649b", "#d18f00", "#3d9ad6", "#6a4fa3")
RAMP = ("#2d1e5f", "#35498e", "#2b74a0", "#2a9d8f", "#6cbf84", "#b7d67a", "#e8c75f", "#9aa5b1")  # layers, by depth
SHADES = ("#f2c063", "#e88a45", "#d4585a", "#ae3f87", "#7d43a8", "#5a48b8")  # of a heat map, from few to many
STYLE: dict[Any, Any] = {
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.parse_math": False,  # dollar signs in names are no formulas
    "path.simplify": False,  # a point of a curve is a point of its path, which the report's script reads
}
_LINES, _MARKERS = ("-", "--", ":", "-."), "os^DvPX"
_MOST_POINTS = 30  # evaluations that are marked one by one
_MOST_LAYERS = len(RAMP) - 1  # in a stack; the others are one more
# Dots of clients: marker, colour, relative size, level. Where accuracies are the same, all are seen: a square, on it a
# dot, on it a small dot. The references are what other methods are compared with, client by client.
_OWN = ("o", "", 1.0, 3)
REFERENCES = {"fedavg": ("o", INK, 0.6, 4), "local": ("s", PALE, 0.85, 2)}
_LABEL = 24  # characters of a label beside bars


class Look(NamedTuple):
    """How the curve of a group is drawn."""

    colour: str
    line: str
    marker: str


def look(index: int) -> Look:
    """Return the look of the group of an index: 28 differ, and groups of one colour differ in their lines."""
    return Look(
        COLOURS[index % len(COLOURS)],
        _LINES[index // len(COLOURS) % len(_LINES)],
        _MARKERS[index % len(_MARKERS)],
    )


class Column(Figure):
    """A figure that a notebook shows without pyplot, so none stays open and no backend is chosen."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=110)
        return content.getvalue()


class Curve(Protocol):
    """A run with accuracies over its rounds: a result, or a run that was saved."""

    @property
    def config(self) -> Config: ...  # noqa: D102
    @property
    def history(self) -> list[tuple[int, float, float]]: ...  # noqa: D102


def accuracy_of(runs: Sequence[Curve]) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64] | None]:
    """Return the evaluated rounds, the mean pooled accuracy of runs, and its standard deviation (None for one run)."""
    rounds = [point[0] for point in runs[0].history]
    pooled = np.array([[point[1] for point in run.history] for run in runs])
    return rounds, pooled.mean(axis=0), pooled.std(axis=0, ddof=1) if len(runs) > 1 else None


def draw_accuracy(ax: Axes, label: str, runs: Sequence[Curve], index: int, *, many: bool = False) -> None:
    """Draw the pooled accuracy over the rounds: the mean, in a band of one standard deviation, pale among many."""
    rounds, mean, deviation = accuracy_of(runs)
    colour, line, marker = look(index)
    ax.plot(
        rounds, mean, line, marker=marker if len(rounds) <= _MOST_POINTS else "", markersize=2.6, linewidth=1.3,
        color=colour, label=label if len(runs) == 1 else f"{label} ({len(runs)} runs)", gid=f"s{index}",
    )  # fmt: skip
    if deviation is not None:
        low, high = mean - deviation, mean + deviation
        ax.fill_between(rounds, low, high, color=colour, alpha=0.05 if many else 0.15, linewidth=0, gid=f"m{index}")


def finish_accuracy(ax: Axes) -> None:
    """Label the axes of accuracies over rounds."""
    ax.set(xlabel="round", ylabel="pooled accuracy (%)")
    ax.xaxis.set_major_locator(_whole(8))
    _finish(ax)


def draw_clients(
    ax: Axes,
    group: "Group",
    references: "Sequence[Group]",
    order: Sequence[int],
    served: Mapping[int, Mapping[int, float]],
) -> None:
    """Draw the accuracy of a group and of references on each client; `served` is by the group's index and by client."""
    size = float(np.clip(60 / math.sqrt(len(order)), 1.4, 4.5))
    for one in (group, *references):
        marker, colour, scale, level = REFERENCES[one.method] if one is not group else _OWN
        found, width = served[one.index], scale * size
        ax.plot(
            range(1, len(order) + 1), [found.get(client, math.nan) for client in order], marker, markersize=width,
            color=colour or look(one.index).colour, markeredgewidth=0, label=one.label, clip_on=False, zorder=level,
            gid=f"dots{one.index}{'r' if marker == 'o' else 's'}{width:.2f}",
        )  # fmt: skip
    ax.set(xlabel=f"clients, sorted by {short(group.label, 30)}", ylabel="accuracy (%)", ylim=(-3, 103))
    ax.set_xlim(1 - 0.02 * len(order) - 0.3, len(order) * 1.02 + 0.3)
    ax.xaxis.set_major_locator(_whole(6))
    _finish(ax)


def draw_layers(ax: Axes, rounds: Sequence[int], layers: Mapping[str, Sequence[float]]) -> None:
    """Draw the mean number of a client's personal parameters over the rounds, layer by layer, as a stack."""
    names = shown_layers(layers)
    rest = [name for name in layers if name not in names and max(layers[name]) > 0]
    stack = [list(layers[name]) for name in names]
    if rest:
        stack.append([sum(values) for values in zip(*(layers[name] for name in rest), strict=True)])
        names = [*names, f"{len(rest)} others"]
    colours = [*_spaced(len(names) - bool(rest)), *RAMP[-1:] * bool(rest)]
    ax.stackplot(rounds, stack, labels=[short(name, 20) for name in names], colors=colours, linewidth=0)
    ax.set(xlabel="round", ylabel="personal parameters", xlim=(rounds[0], max(rounds[-1], rounds[0] + 1)))
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(_whole(5))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
    _finish(ax)
    _legend_beside(ax, ax.get_legend_handles_labels()[0][::-1])


def shown_layers(layers: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the layers that get a colour, in the model's order: those with the most personal parameters."""
    kept = [name for name in layers if max(layers[name]) > 0]
    most = sorted(kept, key=lambda name: -max(layers[name]))[:_MOST_LAYERS]
    return [name for name in kept if name in most]


def _spaced(count: int) -> list[str]:
    """Return some colours of the ramp, as far apart as possible."""
    at = np.linspace(0, _MOST_LAYERS - 1, max(count, 1)) if count > 1 else [2]
    return [RAMP[round(one)] for one in at][:count]


def draw_kept(ax: Axes, layers: Sequence[str], counts: NDArray[np.int64]) -> None:
    """Draw how many personal parameters each client (column) keeps in each layer (row), as a heat map."""
    edges = _edges(int(counts.max()))
    colours = ListedColormap([SHADES[round(at)] for at in np.linspace(0, len(SHADES) - 1, len(edges) - 1)])
    # Not resampled: a pixel is a cell, and the browser enlarges it.
    ax.imshow(
        np.ma.masked_equal(counts, 0), aspect="auto", interpolation="none", cmap=colours,
        norm=BoundaryNorm(edges, len(edges) - 1), gid="cells",
    )  # fmt: skip
    ax.set_facecolor(CELL)
    ax.set_yticks(range(len(layers)), [short(name, 20) for name in layers])
    ax.set_xticks([])
    ax.set_xlabel("clients, few personal first")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    keys = [Patch(color=CELL, label="0")]
    for at, (low, high) in enumerate(pairwise(edges)):
        keys.append(Patch(color=colours(at), label=f"{low:,}" if high - low == 1 else f"{low:,} to {high - 1:,}"))
    _legend_beside(ax, keys[::-1])


def _legend_beside(ax: Axes, handles: Sequence[Any]) -> None:
    ax.legend(
        handles=handles, frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1,
        handletextpad=0.5, labelspacing=0.35, borderpad=0.2,
    )  # fmt: skip


def _edges(largest: int) -> list[int]:
    """Return the lower ends of at most six classes of counts, and one more than the last class ends with."""
    finest = [step * 10**power for power in range(20) for step in (1, 2, 5)]
    for edges in (finest, *([base**power for power in range(20)] for base in (10, 100, 1000))):
        within = [edge for edge in edges if edge <= largest]
        if len(within) <= len(SHADES):
            break
    return [*within, largest + 1]


def draw_bytes(
    ax: Axes, groups: "Sequence[Group]", sizes: Sequence[Sequence[float]], words: Sequence[Sequence[str]]
) -> None:
    """Draw bytes per round: a bar down and below it one up for each group, with `words` beside them."""
    for at, group in enumerate(groups):
        for size, text, shift, alpha in zip(sizes[at], words[at], (-0.2, 0.2), (1.0, 0.55), strict=True):
            _bar(ax, group, at + shift, 0.36, 0.0, size, alpha)
            _beside(ax, group, at + shift, size, text)
    _finish_bars(ax, groups)


def draw_time(ax: Axes, groups: "Sequence[Group]", times: Sequence[tuple[float, float]], words: Sequence[str]) -> None:
    """Draw seconds per round: of training, and in a paler colour what comes on top. `times` are (training, all)."""
    for at, (group, (train, whole)) in enumerate(zip(groups, times, strict=True)):
        _bar(ax, group, at, 0.62, 0.0, train, 1.0)
        _bar(ax, group, at, 0.62, train, whole - train, 0.45)
        _beside(ax, group, at, whole, words[at])
    _finish_bars(ax, groups)


def _bar(ax: Axes, group: "Group", at: float, height: float, left: float, width: float, alpha: float) -> None:
    ax.barh(at, width, height, left, color=look(group.index).colour, alpha=alpha, linewidth=0)
    ax.patches[-1].set_gid(f"m{group.index}")


def _beside(ax: Axes, group: "Group", at: float, value: float, text: str) -> None:
    ax.annotate(
        text, (value, at), (4, 0), textcoords="offset points", va="center", fontsize=7, color=INK,
        gid=f"m{group.index}",
    )  # fmt: skip


def _finish_bars(ax: Axes, groups: "Sequence[Group]") -> None:
    ax.set_yticks(range(len(groups)), [short(group.label, _LABEL) for group in groups], color=INK)
    ax.set(ylim=(len(groups) - 0.4, -0.6), xlim=(0, (ax.get_xlim()[1] or 1.0) * 1.42))
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[["top", "right", "bottom"]].set_visible(False)


def _whole(most: int) -> MaxNLocator:
    """Return what puts at most so many ticks on an axis, at round whole numbers."""
    return MaxNLocator(most, integer=True, steps=[1, 2, 5, 10])


def _finish(ax: Axes) -> None:
    ax.grid(True)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def layer_of(tensor: str) -> str:
    """Return the layer that a tensor belongs to: its name without `.weight` or `.bias`."""
    return tensor.rpartition(".")[0] or tensor


def layers_over_rounds(runs: "Sequence[SavedRun]") -> tuple[list[int], dict[str, list[float]]]:
    """Return the evaluated rounds, and for each layer a client's mean personal parameters then; the mean over runs."""
    lines = [[line for line in run.metrics() if line.get("personal_by_tensor")] for run in runs]
    rounds = [line["round"] for line in lines[0]] if lines else []
    layers: dict[str, list[float]] = {}
    alike = [one for one in lines if [line["round"] for line in one] == rounds]
    for one in alike:
        for at, line in enumerate(one):
            for tensor, mean in line["personal_by_tensor"].items():
                values = layers.setdefault(layer_of(tensor), [0.0] * len(rounds))
                values[at] += mean / len(alike)
    return rounds, layers


def kept_by_clients(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[int], NDArray[np.int64]]:
    """Return layers, clients (few personal parameters first), and [layers, clients]: how many are personal."""
    tensors = [name for name in (rows[0] if rows else {}) if name.startswith("personal.")]
    layers = list(dict.fromkeys(layer_of(name.removeprefix("personal.")) for name in tensors))
    order = sorted(rows, key=lambda row: (row["personal"], row["client"]))
    counts = np.zeros((len(layers), len(order)), dtype=np.int64)
    for tensor in tensors:
        counts[layers.index(layer_of(tensor.removeprefix("personal.")))] += [row[tensor] or 0 for row in order]
    return layers, [row["client"] for row in order], counts
