"""A law without fitted constants: what a global model's accuracy says of the personal models that follow from it.

The toy: K classes, of which class c is a Gaussian with unit variance around m e_c (a regular simplex). With a uniform
prior the best classifier takes the largest coordinate. It is right with the probability

    g(m) = integral of phi(t) Phi(t + m)^(K - 1) dt,

the same for every class; this gives m from the accuracy g of the global model. A client whose labels have the shares p
takes the largest m x_c + log p(c), and is right about class y with the probability

    a(y) = integral of phi(t) product over c other than y of Phi(t + m + (log p(y) - log p(c)) / m) dt.

The prediction is the mean of a(y) over the real test labels of all clients, p being the shares of their real training
labels with 1/2 added to each count. It depends on g and on the label counts, and on nothing else: not on the network,
the images, or how a client adapts the model. The integrals are sums over a fine grid, which are exact to rounding for
such functions; nothing is drawn.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedobp.config import Config
from fedobp.data import data_dir, describe, partition_hash
from fedobp.federation import assign, read
from fedobp.paper.claims import read_evidence
from fedobp.paper.experiment import FIRST_SEED, Experiment, Files, Row, Setting, Work
from fedobp.paper.explained import explain, measure_once, train_run
from fedobp.paper.figures import COLUMN, MARKERS, legend, panels, style
from fedobp.paper.published import title
from fedobp.paper.rows import mean_of, where
from fedobp.paper.tables import Table
from fedobp.resolution import resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
ONE_MODEL = ("fedavg", "fedprox", "scaffold")  # methods that serve one model to all clients
MEASURED = {"last": "own last model", "finetuned": "after 5 epochs", "prior": "with log p"}
TRAINED = "trained here"
_GRID = np.linspace(-10, 10, 401)
_DENSITY = np.exp(-(_GRID**2) / 2) / np.exp(-(_GRID**2) / 2).sum()
_SMALLEST, _LARGEST = 1e-3, 20.0  # separations m: of classes that cannot be told apart, and of those that always can


class Labels(NamedTuple):
    """The label counts of all clients' training and test parts, [clients, classes], and the partition's hash."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    partition: str


def accuracy(m: float, log_prior: Floats) -> Floats:
    """Return a(y), the accuracy on each class of the best classifier for a prior [classes]."""
    from scipy.special import log_ndtr

    gap = m + (log_prior[:, None] - log_prior) / m
    np.fill_diagonal(gap, np.inf)  # log Phi(inf) = 0: a class does not compete with itself
    found: Floats = _DENSITY @ np.exp(log_ndtr(_GRID[:, None, None] + gap).sum(axis=-1))
    return found


def separation(g: float, classes: int) -> float:
    """Return m for an accuracy of g with a uniform prior; at most chance gives the smallest, 1 the largest one."""
    from scipy.optimize import brentq

    def excess(m: float) -> float:
        return float(accuracy(m, np.zeros(classes))[0]) - g

    if excess(_SMALLEST) >= 0:
        return _SMALLEST
    return _LARGEST if excess(_LARGEST) <= 0 else float(brentq(excess, _SMALLEST, _LARGEST, xtol=1e-9))


def predict(g: float, train: NDArray[np.int64], test: NDArray[np.int64]) -> float:
    """Return the accuracy of personal models, predicted from that of the global one; both are shares of 1."""
    m = separation(g, train.shape[1])
    shares = (train + 0.5) / (train + 0.5).sum(axis=1, keepdims=True)
    right = sum(float(accuracy(m, np.log(p)) @ counts) for p, counts in zip(shares, test, strict=True))
    return right / float(test.sum())


@cache
def label_counts(config: Config) -> Labels:
    """Return the label counts of the clients that settings give."""
    dataset = read(config)
    resolved, _ = resolve(config, dataset)
    _, shards = assign(resolved, dataset)
    train, test = (
        np.stack([np.bincount(dataset.y[getattr(shard, part)], minlength=dataset.classes) for shard in shards])
        for part in ("train", "test")
    )
    return Labels(train, test, partition_hash(dataset, shards))


def measure_run(setting: Setting, work: Work, dataset: str, alpha: float, seed: int) -> Files:
    """Train FedAvg; test its global model, that with log p, and the clients' last and fine-tuned models."""
    config = setting.config(dataset, alpha, seed, "fedavg", finetune_epochs=5, eval_every=setting.rounds)
    trained = train_run(config, work, f"law, {title(dataset)}")
    row, _ = explain(trained, trained.last != trained.last)
    tuned = trained.report.finetuned
    assert tuned is not None
    found = {"global": row["global"], "last": row["last"], "finetuned": tuned.pooled, "prior": row["prior"]}
    labels = label_counts(config)
    predicted = 100 * predict(found["global"] / 100, labels.train, labels.test)
    head = {"dataset": dataset, "alpha": alpha, "method": "fedavg", "seed": seed, "source": TRAINED}
    return {"results": [{**head, "predicted": predicted, **found}]}


