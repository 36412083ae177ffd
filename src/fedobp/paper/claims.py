"""The paper's claims, each with a verdict and its evidence, computed from tidy result files.

Only results in the paper's setting count: protocol `paper`, 400 rounds. A claim has parts, such as one for each
dataset. It does not hold if one part does not; it holds if all parts do; otherwise it is not measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedobp.errors import FedobpError, short
from fedobp.importance import count_above
from fedobp.paper.ablation import layer_shares
from fedobp.paper.accuracy import curve, first_within, modes_of
from fedobp.paper.experiment import Experiment, Files, Row, Setting, Work
from fedobp.paper.published import NAMES, TABLE1, TABLE2, published, title
from fedobp.paper.quantiles import SCORES, best_quantile, by_quantile, claimed_peaks, means, published_q, score_sweep
from fedobp.paper.rows import AS_PUBLISHED, EXTRA, by_seed, labelled, mean_of, number, option, quantile, where
from fedobp.paper.stats import TOLERANCE, Spread, paired, probability
from fedobp.paper.tables import Table
from fedobp.report.tidy import read_tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["holds", "does not hold", "not measured", "cannot be checked"]
ROUNDS = 400
_OPEN = ": not measured"
_FEWEST = 5  # quantiles of a sweep
BASELINES = [name for name in NAMES.values() if name != "FedOBP"]


class Part(NamedTuple):
    """A part of a claim: what was found, and whether it holds."""

    verdict: Verdict
    text: str


def missing(what: str) -> Part:
    """Return a part of which nothing is measured."""
    return Part("not measured", what + _OPEN)


class Judged(NamedTuple):
    """A claim with its verdict and evidence."""

    id: str
    section: str
    text: str
    verdict: Verdict
    evidence: str


@dataclass
class Evidence:
    """Tidy rows in the paper's setting, each once."""

    results: list[Row] = field(default_factory=list)
    history: list[Row] = field(default_factory=list)
    layers: list[Row] = field(default_factory=list)

    def rows(self, dataset: str, alpha: float) -> dict[str, list[Row]]:
        """Return the rows of the accuracy tables by name."""
        return labelled([row for row in self.results if is_standard(row)], dataset, alpha)

    def table(self, dataset: str, alpha: float) -> dict[str, Spread]:
        """Return the means of the accuracy tables: all methods as they stand there, by name."""
        return {name: found for name, of in self.rows(dataset, alpha).items() if (found := mean_of(of))}

    def curve(self, dataset: str, alpha: float, name: str) -> dict[int, Spread]:
        """Return a method's accuracy over the rounds."""
        runs = {row["run"] for row in self.results if is_standard(row)}
        rows = [{**row, "model": "served"} for row in self.history if row["run"] in runs]
        return curve(labelled(rows, dataset, alpha).get(name, []))


# Columns of result files, by the name of the file: those that each row needs, and those that hold numbers.
_NEEDED = {
    "results": ("run", "method", "dataset", "model", "alpha", "seed", "pooled"),
    "history": ("run", "method", "dataset", "alpha", "seed", "round", "pooled"),
    "layers": ("layer", "round", "share"),
}
_NUMBERS = ("alpha", "clients", "pooled", "round", "seed", "share")
_PLAIN = {"norm": "none", "scope": "all", "start": "global", "ema": "0.0"}
_RULE = {"rule": "quantile", "warmup": "0", "soft": "0.0"}


def is_papers(row: Row) -> bool:
    """Return whether a run has the paper's partition, clients, participation, scaling of images and local training.

    Results that are older than a column do not have it.
    """
    if row.get("normalize") not in (None, "dataset") or row.get("participation") != 0.1:
        return False
    if row.get("parts") or row.get("training"):
        return False
    if row.get("dataset") in published()["parameters"] and row.get("clients") not in (None, 100):
        return False
    return row.get("partition") in (None, "dirichlet")


def is_plain(row: Row, score: str = "squared", pool: str = "global") -> bool:
    """Return whether a run of `fedobp` or `decoupled` has a score, and no other option of the ablation."""
    plain = {**_PLAIN, "score": score, **({"pool": pool} if row["method"] == "decoupled" else {})}
    # Results that are older than the options of the rule do not name them.
    return all(option(row, name) == value for name, value in plain.items()) and all(
        option(row, name) in (value, "") for name, value in _RULE.items()
    )


