"""The reasoning behind the score, measured: does it rank entries as the loss does, and do the bounds on drift hold.

The paper calls an entry important if replacing it by the global value changes the loss on all clients' data: |L(with
theta_g,k) - L(theta_i)| (eq. 14). To first order that is |dL/dtheta_k * d_k| with d = theta_g - theta_i (eq. 16), and
with theta_i - theta_g in place of the gradient (eq. 18) it is the score d_k^2 (eq. 19). Rank correlations (Spearman)
over entries compare the three. Entries are drawn at random, and from those of the largest scores, where the threshold
is.

The paper's argument starts all clients at one model and lets each take E steps of size eta. With gradients of at most
G, two clients are at most 2 eta G s apart after s steps, and an iterate at most 3 eta G E from another client's end.
Both are measured, with G the largest gradient that occurs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product as pairs
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from fedobp.bench import train
from fedobp.data import FederatedData
from fedobp.engine import Budget
from fedobp.federation import Federation
from fedobp.grouping import batch_size_for, engine_for, memory_for
from fedobp.importance import product, squared
from fedobp.launch import simulate
from fedobp.models import Model
from fedobp.paper.experiment import FIRST_SEED, Experiment, Files, Row, Setting, Work
from fedobp.paper.figures import PAGE, legend, panels, style, whole_numbers
from fedobp.paper.published import title
from fedobp.paper.rows import where
from fedobp.paper.stats import spread
from fedobp.paper.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = {"squared": squared, "product": product}
DRAWN = {"random": "drawn at random", "top": "of the largest scores"}
_STEPS = 20  # of local training, whose drift is measured
_CHUNK = 500  # samples at once


def mean_loss(model: Model, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of samples, computed in parts."""
    parts = zip(x.split(_CHUNK), y.split(_CHUNK), strict=True)
    losses = [functional.cross_entropy(model.logits(theta, some), labels, reduction="sum") for some, labels in parts]
    return torch.stack(losses).sum() / len(y)


def gradient_of(model: Model, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the mean loss of samples, computed in parts."""
    total = torch.zeros_like(theta)
    for some, labels in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True):
        total += len(labels) * grad(lambda at, some=some, labels=labels: mean_loss(model, at, some, labels))(theta)
    return total / len(y)


def loss_changes(
    model: Model,
    theta_i: Tensor,
    theta_g: Tensor,
    entries: Tensor,
    x: Tensor,
    y: Tensor,
    before_each: Callable[[], None] = lambda: None,
) -> Tensor:
    """Eq. 14: |L(with theta_g,k) - L(theta_i)| for each of some entries k."""
    base, changed, found = mean_loss(model, theta_i, x, y), theta_i.clone(), []
    for k in entries.tolist():
        before_each()
        changed[k] = theta_g[k]
        found.append((mean_loss(model, changed, x, y) - base).abs())
        changed[k] = theta_i[k]
    return torch.stack(found)


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Return the rank correlation of two vectors; None if one of them is constant."""
    if a.min() == a.max() or b.min() == b.max():
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(a.cpu().numpy(), b.cpu().numpy()).statistic)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two vectors."""
    return float(functional.cosine_similarity(a, b, dim=0))


def compare_scores(
    model: Model,
    theta_i: Tensor,
    theta_g: Tensor,
    x: Tensor,
    y: Tensor,
    count: int,
    generator: torch.Generator,
    before_each: Callable[[], None] = lambda: None,
) -> tuple[list[Row], list[Row]]:
    """Return rank correlations of one client's scores with the loss, and the entries that they are of. In float64."""
    theta_i, theta_g, x = theta_i.double(), theta_g.double(), x.double()
    gradient = gradient_of(model, theta_i, x, y)
    taylor = (gradient * (theta_g - theta_i)).abs()
    scores = {name: score(theta_i, theta_g) for name, score in SCORES.items()}
    random = torch.randperm(len(theta_i), generator=generator)[:count].to(theta_i.device)
    drawn = {"random": random, "top": scores["squared"].topk(count).indices}
    rows, entries = [], []
    for kind, chosen in drawn.items():
        change = loss_changes(model, theta_i, theta_g, chosen, x, y, before_each)
        for name, score in scores.items():
            rows.append(
                {
                    "drawn": kind, "score": name, "entries": count,
                    "with_loss": spearman(score[chosen], change),
                    "with_taylor": spearman(score[chosen], taylor[chosen]),
                    "taylor_with_loss": spearman(taylor[chosen], change),
                    "cosine": cosine(theta_i - theta_g, gradient),
                }
            )  # fmt: skip
        values = zip(chosen.tolist(), scores["squared"][chosen].tolist(), change.tolist(), strict=True)
        entries += [{"drawn": kind, "entry": k, "squared": score, "loss_change": loss} for k, score, loss in values]
    return rows, entries


