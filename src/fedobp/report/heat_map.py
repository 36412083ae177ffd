"""A partition as a heat map in the terminal: clients by labels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from fedobp.data import Dataset, Shard
from fedobp.report.partition import changes_in_words, label_counts, label_skew

_SHADES = " ·░▒▓█"
_MOST_LINES = 100  # at most this many clients


def _levels(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each cell's shade, 0 (none) to 5, by the square root of its share of the largest cell."""
    shares = np.sqrt(counts / max(1, counts.max()))
    return np.where(counts > 0, np.clip(np.ceil(shares * 5), 1, 5), 0).astype(np.int64)


def heat_map(dataset: Dataset, shards: Sequence[Shard], columns: int) -> RenderableType:
    """Return clients by labels as shaded cells, wrapped where there are more labels than columns."""
    counts = label_counts(dataset, shards)
    levels = _levels(counts)
    sizes = counts.sum(axis=1)
    sized = columns >= 32  # so that ten labels fit beside the sizes
    head = "client   train  test  " if sized else "client  "
    width = 2 if len(head) + 2 * dataset.classes <= columns else 1
    per_block = max(1, (columns - len(head)) // width)
    lines = [
        Text(
            f"{dataset.name}: {sizes.sum():,} samples on {len(shards):,} clients, {sizes.min():,} to {sizes.max():,} "
            "each"
        )
    ]
    for start in range(0, dataset.classes, per_block):
        labels = range(start, min(start + per_block, dataset.classes))
        ruler = "".join(_ruler(dataset, label, width) for label in labels)
        lines.append(Text(f"{head}{ruler}", style="bold"))
        for client, shard in enumerate(shards[:_MOST_LINES]):
            size = f"{len(shard.train):>7,} {len(shard.test):>5,} " if sized else ""
            line = Text(f"{client:>6} {size}{'*' if shard.held_out else ' '}")
            for label in labels:
                line.append(_SHADES[levels[client, label]] * width, style="cyan")
            lines.append(line)
    if len(shards) > _MOST_LINES:
        lines.append(Text(f"... and {len(shards) - _MOST_LINES:,} more clients: see all with --plot or --json"))
    largest = int(counts.max())
    legend = Text("samples of a label on a client: ")
    for level in range(1, 6):
        bound = int(np.floor((level / 5) ** 2 * largest))
        legend.append(_SHADES[level] * 2, style="cyan")
        legend.append(f" to {bound:,}  ")
    found = label_skew(counts)
    differ = (
        f"Label entropy {found.entropy.mean():.2f} bits on average, {found.entropy_of_all:.2f} of all together; "
        f"distance to the mix of all (EMD) {found.emd.mean():.2f} of 2."
    )
    held_out = sum(shard.held_out for shard in shards)
    note = [Text(f"* {held_out} clients are held out: they never train.")] if held_out else []
    return Group(*lines, legend, Text(differ), *map(Text, changes_in_words(shards)), *note)


def _ruler(dataset: Dataset, label: int, width: int) -> str:
    """Return the column head of a label: its name, or the last characters of it that fit."""
    return str(dataset.labels[label])[-width:].rjust(width)
