"""`fedobp paper`: the paper's tables and figures, one command each."""

import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from fedobp.cli.output import print_note, print_result, report_failures
from fedobp.cli.progress import task_progress
from fedobp.cli.settings import Json
from fedobp.cli.sweeping import check_minutes
from fedobp.errors import FedobpError, Stopped, short, unknown


def paper(
    name: Annotated[str, typer.Argument(help="An experiment, or `list`.", metavar="NAME")],
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="For claims, law: folders with result files (default: that of --out).", metavar="[FOLDER]..."
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Datasets, separated by commas (default: the paper's).")] = None,
    alpha: Annotated[str | None, typer.Option(help="Dirichlet alphas, separated by commas (default: 0.1,0.5).")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="For table1, table2, convergence: methods, separated by commas, or all (default: the 13)."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Number of seeds: 42, 43, ... (default at full scale: 3 or 1). Not for overhead, datasets, claims."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Number of rounds (default: by the scale). Not for overhead, datasets, claims."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="faithful|as-published|both",
            help="For table1, table2, convergence, medmnist: methods as their authors meant them, as they ran for the "
            "paper's tables, or both.",
        ),
    ] = None,
    paper_grid: Annotated[
        bool, typer.Option("--paper-grid", help="For quantiles, scores, communication: 32 quantiles, not 12.")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            metavar="smoke|short|full",
            help="The paper's setting (full), 100 of its rounds (short), or the digits, to see that all runs (smoke).",
        ),
    ] = "full",
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop cleanly after so long; the same command goes on.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of all experiments, which share their runs (default: runs/paper-SCALE).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a table or figure of the paper again, beside the published numbers.

    Writes tidy results (CSV), tables (Markdown and LaTeX) and figures (PDF and PNG) into OUT/NAME. Runs that are
    finished are kept: called again, it goes on.

    [bold]Examples[/bold]

    \b
    fedobp paper list
    fedobp paper table1 --scale smoke
    fedobp paper quantiles --dataset fmnist --alpha 0.1 --scale short
    fedobp paper table2 --dataset mnist,fmnist --seeds 3 --max-minutes 30
    fedobp paper claims results
    fedobp paper law results --rounds 60
    """
    from fedobp.paper.experiment import Work, run_experiment, setting_for, unused_flags
    from fedobp.paper.registry import EXPERIMENTS

    if name not in ("list", *EXPERIMENTS):
        raise unknown("experiment", name, ["list", *EXPERIMENTS])
    if folders and (name == "list" or not EXPERIMENTS[name].takes_folders):
        raise FedobpError(f"{short(folders[0])} cannot be used: only `claims` and `law` take folders")
    if name == "list":
        _print_list(as_json)
        return
    check_minutes(max_minutes)
    setting = setting_for(
        EXPERIMENTS[name],
        scale=scale,  # type: ignore[arg-type]
        datasets=_split(dataset),
        alphas=[_number(one) for one in _split(alpha)],
        seeds=seeds,
        rounds=rounds,
        mode=mode,  # type: ignore[arg-type]
        long_grid=paper_grid,
        methods=_methods(methods),
    )
    until = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    try:
        with task_progress() as advance, redirect_stdout(sys.stderr):
            work = Work(out or Path("runs") / f"paper-{setting.scale}", until, advance, sources=folders or ())
            given = {"dataset": dataset, "alpha": alpha, "seeds": seeds, "rounds": rounds, "mode": mode}
            work.notes += unused_flags(EXPERIMENTS[name], given)
            found = run_experiment(EXPERIMENTS[name], setting, work)
    except Stopped:
        print_note("the same command goes on with it")
        raise
    for note in found["notes"]:
        print_note(note)
    if as_json:
        print_result(found)
    else:
        sys.stdout.write("".join(f"{found['folder']}/{file}\n" for file in found["files"]))
    if found["failed"]:
        raise report_failures(FedobpError("\n".join(found["failed"])))


def _split(text: str | None) -> list[str]:
    return [] if text is None else list(dict.fromkeys(part.strip() for part in text.split(",")))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FedobpError(f"--alpha must be numbers separated by commas, not '{short(text)}'") from None


def _methods(text: str | None) -> Sequence[str]:
    from fedobp.algorithms import METHODS, method_class

    names = list(METHODS) if text == "all" else _split(text)
    for one in names:
        method_class(one)  # an unknown name is refused
    return names


def _print_list(as_json: bool) -> None:
    from rich.table import Table

    from fedobp.paper.registry import EXPERIMENTS

    rows: list[dict[str, Any]] = [
        {
            "name": one.name, "summary": one.summary, "datasets": list(one.datasets), "alphas": list(one.alphas),
            "beyond_the_paper": one.beyond,
        }
        for one in EXPERIMENTS.values()
    ]  # fmt: skip
    if as_json:
        print_result({"experiments": rows})
        return
    table, beyond = Table("experiment", "what it measures", box=None), False
    for row in rows:
        if row["beyond_the_paper"] and not beyond:
            table.add_row()
            table.add_row("[bold]beyond the paper[/bold]")
        beyond = row["beyond_the_paper"]
        table.add_row(row["name"], row["summary"])
    print_result(table)
