"""`fedobp partition`: show how a dataset is partitioned over clients."""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from fedobp.cli.output import next_command, print_result, stdout_console
from fedobp.cli.settings import Json, PartitionSet, note_chosen, parse_pairs, with_settings
from fedobp.config import Config

_PARTITION_SETTINGS = (
    "dataset", "data_dir", "clients", "partition", "alpha", "partition_seed", "seed", "val_ratio", "holdout_clients",
    "partition_file",
)  # fmt: skip


@with_settings(*_PARTITION_SETTINGS)
def partition(
    *,
    given: Mapping[str, Any],
    partition_set: PartitionSet = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also plot it into a file.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="NAME", help="Also write NAME.npz and NAME.json, for --partition-file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how a dataset is partitioned over clients: labels by client, sizes and label skew.

    Options of partitions: per_client of shards, k of classes, beta of quantity; change of feature and of concept (what
    differs between clients), groups of feature and of concept, labels of feature and of concept (iid or dirichlet),
    noise and strength of feature.

    [bold]Examples[/bold]

    \b
    fedobp partition
    fedobp partition --clients 10 --alpha 0.5 --plot partition.png
    fedobp partition --dataset cifar10 --partition classes --partition-set k=3 --json
    fedobp partition --partition concept --partition-set labels=dirichlet
    fedobp partition --partition dirichlet-equal --holdout-clients 4 --save mine
    fedobp run --partition-file mine
    """
    from fedobp.data import partition_hash, save_partition
    from fedobp.federation import assign, read
    from fedobp.report.heat_map import heat_map
    from fedobp.report.partition import partition_summary, partition_title
    from fedobp.report.plot import plot_partition
    from fedobp.resolution import resolve

    asked = Config(**given, partition_options=parse_pairs("--partition-set", partition_set))
    with redirect_stdout(sys.stderr):  # what code of the user prints
        source = read(asked)
        config, _ = resolve(asked, source)
        note_chosen(given, config)
        dataset, shards = assign(config, source)
    lines = []
    if plot:
        plot_partition(dataset, shards, plot, partition_title(config))
        lines.append(f"Picture: {plot}")
    found = save_partition(save, source, shards, config.partition_settings) if save else partition_hash(source, shards)
    if save:
        lines.append(f"Saved. {next_command(config.dataset, given.get('data_dir'), '--partition-file', save)}")
    if as_json:
        print_result({**partition_summary(dataset, shards), "hash": found})
    else:
        print_result(heat_map(dataset, shards, stdout_console().width), "\n".join([f"Hash: {found}", *lines]))
