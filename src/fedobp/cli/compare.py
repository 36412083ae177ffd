"""`fedobp compare`: train several methods under one protocol, as a sweep over methods and seeds."""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from fedobp.cli.settings import (
    SETTINGS,
    CheckpointEvery,
    Json,
    ModelSet,
    Out,
    PartitionSet,
    Q,
    Set,
    Track,
    method_options,
    parse_pairs,
    with_settings,
)
from fedobp.cli.sweeping import Asked, refuse_flags, runs_from_flags, train_and_print


@with_settings(*(name for name in SETTINGS if name != "method"), save_models="none")
def compare(
    context: typer.Context,
    *,
    given: Mapping[str, Any],
    methods: Annotated[
        str, typer.Option(help="Methods to compare, separated by commas; `all`: all methods.")
    ] = "fedobp,fedavg,fedavg-last,local,fedper",
    seeds: Annotated[int, typer.Option(help="Number of seeds: the seed, the seed + 1, ...", min=1)] = 1,
    set_: Set = None,
    q: Q = None,
    partition_set: PartitionSet = None,
    model_set: ModelSet = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            help="The compare.toml of another comparison, to repeat it byte for byte; only --out, --track and --json "
            "are allowed with it.",
        ),
    ] = None,
    out: Out = None,
    checkpoint_every: CheckpointEvery = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train several methods under one protocol and print one table.

    An option given with --set applies to every method that has it. If a method fails, the others continue. Called
    again with the same --out, it trains what is missing there.

    [bold]Examples[/bold]

    \b
    fedobp compare
    fedobp compare --methods fedobp,fedavg-last,fedavg-ft --seeds 4 --rounds 30
    fedobp compare --methods all --rounds 2
    fedobp compare --dataset fmnist --alpha 0.5 --json
    fedobp compare --config runs/NAME/compare.toml
    """
    from fedobp.sweep_file import read_sweep_file

    if config:
        refuse_flags(
            context, "--config repeats a comparison as it was", "config", "out", "checkpoint_every", "track", "as_json"
        )
        found = read_sweep_file(config)
        asked = Asked(found.runs, found.launches, found.memory)
    else:
        common = {
            **given,
            "partition_options": parse_pairs("--partition-set", partition_set),
            "model_options": parse_pairs("--model-set", model_set),
        }
        with redirect_stdout(sys.stderr):  # what code of the user prints
            asked = runs_from_flags(common, methods, seeds, method_options(set_, q))
    train_and_print(asked, out, "compare", checkpoint_every=checkpoint_every, track=track, as_json=as_json)
