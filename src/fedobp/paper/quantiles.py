"""Experiments over quantiles and scores: how many entries are personal, chosen by what, and what that costs."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fedobp.algorithms.fedobp import FedOBP
from fedobp.data import REGISTRY
from fedobp.importance import count_above
from fedobp.paper.experiment import Case, Experiment, Files, Setting, train_cases
from fedobp.paper.figures import COLUMN, PAGE, legend, panels, quantile_axis, style
from fedobp.paper.published import TABLE1, TABLE2, accuracy, published, title
from fedobp.paper.rows import Row, mean_of, option, quantile, where
from fedobp.paper.stats import NOISE_RULE, Spread, beside_published, ranks
from fedobp.paper.tables import Cell, Table
from fedobp.report.tables import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALL = (*TABLE1, *TABLE2)
SCORES = {"squared": "OBP", "gradient": "gradient", "fisher": "Fisher"}
POOLS = {"global": "all entries", "tensor": "each tensor"}
CHOSEN = "The best of a grid is chosen on the test parts, as in the paper: it is no tuned result."
RATES = (0.05, 0.1, 0.2, 0.5, 1.0)
_DEFAULT_Q = FedOBP().q


def published_q(dataset: str, alpha: float) -> float:
    """Return the paper's quantile for a dataset; the package's default where it has none."""
    facts = REGISTRY.get(dataset)
    return facts.q.get(alpha, _DEFAULT_Q) if facts else _DEFAULT_Q


def grid_of(setting: Setting, dataset: str, alpha: float) -> list[float]:
    """Return the quantiles of a sweep: the grid, and the paper's own for this dataset."""
    return sorted({*setting.grid, published_q(dataset, alpha)})


def quantile_cases(setting: Setting) -> Iterator[Case]:
    """Yield FedOBP over the quantiles."""
    for dataset, alpha, seed in setting.points():
        for q in grid_of(setting, dataset, alpha):
            yield Case(setting.config(dataset, alpha, seed, "fedobp", options={"q": q}))


def by_quantile(rows: Sequence[Row], dataset: str, alpha: float, **columns: Any) -> dict[float, list[Row]]:
    """Return the served rows of a sweep by their quantile, in order."""
    found: dict[float, list[Row]] = {}
    for row in where(rows, dataset=dataset, alpha=alpha, model="served", **columns):
        if (q := quantile(row)) is not None:
            found.setdefault(q, []).append(row)
    return dict(sorted(found.items()))


def means(sweep: dict[float, list[Row]]) -> dict[float, Spread]:
    """Return the mean accuracy at each quantile."""
    return {q: found for q, rows in sweep.items() if (found := mean_of(rows))}


def best_quantile(sweep: dict[float, list[Row]]) -> float | None:
    """Return the quantile of the highest mean accuracy; the largest of equals, which keeps the fewest entries."""
    return max(means(sweep).items(), key=lambda point: (round(point[1].mean, 2), point[0]), default=(None,))[0]


def quantile_tables(setting: Setting, files: Files) -> list[Table]:
    """Return the paper's table of quantiles and counts beside ours, and the accuracy at each quantile."""
    counts = Table(
        "Quantiles and numbers of personal parameters",
        ["dataset", "alpha", "parameters", "published q", "published count", "count by the rule", "measured count",
         "accuracy there", "best q of the grid", "its count", "its accuracy"],
        notes=["Count by the rule: N - 1 - floor(q (N - 1)) of N parameters. Measured: mean over clients. In "
               "parentheses the published accuracy: ✓ within noise, ✗ not.", NOISE_RULE, CHOSEN],
    )  # fmt: skip
    sweeps = {cell: by_quantile(files["results"], *cell) for cell in setting.cells()}
    for (dataset, alpha), sweep in sweeps.items():
        table, q, best = published()["quantiles"].get(dataset, {}), published_q(dataset, alpha), best_quantile(sweep)
        size, theirs = published()["parameters"].get(dataset, {}).get("total"), accuracy(dataset, "fedobp", alpha)
        there, at_best = (mean_of(sweep.get(one, [])) for one in (q, best if best is not None else -1))
        kept = {at: mean_of(sweep.get(at, []), "personal_mean") for at in (q, best) if at is not None}
        counts.add(
            title(dataset),
            f"{alpha:g}",
            f"{size:,}" if size else "",
            f"{table[f'{alpha:g}']['q']:g}" if f"{alpha:g}" in table else "",
            f"{table[f'{alpha:g}']['count']:,}" if f"{alpha:g}" in table else "",
            f"{count_above(size, q):,}" if size and f"{alpha:g}" in table else "",
            _count(kept.get(q)),
            Cell(str(there or ""), beside=beside_published(there, theirs)),
            f"{best:g}" if best is not None else "",
            _count(kept.get(best)) if best is not None else "",
            str(at_best or ""),
        )
    tables = [counts]
    for (dataset, alpha), sweep in sweeps.items():
        table = Table(f"{title(dataset)}, Dirichlet({alpha:g})", ["q", "personal parameters", "accuracy"])
        order = ranks({f"{q:g}": found.mean for q, found in means(sweep).items()})
        for q, rows in sweep.items():
            table.add(
                f"{q:g}", _count(mean_of(rows, "personal_mean")), Cell(str(mean_of(rows)), order.get(f"{q:g}", 0))
            )
        tables += [table] if table.rows else []
    return tables