def is_standard(row: Row) -> bool:
    """Return whether a run has the settings of the accuracy tables; those of sweeps have others."""
    if not is_papers(row):
        return False
    if row["method"] not in ("fedobp", "decoupled"):
        return True
    return quantile(row) == published_q(row["dataset"], row["alpha"]) and is_plain(row)


def _checked(path: Path, rows: list[Row]) -> list[Row]:
    """Return rows of a result file; a cell that is needed and empty, or no number where one must be, is refused."""
    for row in rows:
        wrong = [name for name in _NEEDED[path.stem] if row.get(name) is None]
        wrong += [name for name in _NUMBERS if row.get(name) is not None and not _is_number(row[name])]
        if wrong:
            what = f"no {'number' if wrong[0] in _NUMBERS else 'value'} in column '{wrong[0]}'"
            raise FedobpError(f"{short(path, 200)} is damaged (a row has {what}): write it again")
    return rows


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number, of which sums are finite too."""
    return isinstance(value, int | float) and abs(value) < 2**53


def read_evidence(folders: Sequence[Path]) -> Evidence:
    """Read the result files of folders and of the folders in them."""
    found = Evidence()
    seen: set[tuple[Any, ...]] = set()
    for folder in folders:
        if not folder.is_dir():
            raise FedobpError(f"there is no folder {short(folder, 200)}: give one that holds result files")
        for path in sorted({*folder.glob("results.csv"), *folder.glob("*/results.csv")}):
            rows = read_tidy(path)
            full = [
                row for row in rows if row.get("protocol") == "paper" and row.get("rounds") == ROUNDS and is_papers(row)
            ]
            runs = set()
            for row in _checked(path, full):
                names = ("method", "mode", "dataset", "alpha", "seed", "model", "options", "participation", "normalize")
                key = tuple(row.get(name) for name in names)
                if key not in seen:
                    seen.add(key)
                    found.results.append(row)
                    runs.add(row["run"])
            for name in ("history", "layers"):
                beside = path.with_name(f"{name}.csv")
                more = read_tidy(beside) if beside.exists() else []
                known = [row for row in more if row.get("run") in runs or name == "layers"]
                getattr(found, name).extend(_checked(beside, known))
    return found


def combine(parts: Sequence[Part]) -> Verdict:
    """Return the verdict of a claim from those of its parts."""
    verdicts = [part.verdict for part in parts]
    for verdict in ("does not hold", "not measured", "cannot be checked"):
        if verdict in verdicts:
            return verdict
    return "holds"


def lead(evidence: Evidence, dataset: str, alpha: float, claimed: float | None = None) -> Part:
    """Judge whether FedOBP is above all of the paper's baselines, as their authors meant them.

    The evidence also names the gap to the baselines as they were run for the paper, and the baselines that it omits.
    """
    found, where_ = evidence.table(dataset, alpha), f"{title(dataset)} {alpha:g}"
    said = f" (the paper: {claimed:+.2f})" if claimed is not None else ""
    if "FedOBP" not in found:
        return missing(where_)
    ours = found["FedOBP"].mean
    faithful = {name: found[name].mean for name in BASELINES if name in found}
    as_run = {name: found.get(name + AS_PUBLISHED, found.get(name)) for name in BASELINES if _is_run(name, found)}
    words = [f"{where_}: FedOBP {ours:.2f}{said}"]
    if as_run:
        best, value = max(((name, one.mean) for name, one in as_run.items() if one), key=lambda pair: pair[1])
        unseen = len(BASELINES) - len(as_run)
        words.append(f"best baseline as run for the paper: {best} {value:.2f}" + _left_out(unseen))
    if faithful:
        best, value = max(faithful.items(), key=lambda pair: pair[1])
        test = paired(*(by_seed(evidence.rows(dataset, alpha)[name]) for name in ("FedOBP", best)))
        shown = f", {probability(test.p)} over {test.pairs} pairs" if test and test.p is not None else ""
        words.append(f"as meant: {best} {value:.2f}{shown}" + _left_out(len(BASELINES) - len(faithful)))
    extra = [f"{name} {found[name].mean:.2f}" for name in EXTRA.values() if name in found]
    words += [f"left out by the paper: {', '.join(extra)}"] if extra else []
    if any(round(value, 2) > round(ours, 2) for value in faithful.values()):
        verdict: Verdict = "does not hold"
    else:
        verdict = "holds" if len(faithful) == len(BASELINES) else "not measured"
    return Part(verdict, "; ".join(words))


def _is_run(name: str, found: dict[str, Spread]) -> bool:
    """Return whether a baseline was measured as it ran for the paper: in that mode, if it has one."""
    method = next(key for key, shown in NAMES.items() if shown == name)
    return (name + AS_PUBLISHED if modes_of(method) else name) in found


def _left_out(count: int) -> str:
    return f" ({count} of {len(BASELINES)} not measured)" if count else ""


def gaps_at_01(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """perf.d01.gaps."""
    values = claim["values"]
    claimed = {name: values.get(name, values.get(f"{name}_vs_FedPer")) for name in TABLE1}
    return [lead(evidence, dataset, 0.1, gap) for dataset, gap in claimed.items()]


def best_at_05(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """perf.d05."""
    return [lead(evidence, dataset, 0.5) for dataset in TABLE1]


def gaps_of_table_2(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """perf.t2; the MedMNIST parts are about images without contrast, where no method can learn them."""
    values = claim["values"]
    parts = [
        lead(evidence, "mnist", 0.1, values["mnist_0.1_gap"]),
        lead(evidence, "fmnist", 0.1, values["fmnist_0.1_gap"]),
    ]
    parts.append(lead(evidence, "fmnist", 0.5, values["fmnist_0.5_gap_vs_FLOCO"]))
    return [*parts, Part("cannot be checked", "OrganA: the published rows are an artefact of wrong scaling constants")]


def above(evidence: Evidence, dataset: str, alpha: float, names: Sequence[str], limit: float, sign: int) -> list[Part]:
    """Judge whether methods as run for the paper are above (sign 1) or below (-1) a limit."""
    found, parts = evidence.table(dataset, alpha), []
    for name in names:
        one = found.get(name + AS_PUBLISHED, found.get(name)) if _is_run(name, found) else None
        word = "above" if sign > 0 else "below"
        if one is None:
            parts.append(missing(f"{name} on {title(dataset)}"))
        else:
            holds = sign * (one.mean - limit) > 0
            told = f"{name} on {title(dataset)} is {one.mean:.2f}, said to be {word} {limit:g}"
            parts.append(Part("holds" if holds else "does not hold", told))
    return parts


def converges_at_01(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """conv.01."""
    parts = [lead(evidence, "cifar10", 0.1)]
    parts += above(evidence, "cifar10", 0.1, ["pFedFDA", "FedPer"], 85, 1)
    parts += above(evidence, "cifar10", 0.1, ["APFL", "FLUTE", "FedALA"], 75, -1)
    return [*parts, *(fastest(evidence, dataset, 0.1) for dataset in ("cifar100", "emnist"))]


def fastest(evidence: Evidence, dataset: str, alpha: float) -> Part:
    """Judge whether FedOBP is the first to come within a point of the best final accuracy of all methods."""
    curves = {name: evidence.curve(dataset, alpha, name) for name in NAMES.values()}
    where_ = f"fastest on {title(dataset)} {alpha:g}"
    if any(not points for points in curves.values()):
        return missing(where_)
    goal = max(points[max(points)].mean for points in curves.values()) - 1
    reached = {
        name: min((at for at, found in points.items() if found.mean >= goal), default=None)
        for name, points in curves.items()
    }
    first = min((at for at in reached.values() if at is not None), default=None)
    told = ", ".join(f"{name} in round {at}" for name, at in reached.items() if at is not None)
    return Part("holds" if reached["FedOBP"] == first else "does not hold", f"{where_}, at {goal:.2f}: {told}")


def converges_at_05(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """conv.05: near-optimal is within a point of its own end."""
    parts = []
    for dataset in ("cifar10", "cifar100"):
        points = evidence.curve(dataset, 0.5, "FedOBP")
        at = first_within(points)
        if at is None or max(points) < ROUNDS:
            parts.append(missing(f"{title(dataset)} 0.5"))
            continue
        told = f"{title(dataset)} 0.5: from round {at} on within 1 point of its end, {points[max(points)].mean:.2f}"
        parts.append(Part("holds" if at <= 200 else "does not hold", told))
    return [*parts, fastest(evidence, "svhn", 0.5)]


def best_scores(dataset: str) -> Callable[[Evidence, dict[str, Any]], list[Part]]:
    """score.DATASET: each score is best at its claimed quantile, to within the tolerance."""

    def judge(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
        claimed, parts = claimed_peaks(dataset), []
        for score, name in SCORES.items():
            sweep = score_sweep(evidence.results, dataset, 0.1, score, "global" if score == "squared" else "tensor")
            top, found = best_quantile(sweep), means(sweep)
            at = claimed.get(score)
            if top is None or len(found) < _FEWEST or (at is not None and at not in found):
                parts.append(missing(name))
            elif at is None:  # said to keep fewer than 0.1 per cent
                parts.append(Part("holds" if top > 0.999 else "does not hold", f"{name}: best at q = {top:g}"))
            else:
                near = found[top].mean - found[at].mean <= TOLERANCE
                told = f"{name}: best at q = {top:g} ({found[top].mean:.2f}); at {at:g}, as said, {found[at].mean:.2f}"
                parts.append(Part("holds" if near else "does not hold", told))
        return parts

    return judge


def scores_on_medmnist(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """score.medmnist."""
    return [Part("cannot be checked", "the published curves are of images without contrast: no score matters there")]


def shape_of_sweeps(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """score.shape: the best quantile is neither 0 nor 1."""
    parts = []
    for dataset in (*TABLE1, *TABLE2):
        for score, name in SCORES.items():
            sweep = score_sweep(evidence.results, dataset, 0.1, score, "global" if score == "squared" else "tensor")
            top, where_ = best_quantile(sweep), f"{name} on {title(dataset)}"
            if top is None or len(sweep) < _FEWEST or not {0.0, 1.0} <= sweep.keys():
                parts.append(missing(where_))
            else:
                parts.append(Part("holds" if 0 < top < 1 else "does not hold", f"{where_}: best at q = {top:g}"))
    return parts


def ratio(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """Judge the share of personal parameters by the rule of counting, with the paper's quantiles: no run is needed."""
    parts = []
    for dataset, by_alpha in published()["quantiles"].items():
        size = published()["parameters"][dataset]["total"]
        for alpha, cell in by_alpha.items():
            share = count_above(size, cell["q"]) / size
            parts.append(Part("holds" if share < 0.005 else "does not hold", f"{title(dataset)} {alpha}: {share:.4%}"))
    wrong = [part for part in parts if part.verdict != "holds"]
    kept = f"{len(parts) - len(wrong)} of {len(parts)} cells are below 0.5 %"
    return [Part(part.verdict, part.text) for part in wrong] + [Part("holds", kept)]


