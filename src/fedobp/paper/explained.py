"""What FedOBP's personal entries do: are they an improvised class bias, and what is left if that bias replaces them.

A client's model differs from the global one by d = theta_i - theta_g in its personal entries S. In the classifier,
whose input is z, they add the class bias

    b_i(c) = sum over k in S, row c, of d_k mean(z_k)        (z = 1 for the classifier's bias)

on average over the client's training samples. Personal entries elsewhere act through all layers behind them, so the
bias of all entries is measured: the mean over samples of the logit under the client's model minus that under the global
one. Under label shift alone the best personal classifier is the global one plus log p_i(c), p_i the client's share of
each label (with 1/2 added to each count). So b_i(c) is compared with log p_i(c), both centred over classes, and the
entries are replaced: the global model with b_i, and with log p_i, on the clients' test parts.

A global model has a class bias of its own, such as one towards the labels of the last cohort. The best bias takes it
off: log p_i(c) - log p_g(c), with a p_g that is not known, but the same for all clients. So both are also compared
without their means over clients. If the entries are this bias and nothing else, the slope is 1. The global model's own
bias is also estimated by itself: a bias that is the same for all clients takes it off if with it each class is
predicted as often as it occurs in all clients' training samples. With it and log p_i(c) / p(c), p the shares of all
labels, a client has its K numbers without any personal entry.

Two rules choose S: FedOBP's quantile, and |d| > 20 rms(d). Both choose from the clients' last models of one run.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedobp.algorithms.fedobp import FedOBP
from fedobp.bench import train
from fedobp.config import Config
from fedobp.data import FederatedData, Split
from fedobp.engine import Budget
from fedobp.evaluation import Report
from fedobp.federation import Federation
from fedobp.grouping import batch_size_for, engine_for, memory_for
from fedobp.importance import squared
from fedobp.launch import simulate
from fedobp.method import Method
from fedobp.models import Layout, Model
from fedobp.paper.experiment import Experiment, Files, Row, Setting, Work
from fedobp.paper.figures import COLOURS, legend, panels
from fedobp.paper.published import TABLE1, TABLE2, title
from fedobp.paper.quantiles import published_q
from fedobp.paper.rows import mean_of, where
from fedobp.paper.stats import ranks
from fedobp.paper.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES = {"quantile": "FedOBP's quantile", "rms": "20 rms"}
BIASES = ("classifier", "all")  # of the classifier's personal entries, and of all
ACCURACIES = {
    "global": "global model",
    "unbiased": "without its own class bias",
    "served": "with its personal entries",
    "head": "with those of the classifier",
    "bias_all": "with the bias of all",
    "bias_classifier": "with the bias of the classifier's",
    "prior": "with log p",
    "prior_unbiased": "the same without its class bias",
    "last": "own last model",
}
SPLITS: tuple[Split, ...] = ("train", "test")
_RMS = 20  # the rms rule's factor
_CHUNK = 500  # samples at once
_STEPS = 200  # of the iteration for a common bias


class Trained(NamedTuple):
    """A run after its last round."""

    config: Config
    method: Method
    model: Model
    data: FederatedData
    theta: Tensor  # the global model
    last: Tensor  # [clients, entries]: their last models; the global one of a client that has not trained
    report: Report  # of the last round


def train_run(config: Config, work: Work, label: str) -> Trained:
    """Train a run, and return all models of its last round."""
    federation = Federation(config)
    config, model, data = federation.config, federation.model, federation.data
    engine = engine_for(config, model, batch_size_for(config, [data]))
    simulation = simulate(federation.plan(config, federation.method), engine, Budget(memory_for(config, "store")))
    run = simulation.run
    for number in range(1, config.rounds + 1):
        work.advance(f"{label}, round {number}", number / config.rounds)
        train(engine, [simulation], [[job] for job in run.plan(number)])
    run.settle()
    theta = run.server["theta"]
    last = simulation.clients.last_models(torch.arange(config.clients), theta)
    return Trained(config, federation.method, model, data, theta, last, run.reports[-1])


def above_rms(layout: Layout, d: Tensor) -> Tensor:
    """Return the mask of entries with |d| > 20 rms(d)."""
    return layout.among_learned(lambda one: one.abs() > _RMS * one.square().mean(dim=-1, keepdim=True).sqrt(), d)


def logits_of(model: Model, theta: Tensor, x: Tensor) -> Tensor:
    """Return the logits of samples, computed in parts."""
    with torch.no_grad():
        return torch.cat([model.logits(theta, some) for some in x.split(_CHUNK)])


def classifier_bias(model: Model, theta: Tensor, d: Tensor, x: Tensor) -> Tensor:
    """Return b(c): the sum over the classifier's entries of row c of d_k mean(z_k), z the global model's features."""
    with torch.no_grad():
        z = torch.cat([model.features(theta, some) for some in x.split(_CHUNK)]).mean(dim=0)
    weight, bias = model.head(d)
    return weight @ z + bias


def log_prior(counts: Tensor) -> Tensor:
    """Return log p(c) of label counts [..., classes], with 1/2 added to each."""
    counts = counts.double() + 0.5
    return (counts / counts.sum(dim=-1, keepdim=True)).log()


def common_bias(logits: Tensor, log_shares: Tensor) -> Tensor:
    """Return the bias, the same for all samples, with which the mean over samples of p(c) is the share of class c."""
    bias = torch.zeros_like(log_shares)
    for _ in range(_STEPS):
        bias += log_shares - (logits + bias).softmax(dim=1).mean(dim=0).log()
    return bias


def centred(values: Tensor) -> Tensor:
    """Return values minus their mean over the last axis, the classes: adding one number to all logits does nothing."""
    return values - values.mean(dim=-1, keepdim=True)


def correlation(a: Tensor, b: Tensor) -> float | None:
    """Return the correlation (Pearson) of all entries; None if there are none, or they are all the same."""
    a, b = (values.double().flatten().cpu() - values.double().mean().cpu() for values in (a, b))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else None


def explain_client(
    model: Model,
    theta: Tensor,
    last: Tensor,
    mine: Tensor,
    given: Mapping[str, Tensor],
    train: Tensor,
    test: tuple[Tensor, Tensor],
) -> tuple[dict[str, Tensor], dict[str, int], tuple[float, float]]:
    """Return a client's biases, how many test samples each model gets right, and the change of the logits.

    `given` are biases to test beside those of the personal entries. The change: the sum over training samples of the
    squares of what the personal entries add to the (centred) logits, and the part of it that is the same for all
    samples, which a bias can replace.
    """
    d = torch.where(mine, last - theta, 0.0)
    head = torch.where(model.layout.is_head(d.device), d, 0.0)
    change = logits_of(model, theta + d, train) - logits_of(model, theta, train)
    biases = {"classifier": classifier_bias(model, theta, d, train), "all": change.mean(dim=0)}
    x, y = test
    base = logits_of(model, theta, x)
    logits = {
        "global": base,
        "served": logits_of(model, torch.where(mine, last, theta), x),
        "head": logits_of(model, theta + head, x),
        "last": logits_of(model, last, x),
        **{f"bias_{name}": base + bias for name, bias in biases.items()},
        **{name: base + bias for name, bias in given.items()},
    }
    right = {name: int((of.argmax(dim=1) == y).sum()) for name, of in logits.items()}
    total, same = (float(centred(one).double().square().sum()) for one in (change, biases["all"]))
    return biases, right, (total, len(train) * same)


def explain(trained: Trained, mine: Tensor) -> tuple[Row, list[Row]]:
    """Return what clients' personal entries, marked in `mine` [clients, entries], do: a row, and a row a class."""
    model, data, theta = trained.model, trained.data, trained.theta
    right, samples, changes = dict.fromkeys(ACCURACIES, 0), 0, np.zeros(2)
    kept: dict[int, Mapping[str, Tensor]] = {}
    counts, pooled = data.label_counts, [data.pooled_ids(split).split(_CHUNK) for split in SPLITS]
    of_train, of_test = (torch.cat([logits_of(model, theta, data.samples(ids)) for ids in parts]) for parts in pooled)
    priors, shares = log_prior(counts), log_prior(counts.sum(dim=0))
    common = common_bias(of_train, shares)
    for client in range(trained.config.clients):
        test = data.inputs(client, "test"), data.targets(client, "test")
        given = {"unbiased": common, "prior": priors[client], "prior_unbiased": common + priors[client] - shares}
        inputs, last, own = data.inputs(client, "train"), trained.last[client], mine[client]
        biases, hits, change = explain_client(model, theta, last, own, given, inputs, test)
        right = {name: right[name] + hits[name] for name in right}
        samples, changes = samples + len(test[1]), changes + change
        if own.any():  # the others have no bias to compare
            kept[client] = {"log_prior": priors[client], **biases}
    personal, of_head = int(mine.sum()), int((mine & model.layout.is_head(mine.device)).sum())
    row: Row = {"personal_mean": personal / len(mine), "in_classifier": of_head / personal if personal else None}
    stacked = {
        name: centred(torch.stack([one[name].double() for one in kept.values()] or [torch.zeros_like(shares)]))
        for name in ("log_prior", *BIASES)
    }
    between = {name: of - of.mean(dim=0) for name, of in stacked.items()}
    for name in BIASES:
        row[f"correlation_{name}"] = correlation(stacked[name], stacked["log_prior"])
        row[f"between_{name}"] = correlation(between[name], between["log_prior"])
    scale = float(between["log_prior"].square().sum())
    row["slope"] = float((between["all"] * between["log_prior"]).sum()) / scale if scale else None
    row["same_for_all_samples"] = float(changes[1] / changes[0]) if changes[0] else None
    row["confidence"] = 100 * float((of_test + common).softmax(dim=1).amax(dim=1).mean())
    row |= {name: 100 * count / samples for name, count in right.items()}
    classes = [
        {"client": client, "class": c, **{name: float(of[at, c]) for name, of in stacked.items()}}
        for at, client in enumerate(kept)
        for c in range(data.classes)
    ]
    return row, classes


