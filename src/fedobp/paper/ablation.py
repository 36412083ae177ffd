"""The ablation of FedOBP, and in which layers its personal entries lie."""

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fedobp.importance import count_above
from fedobp.paper.accuracy import curve
from fedobp.paper.experiment import Case, Experiment, Files, Setting, Work, train_cases
from fedobp.paper.figures import PAGE, legend, panels, style, whole_numbers
from fedobp.paper.published import TABLE1, TABLE2, published, title
from fedobp.paper.quantiles import published_q
from fedobp.paper.rows import Row, mean_of, where
from fedobp.paper.stats import NOISE_RULE, beside_published, ranks
from fedobp.paper.tables import Cell, Table
from fedobp.report.tidy import history_rows, tidy_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = {"squared": "squared (eq. 19)", "product": "product (released code)"}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"norm": "none"},
    "layer": {"norm": "layer"},
    "global": {"norm": "global"},
    "classifier": {"norm": "global", "scope": "classifier"},
    "ema": {"norm": "none", "ema": 0.5},
}
TITLES = {
    "none": "no normalisation",
    "layer": "normalised by tensor",
    "global": "normalised over all entries",
    "classifier": "the same, classifier only",
    "ema": "no normalisation, EMA 0.5",
}
_DIGITS_HEAD, _DIGITS_SIZE = 1290, 53002  # of the network that the digits get


def quantiles_of(dataset: str, alpha: float) -> tuple[float, float]:
    """Return q over all entries and over the classifier's: the authors', or ones that keep as many entries."""
    if logged := published()["ablation"].get(dataset):
        return logged["q"], logged["q_classifier"]
    q = published_q(dataset, alpha)
    return q, round(1 - count_above(_DIGITS_SIZE, q) / _DIGITS_HEAD, 4)


def variant_cases(setting: Setting) -> Iterator[Case]:
    """Yield all variants with both formulas of the score."""
    for dataset, alpha, seed in setting.points():
        q, of_classifier = quantiles_of(dataset, alpha)
        for score in SCORES:
            for variant, options in VARIANTS.items():
                given = {"q": of_classifier if variant == "classifier" else q, "score": score, **options}
                yield Case(
                    setting.config(dataset, alpha, seed, "fedobp", options=given),
                    {"score": score, "variant": variant},
                )


def variant_tables(setting: Setting, files: Files) -> list[Table]:
    """Return the ablation table: both formulas, the published numbers beside the formula that they were run with."""
    table = Table(
        "Accuracy in per cent, pooled over clients, as served",
        ["dataset", "alpha", "score", *TITLES.values()],
        notes=[
            "In parentheses the published number, of the formula that it was run with: ✓ within noise, ✗ not. "
            "Normalising over all entries is monotone, so it changes nothing but ties. The published classifier column "
            "of MNIST, FMNIST, OrganA and OrganC is that of runs with EMA (their logs).",
            NOISE_RULE,
        ],
    )
    for dataset, alpha in setting.cells():
        rows = where(files["results"], dataset=dataset, alpha=alpha, model="served")
        found = {key: mean_of(where(rows, score=key[0], variant=key[1])) for key in _keys()}
        best = ranks({str(key): one.mean for key, one in found.items() if one})
        theirs = published()["ablation"].get(dataset, {}) if alpha == 0.1 else {}
        for score, name in SCORES.items():
            cells = []
            for variant in VARIANTS:
                number = theirs.get(variant) if score == "product" else None
                text = beside_published(found[score, variant], (number, 0.0)) if number is not None else ""
                cells.append(Cell(str(found[score, variant] or ""), best.get(str((score, variant)), 0), text))
            table.add(title(dataset), f"{alpha:g}", name, *cells)
    return [table]


def _keys() -> list[tuple[str, str]]:
    return [(score, variant) for score in SCORES for variant in VARIANTS]


