"""The paper's runs of every method: 400 rounds each, with a file for each result, so that it can be resumed.

    python benchmarks/methods.py run --dataset cifar10 --seeds 42,43          # all that are missing
    python benchmarks/methods.py run --dataset mnist --methods fedobp,fedper  # some of them
    python benchmarks/methods.py table --dataset cifar10                      # as a table, with published.json
    python benchmarks/methods.py pages --dataset cifar10                      # a curve and a table on every page
    python benchmarks/methods.py run --alpha 0.5 --methods fedper,floco       # another split, in another folder

Dirichlet(0.1) unless another alpha is given, partition seed 42, the sampling of the authors' code; the best of rounds
100, 200, 300 and 400 is reported, with each client's last local model and the served model after 5 local epochs.
Methods whose implementation behind the paper's tables differs run in both modes, and FedBN on a model with BatchNorm.
Data: $FEDOBP_DATA.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedobp import Config, FedobpError, sweep
from fedobp.algorithms import METHODS
from fedobp.data import data_dir
from fedobp.launch import Progress
from fedobp.method import RoundContext, Sweep, Train
from fedobp.models import Model
from fedobp.sweeps import plan_sweep

RESULTS = Path(__file__).parent / "results"
PUBLISHED = Path(__file__).parent / "published.json"
DOCS = Path(__file__).parents[1] / "docs"
ALPHA = 0.1  # of the pages' tables
FIRST = "faithful"  # the default mode
MODEL = {"fedbn": "cnn-bn"}  # instead of the paper's, on which it would be FedAvg
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"  # `pages` writes between them


def variants(names: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return methods with their options: once, or once in each mode."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        name, _, only = name.partition(":")
        modes = [spec.metadata["choices"] for spec in METHODS[name].options() if spec.name == "mode"]
        chosen = [mode for mode in modes[0] if mode == only or not only] if modes else []
        found += [(name, {"mode": mode}) for mode in chosen] if modes else [(name, {})]
    return found


def setting_of(dataset: str, alpha: float) -> str:
    """Return the name of the folder that holds a dataset's results."""
    return dataset if alpha == ALPHA else f"{dataset}-dir{alpha:g}"


def file_of(folder: Path, config: Config) -> Path:
    """Return the file of a run's result."""
    mode = config.options.get("mode", FIRST)
    name = config.method if mode == FIRST else f"{config.method}-{mode}"
    return folder / setting_of(config.dataset, config.alpha) / f"{name}-seed{config.seed}.json"


def launch(config: Config) -> str:
    """Return which runs share a launch: those of the fast path, those with custom functions, or sequential ones."""
    method = METHODS[config.method].configure(config.options)
    ctx = RoundContext(Model("mlp", (4,), 2), 1, config.rounds, 2, config.epochs, torch.arange(2))
    items = [*method.client_update(ctx), *method.personalize(ctx)]
    custom = any(isinstance(item, Sweep) or (isinstance(item, Train) and item.loss is not None) for item in items)
    return "sequential" if method.sequential else "custom" if custom else "plain"


def run(given: argparse.Namespace) -> None:
    """Run what is missing, in up to three launches: name fewer methods if that takes too long."""
    names = list(METHODS) if given.methods == "all" else given.methods.split(",")
    configs = [
        Config(dataset=given.dataset, method=name, options=options, seed=seed, partition_seed=42, rounds=given.rounds,
               clients=100, alpha=given.alpha, protocol="paper", sampling="published", eval_every=50, finetune_epochs=5,
               save_models="none", precision=given.precision, device=given.device, data_dir=str(data_dir()))
        for name, options in variants(names)
        for seed in map(int, given.seeds.split(","))
    ]  # fmt: skip
    configs = [replace(one, model=MODEL.get(one.method, one.model)) for one in configs]
    missing = [config for config in configs if not file_of(given.out, config).exists()]
    grouped: dict[str, list[Config]] = {}
    for config in missing:
        grouped.setdefault(launch(config), []).append(config)
    begun = time.perf_counter()
    for group in grouped.values():
        started = time.perf_counter()
        if started > begun + 60 * given.minutes:
            print("out of time: run again for the rest", flush=True)
            return
        with tempfile.TemporaryDirectory() as place:
            plan, folders = plan_sweep(group), [Path(place, str(run)) for run in range(len(group))]
            try:
                sweep(plan, out=folders, keep_models=False, progress=watch(begun + 60 * given.minutes))
            except FedobpError as error:  # all runs, if time is out; or one run, and the others have finished
                print(error, flush=True)
            for run, (config, folder) in enumerate(zip(group, folders, strict=True)):
                if (folder / "result.json").exists():
                    file, result = file_of(given.out, config), json.loads((folder / "result.json").read_text())
                    file.parent.mkdir(parents=True, exist_ok=True)
                    resolved = {**result, "options": plan.configs[run].options, "out": None}
                    file.write_text(json.dumps(resolved, indent=1) + "\n")
                    print(f"{file.stem}: {mean([result], 'accuracy')}, last {mean([result], 'last')}", flush=True)
        print(f"  {len(group)} runs in {time.perf_counter() - started:.1f} s", flush=True)


