"""Plots of partitions: labels by clients as circles or as a heat map, and bars of each client's size and label skew."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data import Dataset, Shard
from fedobp.errors import FedobpError, short
from fedobp.files import write
from fedobp.report.partition import label_counts, label_skew

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_CIRCLES = 40  # at most this many clients and labels are drawn as circles
_CIRCLE = 300  # area of the largest circle, in square points
_DARK, _LIGHT = "#225ea8", "#7fcdbb"


def plot_partition(dataset: Dataset, shards: Sequence[Shard], path: Path, title: str) -> None:
    """Plot labels by clients, and below them sizes, entropy and distance, into a PNG, PDF or SVG file.

    Few clients are drawn as circles with an area proportional to the samples. Many are drawn as a heat map, sorted by
    their most frequent label.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    formats = ("png", "pdf", "svg")
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in formats:
        raise FedobpError(f"--plot {short(path, 200)} must end in .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise FedobpError(f"--plot {short(path, 200)}: there is no folder {short(path.parent, 200)}; make it first")
    counts = label_counts(dataset, shards)
    clients, labels = counts.shape
    few = max(clients, labels) <= _MOST_CIRCLES
    if not few:
        shards = [shards[client] for client in _order(counts, shards)]
        counts = label_counts(dataset, shards)
    tall = float(np.clip(0.28 * labels, 2.8, 9))
    figure, panels = pyplot.subplots(
        4,
        1,
        figsize=(float(np.clip(0.32 * clients + 2.5, 7.5, 15)), tall + 4.2),
        height_ratios=(tall, 1, 1, 1),
        sharex=True,
        layout="constrained",
    )
    cells, sizes, entropy, emd = panels
    if few:
        _circles(cells, counts)
        cells.set_xticks(range(clients))
    else:
        image = cells.imshow(np.ma.masked_equal(counts.T, 0), aspect="auto", cmap="YlGnBu", norm="log",
                             interpolation="nearest", origin="lower")  # fmt: skip
        figure.colorbar(image, ax=cells, label="samples (white: none)", pad=0.01)
    cells.set(ylabel="label", ylim=(-0.6, labels - 0.4), xlim=(-0.6, clients - 0.4))
    # Dollar signs in names are no formulas.
    cells.set_title(title, parse_math=False)
    if labels <= 30:
        cells.set_yticks(range(labels), [_short(str(label)) for label in dataset.labels], parse_math=False)
    found = label_skew(counts)
    trained = np.array([len(shard.train) + len(shard.val) for shard in shards])
    _bars(sizes, trained, color=_DARK, label="train")
    _bars(sizes, counts.sum(axis=1), trained, color=_LIGHT, label="test")
    sizes.set(ylabel="samples")
    sizes.legend(ncols=2, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.95), borderpad=0, fontsize="small")
    _bars(entropy, found.entropy, color=_DARK)
    entropy.axhline(found.entropy_of_all, color="black", linewidth=0.8, linestyle="--")
    entropy.set(ylabel="label entropy\n(bits)", ylim=(0, 1.1 * max(found.entropy_of_all, found.entropy.max(), 0.1)))
    _note(entropy, f"mean {found.entropy.mean():.2f}; dashed: all together, {found.entropy_of_all:.2f}")
    _bars(emd, found.emd, color=_DARK)
    emd.set(ylabel="EMD to the\nmix of all", ylim=(0, 2))
    emd.set_xlabel("client" if few else "clients, in the order of their most frequent labels")
    _note(emd, f"mean {found.emd.mean():.2f}; 0: the same mix, 2: nothing in common")
    trainers = sum(not shard.held_out for shard in shards)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        if trainers < clients:
            panel.axvspan(trainers - 0.5, clients - 0.4, color="#fee8c8", linewidth=0, zorder=-1)
    if trainers < clients:
        _note(sizes, "shaded: held out", left=True)
    content = io.BytesIO()
    figure.savefig(content, format=suffix, dpi=150)
    pyplot.close(figure)
    write(path, content.getvalue())


def _order(counts: NDArray[np.int64], shards: Sequence[Shard]) -> list[int]:
    """Return clients sorted by whether they are held out, by their most frequent label, and by its share."""
    shares = counts.max(axis=1) / counts.sum(axis=1)
    held_out = np.array([shard.held_out for shard in shards])
    order: list[int] = np.lexsort((-shares, counts.argmax(axis=1), held_out)).tolist()
    return order


def _circles(panel: "Axes", counts: NDArray[np.int64]) -> None:
    """Draw a circle for each label on each client."""
    client, label = counts.nonzero()
    samples = counts[client, label]
    panel.scatter(client, label, s=_CIRCLE * samples / counts.max(), color=_DARK, alpha=0.85, linewidths=0)
    panel.grid(color="#eeeeee")
    panel.set_axisbelow(True)
    largest = int(counts.max())
    for share in (1.0, 0.25):
        panel.scatter([], [], s=_CIRCLE * share, color=_DARK, alpha=0.85, linewidths=0, label=f"{largest * share:,.0f}")
    panel.legend(title="samples", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), labelspacing=1.2)


def _bars(panel: "Axes", top: NDArray[Any], bottom: NDArray[Any] | float = 0.0, **look: Any) -> None:
    """Draw a bar for each client; many are one filled outline, because bars below a pixel's width look uneven."""
    if len(top) <= 100:
        panel.bar(range(len(top)), top - bottom, bottom=bottom, **look)
    else:
        panel.stairs(top, np.arange(len(top) + 1) - 0.5, baseline=bottom, fill=True, **look)


def _note(panel: "Axes", text: str, *, left: bool = False) -> None:
    """Write a line of text above a panel."""
    panel.text(0.0 if left else 1.0, 1.02, text, transform=panel.transAxes, ha="left" if left else "right",
               va="bottom", fontsize="small")  # fmt: skip


def _short(name: str) -> str:
    return name if len(name) <= 14 else name[:13] + "…"
