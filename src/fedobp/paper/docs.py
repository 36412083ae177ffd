"""Write what the documentation says was measured, from the result files of the repository.

    python -m fedobp.paper.docs            # in the root of the repository: results/ -> docs/

Between the marks `<!-- measured ... -->` and `<!-- end of measured -->` it writes: on the page of every method a table
and a curve (CIFAR10, Dirichlet(0.1)), in docs/results.md a table for each dataset and alpha, in docs/claims.md the
verdicts. Only results in the paper's setting count, so those of `--scale smoke` never enter. docs/beyond.md has a table
and curves for each setting of the sweeps in results/beyond.
"""

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from fedobp.algorithms import METHODS
from fedobp.errors import FedobpError
from fedobp.files import write
from fedobp.paper import published
from fedobp.paper.accuracy import NETWORKS
from fedobp.paper.beyond import curves as beyond_curves
from fedobp.paper.beyond import read_study
from fedobp.paper.beyond import tables as beyond_tables
from fedobp.paper.claims import Evidence, claims_table, is_standard, judge, read_evidence
from fedobp.paper.figures import drawing
from fedobp.paper.rows import AS_PUBLISHED, Row, where
from fedobp.paper.tables import markdown_row

HEADER = ["method", "as served", "own last model", "after 5 epochs", "passes in a visit, before use", "seeds"]
PAGES = ("cifar10", 0.1)  # the dataset and alpha of the methods' pages
BEYOND = Path("results", "beyond")  # of the repository
_END = "<!-- end of measured -->"
Runs = dict[str, list[Row]]  # rows of all models and seeds, by the name of method and mode


def found(evidence: Evidence, dataset: str, alpha: float) -> Runs:
    """Return the rows of a dataset and alpha, in the order of the methods."""
    rows = [row for row in where(evidence.results, dataset=dataset, alpha=alpha) if is_standard(row)]
    names = [(name, mode) for name in METHODS for mode in ("", "as-published")]
    by_name = {
        (name, mode): [row for row in rows if row["method"] == name and (row["mode"] == "as-published") == bool(mode)]
        for name, mode in names
    }
    return {name + (AS_PUBLISHED if mode else ""): of for (name, mode), of in by_name.items() if of}


def title(name: str) -> str:
    """Return the name of a method in tables; one that runs on another network has it behind."""
    return name + (f" (`{NETWORKS[name]}`)" if name in NETWORKS else "")


def mean(rows: Sequence[Row], model: str) -> str:
    """Return the mean pooled accuracy of a model over seeds."""
    values = [row["pooled"] for row in where(rows, model=model)]
    return f"{statistics.fmean(values):.2f}" if values else ""


def cells(name: str, rows: Sequence[Row]) -> list[str]:
    """Return the measurements of a method as cells."""
    served = sorted(where(rows, model="served"), key=lambda row: row["seed"])
    passes = f"{served[0]['visit_passes']:.1f}, {served[0]['use_passes']:.1f}"
    columns = [mean(rows, model) for model in ("served", "last", "finetuned")]
    return [title(name), *columns, passes, ", ".join(str(row["seed"]) for row in served)]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table; the first is its header."""
    return "\n".join([markdown_row(rows[0]), "|---" * len(rows[0]) + "|", *map(markdown_row, rows[1:])])


def results_table(evidence: Evidence, dataset: str, alpha: float) -> str:
    """Return all methods of a dataset and alpha as a table, with the published values."""
    rows = [[HEADER[0], "published", "momentum 0", *HEADER[1:]]]
    for name, of in found(evidence, dataset, alpha).items():
        theirs = published.accuracy(dataset, of[0]["method"], alpha)
        at_0 = published.momentum_0(dataset, of[0]["method"], alpha)
        shown, *more = cells(name, of)
        rows.append([shown, str(theirs[0]) if theirs else "", "" if at_0 is None else str(at_0), *more])
    return markdown(rows)


def replaced(page: str, what: str, text: str) -> str | None:
    """Return a page with the text between the marks of `what` replaced; None if it has no such marks."""
    begin = f"<!-- {what} -->"
    pattern = re.compile(re.escape(begin) + r"\n.*?" + re.escape(_END), re.DOTALL)
    changed, count = pattern.subn(lambda _: f"{begin}\n{text}\n{_END}", page, count=1)
    return changed if count else None


def method_section(name: str, runs: Runs) -> str:
    """Return what the page of a method says was measured."""
    mine, beside = parts(name, runs)
    rows = [HEADER, *(cells(key, of) for key, of in [*mine.items(), *beside.items()])]
    place, (dataset, alpha) = "methods/curves" if name == "fedobp" else "curves", PAGES
    return (
        f"## Measured\n\n{dataset}, Dirichlet({alpha}), partition seed 42, 100 clients, 10 a round, 400 rounds:\n"
        "the best of rounds 100, 200, 300 and 400, mean over seeds (`results/methods`, one H200).\n\n"
        f"{markdown(rows)}\n\n![accuracy by round]({place}/{name}.svg)\n\n"
        "One line per seed. Grey: other methods, first seed."
    )


def parts(name: str, runs: Runs) -> tuple[Runs, Runs]:
    """Return a method's rows in all modes, and those that it is compared with."""
    mine = {key: runs[key] for key in (name, name + AS_PUBLISHED) if key in runs}
    return mine, {key: runs[key] for key in ("fedavg", "local", "fedobp") if key in runs and key != name}


