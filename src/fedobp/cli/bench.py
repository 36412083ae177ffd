"""`fedobp bench`: measure how fast this machine trains."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from fedobp.cli.output import print_result
from fedobp.cli.progress import task_progress
from fedobp.cli.settings import Json, ModelSet, note_chosen, parse_pairs, with_settings
from fedobp.config import Config

_BENCH_SETTINGS = (
    "dataset", "data_dir", "clients", "alpha", "model", "rounds", "participation", "epochs", "batch_size", "device",
    "precision", "kernels",
)  # fmt: skip


@with_settings(*_BENCH_SETTINGS, dataset="fmnist")
def bench(
    *,
    given: Mapping[str, Any],
    runs: Annotated[int, typer.Option(help="Runs that train side by side, each with another seed.")] = 1,
    model_set: ModelSet = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine trains, and how long a run would take.

    No data is needed: if a dataset's file is missing, random images of its shape and size replace it.

    [bold]Examples[/bold]

    \b
    fedobp bench
    fedobp bench --dataset cifar10 --runs 8 --precision tf32
    fedobp bench --dataset digits --participation 1 --seconds 10 --json
    """
    from fedobp.bench import bench as measure
    from fedobp.bench import source
    from fedobp.report.tables import bench_table
    from fedobp.resolution import resolve

    asked = Config(**given, model_options=parse_pairs("--model-set", model_set))
    dataset = source(asked)
    config, _ = resolve(asked, dataset)
    note_chosen(given, config)
    with task_progress() as advance:
        found = asdict(measure(config, runs=runs, seconds=seconds, progress=advance, dataset=dataset))
    print_result(found if as_json else bench_table(found))
