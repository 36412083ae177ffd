"""`fedobp doctor`: what this machine has, for bug reports."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from fedobp.cli.output import print_result
from fedobp.cli.progress import task_progress
from fedobp.cli.settings import Json, KernelPrecisionFlag, kernel_precision


def doctor(
    *,
    card: Annotated[
        str | None,
        typer.Option(metavar="X.Y", help="Answer for a card of this compute capability, which need not be there."),
    ] = None,
    precision: KernelPrecisionFlag = "bf16",
    data_dir: Annotated[
        str | None, typer.Option(help="Folder that holds datasets (default: $FEDOBP_DATA, or the cache folder)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show versions, the card, whether the fused kernels are on and why, data, memory and disk.

    Add its output to a bug report.

    [bold]Examples[/bold]

    \b
    fedobp doctor
    fedobp doctor --json
    fedobp doctor --card 8.6
    """
    chosen = kernel_precision(precision)
    from fedobp.doctor import examine
    from fedobp.report.machine import doctor_table

    with task_progress(), redirect_stdout(sys.stderr):  # what Triton prints
        found = examine(card, chosen, data_dir)
    print_result(found if as_json else doctor_table(found))