def watch(until: float) -> Callable[[Progress], None]:
    """Return a callback that prints the progress of a launch, and ends it if it would not finish in time.

    The estimate is from its last 50 rounds, and not before round 100: graphs are captured in the first rounds, and
    FedALA's clients take up to a hundred epochs once.
    """
    started = time.perf_counter()
    rounds: dict[int, float] = {}

    def report(at: Progress) -> None:
        if at.round == 50 and 100 in rounds:
            rounds.clear()  # the next launch: of another model, or of runs that did not fit in memory
        if at.round in rounds or at.round % 50:
            return
        now = rounds[at.round] = time.perf_counter()
        print(f"  round {at.round} of {at.rounds} after {now - started:.0f} s", flush=True)
        if 50 < at.round < at.rounds and now + (now - rounds[at.round - 50]) / 50 * (at.rounds - at.round) > until:
            raise FedobpError("the launch would not end in time: name fewer methods")

    return report


def found(folder: Path, dataset: str, alpha: float = ALPHA) -> dict[str, list[dict[str, Any]]]:
    """Return all results of a dataset, in the order of the methods, by file name without the seed."""
    names = [f"{name}{mode}" for name in METHODS for mode in ("", "-as-published")]
    runs: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((folder / setting_of(dataset, alpha)).glob("*.json")):
        runs.setdefault(file.stem.rpartition("-seed")[0], []).append(json.loads(file.read_text()))
    return {name: runs[name] for name in names if name in runs}


def mean(runs: list[dict[str, Any]], column: str) -> str:
    """Return a column's mean over seeds."""
    return f"{statistics.fmean(run[column]['pooled'] for run in runs):.2f}"


def title(name: str) -> str:
    """Return the name of a method in tables."""
    return name.replace("-as-published", ", as published") + (f" (`{MODEL[name]}`)" if name in MODEL else "")


