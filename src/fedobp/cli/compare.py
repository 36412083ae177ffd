"""`fedobp compare`: train several methods under one protocol."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedobp.cli.output import print_result, report_failures
from fedobp.cli.progress import round_progress
from fedobp.cli.settings import (
    SETTINGS,
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
from fedobp.config import Config, run_name
from fedobp.errors import FedobpError, short, unknown

if TYPE_CHECKING:
    from fedobp.callbacks import Callback
    from fedobp.data import Dataset
    from fedobp.method import Method
    from fedobp.result import Failure, Result
    from fedobp.sweeps import SweepPlan

_MOST_RUNS = 1_000


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
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train several methods under one protocol and print one table.

    An option given with --set applies to every method that has it. If a method fails, the others continue.

    [bold]Examples[/bold]

    \b
    fedobp compare
    fedobp compare --methods fedobp,fedavg-last,fedavg-ft --seeds 4 --rounds 30
    fedobp compare --methods all --rounds 2
    fedobp compare --dataset fmnist --alpha 0.5 --json
    fedobp compare --config runs/NAME/compare.toml
    """
    from fedobp.comparison import read_comparison, to_toml
    from fedobp.files import write_json
    from fedobp.report.tables import compare_table, summarise
    from fedobp.storage import claim, new_run_folder, provenance, release
    from fedobp.sweeps import SweepError, plan_sweep
    from fedobp.trackers import trackers_named

    failed: list[Failure] = []
    launches = dataset = None
    trackers = trackers_named(track or [])
    if config:
        _refuse_flags(context, "config", "out", "track", "as_json")
        requested, launches = read_comparison(config)
    else:
        common = {
            **given,
            "partition_options": parse_pairs("--partition-set", partition_set),
            "model_options": parse_pairs("--model-set", model_set),
        }
        with redirect_stdout(sys.stderr):  # what code of the user prints
            requested, failed, dataset = _requested(common, methods, seeds, method_options(set_, q))
    made, refused = _make_configs(requested)
    with redirect_stdout(sys.stderr):
        plan = plan_sweep(made.values(), _launches(made, launches), dataset)
    positions = list(made)
    refused |= {positions[run]: one for run, one in zip(sorted(plan.failures), plan.failed(), strict=True)}
    failed += [refused[position] for position in sorted(refused)]
    bug = plan.bug()
    plan = plan.without_failures()
    if not plan.configs:
        raise report_failures(SweepError([], failed), bug)
    configs = list(plan.configs.values())
    head = f"# Repeat with: fedobp compare --config compare.toml\n{provenance()}"
    new = out is None or not out.exists()
    folder = out or new_run_folder(f"compare-{configs[0].dataset}")
    claim(folder, "compare.toml", head + to_toml(configs, plan.launches))
    names = list(map(run_name, configs))
    try:
        callbacks = [tracker(folder / tracker.subfolder) for tracker in trackers]
        found, failures, training_bug = _train(plan, [folder / name for name in names], callbacks)
    finally:
        released = release(folder, "compare.toml", names, new)  # if no run has started, the folder can be used again
    failed += failures
    results = [result for result in found if result is not None]
    content: dict[str, Any] = {"runs": [result.to_json() for result in results], "table": summarise(results)}
    if failed:
        content["failed"] = [failure.to_json() for failure in failed]
    if not released:
        write_json(folder / "compare.json", content)
    if results:
        print_result(content if as_json else compare_table(results), f"Run folder: {folder}")
    if failed:
        raise report_failures(SweepError(results, failed), bug or training_bug)