def measure_drift(
    model: Model, data: FederatedData, clients: Sequence[int], theta: Tensor, lr: float, batch: int
) -> tuple[list[Row], Row]:
    """Train clients from one model step by step; return distances with their bounds, and how good eq. 18 is there."""
    shards = [(data.inputs(client, "train"), data.targets(client, "train")) for client in clients]
    paths, largest = [], 0.0
    for x, y in shards:
        at, path = theta, [theta]
        for step in range(_STEPS):
            some = torch.arange(step * batch, (step + 1) * batch, device=x.device) % len(y)
            slope = gradient_of(model, at, x[some], y[some])
            largest = max(largest, float(slope.norm()))
            at = at - lr * slope
            path.append(at)
        paths.append(torch.stack(path))
    walked = torch.stack(paths)  # [clients, steps + 1, entries]
    ends = walked[:, -1]
    rows = []
    for step in range(1, _STEPS + 1):
        apart = torch.cdist(walked[:, step], walked[:, step]).max()
        to_ends = torch.cdist(walked[:, step], ends).max()
        rows.append(
            {
                "step": step, "apart": float(apart), "bound_apart": 2 * lr * largest * step,
                "to_end": float(to_ends), "bound_to_end": 3 * lr * largest * _STEPS, "gradient_bound": largest,
            }
        )  # fmt: skip
    weights = torch.tensor([float(len(y)) for _, y in shards], device=theta.device)
    mean = (ends * (weights / weights.sum())[:, None]).sum(dim=0)
    x, y = torch.cat([x for x, _ in shards]), torch.cat([y for _, y in shards])
    true = [gradient_of(model, end, x, y) for end in ends]
    estimated = [(end - mean) / (lr * _STEPS) for end in ends]
    errors = [float((guess - one).norm() / one.norm()) for guess, one in zip(estimated, true, strict=True)]
    cosines = [cosine(guess, one) for guess, one in zip(estimated, true, strict=True)]
    return rows, {"cosine": sum(cosines) / len(cosines), "relative_error": sum(errors) / len(errors)}