def ablated(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """abl.text: no normalisation equals the global one and is above that by tensor; CLS is lower where it is said."""
    parts = []
    for dataset in (*TABLE1, *TABLE2):
        rows = [
            row
            for row in where(evidence.results, method="fedobp", dataset=dataset, alpha=0.1, model="served")
            if option(row, "score") == "product" and number(row, "ema") == 0
        ]

        def of(norm: str, scope: str, rows: Sequence[Row] = rows) -> Spread | None:
            return mean_of([row for row in rows if option(row, "norm") == norm and option(row, "scope") == scope])

        none, layer, whole = of("none", "all"), of("layer", "all"), of("global", "all")
        if none is None or layer is None or whole is None:
            parts.append(missing(title(dataset)))
            continue
        theirs = published()["ablation"][dataset]
        told = (
            f"{title(dataset)}: none {none.mean:.2f} (the paper: {theirs['none']:.2f}), by tensor {layer.mean:.2f} "
            f"({theirs['layer']:.2f}), over all {whole.mean:.2f} ({theirs['global']:.2f})"
        )
        same = abs(none.mean - whole.mean) <= TOLERANCE
        parts.append(Part("holds" if same and none.mean > layer.mean else "does not hold", told))
    wrong = "87.52 and 99.40 in the text are not the table's numbers: they are of runs with EMA, which logs show"
    return [*parts, Part("does not hold", wrong)]


def distributed(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """dist: shares in the last rounds lie in the figure's ranges, and the classifier's has risen."""
    parts = []
    for dataset, said in claim["values"].items():
        rows = where(evidence.layers, dataset=dataset, alpha=0.1, score="product")
        if not rows or max(row["round"] for row in rows) < ROUNDS:
            parts.append(missing(title(dataset)))
            continue
        last = {layer: _share(rows, layer, ROUNDS - 44, ROUNDS) for layer in ("classifier", "conv1")}
        rises = last["classifier"] > _share(rows, "classifier", 1, 45)
        inside = all(said[layer][0] - 0.05 <= share <= said[layer][1] + 0.05 for layer, share in last.items())
        ranges = ", ".join(
            f"{layer} {share:.2f} (figure: {said[layer][0]:g} to {said[layer][1]:g})" for layer, share in last.items()
        )
        parts.append(Part("holds" if inside and rises else "does not hold", f"{title(dataset)}: {ranges}"))
    return parts


def _share(rows: Sequence[Row], layer: str, first: int, last: int) -> float:
    return layer_shares(rows, first, last).get(layer, 0.0)


def communicated(evidence: Evidence, claim: dict[str, Any]) -> list[Part]:
    """comm: accuracy at ratio 1 is below that at all smaller ratios up to 0.9."""
    parts = []
    for dataset in (*TABLE1, *TABLE2):
        rows = [row for row in where(evidence.results, method="fedobp") if is_plain(row)]
        points = means(by_quantile(rows, dataset, 0.1))
        some = {q: found.mean for q, found in points.items() if q <= 0.9}
        if 1.0 not in points or not some or len(points) < _FEWEST:
            parts.append(missing(title(dataset)))
            continue
        told = (
            f"{title(dataset)}: {points[1.0].mean:.2f} at ratio 1, {min(some.values()):.2f} to {max(some.values()):.2f}"
        )
        holds = min(some.values()) > points[1.0].mean
        parts.append(Part("holds" if holds else "does not hold", f"{told} at ratios up to 0.9"))
    return parts


JUDGES: dict[str, Callable[[Evidence, dict[str, Any]], list[Part]]] = {
    "perf.d01.gaps": gaps_at_01,
    "perf.d05": best_at_05,
    "perf.t2": gaps_of_table_2,
    "conv.01": converges_at_01,
    "conv.05": converges_at_05,
    **{f"score.{dataset}": best_scores(dataset) for dataset in ("cifar10", "cifar100", "mnist", "fmnist")},
    "score.medmnist": scores_on_medmnist,
    "score.shape": shape_of_sweeps,
    "ratio": ratio,
    "abl.text": ablated,
    "dist": distributed,
    "comm": communicated,
}
_TEXTS = {
    "perf.t2": "FedOBP minus the runner-up on MNIST and FMNIST; ties on MedMNIST",
    "score.cifar10": "best quantile of each score on CIFAR10",
    "score.cifar100": "best quantile of each score on CIFAR100",
    "score.mnist": "best share of personal entries of each score on MNIST",
    "score.fmnist": "best quantile of each score on FMNIST",
    "abl.text": "normalisation: none equals global and beats that by tensor; the numbers of the text",
}  # of claims that have numbers only


def judge(evidence: Evidence) -> list[Judged]:
    """Return the verdict on every claim, in the order of the published data."""
    found = []
    for claim in published()["claims"]:
        parts = JUDGES[claim["id"]](evidence, claim)
        open_ = [part.text.removesuffix(_OPEN) for part in parts if part.text.endswith(_OPEN)]
        told = [part.text for part in parts if not part.text.endswith(_OPEN)]
        told += [f"not measured: {', '.join(open_)}"] if open_ else []
        text = claim.get("text", _TEXTS.get(claim["id"], ""))
        found.append(Judged(claim["id"], claim["section"], text, combine(parts), "; ".join(told)))
    return found


def claims_table(judged: Sequence[Judged]) -> Table:
    """Return verdicts and evidence as a table."""
    table = Table(
        "Claims of the paper", ["claim", "what it says", "verdict", "evidence"], notes=[__doc__.split("\n\n")[1]]
    )
    for one in judged:
        table.add(one.id, one.text, one.verdict, one.evidence)
    return table


def measure(setting: Setting, work: Work) -> Files:
    """Judge the claims by the result files of the other experiments, or of the folders that are given."""
    folders = work.sources or [work.folder]
    return {"results": [one._asdict() for one in judge(read_evidence(folders))]}


def tables(setting: Setting, files: Files) -> list[Table]:
    """Return the verdicts."""
    return [claims_table([Judged(**row) for row in files["results"]])]


def figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw nothing: a verdict is a sentence."""
    return {}


EXPERIMENTS = [
    Experiment(
        "claims", "a verdict with evidence for every claim, from the result files of the other experiments", measure,
        tables, figures, trains=False, takes_folders=True,
    )
]  # fmt: skip