def rows_of(folders: Sequence[Path], work: Work) -> list[Row]:
    """Return the rows of finished runs in the paper's setting whose methods serve one model to all clients."""
    runs: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in read_evidence(folders).results:
        if row["method"] in ONE_MODEL and row.get("partition") == "dirichlet":
            runs.setdefault((row["run"], row["partition_hash"]), {})[row["model"]] = row
    found, notes = [], dict[str, None]()
    for run in runs.values():
        served = run["served"]
        name = f"{title(served['dataset'])}, Dirichlet({served['alpha']:g})"
        if not describe(served["dataset"], data_dir()).available:
            notes[f"{name} is left out, because its labels are needed: fedobp data fetch {served['dataset']}"] = None
            continue
        keys = ("dataset", "alpha", "clients")
        labels = label_counts(Config(partition_seed=FIRST_SEED, **{key: served[key] for key in keys}))
        if labels.partition != served["partition_hash"]:
            notes[f"{name} is left out: its partition is not that of seed {FIRST_SEED}"] = None
            continue
        head = {key: served[key] for key in ("dataset", "alpha", "method", "seed")}
        predicted = 100 * predict(served["pooled"] / 100, labels.train, labels.test)
        measured = {name: run[name]["pooled"] if name in run else None for name in MEASURED}
        found.append({**head, "source": "results", "predicted": predicted, "global": served["pooled"], **measured})
    work.notes += notes
    return found


def measure(setting: Setting, work: Work) -> Files:
    """Train FedAvg on the datasets of the setting, and add the runs of result files."""
    files = measure_once("law", ("results",), setting, work, measure_run)
    return {"results": rows_of(work.sources or [work.folder], work) + files["results"]}


def groups(files: Files) -> dict[tuple[str, float, str, str], list[Row]]:
    """Return the rows of all seeds by dataset, alpha, method and source."""
    found: dict[tuple[str, float, str, str], list[Row]] = {}
    for row in files["results"]:
        found.setdefault((row["dataset"], row["alpha"], row["method"], row["source"]), []).append(row)
    return found


def differences(rows: Sequence[Row], name: str) -> list[Row]:
    """Return rows with measured minus predicted."""
    return [{**row, "difference": row[name] - row["predicted"]} for row in rows if row[name] is not None]


def tables(setting: Setting, files: Files) -> list[Table]:
    """Return what is predicted beside what is measured."""
    table = Table(
        "Accuracy of personal models in per cent, predicted from that of the global model, and measured",
        ["dataset", "alpha", "method", "runs", "seeds", "global model", "predicted",
         *(text for name in MEASURED.values() for text in (name, "minus predicted"))],
        notes=["Predicted: from the global model's accuracy and the clients' label counts alone, for each seed. Runs "
               "of result files: of 400 rounds, best of rounds 100, 200, 300 and 400; trained here: last round. With "
               "log p: the global model with the logarithm of the client's label shares in its bias; result files do "
               "not have it. Mean ± deviation over seeds."],
    )  # fmt: skip
    for (dataset, alpha, method, source), rows in groups(files).items():
        cells = [
            str(found or "")
            for name in MEASURED
            for found in (mean_of(rows, name), mean_of(differences(rows, name), "difference"))
        ]
        means = (str(mean_of(rows, name)) for name in ("global", "predicted"))
        table.add(title(dataset), f"{alpha:g}", method, source, str(len(rows)), *means, *cells)
    return [table]


def figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw measured against predicted accuracies, with the diagonal: a colour for each dataset and alpha."""
    figure, axes = panels(1, 1, width=1.4 * COLUMN, height=3.6)
    ax, values = axes[0][0], []
    cells = list(dict.fromkeys((row["dataset"], row["alpha"]) for row in files["results"]))
    for place, (dataset, alpha) in enumerate(cells):
        rows = where(files["results"], dataset=dataset, alpha=alpha)
        for (name, text), marker in zip(MEASURED.items(), MARKERS, strict=False):
            points = np.array([(row["predicted"], row[name]) for row in rows if row[name] is not None]).reshape(-1, 2)
            values += points.ravel().tolist()
            look = {"color": style(place)["color"], "marker": marker, "markersize": 4, "linestyle": ""}
            ax.plot(*points.T, label=f"{title(dataset)} {alpha:g}, {text}", fillstyle="none", **look)
    if values:
        ends = [min(values) - 1, min(100.0, max(values) + 1)]
        ax.plot(ends, ends, color="#777777", linewidth=0.8, linestyle="--", label="as predicted")
    ax.set(xlabel="predicted accuracy, per cent", ylabel="measured accuracy, per cent")
    legend(figure, axes, 2)
    return {"figure": figure}


EXPERIMENTS = [
    Experiment(
        "law", "the accuracy of personal models, predicted from that of the global model alone", measure, tables,
        figures, ("digits",), seeds=3, takes_folders=True, beyond=True,
    )
]  # fmt: skip