def _refuse_flags(context: typer.Context, *allowed: str) -> None:
    """Refuse all flags on the command line that are not allowed."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in allowed:
            raise FedobpError(f"--config repeats a comparison as it was: leave out {parameter.opts[0]}")


def _requested(
    given: Mapping[str, Any], methods: str, seeds: int, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], "list[Failure]", "Dataset"]:
    """Return the settings of every run of a comparison, the methods that cannot be loaded, and the dataset."""
    from fedobp.algorithms import names
    from fedobp.federation import read
    from fedobp.resolution import resolve

    first = given.get("seed", Config.seed)
    span = range(first, first + seeds)
    count = len(names()) if methods == "all" else methods.count(",") + 1
    if count * seeds > _MOST_RUNS:
        raise FedobpError(
            f"--seeds {short(seeds)} of {count} methods are more than the {_MOST_RUNS:,} runs that a comparison may "
            "have: use fewer, and several comparisons with other values of --seed"
        )
    # An error that concerns all runs is raised here, once.
    asked = Config(**{**given, "seed": span[-1], "method": "fedavg"})
    loaded, failed = _load_methods(methods, span)
    fields = {name: [spec.name for spec in method.options()] for name, method in loaded.items()}
    if not failed:
        _check_options(options, fields)
    dataset = read(asked)
    common, _ = resolve(asked, dataset)
    note_chosen(given, common)
    given = {**given, "clients": common.clients, "alpha": common.alpha}
    chosen = {name: {option: options[option] for option in options if option in fields[name]} for name in loaded}
    requested = [{**given, "seed": seed, "method": name, "options": chosen[name]} for seed in span for name in loaded]
    return requested, failed, dataset


def _load_methods(methods: str, seeds: Sequence[int]) -> "tuple[dict[str, type[Method]], list[Failure]]":
    """Return the methods by name, and a failure for each run of one that cannot be loaded."""
    from fedobp.algorithms import METHODS, available, method_class, names
    from fedobp.result import Failure

    failed: list[Failure] = []
    if methods == "all":
        loaded, broken = available()
        for name, error in broken.items():
            failed += [Failure(name, seed, str(error)) for seed in ([None] if name in METHODS else seeds)]
        return loaded, failed
    loaded = {}
    for name in dict.fromkeys(name.strip() for name in methods.split(",")):
        try:
            loaded[name] = method_class(name)
        except FedobpError as error:
            if name not in names():
                raise
            failed += [Failure(name, seed, str(error)) for seed in seeds]
    return loaded, failed


def _check_options(options: Iterable[str], fields: Mapping[str, Sequence[str]]) -> None:
    """Refuse an option that none of the methods has."""
    for option in options:
        if not any(option in names for names in fields.values()):
            existing = sorted({name for names in fields.values() for name in names})
            if not existing:
                raise FedobpError(f"none of these methods has options, so '{short(option)}' cannot be set")
            raise unknown("option of these methods", option, existing)


def _make_configs(requested: Sequence[Mapping[str, Any]]) -> "tuple[dict[int, Config], dict[int, Failure]]":
    """Return the valid configurations by position in `requested`, and a failure for each invalid one."""
    from fedobp.result import Failure

    made: dict[int, Config] = {}
    failed: dict[int, Failure] = {}
    for position, settings in enumerate(requested):
        try:
            made[position] = Config(**settings)
        except FedobpError as error:
            failed[position] = Failure(settings["method"], settings["seed"], str(error))
    return made, failed


def _launches(made: Mapping[int, Config], launches: Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    """Return the launches of a file by index into the valid configurations, without the runs that are invalid."""
    if launches is None:
        return None
    positions = {position: index for index, position in enumerate(made)}
    kept = [[positions[position] for position in launch if position in made] for launch in launches]
    return [launch for launch in kept if launch]


def _train(
    plan: "SweepPlan", folders: Sequence[Path], callbacks: "Sequence[Callback]"
) -> "tuple[Sequence[Result | None], list[Failure], BaseException | None]":
    """Train all runs; return their results (None for a failed run), the failures, and the first bug among them."""
    from fedobp.sweeps import SweepError, sweep

    configs = plan.configs
    label = f"{len(configs)} runs"
    try:
        with round_progress(len(configs), configs[0].rounds) as advance, redirect_stdout(sys.stderr):  # plugins' output
            results = sweep(
                plan,
                out=folders,
                progress=lambda at: advance(label, replace(at, accuracy=None)),
                callbacks=callbacks,
                keep_models=False,
            )
    except SweepError as error:
        return error.results, error.failed, error.__cause__
    return results, [], None