def variant_figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the accuracy of all variants over the rounds, a panel for each dataset, alpha and formula."""
    figure, axes = panels(len(setting.cells()), len(SCORES), height=2.0, sharey="row")
    for line, (dataset, alpha) in zip(axes, setting.cells(), strict=True):
        for ax, (score, name) in zip(line, SCORES.items(), strict=True):
            for place, variant in enumerate(VARIANTS):
                points = curve(where(files["history"], dataset=dataset, alpha=alpha, score=score, variant=variant))
                if points:
                    look = {**style(place), "markevery": (place, 5)}
                    ax.plot(list(points), [one.mean for one in points.values()], label=TITLES[variant], **look)
            ax.set(title=f"{title(dataset)}, Dir({alpha:g}), score: {name}", xlabel="round")
            whole_numbers(ax)
        line[0].set_ylabel("accuracy, per cent")
    legend(figure, axes, 3)
    return {"figure": figure}


def layer_cases(setting: Setting) -> Iterator[Case]:
    """Yield FedOBP with the squared score at the paper's q, and with the other one at the figure's."""
    for dataset, alpha, seed in setting.points():
        q = published_q(dataset, alpha)
        for score, at in (("squared", q), ("product", published()["layers"].get(dataset, {}).get("q", q))):
            options = {"q": at} if score == "squared" else {"q": at, "score": score}  # the former as in `quantiles`
            yield Case(setting.config(dataset, alpha, seed, "fedobp", options=options), {"score": score})


def layer_of(tensor: str) -> str:
    """Return the layer that a tensor belongs to: its name without `weight` or `bias`."""
    return tensor.rpartition(".")[0] or tensor


def measure_layers(setting: Setting, work: Work) -> Files:
    """Train, and give the share of each layer among the personal entries in every evaluated round."""
    done = work.train(list(layer_cases(setting)))
    layers = []
    for case, run in done:
        config = run.config
        head = {"run": run.name, "dataset": config.dataset, "alpha": config.alpha, "seed": config.seed, **case.columns}
        for line in run.metrics():
            counts: dict[str, float] = {}
            for tensor, count in line.get("personal_by_tensor", {}).items():
                counts[layer_of(tensor)] = counts.get(layer_of(tensor), 0.0) + count
            total = sum(counts.values())
            layers += [
                {**head, "round": line["round"], "layer": layer, "personal": count, "share": count / total}
                for layer, count in counts.items()
                if total
            ]
    return {
        "results": [{**row, **case.columns} for case, run in done for row in tidy_rows(run)],
        "history": [{**row, **case.columns} for case, run in done for row in history_rows(run)],
        "layers": layers,
    }


def layer_shares(rows: Sequence[Row], first: int, last: int) -> dict[str, float]:
    """Return each layer's mean share over the evaluated rounds from `first` to `last`."""
    some = [row for row in rows if first <= row["round"] <= last]
    layers = dict.fromkeys(row["layer"] for row in some)
    return {layer: mean_share(where(some, layer=layer)) for layer in layers}


def mean_share(rows: Sequence[Row]) -> float:
    """Return the mean share of rows."""
    return statistics.fmean(row["share"] for row in rows)


def layer_tables(setting: Setting, files: Files) -> list[Table]:
    """Return the layers' shares in the first and last ninth of the rounds, beside those of the authors' logs."""
    table = Table(
        "Share of each layer among the personal entries",
        ["dataset", "alpha", "score", "rounds", "layer", "share", "logs, last rounds", "paper's figure"],
        notes=[
            "Measured on all clients in every evaluated round; the paper's figure and the logs are of the sampled "
            "clients, with the score of the released code."
        ],
    )
    span = max(1, setting.rounds // 9)
    claim = next(one for one in published()["claims"] if one["id"] == "dist")["values"]
    for dataset, alpha in setting.cells():
        logs = published()["layers"].get(dataset, {})
        for score, name in SCORES.items():
            rows = where(files["layers"], dataset=dataset, alpha=alpha, score=score)
            for first, last in ((1, span), (setting.rounds - span + 1, setting.rounds)):
                for layer, share in layer_shares(rows, first, last).items():
                    end = last == setting.rounds
                    logged = logs.get(layer) if end and score == "product" else None
                    shown = claim.get(dataset, {}).get(layer) if end else None
                    table.add(
                        title(dataset), f"{alpha:g}", name, f"{first} to {last}", layer, f"{share:.2f}",
                        f"{logged:.2f}" if logged is not None else "",
                        f"{shown[0]:.1f} to {shown[1]:.1f}" if shown else "",
                    )  # fmt: skip
            if not rows:
                table.add(title(dataset), f"{alpha:g}", name, *[""] * 5)
    return [table]


def layer_figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the layers' shares over the rounds, a panel for each dataset and formula."""
    figure, axes = panels(len(setting.cells()), len(SCORES), width=PAGE, height=1.9, sharey=True)
    for line, (dataset, alpha) in zip(axes, setting.cells(), strict=True):
        for ax, (score, name) in zip(line, SCORES.items(), strict=True):
            rows = where(files["layers"], dataset=dataset, alpha=alpha, score=score)
            for place, layer in enumerate(dict.fromkeys(row["layer"] for row in rows)):
                of = where(rows, layer=layer)
                rounds = sorted({row["round"] for row in of})
                look = {**style(place), "markevery": max(1, len(rounds) // 6)}
                ax.plot(rounds, [mean_share(where(of, round=at)) for at in rounds], label=layer, **look)
            ax.set(title=f"{title(dataset)}, Dir({alpha:g}), {name}", xlabel="round", ylim=(-0.03, 1.03))
            whole_numbers(ax)
        line[0].set_ylabel("share of personal entries")
    legend(figure, axes, 4)
    return {"figure": figure}


EXPERIMENTS = [
    Experiment(
        "ablation", "FedOBP without and with normalisation, classifier scope and EMA, for both formulas of the score",
        train_cases(variant_cases), variant_tables, variant_figures, (*TABLE1, *TABLE2), alphas=(0.1,),
    ),
    Experiment(
        "layers", "in which layers the personal entries lie, over the rounds", measure_layers, layer_tables,
        layer_figures, (*TABLE1, *TABLE2), alphas=(0.1,),
    ),
]  # fmt: skip