def measure_run(setting: Setting, work: Work, dataset: str, alpha: float, seed: int) -> Files:
    """Train FedOBP, and explain the entries that each rule chooses from its clients' last models."""
    options = {"q": published_q(dataset, alpha)}
    config = setting.config(dataset, alpha, seed, "fedobp", options=options, eval_every=setting.rounds)
    trained = train_run(config, work, f"explained, {title(dataset)}")
    method, model, last, theta = trained.method, trained.model, trained.last, trained.theta
    assert isinstance(method, FedOBP)
    chosen = {
        "quantile": method.personal(model, squared(last, theta)),
        "rms": above_rms(model.layout, last - theta),
    }
    found: Files = {"results": [], "classes": []}
    for rule, mine in chosen.items():
        row, classes = explain(trained, mine)
        head = {"dataset": dataset, "alpha": alpha, "seed": seed, "rounds": setting.rounds, "rule": rule}
        found["results"].append({**head, **row})
        found["classes"] += [{**head, **one} for one in classes]
    return found


def measure(setting: Setting, work: Work) -> Files:
    """Measure each dataset, alpha and seed once."""
    return measure_once("explained", ("results", "classes"), setting, work, measure_run)


def measure_once(
    name: str,
    stems: Sequence[str],
    setting: Setting,
    work: Work,
    one: Callable[[Setting, Work, str, float, int], Files],
) -> Files:
    """Return the rows of all datasets, alphas and seeds, each computed once and kept."""
    files: Files = {stem: [] for stem in stems}
    for dataset, alpha, seed in setting.points():
        key = f"{dataset}-dir{alpha:g}-seed{seed}-{setting.rounds}-rounds-{setting.scale}"
        for stem, rows in work.once(name, key, partial(one, setting, work, dataset, alpha, seed)).items():
            files[stem] += rows
    return files


