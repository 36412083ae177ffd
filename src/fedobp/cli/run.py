"""`fedobp run`: train one method on a federation."""

import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedobp.cli.output import print_note, print_result
from fedobp.cli.progress import round_progress
from fedobp.cli.settings import (
    SETTINGS,
    CheckpointEvery,
    ConfigFile,
    Json,
    ModelSet,
    Out,
    PartitionSet,
    Q,
    Set,
    Track,
    method_options,
    note_chosen,
    parse_pairs,
    with_settings,
)
from fedobp.cli.sweeping import refuse_flags
from fedobp.config import TABLES, Config, read_config
from fedobp.errors import FedobpError, Stopped, short


@with_settings(*SETTINGS)
def run(
    context: typer.Context,
    *,
    given: Mapping[str, Any],
    set_: Set = None,
    q: Q = None,
    partition_set: PartitionSet = None,
    model_set: ModelSet = None,
    config: ConfigFile = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Go on with a run that was interrupted, in its folder."),
    ] = None,
    out: Out = None,
    checkpoint_every: CheckpointEvery = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train one method on a federation and write a run folder.

    [bold]Examples[/bold]

    \b
    fedobp run
    fedobp run --method fedper --rounds 20 --clients 10 --alpha 0.5
    fedobp run --dataset cifar10 --q 0.9999 --set score=product --protocol paper
    fedobp run --model conv --model-set depth=3
    fedobp run --model mynets:wide --dataset cifar10
    fedobp run --config runs/NAME/config.toml
    fedobp run --track tensorboard
    fedobp run --resume runs/NAME
    """
    from fedobp.federation import Federation, read
    from fedobp.report.tables import run_table
    from fedobp.resolution import resolve
    from fedobp.storage import new_run_folder
    from fedobp.trackers import trackers_named

    if resume:
        refuse_flags(context, "--resume goes on as it began", "resume", "checkpoint_every", "track", "as_json")
        out, config = resume, unfinished(resume)
    base = read_config(config) if config else {}
    partition_options = parse_pairs("--partition-set", partition_set)
    merged = _merged(base, given, method_options(set_, q), partition_options, parse_pairs("--model-set", model_set))
    asked = Config(**merged)
    trackers = trackers_named(track or [])
    with redirect_stdout(sys.stderr):  # what code of the user prints
        dataset = read(asked)
        resolved, method = resolve(asked, dataset)
        note_chosen(merged, resolved)
        federation = Federation.resolved(dataset, resolved, method)
    folder = out or new_run_folder(f"{resolved.method}-{resolved.dataset}-seed{resolved.seed}")
    try:
        with round_progress(1) as advance, redirect_stdout(sys.stderr):  # what plugins print
            callbacks = [tracker(folder / tracker.subfolder) for tracker in trackers]
            result = federation.run(
                out=folder,
                progress=partial(advance, resolved.method),
                callbacks=callbacks,
                checkpoint_every=checkpoint_every,
                resume=resume is not None,
            )
    except Stopped:
        if (folder / "checkpoint").is_dir():
            print_note(f"fedobp run --resume {shlex.quote(str(folder))} goes on with it")
        raise
    finally:
        if out is None:
            with suppress(OSError):  # the new folder is empty only if the run could not start
                folder.rmdir()
    print_result(result.to_json() if as_json else run_table(result), f"Run folder: {folder}")


def unfinished(folder: Path) -> Path:
    """Return the settings of a run that has not finished."""
    if (folder / "result.json").exists():
        raise FedobpError(f"the run in {short(folder, 200)} has finished: fedobp report {short(folder, 200)} shows it")
    if not (folder / "config.toml").is_file():
        raise FedobpError(f"there is no run in {short(folder, 200)}: give the folder of a run that was interrupted")
    if whole := sweep_of(folder):
        raise FedobpError(f"the run in {short(folder, 200)} is one of a sweep: `fedobp sweep {whole}` goes on with it")
    return folder / "config.toml"


def sweep_of(folder: Path) -> Path | None:
    """Return the folder of the sweep that a run belongs to; None: to none."""
    from fedobp.sweep_plan import plan_file, read_plan

    run = folder.resolve()
    try:
        plan = read_plan(plan_file(run.parent))
    except FedobpError:  # there is no plan
        return None
    return folder.parent if run.name in plan.configs else None


def _merged(base: Mapping[str, Any], given: Mapping[str, Any], *options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration file with those of the command line on top.

    The file's options of the method, the partition and the model are kept if that is the same.
    """
    merged = {**base, **given}
    for name, table, more in zip(("method", "partition", "model"), TABLES, options, strict=True):
        same = merged.get(name) == base.get(name, merged.get(name))
        merged[table] = {**(base.get(table, {}) if same else {}), **more}
    return merged
