"""`fedobp sweep`: train a grid of runs. `fedobp collect`: bring the parts of one sweep together."""

import math
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedobp.cli.output import print_result
from fedobp.cli.progress import task_progress
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
from fedobp.cli.sweeping import (
    Asked,
    check_minutes,
    make_configs,
    print_outcome,
    refuse_flags,
    runs_from_flags,
    train_and_print,
)
from fedobp.errors import FedobpError, short, unknown

if TYPE_CHECKING:
    from fedobp.sweep_folder import Train
    from fedobp.sweep_plan import Shard


@with_settings(*(name for name in SETTINGS if name != "method"), save_models="none")
def sweep(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.toml|FOLDER]", help="A sweep file; or a sweep's folder, to continue it."),
    ] = None,
    *,
    given: Mapping[str, Any],
    methods: Annotated[str, typer.Option(help="Methods, separated by commas; `all`: all methods.")] = "fedobp",
    seeds: Annotated[int, typer.Option(help="Number of seeds: the seed, the seed + 1, ...", min=1)] = 1,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V1,V2,...", help="Values of a setting, or of an option of methods; repeatable."),
    ] = None,
    set_: Set = None,
    q: Q = None,
    partition_set: PartitionSet = None,
    model_set: ModelSet = None,
    out: Out = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop cleanly after this long; `fedobp sweep FOLDER` goes on.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Train part I of N of the launches only, such as 1/4.")
    ] = None,
    checkpoint_every: CheckpointEvery = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ray[:ADDRESS]", help="Train on Ray: a cluster on this machine, or the one at an address."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be trained and how long it takes here; write nothing.")
    ] = False,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train a grid of runs into one folder, as many side by side as fit.

    Called again for the same folder, it goes on. With --val-ratio, values are compared on the validation parts.

    [bold]Examples[/bold]

    \b
    fedobp sweep --grid q=0.9,0.99,0.999 --seeds 3 --val-ratio 0.2
    fedobp sweep --methods fedobp,fedavg --grid alpha=0.1,0.5 --grid dataset=mnist,fmnist
    fedobp sweep grid.toml --out runs/grid --dry-run
    fedobp sweep grid.toml --out runs/grid --max-minutes 60
    fedobp sweep runs/grid
    fedobp sweep grid.toml --out runs/grid --shard 1/4
    fedobp sweep grid.toml --out runs/grid --on ray:10.0.0.1:6379
    """
    from fedobp.sweep_file import read_sweep_file

    check_minutes(max_minutes)
    if max_minutes is not None and checkpoint_every == 0:
        raise FedobpError("--max-minutes stops with a checkpoint, and --checkpoint-every 0 takes none: leave out one")
    part, name, train = _shard(shard), "sweep", _trainer(on)
    if source:
        allowed = ("source", "out", "max_minutes", "checkpoint_every", "shard", "on", "dry_run", "track", "as_json")
        refuse_flags(context, "the file says what is trained", *allowed)
        if source.is_dir():
            if out:
                raise FedobpError("--out is not used when a sweep is continued in its folder: leave it out")
            out, source = source, _plan_in(source)
            name = source.stem
        found = read_sweep_file(source)
        asked = Asked(found.runs, found.launches, found.memory)
    else:
        common = {
            **given,
            "partition_options": parse_pairs("--partition-set", partition_set),
            "model_options": parse_pairs("--model-set", model_set),
        }
        with redirect_stdout(sys.stderr):  # what code of the user prints
            asked = runs_from_flags(common, methods, seeds, method_options(set_, q), grid or [])
    if dry_run:
        _print_plan(asked, out, name, part, as_json)
    else:
        train_and_print(
            asked, out, name, minutes=max_minutes, shard=part, train=train, checkpoint_every=checkpoint_every,
            track=track, as_json=as_json,
        )  # fmt: skip


def collect(
    folder: Annotated[Path, typer.Argument(help="The folder to bring the runs into; it may be one of the parts.")],
    parts: Annotated[list[Path], typer.Argument(help="Folders of parts of one sweep, trained with --shard.")],
    as_json: Json = False,
) -> None:
    """Bring the finished runs of one sweep's parts into one folder, and print its table.

    [bold]Examples[/bold]

    \b
    fedobp collect runs/grid runs/grid-1 runs/grid-2
    """
    from fedobp.sweep_folder import collect as collect_runs

    plan = collect_runs(folder, parts)
    outcome = plan.outcome(list(plan.configs), {})
    print_outcome(folder, plan.file.stem, outcome, list(outcome.failed.values()), as_json)


def _plan_in(folder: Path) -> Path:
    from fedobp.sweep_plan import plan_file

    return plan_file(folder)


def _shard(text: str | None) -> "Shard":
    from fedobp.sweep_plan import Shard

    if text is None:
        return Shard()
    index, _, count = text.partition("/")
    numbers = text.isascii() and index.isdecimal() and count.isdecimal()
    if not numbers or not 1 <= int(index) <= int(count) <= 10_000:
        raise FedobpError(f"--shard {short(text)} must be written I/N with I from 1 to N, such as --shard 1/4")
    return Shard(int(index), int(count))


def _trainer(on: str | None) -> "Train | None":
    """Return what trains launches; None: this process."""
    if on is None:
        return None
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise unknown("value of --on", kind, ["ray"])
    from fedobp.on_ray import train_on_ray

    return partial(train_on_ray, address=address or None)


def _print_plan(asked: Asked, out: Path | None, name: str, shard: "Shard", as_json: bool) -> None:
    """Print what would be trained, launch by launch, and about how long it takes; nothing is written."""
    from fedobp.cli.output import report_failures
    from fedobp.report.plans import plan_table
    from fedobp.sweep_folder import estimate
    from fedobp.sweep_plan import plan_folder
    from fedobp.sweeps import SweepError

    configs, refused = make_configs(asked.runs)
    folder = out or Path("a new folder")
    with redirect_stdout(sys.stderr):
        file = folder / f"{name}.toml"
        plan, more, bug = plan_folder(file, configs, asked.launches, dataset=asked.dataset, memory=asked.memory)
        failed = [*asked.unloadable, *({**refused, **more}).values()]
        if plan:
            launches = plan.part(configs, shard)
            due = [launch for launch in launches if not all(map(plan.is_done, launch))]
            with task_progress() as advance:
                seconds, times = [], estimate(plan, due)
                for at in range(len(due)):
                    advance(f"measuring launch {at + 1} of {len(due)}", at / len(due))
                    seconds.append(next(times))
    if plan:
        rows = [
            {"runs": list(launch), "seconds": None if math.isnan(time) else time}
            for launch, time in zip(due, seconds, strict=True)
        ]
        finished = sum(plan.is_done(run) for launch in launches for run in launch)
        content = {"launches": rows, "finished": finished, "memory_gib": plan.memory}
        print_result(content if as_json else plan_table(content))
    if failed:
        raise report_failures(SweepError([], failed), bug)