def _count(found: Spread | None) -> str:
    return "" if found is None else f"{found.mean:,.0f}"


def _sweep_line(ax: "Axes", grid: Sequence[float], sweep: dict[float, list[Row]], **look: Any) -> None:
    """Draw the accuracies of a sweep at the positions of its quantiles on a grid."""
    points = means(sweep)
    if points:
        ax.plot([grid.index(q) for q in points], [found.mean for found in points.values()], **look)


def _sweep_panels(setting: Setting) -> "tuple[Figure, Any, int]":
    columns = min(len(setting.datasets), 4)
    rows = -(-len(setting.datasets) // columns)
    figure, axes = panels(rows, columns, width=PAGE if columns > 1 else COLUMN, height=2.3)
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy, per cent")
    return figure, axes, columns


def quantile_figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the accuracy over the quantiles, a panel for each dataset; the paper's quantile is marked."""
    figure, axes, columns = _sweep_panels(setting)
    for at, dataset in enumerate(setting.datasets):
        ax = axes[at // columns][at % columns]
        grid = sorted({q for alpha in setting.alphas for q in grid_of(setting, dataset, alpha)})
        for place, alpha in enumerate(setting.alphas):
            look = style(place + 1)
            _sweep_line(ax, grid, by_quantile(files["results"], dataset, alpha), label=f"Dir({alpha:g})", **look)
            there, label = grid.index(published_q(dataset, alpha)), f"Dir({alpha:g}), the paper's q or the default"
            ax.axvline(there, color=look["color"], linestyle=":", linewidth=0.8, label=label)
        quantile_axis(ax, grid)
        ax.set(title=title(dataset), xlabel="q")
    legend(figure, axes, 2 if columns > 1 else 1)
    return {"figure": figure}


def score_cases(setting: Setting) -> Iterator[Case]:
    """Yield the three scores over the quantiles, with one quantile over all entries and one in each tensor."""
    for dataset, alpha, seed in setting.points():
        for score in SCORES:
            for pool in POOLS:
                for q in grid_of(setting, dataset, alpha):
                    options = {"q": q, "score": score, "pool": pool}
                    yield Case(setting.config(dataset, alpha, seed, "decoupled", options=options))


def score_sweep(rows: Sequence[Row], dataset: str, alpha: float, score: str, pool: str) -> dict[float, list[Row]]:
    """Return a score's rows by quantile."""
    chosen = [row for row in rows if option(row, "score") == score and option(row, "pool") == pool]
    return by_quantile(chosen, dataset, alpha)


def score_tables(setting: Setting, files: Files) -> list[Table]:
    """Return where each score is best, beside the peaks in the authors' logs, and all accuracies."""
    peaks = Table(
        "Where each score is best",
        ["dataset", "alpha", "score", "quantile over", "best q", "personal parameters", "accuracy", "published q",
         "in the logs: q", "accuracy"],
        notes=[
            "Published q: of the paper's text. The logs have momentum 0.7 and mostly 200 rounds, and the quantile of "
            "gradient and Fisher in each tensor; those of OBP have the score |(local - global) * local|.",
            CHOSEN,
        ],
    )  # fmt: skip
    tables = [peaks]
    for dataset, alpha in setting.cells():
        claimed, logged = claimed_peaks(dataset), published()["score_peaks"].get(dataset, {})
        sweeps = {
            (score, pool): score_sweep(files["results"], dataset, alpha, score, pool)
            for score in SCORES
            for pool in POOLS
        }
        tops = {key: best_quantile(sweep) for key, sweep in sweeps.items()}
        order = ranks({str(key): means(sweeps[key])[q].mean for key, q in tops.items() if q is not None})
        for (score, pool), q in tops.items():
            rows = sweeps[score, pool].get(-1.0 if q is None else q, [])
            in_logs = logged.get("product" if score == "squared" else score) if alpha == 0.1 else None
            peaks.add(
                title(dataset),
                f"{alpha:g}",
                SCORES[score],
                POOLS[pool],
                "" if q is None else f"{q:g}",
                _count(mean_of(rows, "personal_mean")),
                Cell(str(mean_of(rows) or ""), order.get(str((score, pool)), 0)),
                f"{claimed[score]:g}" if alpha == 0.1 and score in claimed else "",
                f"{in_logs[0]:g}" if in_logs else "",
                f"{in_logs[1]:.2f}" if in_logs else "",
            )
        header = [f"{SCORES[score]}, {POOLS[pool]}" for score, pool in sweeps]
        table = Table(f"{title(dataset)}, Dirichlet({alpha:g}): accuracy", ["q", *header])
        for q in grid_of(setting, dataset, alpha):
            found = [mean_of(sweep.get(q, [])) for sweep in sweeps.values()]
            shown = ranks({str(at): one.mean for at, one in enumerate(found) if one})
            if any(found):
                table.add(f"{q:g}", *(Cell(str(one or ""), shown.get(str(at), 0)) for at, one in enumerate(found)))
        tables += [table] if table.rows else []
    return tables


def claimed_peaks(dataset: str) -> dict[str, float]:
    """Return the best quantile of each score in the paper's text; a share of personal entries is 1 - q."""
    claim: dict[str, Any] = next((one for one in published()["claims"] if one["id"] == f"score.{dataset}"), {})
    found: dict[str, float] = {}
    for score, name in (("gradient", "I_G"), ("fisher", "I_F"), ("squared", "I_O")):
        values = claim.get("values", {}).get(name, {})
        if "best_q" in values:
            found[score] = values["best_q"]
        elif "personal_fraction" in values:
            found[score] = round(1 - values["personal_fraction"], 6)
    return found


def score_figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw each score's accuracy over the quantiles, a figure for each alpha and a panel for each dataset."""
    drawn = {}
    for alpha in setting.alphas:
        figure, axes, columns = _sweep_panels(setting)
        for at, dataset in enumerate(setting.datasets):
            ax, grid = axes[at // columns][at % columns], grid_of(setting, dataset, alpha)
            for place, (score, name) in enumerate(SCORES.items()):
                for pool, line in (("global", "-"), ("tensor", "--")):
                    sweep = score_sweep(files["results"], dataset, alpha, score, pool)
                    look = {**style(place), "linestyle": line, "markerfacecolor": None if line == "-" else "white"}
                    _sweep_line(ax, grid, sweep, label=f"{name}, {POOLS[pool]}", **look)
            quantile_axis(ax, grid)
            ax.set(title=f"{title(dataset)}, Dir({alpha:g})", xlabel="q")
        legend(figure, axes, 2)
        drawn["figure" if len(setting.alphas) == 1 else f"figure-dir{alpha:g}"] = figure
    return drawn


def communication_tables(setting: Setting, files: Files) -> list[Table]:
    """Return the accuracy beside the share of entries that are sent, and beside the bytes that this takes."""
    tables = []
    for dataset, alpha in setting.cells():
        sweep = by_quantile(files["results"], dataset, alpha)
        table = Table(
            f"{title(dataset)}, Dirichlet({alpha:g})",
            ["q", "entries sent", "bytes down a round", "of FedAvg's", "bytes up a round", "accuracy"],
            notes=[
                "Bytes are the whole cohort's payload, with the positions of the entries that are not sent (4 bytes "
                "each, or run lengths or a bitmap where that is smaller); q = 1 is FedAvg. The paper's ratio is the "
                "column of entries sent, without positions.",
            ],
        )
        order = ranks({f"{q:g}": found.mean for q, found in means(sweep).items()})
        for q, rows in sweep.items():
            down, up = (f"{format_bytes(rows[0][name] / rows[0]['rounds'])}" for name in ("bytes_down", "bytes_up"))
            share = mean_of(rows, "personal_share")
            table.add(
                f"{q:g}", f"{100 * (1 - share.mean):.4f} %" if share else "", down, f"{100 * downlink(sweep, q):.2f} %",
                up, Cell(str(mean_of(rows)), order.get(f"{q:g}", 0)),
            )  # fmt: skip
        if not sweep:
            table.add(*[""] * 6)
        tables.append(table)
    return tables


def downlink(sweep: dict[float, list[Row]], q: float) -> float:
    """Return the bytes down at a quantile as a share of those at q = 1, where nothing is personal: FedAvg's."""
    return float(sweep[q][0]["bytes_down"] / sweep[1.0][0]["bytes_down"]) if 1.0 in sweep else float("nan")


def communication_figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the accuracy over the bytes down, as a share of FedAvg's; the paper's ratio beside it."""
    figure, axes, columns = _sweep_panels(setting)
    for at, dataset in enumerate(setting.datasets):
        ax = axes[at // columns][at % columns]
        for place, alpha in enumerate(setting.alphas):
            sweep, look = by_quantile(files["results"], dataset, alpha), style(place + 1)
            points = means(sweep)
            if 1.0 not in points:
                continue
            level = [found.mean for found in points.values()]
            sent = [1 - mean.mean for rows in sweep.values() if (mean := mean_of(rows, "personal_share"))]
            ax.plot([downlink(sweep, q) for q in points], level, label=f"Dir({alpha:g}), true bytes", **look)
            ratio = {**look, "linestyle": "", "markerfacecolor": "white"}
            ax.plot(sent, level, label=f"Dir({alpha:g}), entries sent (the paper's ratio)", **ratio)
        ax.set(title=title(dataset), xlabel="downlink, share of FedAvg's")
    legend(figure, axes, 2 if columns > 1 else 1)
    return {"figure": figure}


def rate_cases(setting: Setting) -> Iterator[Case]:
    """Yield the three scores at several rates of participation: at FedOBP's q, and the others at their own best q."""
    for dataset, alpha, seed in setting.points():
        q, peaks = published_q(dataset, alpha), claimed_peaks(dataset)
        rows = {f"{name}, q = {q:g}": (score, q) for score, name in SCORES.items()}
        for score in ("gradient", "fisher"):
            own = peaks.get(score, 0.9)
            rows[f"{SCORES[score]}, q = {own:g}"] = (score, own)
        for name, (score, at) in rows.items():
            for rate in RATES if setting.scale != "smoke" else (0.1, 0.5):
                options = {"q": at, "score": score, "pool": "global"}
                config = setting.config(
                    dataset, alpha, seed, "decoupled", options=options, participation=rate, sampling="keyed"
                )
                yield Case(config, {"score": name})


def rate_tables(setting: Setting, files: Files) -> list[Table]:
    """Return the accuracy at each rate of participation."""
    tables = []
    for dataset, alpha in setting.cells():
        rows = where(files["results"], dataset=dataset, alpha=alpha, model="served")
        rates = sorted({row["participation"] for row in rows})
        table = Table(
            f"{title(dataset)}, Dirichlet({alpha:g})",
            ["score", *(f"{rate:g}" for rate in rates)],
            notes=[
                "Accuracy in per cent by the share of clients in a round. Gradient and Fisher are shown at FedOBP's q, "
                "with as many personal entries, and at the q that the paper finds best for them (0.9 where it names "
                "none). The paper says that its score has no delay when few clients take part; it publishes no numbers."
            ],
        )
        scores = list(dict.fromkeys(row["score"] for row in rows))
        found = {
            (score, rate): mean_of(where(rows, score=score, participation=rate)) for score in scores for rate in rates
        }
        best = {rate: ranks({s: one.mean for (s, at), one in found.items() if at == rate and one}) for rate in rates}
        for score in scores:
            table.add(score, *(Cell(str(found[score, rate] or ""), best[rate].get(score, 0)) for rate in rates))
        tables.append(table)
    return tables


def rate_figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw the accuracy over the rate of participation."""
    cells = setting.cells()
    columns = min(2, len(cells))
    figure, axes = panels(-(-len(cells) // columns), columns, width=COLUMN * columns, height=2.6)
    for ax, (dataset, alpha) in zip(axes.flat, cells, strict=False):
        rows = where(files["results"], dataset=dataset, alpha=alpha, model="served")
        for place, score in enumerate(dict.fromkeys(row["score"] for row in rows)):
            of = where(rows, score=score)
            points = {rate: mean_of(where(of, participation=rate)) for rate in sorted({r["participation"] for r in of})}
            ax.plot(list(points), [one.mean for one in points.values() if one], label=score, **style(place))
        ax.set(title=f"{title(dataset)}, Dir({alpha:g})", xlabel="share of clients in a round", xscale="log")
        ticks = sorted({row["participation"] for row in rows})
        ax.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        ax.minorticks_off()
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy, per cent")
    legend(figure, axes, columns + 1)
    return {"figure": figure}


EXPERIMENTS = [
    Experiment(
        "quantiles", "accuracy and number of personal parameters over the quantile q", train_cases(quantile_cases),
        quantile_tables, quantile_figures, ALL, takes_quantiles=True,
    ),
    Experiment(
        "scores", "OBP, gradient and Fisher scores over the quantiles, over all entries and in each tensor",
        train_cases(score_cases), score_tables, score_figures, ALL, alphas=(0.1,), takes_quantiles=True,
    ),
    Experiment(
        "communication", "accuracy against the bytes down, positions of personal entries included",
        train_cases(quantile_cases), communication_tables, communication_figures, ALL, alphas=(0.1,),
        takes_quantiles=True,
    ),
    Experiment(
        "participation", "accuracy against the share of clients in a round, for the three scores",
        train_cases(rate_cases), rate_tables, rate_figures, ("cifar10", "fmnist"), alphas=(0.1,),
    ),
]  # fmt: skip