def measure_cell(setting: Setting, work: Work, dataset: str, alpha: float, seed: int) -> Files:
    """Train FedOBP, and compare scores with the loss after a quarter of the rounds and at the end."""
    federation = Federation(setting.config(dataset, alpha, seed, "fedobp", eval_every=setting.rounds))
    config, model, data = federation.config, federation.model, federation.data
    engine = engine_for(config, model, batch_size_for(config, [data]))
    simulation = simulate(federation.plan(config, federation.method), engine, Budget(memory_for(config, "store")))
    run, generator = simulation.run, torch.Generator().manual_seed(config.seed)
    samples, clients, count = (200, 2, 30) if setting.scale == "smoke" else (2000, 10, 200)
    ids = data.pooled_ids("train")
    ids = ids[torch.randperm(len(ids), generator=generator)[:samples].to(ids.device)]
    head = {"dataset": dataset, "alpha": alpha, "seed": config.seed, "samples": len(ids)}
    found: Files = {"results": [], "entries": [], "drift": []}
    done = 0
    for round in sorted({max(1, config.rounds // 4), config.rounds}):
        for number in range(done + 1, round + 1):
            work.advance(f"theory, {title(dataset)}, round {number}", number / config.rounds)
            train(engine, [simulation], [[job] for job in run.plan(number)])
        done = round
        records = run.records.gather(list(range(config.clients)))
        seen = torch.nonzero(records["seen"]).flatten().tolist()
        for client in seen[:: max(1, len(seen) // clients)][:clients]:
            theta_i, theta_g = records["theta"][client], run.server["theta"]
            x, y = data.samples(ids), data.y[ids]
            what = f"theory, {title(dataset)}, round {round}, client {client}"
            check = partial(work.advance, what, round / config.rounds)
            rows, entries = compare_scores(model, theta_i, theta_g, x, y, count, generator, check)
            place = {**head, "round": round, "client": client}
            found["results"] += [{**place, **row} for row in rows]
            found["entries"] += [{**place, **row} for row in entries]
    some = sorted(range(config.clients), key=lambda client: -data.size(client, "train"))[:5]
    rows, guess = measure_drift(model, data, some, run.server["theta"], config.lr, config.batch_size)
    found["drift"] = [{**head, **row, **guess, "lr": config.lr, "steps": _STEPS} for row in rows]
    return found


def measure(setting: Setting, work: Work) -> Files:
    """Measure each dataset, alpha and seed once."""
    files: Files = {"results": [], "entries": [], "drift": []}
    for (dataset, alpha), seed in pairs(setting.cells(), setting.seeds):
        if dataset in setting.available:
            key = f"{dataset}-dir{alpha:g}-{setting.rounds}-rounds-{setting.scale}"
            key += f"-seed{seed}" if seed != FIRST_SEED else ""
            part = work.once("theory", key, partial(measure_cell, setting, work, dataset, alpha, seed))
            for name, rows in part.items():
                files[name] += rows
    return files


def _correlation(rows: Sequence[Row], column: str) -> str:
    found = spread([row[column] for row in rows if row[column] is not None])
    return "" if found is None else str(found)


def tables(setting: Setting, files: Files) -> list[Table]:
    """Return the rank correlations, and the drift beside its bounds."""
    ranks = Table(
        "Rank correlation (Spearman) over entries",
        ["dataset", "alpha", "round", "entries", "score", "clients", "score and true loss change",
         "score and gradient * d", "gradient * d and true loss change", "cosine of eq. 18"],
        notes=["Mean ± deviation over clients of all seeds. Loss and gradient are of all clients' training data (a "
               "sample of it). Cosine: between the client's model minus the global one, and the gradient. The paper "
               "measures none of this."],
    )  # fmt: skip
    for dataset, alpha in setting.cells():
        rows = where(files["results"], dataset=dataset, alpha=alpha)
        for round in sorted({row["round"] for row in rows}):
            for kind, text in DRAWN.items():
                for score in SCORES:
                    of = where(rows, round=round, drawn=kind, score=score)
                    values = (
                        _correlation(of, name) for name in ("with_loss", "with_taylor", "taylor_with_loss", "cosine")
                    )
                    ranks.add(title(dataset), f"{alpha:g}", str(round), text, score, str(len(of)), *values)
        if not rows:
            ranks.add(title(dataset), f"{alpha:g}", *[""] * 8)
    drift = Table(
        "Drift of clients from a common model, and its bounds",
        ["dataset", "alpha", "step", "two clients apart", "bound 2 eta G s", "to another's end", "bound 3 eta G E",
         "cosine of eq. 18", "its relative error"],
        notes=["The largest distance between any two of the five largest clients; G is the largest gradient that "
               f"occurs. Seed {FIRST_SEED}. Eq. 18 in the case of the paper's argument: one start, equal steps, all "
               "clients averaged."],
    )  # fmt: skip
    for dataset, alpha in setting.cells():
        rows = where(files["drift"], dataset=dataset, alpha=alpha, seed=FIRST_SEED)
        for row in (row for row in rows if row["step"] in (1, _STEPS // 4, _STEPS // 2, _STEPS)):
            end = row["step"] == _STEPS
            drift.add(
                title(dataset), f"{alpha:g}", str(row["step"]), f"{row['apart']:.4f}", f"{row['bound_apart']:.4f}",
                f"{row['to_end']:.4f}", f"{row['bound_to_end']:.4f}", f"{row['cosine']:.3f}" if end else "",
                f"{row['relative_error']:.2f}" if end else "",
            )  # fmt: skip
    return [ranks, drift]


def figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the score against the true loss change of entries, and the drift against its bounds."""
    figure, axes = panels(len(setting.cells()), 2, width=PAGE, height=2.5)
    for line, (dataset, alpha) in zip(axes, setting.cells(), strict=True):
        entries = where(files["entries"], dataset=dataset, alpha=alpha, seed=FIRST_SEED)
        line[0].set_title(f"{title(dataset)}, Dir({alpha:g})")
        line[1].set_title("drift from a common model")
        if not entries:  # a logarithmic axis needs points
            continue
        last = max(row["round"] for row in entries)
        for place, (kind, text) in enumerate(DRAWN.items()):
            of = [
                row for row in where(entries, drawn=kind, round=last) if row["squared"] > 0 and row["loss_change"] > 0
            ]
            points: list[Any] = [[row["squared"] for row in of], [row["loss_change"] for row in of]]
            colour = style(place + 1)["color"]
            line[0].plot(
                *points, ".", color=colour, markersize=2.5, alpha=0.5, label=f"entries {text}", rasterized=True
            )
        line[0].set(xscale="log", yscale="log", xlabel="score (eq. 19)", ylabel="true loss change (eq. 14)")
        line[0].set_title(f"{title(dataset)}, Dir({alpha:g}), round {last}")
        drift = where(files["drift"], dataset=dataset, alpha=alpha, seed=FIRST_SEED)
        steps = [row["step"] for row in drift]
        for place, (column, text, look) in enumerate(
            (
                ("apart", "two clients apart", "-"),
                ("bound_apart", "its bound, 2 eta G s", "--"),
                ("to_end", "to another client's end", "-"),
                ("bound_to_end", "its bound, 3 eta G E", "--"),
            )
        ):
            shown = {**style(place // 2 + 3), "linestyle": look, "marker": "o" if look == "-" else ""}
            line[1].plot(steps, [row[column] for row in drift], label=text, **shown)
        line[1].set(xlabel="step s of local training", ylabel="largest distance")
        whole_numbers(line[1])
    legend(figure, axes, 3)
    return {"figure": figure}


EXPERIMENTS = [
    Experiment(
        "theory", "does the score rank entries as the loss does, and do the bounds on drift hold", measure, tables,
        figures, ("cifar10", "fmnist"), alphas=(0.1,),
    )
]  # fmt: skip
