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

The toy's global model has no class bias of its own. One that FedAvg has trained on few clients a round may have one,
which costs accuracy, and which any personal bias takes off again. So where the models are at hand, g is also measured
without it, as in `explained`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedobp.config import Config
from fedobp.data import data_dir, list_datasets, partition_hash
from fedobp.federation import assign, read
from fedobp.paper.claims import is_standard, read_evidence
from fedobp.paper.experiment import FIRST_SEED, Experiment, Files, Row, Setting, Work
from fedobp.paper.explained import explain, measure_once, train_run
from fedobp.paper.figures import COLOURS, MARKERS, legend, panels
from fedobp.paper.published import title
from fedobp.paper.rows import mean_of, where
from fedobp.paper.tables import Table
from fedobp.resolution import resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
ONE_MODEL = ("fedavg", "fedprox", "scaffold")  # methods that serve one model to all clients
MEASURED = {
    "last": "own last model",
    "finetuned": "after 5 epochs",
    "prior": "global with log p",
    "prior_unbiased": "the same without its class bias",
}
GLOBALS = {"global": "global model", "unbiased": "global model without its own class bias"}
PREDICTED = {"global": "predicted", "unbiased": "predicted_unbiased"}
TRAINED = "trained here"
_GRID = np.linspace(-9, 9, 241)
_DENSITY = np.exp(-(_GRID**2) / 2) / np.exp(-(_GRID**2) / 2).sum()
_SMALLEST, _LARGEST = 1e-3, 20.0  # separations m: of classes that cannot be told apart, and of those that always can


class Labels(NamedTuple):
    """The label counts of all clients' training and test parts, [clients, classes], and the partition's hash."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    partition: str


def accuracy(m: float, log_prior: Floats, of: NDArray[np.int64]) -> Floats:
    """Return a(y) for each of some labels y: the accuracy on them of the best classifier for a prior [classes]."""
    from scipy.special import log_ndtr

    gap = m + (log_prior[of, None] - log_prior) / m
    gap[np.arange(len(of)), of] = np.inf  # log Phi(inf) = 0: a class does not compete with itself
    found: Floats = _DENSITY @ np.exp(log_ndtr(_GRID[:, None, None] + gap).sum(axis=-1))
    return found


def separation(g: float, classes: int) -> float:
    """Return m for an accuracy of g with a uniform prior; at most chance gives the smallest, 1 the largest one."""
    from scipy.optimize import brentq

    def excess(m: float) -> float:
        return float(accuracy(m, np.zeros(classes), np.zeros(1, np.int64))[0]) - g

    if excess(_SMALLEST) >= 0:
        return _SMALLEST
    return _LARGEST if excess(_LARGEST) <= 0 else float(brentq(excess, _SMALLEST, _LARGEST, xtol=1e-9))


def predict(g: float, train: NDArray[np.int64], test: NDArray[np.int64]) -> float:
    """Return the accuracy of personal models, predicted from that of the global one; both are shares of 1."""
    m = separation(g, train.shape[1])
    shares = (train + 0.5) / (train + 0.5).sum(axis=1, keepdims=True)
    right = 0.0
    for p, counts in zip(shares, test, strict=True):
        there = np.flatnonzero(counts)
        right += float(accuracy(m, np.log(p), there) @ counts[there])
    return right / float(test.sum())


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
    row, _ = explain(trained, torch.zeros_like(trained.last, dtype=torch.bool))  # no entry is personal
    tuned = trained.report.finetuned
    assert tuned is not None
    names = ("global", "unbiased", "confidence", "last", "prior", "prior_unbiased")
    labels = label_counts(config)
    found = {**{name: row[name] for name in names}, "finetuned": tuned.pooled}
    found |= {PREDICTED[g]: 100 * predict(found[g] / 100, labels.train, labels.test) for g in GLOBALS}
    head = {"dataset": dataset, "alpha": alpha, "method": "fedavg", "seed": seed, "source": TRAINED}
    return {"results": [{**head, **found}]}


def rows_of(folders: Sequence[Path], work: Work) -> list[Row]:
    """Return the rows of runs with the settings of the accuracy tables whose methods serve one model to all clients."""
    runs: dict[tuple[Any, ...], dict[str, Row]] = {}
    names = ("method", "dataset", "alpha", "seed", "partition_hash")
    for row in read_evidence(folders).results:
        if row["method"] in ONE_MODEL and row.get("partition") == "dirichlet" and is_standard(row):
            runs.setdefault(tuple(row.get(name) for name in names), {})[row["model"]] = row
    installed = {one.name for one in list_datasets(data_dir()) if one.available}
    found, notes, known = [], dict[str, None](), dict[tuple[Any, ...], Labels]()
    for run in (run for run in runs.values() if "served" in run):
        served = run["served"]
        name = f"{title(served['dataset'])}, Dirichlet({served['alpha']:g})"
        if served["dataset"] not in installed:
            notes[f"{name} is left out, because its labels are needed: fedobp data fetch {served['dataset']}"] = None
            continue
        given: Row = {key: served.get(key) for key in ("dataset", "alpha", "clients")}
        if (at := tuple(given.values())) not in known:
            known[at] = label_counts(Config(partition_seed=FIRST_SEED, **given))
        labels = known[at]
        if labels.partition != served.get("partition_hash"):
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


def differences(rows: Sequence[Row], name: str, predicted: str) -> list[Row]:
    """Return the rows that have both, with measured minus predicted."""
    both = [row for row in rows if None not in (row.get(name), row.get(predicted))]
    return [{**row, "difference": row[name] - row[predicted]} for row in both]


def tables(setting: Setting, files: Files) -> list[Table]:
    """Return what is predicted beside what is measured: from the global model's accuracy, and without its own bias."""
    found = []
    for g, text in GLOBALS.items():
        columns = {g: text, **({"confidence": "its confidence"} if g == "unbiased" else {}), PREDICTED[g]: "predicted"}
        table = Table(
            f"Accuracy of personal models in per cent, predicted from that of the {text}, and measured",
            ["dataset", "alpha", "method", "runs", "seeds", *columns.values(),
             *(column for name in MEASURED.values() for column in (name, "minus predicted"))],
        )  # fmt: skip
        for (dataset, alpha, method, source), rows in groups(files).items():
            if mean_of(rows, g):
                cells = [
                    str(one or "")
                    for name in MEASURED
                    for one in (mean_of(rows, name), mean_of(differences(rows, name, PREDICTED[g]), "difference"))
                ]
                means = (str(mean_of(rows, name)) for name in columns)
                table.add(title(dataset), f"{alpha:g}", method, source, str(len(rows)), *means, *cells)
        found.append(table)
    found[0].notes = [
        "Predicted: from the global model's accuracy and the clients' label counts alone, for each seed. Runs of "
        "result files: of 400 rounds, best of rounds 100, 200, 300 and 400; trained here: last round. With log p: the "
        "logarithm of the client's label shares in the bias; result files do not have it. Mean ± deviation over seeds."
    ]
    found[1].notes = [
        "Without its own class bias: with one bias for all clients, such that each class is predicted as often as it "
        "occurs in all training samples. Its confidence: the mean probability of what it predicts, which in the toy is "
        "its accuracy. Both need the model, so only of runs that are trained here."
    ]
    return found


def figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw measured against predicted accuracies, with the diagonal: a colour for each dataset and alpha."""
    figure, axes = panels(1, 2, height=3.9, sharex=True, sharey=True)
    cells = list(dict.fromkeys((row["dataset"], row["alpha"]) for row in files["results"]))
    for ax, (g, text) in zip(axes[0], GLOBALS.items(), strict=True):
        ends = [100.0, 0.0]
        for place, (dataset, alpha) in enumerate(cells):
            rows = where(files["results"], dataset=dataset, alpha=alpha)
            for (name, model), marker in zip(MEASURED.items(), MARKERS, strict=False):
                both = differences(rows, name, PREDICTED[g])
                if both:
                    x, y = [row[PREDICTED[g]] for row in both], [row[name] for row in both]
                    ends = [min(ends[0], *x, *y), max(ends[1], *x, *y)]
                    look: Any = {"color": COLOURS[place % len(COLOURS)], "marker": marker, "linestyle": ""}
                    ax.plot(x, y, label=f"{title(dataset)} {alpha:g}, {model}", fillstyle="none", **look)
        if ends[0] <= ends[1]:
            ax.plot(ends, ends, color="#777777", linewidth=0.8, linestyle="--", label="as predicted")
        ax.set(title=f"from the {text}", xlabel="predicted accuracy, per cent")
    axes[0][0].set_ylabel("measured accuracy, per cent")
    legend(figure, axes, 3)
    return {"figure": figure}


EXPERIMENTS = [
    Experiment(
        "law", "the accuracy of personal models, predicted from that of the global model alone", measure, tables,
        figures, ("digits",), seeds=3, takes_folders=True, beyond=True,
    )
]  # fmt: skip
