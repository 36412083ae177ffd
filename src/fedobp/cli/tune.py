"""`fedobp tune`: search for the tile shapes of this machine's card."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from fedobp.cli.output import print_result
from fedobp.cli.progress import task_progress
from fedobp.cli.settings import Json, KernelPrecisionFlag, kernel_precision
from fedobp.errors import FedobpError


def tune(
    *,
    precision: KernelPrecisionFlag = "bf16",
    seconds: Annotated[float, typer.Option(help="About how long to search; 0: only time the shapes in use.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Search for the fused kernels' tile shapes on this machine's card, and keep them for later runs.

    A run on a card without a table does this by itself for up to a minute. Results of runs depend on the table in
    their last bits; config.toml names it by its hash.

    [bold]Examples[/bold]

    \b
    fedobp tune
    fedobp tune --precision tf32 --seconds 120
    fedobp tune --seconds 0
    """
    chosen = kernel_precision(precision)
    if not 0 <= seconds <= 86_400:
        raise FedobpError("--seconds must be between 0 and 86,400")
    import torch

    from fedobp.doctor import tune_card
    from fedobp.report.machine import tune_table

    if not torch.cuda.is_available():
        raise FedobpError("fedobp tune needs a CUDA card that torch can use, and there is none here")
    with task_progress(), redirect_stdout(sys.stderr):  # what Triton prints
        found = tune_card(chosen, seconds)
    print_result(found if as_json else tune_table(found))