def tables(setting: Setting, files: Files) -> list[Table]:
    """Return what the entries' bias has to do with the labels, and the accuracies with it in their place."""
    bias = Table(
        "The bias of the personal entries, and log p",
        ["dataset", "alpha", "entries chosen by", "entries a client", "in the classifier", "correlation, classifier's",
         "correlation, all", "the same between clients, classifier's", "all", "slope", "same for all samples"],
        notes=["Correlations (Pearson) over clients and classes of the bias with log p, both centred over classes: of "
               "the classifier's entries by their sum of d z, of all entries by the logits. Between clients: without "
               "what all clients share, such as the global model's own class bias. Slope: of the bias of all entries "
               "on log p, between clients. Same for all samples: the share of the squared change of the (centred) "
               "logits that does not vary over a client's samples. Mean ± deviation over seeds."],
    )  # fmt: skip
    accuracy = Table(
        "Accuracy in per cent, pooled over clients, last round",
        ["dataset", "alpha", "entries chosen by", *ACCURACIES.values()],
        notes=["All but the last are the global model of one run of FedOBP, and what stands there added for each "
               "client: its personal entries, or one number for each class. p: the client's share of each label, with "
               "1/2 added to each count. Own class bias: taken off by one bias for all clients, with which each class "
               "is predicted as often as it occurs in all training samples. Both rules choose from the clients' last "
               "models of that run, which was trained with the quantile."],
    )  # fmt: skip
    measured = ("correlation_classifier", "correlation_all", "between_classifier", "between_all", "slope")
    for dataset, alpha in setting.cells():
        for rule, text in RULES.items():
            rows, head = (
                where(files["results"], dataset=dataset, alpha=alpha, rule=rule),
                [title(dataset), f"{alpha:g}"],
            )
            shown = [str(mean_of(rows, name) or "") for name in ("in_classifier", *measured, "same_for_all_samples")]
            entries = mean_of(rows, "personal_mean")
            bias.add(*head, text, f"{entries.mean:.1f}" if entries else "", *shown)
            found = {name: mean_of(rows, name) for name in ACCURACIES}
            order = ranks({name: one.mean for name, one in found.items() if one})
            accuracy.add(*head, text, *(Cell(str(one or ""), order.get(name, 0)) for name, one in found.items()))
    return [bias, accuracy]


def figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the bias of the entries against log p, and the accuracies, for FedOBP's rule and the rms rule."""
    figure, axes = panels(len(setting.cells()), 3, height=2.6, width_ratios=(1.15, 1.15, 1))
    for line, (dataset, alpha) in zip(axes, setting.cells(), strict=True):
        line[0].set(title=f"{title(dataset)}, Dir({alpha:g})", ylabel="bias of the entries, likewise")
        for at, (rule, text) in enumerate(RULES.items()):
            rows = where(files["results"], dataset=dataset, alpha=alpha, rule=rule)
            points = where(files["classes"], dataset=dataset, alpha=alpha, rule=rule)
            if not rows:
                continue
            colour, shown = COLOURS[at + 1], between_clients(points)
            line[at].plot(*shown, ".", color=colour, markersize=2.5, alpha=0.5, rasterized=True)
            ends = [float(shown[0].min()), float(shown[0].max())]
            line[at].plot(ends, ends, color="#777777", linewidth=0.8, linestyle="--", label="slope 1")
            line[at].set_title(f"{title(dataset)}, Dir({alpha:g})\n{text}, r = {mean_of(rows, 'between_all')}")
            line[at].set_xlabel("log p, less mean over clients")
            names, means = list(ACCURACIES), [mean_of(rows, name) for name in ACCURACIES]
            places = np.arange(len(names)) + 0.38 * (at - 0.5)
            bars = line[2].barh(places, [one.mean for one in means if one], height=0.36, color=colour, label=text)
            line[2].bar_label(bars, fmt="%.1f", fontsize=5.5, padding=1)
            line[2].set_yticks(range(len(names)), list(ACCURACIES.values()))
            line[2].set(xlim=(0, 112), xlabel="accuracy, per cent", ylim=(len(names) - 0.4, -0.6))
            line[2].grid(axis="y", visible=False)
    legend(figure, axes, 3)
    return {"figure": figure}


def between_clients(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return log p and the bias of all entries, each without the mean over the clients of its seed."""
    of_class: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        of_class.setdefault((row["seed"], row["class"]), []).append(row)
    found = []
    for group in of_class.values():
        values = np.array([[row["log_prior"], row["all"]] for row in group])
        found.append(values - values.mean(axis=0))
    x, y = np.concatenate(found).T
    return x, y


EXPERIMENTS = [
    Experiment(
        "explained", "are FedOBP's personal entries a class bias: what is left if that bias replaces them", measure,
        tables, figures, (*TABLE1, *TABLE2), seeds=3, beyond=True,
    )
]  # fmt: skip
