"""The table of datasets: what the paper prints, and what is really in each."""

from typing import TYPE_CHECKING

import numpy as np

from fedobp.data import REGISTRY
from fedobp.federation import assign, read
from fedobp.paper.experiment import Experiment, Files, Setting, Work
from fedobp.paper.figures import COLUMN, PAGE, legend, panels, style, whole_numbers
from fedobp.paper.published import TABLE1, TABLE2, published, title
from fedobp.paper.rows import where
from fedobp.paper.tables import Table
from fedobp.resolution import resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure(setting: Setting, work: Work) -> Files:
    """Read each dataset, and partition it as the experiments do."""
    rows, clients = [], []
    for at, (name, alpha) in enumerate(setting.cells()):
        if name not in setting.available:
            continue
        work.progress(f"datasets, {title(name)}", at / len(setting.cells()))
        asked = setting.config(name, alpha, setting.seeds[0], "fedobp")
        dataset = read(asked)
        config, _ = resolve(asked, dataset)
        _, shards = assign(config, dataset)
        labels = np.bincount(dataset.y, minlength=dataset.classes)
        sizes = [len(shard.train) + len(shard.test) for shard in shards]
        kinds = [len(np.unique(dataset.y[shard.train])) for shard in shards]
        rows.append(
            {
                "dataset": name, "alpha": alpha, "samples": len(dataset.y), "official_train": dataset.n_train,
                "classes": dataset.classes, "resolution": "x".join(map(str, dataset.x.shape[1:])),
                "smallest_class": int(labels.min()), "largest_class": int(labels.max()), "clients": len(shards),
                "smallest_client": min(sizes), "mean_client": float(np.mean(sizes)), "largest_client": max(sizes),
                "labels_of_a_client": float(np.mean(kinds)), "sha256": dataset.content_hash,
            }
        )  # fmt: skip
        clients += [{"dataset": name, "alpha": alpha, "client": at, "samples": size} for at, size in enumerate(sizes)]
    return {"results": rows, "clients": clients}


def tables(setting: Setting, files: Files) -> list[Table]:
    """Return what is printed beside what is there, and the clients of each partition."""
    printed = Table(
        "What the paper prints, and what is there",
        ["dataset", "samples printed", "official", "in the file", "agrees", "classes printed", "in the file",
         "resolution printed", "in the file", "year printed", "note"],
    )  # fmt: skip
    for name in setting.datasets:
        theirs, rows = published()["datasets"].get(name, {}), where(files["results"], dataset=name)
        here = rows[0] if rows else {}
        official = REGISTRY[name].samples if name in REGISTRY else None
        known = here.get("samples") or official
        printed.add(
            title(name),
            f"{theirs['samples']:,}" if theirs else "",
            f"{official:,}" if official else "",
            f"{here['samples']:,}" if here else "",
            ("yes" if known == theirs["samples"] else "no") if theirs else "",
            *(str(theirs.get("classes", "")), str(here.get("classes", ""))),
            *(str(theirs.get("resolution", "")), str(here.get("resolution", ""))),
            str(theirs.get("year", "")),
            theirs.get("note", ""),
        )
    clients = Table(
        "Clients of the partition (seed 42)",
        ["dataset", "alpha", "clients", "smallest", "mean", "largest", "labels of a client", "smallest class",
         "largest class"],
        notes=["Samples of a client: training and test together. Labels of a client: the mean number of different "
               "training labels."],
    )  # fmt: skip
    for row in files["results"]:
        clients.add(
            title(row["dataset"]), f"{row['alpha']:g}", str(row["clients"]), f"{row['smallest_client']:,}",
            f"{row['mean_client']:,.0f}", f"{row['largest_client']:,}", f"{row['labels_of_a_client']:.1f}",
            f"{row['smallest_class']:,}", f"{row['largest_class']:,}",
        )  # fmt: skip
    return [printed, clients]


def figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the sizes of clients, sorted, a panel for each dataset."""
    columns = min(4, len(setting.datasets))
    figure, axes = panels(-(-len(setting.datasets) // columns), columns, width=PAGE if columns > 1 else COLUMN)
    for at, name in enumerate(setting.datasets):
        ax = axes[at // columns][at % columns]
        for place, alpha in enumerate(setting.alphas):
            sizes = sorted(row["samples"] for row in where(files["clients"], dataset=name, alpha=alpha))
            if sizes:
                look = {**style(place + 1), "marker": ""}
                ax.step(range(1, len(sizes) + 1), sizes[::-1], where="mid", label=f"Dir({alpha:g})", **look)
        ax.set(title=title(name), xlabel="clients, the largest first")
        whole_numbers(ax)
    for ax in axes[:, 0]:
        ax.set_ylabel("samples")
    legend(figure, axes, 2)
    return {"figure": figure}


EXPERIMENTS = [
    Experiment(
        "datasets",
        "the table of datasets, with what is really in each",
        measure,
        tables,
        figures,
        (*TABLE1, *TABLE2),
        trains=False,
        takes_seeds=False,
    )
]
