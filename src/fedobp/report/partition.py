"""How the data falls on clients, for the eye: a heat map in the terminal, and one as a picture."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from fedobp.data import Dataset, Shard
from fedobp.errors import FedobpError
from fedobp.files import write

_SHADES = " ·░▒▓█"


def label_counts(dataset: Dataset, shards: Sequence[Shard]) -> NDArray[np.int64]:
    """Return [clients, labels]: how often each label occurs on each client, in all its parts together."""
    return np.stack(
        [np.bincount(dataset.y[np.concatenate([s.train, s.val, s.test])], minlength=dataset.classes) for s in shards]
    )


def _levels(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each cell's shade, 0 (none) to 5, by the square root of its share of the largest cell."""
    shares = np.sqrt(counts / max(1, counts.max()))
    return np.where(counts > 0, np.clip(np.ceil(shares * 5), 1, 5), 0).astype(np.int64)


def heat_map(dataset: Dataset, shards: Sequence[Shard], columns: int) -> RenderableType:
    """Return clients by labels as shaded cells, wrapped where there are more labels than columns."""
    counts = label_counts(dataset, shards)
    levels = _levels(counts)
    sizes = [len(s.train) + len(s.val) + len(s.test) for s in shards]
    width = 2 if 22 + 2 * dataset.classes <= columns else 1
    per_block = max(1, (columns - 22) // width)
    lines = [
        Text(f"{dataset.name}: {sum(sizes):,} samples on {len(shards)} clients, {min(sizes):,} to {max(sizes):,} each")
    ]
    for start in range(0, dataset.classes, per_block):
        labels = range(start, min(start + per_block, dataset.classes))
        ruler = "".join(_ruler(dataset, label, width) for label in labels)
        lines.append(Text(f"client   train  test  {ruler}", style="bold"))
        for client, shard in enumerate(shards):
            line = Text(f"{client:>6} {len(shard.train):>7,} {len(shard.test):>5,}  ")
            for label in labels:
                line.append(_SHADES[levels[client, label]] * width, style="cyan")
            lines.append(line)
    largest = int(counts.max())
    legend = Text("samples of a label on a client: ")
    for level in range(1, 6):
        bound = int(np.floor((level / 5) ** 2 * largest))
        legend.append(_SHADES[level] * 2, style="cyan")
        legend.append(f" to {bound:,}  ")
    return Group(*lines, legend)


def _ruler(dataset: Dataset, label: int, width: int) -> str:
    """Return a label's column head: its name, or the last digit of it where there is no room."""
    return str(dataset.labels[label])[-width:].rjust(width)


def plot(dataset: Dataset, shards: Sequence[Shard], path: Path, title: str) -> None:
    """Draw clients by labels, with each client's size beside it, into a PNG, PDF or SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    kinds = ("png", "pdf", "svg")
    kind = path.suffix.lower().removeprefix(".")
    if kind not in kinds:
        raise FedobpError(f"--plot {path} must end in .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise FedobpError(f"--plot {path}: there is no folder {path.parent}; make it first")
    counts = label_counts(dataset, shards)
    clients, labels = counts.shape
    height = float(np.clip(0.12 * clients + 2, 4, 18))
    width = float(np.clip(0.3 * labels + 4.5, 7, 16))
    figure, (cells, bars) = pyplot.subplots(
        1, 2, figsize=(width, height), width_ratios=(3, 1), sharey=True, layout="constrained"
    )
    image = cells.imshow(
        np.ma.masked_equal(counts, 0), aspect="auto", cmap="YlGnBu", norm="log", interpolation="nearest",
    )  # fmt: skip
    cells.set(xlabel="label", ylabel="client", title=title)
    cells.yaxis.set_major_locator(MaxNLocator(integer=True))
    if labels <= 30:
        cells.set_xticks(range(labels), [str(label) for label in dataset.labels])
    figure.colorbar(image, ax=cells, label="samples (white: none)", location="bottom", shrink=0.6, pad=0.02)
    trained = [len(s.train) + len(s.val) for s in shards]
    bars.barh(range(clients), trained, color="#225ea8", label="train")
    bars.barh(range(clients), [len(s.test) for s in shards], left=trained, color="#7fcdbb", label="test")
    bars.set(xlabel="samples")
    bars.legend(loc="best", frameon=False)
    for side in ("top", "right"):
        bars.spines[side].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    pyplot.close(figure)
    write(path, content.getvalue())