def row(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """Return the measurements of a method as cells."""
    compute = f"{runs[0]['compute']['visit']:.1f}, {runs[0]['compute']['use']:.1f}"
    columns = [mean(runs, column) for column in ("accuracy", "last", "finetuned")]
    return [title(name), *columns, compute, ", ".join(str(run["seed"]) for run in runs)]


HEADER = ["method", "as served", "own last model", "after 5 epochs", "passes in a visit, before use", "seeds"]


def markdown(rows: list[list[str]]) -> str:
    """Return rows as a table; the first is its header."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def table(given: argparse.Namespace) -> None:
    """Print all results as a table in Markdown: means over seeds, with the published values.

    The authors' runs without momentum are available at alpha 0.1.
    """
    theirs = json.loads(PUBLISHED.read_text())["accuracy"].get(given.dataset, {})
    rows = [[HEADER[0], "published", "momentum 0", *HEADER[1:]]]
    for name, runs in found(given.out, given.dataset, given.alpha).items():
        method, *cells = row(name, runs)
        row_of = theirs.get(runs[0]["method"], {})
        published = row_of.get("published", {}).get(f"{given.alpha:g}", "")
        without_momentum = row_of.get("momentum 0", "") if given.alpha == ALPHA else ""
        rows.append([method, str(published), str(without_momentum), *cells])
    print(markdown(rows))


def points(run: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return a run's evaluated rounds, and the pooled accuracies."""
    return [round for round, _, _ in run["history"]], [pooled for _, pooled, _ in run["history"]]


def plotting() -> Any:
    """Return pyplot, set up for small files with reproducible bytes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fedobp", "svg.fonttype": "none"}
    from matplotlib import pyplot

    return pyplot


def curve(file: Path, lines: dict[str, list[dict[str, Any]]], beside: dict[str, list[dict[str, Any]]]) -> None:
    """Draw pooled accuracy by round: a method's runs, and in grey those of others."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    shades = ["0.75", "0.55", "0.35"]
    for (name, runs), shade in zip(beside.items(), shades, strict=False):
        axes.plot(*points(runs[0]), color=shade, linewidth=1, label=name)
    for at, (name, runs) in enumerate(lines.items()):
        for run in runs:
            label = title(name).replace("`", "") if run is runs[0] else None
            axes.plot(*points(run), color=f"C{at}", linewidth=1.6, label=label)
    axes.set(xlabel="round", ylabel="accuracy, per cent")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def overview(file: Path, dataset: str, lines: dict[str, list[dict[str, Any]]]) -> None:
    """Draw all methods, the best on top: as served, the other models of a client, and the published values."""
    pyplot = plotting()
    theirs = json.loads(PUBLISHED.read_text())["accuracy"].get(dataset, {})
    order = sorted(lines, key=lambda name: float(mean(lines[name], "accuracy")))
    figure, axes = pyplot.subplots(figsize=(7.2, 0.21 * len(order) + 1), layout="constrained")
    shown = [("finetuned", "after 5 epochs", "+", "0.45"), ("last", "own last model", "x", "0.65")]
    for column, label, marker, colour in [*shown, ("accuracy", "as served", "o", "C0")]:
        axes.scatter(
            [float(mean(lines[name], column)) for name in order], order, marker=marker, color=colour, label=label
        )
    rows = {name: theirs.get(lines[name][0]["method"]) for name in order}
    published = {name: row["published"][str(ALPHA)] for name, row in rows.items() if row}
    axes.scatter([*published.values()], [*published], marker="|", s=120, color="C3", label="published")
    axes.set(xlabel="accuracy, per cent", yticks=range(len(order)), axisbelow=True)
    axes.set_yticklabels([title(name).replace("`", "") for name in order], fontsize="small")
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize="small", reverse=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def pages(given: argparse.Namespace) -> None:
    """Write a curve and a table on every method's page, and a picture of all of them."""
    runs = found(given.out, given.dataset)
    overview(DOCS / "methods" / "curves" / f"all-{given.dataset}.svg", given.dataset, runs)
    for name in METHODS:
        mine = {key: runs[key] for key in (name, f"{name}-as-published") if key in runs}
        if not mine:
            continue
        page = DOCS / "fedobp.md" if name == "fedobp" else DOCS / "methods" / f"{name}.md"
        image = DOCS / "methods" / "curves" / f"{name}.svg"
        beside: dict[str, list[dict[str, Any]]] = {
            key: runs[key] for key in ("fedavg", "local", "fedobp") if key in runs and key != name
        }
        curve(image, mine, beside)
        rows = [HEADER, *(row(key, found) for key, found in [*mine.items(), *beside.items()])]
        place = "methods/curves" if name == "fedobp" else "curves"
        setting = f"{given.dataset}, Dirichlet({ALPHA}), partition seed 42, 100 clients, 10 a round, 400 rounds"
        text = (
            f"{BEGIN}\n## Measured\n\n{setting}:\nthe best of rounds 100, 200, 300 and 400, mean over seeds "
            f"(`benchmarks/methods.py`, one H200).\n\n{markdown(rows)}\n\n"
            f"![accuracy by round]({place}/{image.name})\n\n"
            f"One line per seed. Grey: other methods, first seed.\n{END}\n"
        )
        old = page.read_text()
        start = old.index(BEGIN) if BEGIN in old else len(old)
        rest = old[old.index(END) + len(END) + 1 :] if END in old else ""
        before = old[:start] if BEGIN in old else old.rstrip("\n") + "\n\n"
        page.write_text(before + text + rest)
        print(page)


def main() -> None:
    """Run a section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=["run", "table", "pages"])
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--alpha", type=float, default=ALPHA, help="of the Dirichlet split")
    parser.add_argument("--methods", default="all", help="separated by commas; all, or as NAME:MODE one mode only")
    parser.add_argument("--seeds", default="42,43")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=1e9, help="end what would take longer")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    {"run": run, "table": table, "pages": pages}[given.section](given)


if __name__ == "__main__":
    main()
