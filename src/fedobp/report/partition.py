"""How the data falls on clients, for the eye: a heat map in the terminal, and circles or a heat map as a picture."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from fedobp.config import Config
from fedobp.data import Dataset, Shard
from fedobp.errors import FedobpError, short
from fedobp.files import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = " ·░▒▓█"
_MOST_LINES = 100  # clients in the terminal
_MOST_CIRCLES = 40  # clients, or labels, in a picture with circles
_CIRCLE = 300  # the largest one's area, in square points
_DARK, _LIGHT = "#225ea8", "#7fcdbb"


def label_counts(dataset: Dataset, shards: Sequence[Shard]) -> NDArray[np.int64]:
    """Return [clients, labels]: how often each label occurs on each client, in all its parts together."""
    return np.stack([np.bincount(dataset.y[shard.samples], minlength=dataset.classes) for shard in shards])


class Measures(NamedTuple):
    """How much clients differ."""

    entropy: NDArray[np.float64]  # of each client's mix of labels, in bits; 0: one label
    entropy_of_all: float
    # Of each client's mix from that of all together, as Zhao et al. (2018) have it: the sum of the absolute
    # differences; 0: the same, 2: nothing in common.
    emd: NDArray[np.float64]


def measures(counts: NDArray[np.int64]) -> Measures:
    """Return the label entropy of clients, and their earth mover's distance to the mix of all."""
    everyone = counts.sum(axis=0) / counts.sum()
    mixes = counts / counts.sum(axis=1, keepdims=True)
    return Measures(_entropy(mixes), float(_entropy(everyone[None])[0]), np.abs(mixes - everyone).sum(axis=1))


def _entropy(mixes: NDArray[np.float64]) -> NDArray[np.float64]:
    bits: NDArray[np.float64] = -(mixes * np.log2(np.where(mixes > 0, mixes, 1.0))).sum(axis=1)
    return np.abs(bits)  # and no -0.0


def facts(dataset: Dataset, shards: Sequence[Shard]) -> dict[str, Any]:
    """Return a partition as plain values: what `fedobp partition --json` prints, but for the hash."""
    counts = label_counts(dataset, shards)
    found = measures(counts)
    clients = []
    for client, shard in enumerate(shards):
        row = {
            "id": client,
            "train": len(shard.train),
            "val": len(shard.val),
            "test": len(shard.test),
            "labels": {str(dataset.labels[k]): int(n) for k, n in enumerate(counts[client]) if n},
            "entropy": float(found.entropy[client]),
            "emd": float(found.emd[client]),
            "held_out": shard.held_out,
            "turns": shard.change.turns,
            "noise": shard.change.noise,
        }
        if dataset.clients is not None and len(whose := np.unique(dataset.clients[shard.samples])) == 1:
            row["name"] = dataset.client_names[int(whose[0])]
        clients.append(row)
    means = {"entropy": float(found.entropy.mean()), "emd": float(found.emd.mean())}
    return {"clients": clients, **means, "entropy_of_all": found.entropy_of_all}


def title(config: Config) -> str:
    """Return what a partition is, in a line."""
    kind = config.partition
    if kind.startswith("dirichlet"):
        kind += f"({config.alpha:g})"
    elif config.partition_options:
        kind += " (" + ", ".join(f"{name} {value}" for name, value in config.partition_options.items()) + ")"
    return f"{config.dataset}, {kind}, {config.clients:,} clients, seed {config.partition_seed}"


def _levels(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each cell's shade, 0 (none) to 5, by the square root of its share of the largest cell."""
    shares = np.sqrt(counts / max(1, counts.max()))
    return np.where(counts > 0, np.clip(np.ceil(shares * 5), 1, 5), 0).astype(np.int64)


def heat_map(dataset: Dataset, shards: Sequence[Shard], columns: int) -> RenderableType:
    """Return clients by labels as shaded cells, wrapped where there are more labels than columns."""
    counts = label_counts(dataset, shards)
    levels = _levels(counts)
    sizes = counts.sum(axis=1)
    sized = columns >= 32  # so that ten labels find room beside the sizes
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
    found = measures(counts)
    differ = (
        f"Label entropy {found.entropy.mean():.2f} bits on average, {found.entropy_of_all:.2f} of all together; "
        f"distance to the mix of all (EMD) {found.emd.mean():.2f} of 2."
    )
    held_out = sum(shard.held_out for shard in shards)
    note = [Text(f"* {held_out} clients are held out: they never train.")] if held_out else []
    return Group(*lines, legend, Text(differ), *note)


def _ruler(dataset: Dataset, label: int, width: int) -> str:
    """Return a label's column head: its name, or the last letters of it where there is no room."""
    return str(dataset.labels[label])[-width:].rjust(width)


def plot(dataset: Dataset, shards: Sequence[Shard], path: Path, title: str) -> None:
    """Draw labels by clients, and below them sizes, entropy and distance, into a PNG, PDF or SVG file.

    Few clients are drawn with circles, whose area counts samples. Many are drawn as a heat map, those beside each other
    that have the same most frequent label.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = ("png", "pdf", "svg")
    kind = path.suffix.lower().removeprefix(".")
    if kind not in kinds:
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
    # Names may have dollars in them, which are no formulas.
    cells.set_title(title, parse_math=False)
    if labels <= 30:
        cells.set_yticks(range(labels), [_short(str(label)) for label in dataset.labels], parse_math=False)
    found = measures(counts)
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
    figure.savefig(content, format=kind, dpi=150)
    pyplot.close(figure)
    write(path, content.getvalue())


def _order(counts: NDArray[np.int64], shards: Sequence[Shard]) -> list[int]:
    """Return clients by whether they are held out, by their most frequent label, and by its share."""
    shares = counts.max(axis=1) / counts.sum(axis=1)
    held_out = np.array([shard.held_out for shard in shards])
    order: list[int] = np.lexsort((-shares, counts.argmax(axis=1), held_out)).tolist()
    return order


def _circles(panel: "Axes", counts: NDArray[np.int64]) -> None:
    """Draw a circle for each label on each client; the largest just fits between its neighbours."""
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
    """Draw a bar for each client; many are one outline, because bars thinner than a pixel would come and go."""
    if len(top) <= 100:
        panel.bar(range(len(top)), top - bottom, bottom=bottom, **look)
    else:
        panel.stairs(top, np.arange(len(top) + 1) - 0.5, baseline=bottom, fill=True, **look)


def _note(panel: "Axes", text: str, *, left: bool = False) -> None:
    """Write a line above a panel."""
    panel.text(0.0 if left else 1.0, 1.02, text, transform=panel.transAxes, ha="left" if left else "right",
               va="bottom", fontsize="small")  # fmt: skip


def _short(name: str) -> str:
    return name if len(name) <= 14 else name[:13] + "…"