def points(history: Sequence[Row], run: str) -> tuple[list[int], list[float]]:
    """Return a run's evaluated rounds, and the pooled accuracies."""
    rows = where(history, run=run)
    return [row["round"] for row in rows], [row["pooled"] for row in rows]


def draw_curve(file: Path, history: Sequence[Row], lines: Runs, beside: Runs) -> None:
    """Draw pooled accuracy by round: a method's runs, and in grey those of others."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for (name, rows), shade in zip(beside.items(), ["0.75", "0.55", "0.35"], strict=False):
        axes.plot(*points(history, rows[0]["run"]), color=shade, linewidth=1, label=name)
    for at, (name, rows) in enumerate(lines.items()):
        for run in dict.fromkeys(row["run"] for row in rows):
            label = title(name).replace("`", "") if run == rows[0]["run"] else None
            axes.plot(*points(history, run), color=f"C{at}", linewidth=1.6, label=label)
    axes.set(xlabel="round", ylabel="accuracy, per cent")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    _save(figure, file)


def draw_overview(file: Path, dataset: str, alpha: float, runs: Runs) -> None:
    """Draw all methods, the best on top: as served, the other models of a client, and the published values."""
    order = sorted(runs, key=lambda name: float(mean(runs[name], "served")))
    keys = [name.replace(AS_PUBLISHED, "-as-published") for name in order]
    figure = Figure(figsize=(7.2, 0.21 * len(order) + 1), layout="constrained")
    axes = figure.subplots()
    shown = [("finetuned", "after 5 epochs", "+", "0.45"), ("last", "own last model", "x", "0.65")]
    for model, label, marker, colour in [*shown, ("served", "as served", "o", "C0")]:
        axes.scatter([float(mean(runs[name], model)) for name in order], keys, marker=marker, color=colour, label=label)
    theirs = {
        key: value[0]
        for key, name in zip(keys, order, strict=True)
        if (value := published.accuracy(dataset, runs[name][0]["method"], alpha))
    }
    axes.scatter([*theirs.values()], [*theirs], marker="|", s=120, color="C3", label="published")
    axes.set(xlabel="accuracy, per cent", yticks=range(len(order)), axisbelow=True)
    axes.set_yticklabels([title(name).replace("`", "") for name in order], fontsize="small")
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize="small", reverse=True)
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    """Write a small SVG file, with the same bytes each time."""
    with rc_context({"svg.hashsalt": "fedobp", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None})


def pages(evidence: Evidence, docs: Path) -> dict[Path, str]:
    """Return all pages as they should be; a page without its marks is an error."""
    wanted: dict[Path, dict[str, str]] = {}
    settings = dict.fromkeys((row["dataset"], row["alpha"]) for row in evidence.results)
    wanted[docs / "results.md"] = {
        f"measured {dataset} {alpha:g}": results_table(evidence, dataset, alpha) for dataset, alpha in settings
    }
    wanted[docs / "claims.md"] = {"measured claims": "\n".join(_verdicts(evidence))}
    study, _ = read_study(docs.parent / BEYOND)
    if study:
        sections = [table.markdown().replace("## ", "### ", 1).strip() for table in beyond_tables(study)]
        wanted[docs / "beyond.md"] = {"measured beyond": "\n\n".join(sections)}
    runs = found(evidence, *PAGES)
    for name in METHODS:
        if name in runs:
            page = docs / "fedobp.md" if name == "fedobp" else docs / "methods" / f"{name}.md"
            wanted[page] = {"measured": method_section(name, runs)}
    return {path: _filled(path, texts) for path, texts in wanted.items()}


def _verdicts(evidence: Evidence) -> list[str]:
    table = claims_table(judge(evidence))
    return [markdown_row(table.header), "|---" * len(table.header) + "|"] + [
        markdown_row([cell.text for cell in row]) for row in table.rows
    ]


def _filled(path: Path, texts: Mapping[str, str]) -> str:
    page = path.read_text(encoding="utf-8")
    for what, text in texts.items():
        changed = replaced(page, what, text)
        if changed is None:
            raise FedobpError(f"{path} has no place for it: add the lines <!-- {what} --> and {_END}")
        page = changed
    return page


def draw(evidence: Evidence, docs: Path) -> None:
    """Draw the curves of the methods' pages, and the picture of all methods."""
    runs, curves = found(evidence, *PAGES), docs / "methods" / "curves"
    draw_overview(curves / f"all-{PAGES[0]}.svg", *PAGES, runs)
    for name in METHODS:
        if name in runs:
            draw_curve(curves / f"{name}.svg", evidence.history, *parts(name, runs))
    study, history = read_study(docs.parent / BEYOND)
    if study:
        with drawing():
            _save(beyond_curves(study, history), docs / "beyond.svg")


def main() -> None:
    """Write all pages and curves."""
    evidence, docs = read_evidence([Path("results")]), Path("docs")
    for path, text in pages(evidence, docs).items():
        write(path, text.encode())
        sys.stdout.write(f"{path}\n")
    draw(evidence, docs)


if __name__ == "__main__":
    main()
