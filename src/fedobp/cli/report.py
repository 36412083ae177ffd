"""`fedobp report` and `fedobp plot`: finished runs as a page, and as single figures."""

from pathlib import Path
from typing import Annotated

import typer

from fedobp.cli.output import print_result
from fedobp.cli.progress import task_progress
from fedobp.cli.settings import Json
from fedobp.errors import FedobpError, unknown

Folders = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, comparisons or sweeps.", show_default=False)
]


def report(
    folders: Folders,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="File to write (default: report.html in the folder).")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page (default: methods and datasets).")] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML file with tables and figures of finished runs; it opens in any browser, without a network.

    A report that is there is replaced; any other file is not.

    [bold]Examples[/bold]

    \b
    fedobp report runs/NAME
    fedobp report runs/ONE runs/TWO --out both.html --title "Two learning rates"
    """
    from fedobp.cli.sweeping import notes_of
    from fedobp.report.page import write_report
    from fedobp.saved_runs import find_runs

    path = out or _inside(folders, "report.html")
    with task_progress() as advance:
        runs = find_runs(folders)
        advance(f"drawing {len(runs):,} runs", 0.3)
        notes = [note for one in {folder.resolve(): folder for folder in folders} for note in notes_of(one, runs)]
        write_report(path, runs, title=title, notes=notes)
    if as_json:
        print_result({"out": str(path), "runs": len(runs), "bytes": path.stat().st_size})
    else:
        print_result(f"Report of {len(runs):,} run{'s' * (len(runs) > 1)}: {path}")


def plot(
    folders: Folders,
    figure: Annotated[
        str, typer.Option(metavar="accuracy|clients|layers|bytes|time", help="What to plot.")
    ] = "accuracy",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="A .png, .pdf or .svg (default: FIGURE.png in the folder).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plot one figure of finished runs into a file, as wide as a paper's column.

    accuracy: over the rounds, with a band over seeds. clients: of each client, sorted, beside FedAvg and Local-Only.
    layers: personal parameters by layer, over rounds and by client. bytes, time: of a round. A figure that this command
    has written is replaced; any other file is not.

    [bold]Examples[/bold]

    \b
    fedobp plot runs/NAME
    fedobp plot runs/ONE runs/TWO --figure clients --out clients.pdf
    """
    from fedobp.report.page import check_writable
    from fedobp.report.plots import FIGURES, FORMATS, MARK, plot_runs, save_plot
    from fedobp.saved_runs import find_runs

    if figure not in FIGURES:
        raise unknown("figure", figure, FIGURES)
    path = out or _inside(folders, f"{figure}.png")
    with task_progress() as advance:
        runs = find_runs(folders)
        check_writable(path, FORMATS, MARK.encode())
        advance(f"drawing {len(runs):,} runs", 0.3)
        save_plot(plot_runs(runs, figure), path)
    print_result({"out": str(path), "runs": len(runs), "figure": figure} if as_json else f"Figure: {path}")


def _inside(folders: list[Path], name: str) -> Path:
    """Return where to write if the user does not say: in the only folder."""
    if len(folders) > 1:
        raise FedobpError(f"several folders are given, so say where to write: --out {name}")
    return folders[0] / name
