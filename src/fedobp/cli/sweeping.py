"""What `fedobp sweep` and `fedobp compare` share: runs from flags, training in a folder, and what is printed."""

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedobp.cli.output import print_note, print_result, report_failures
from fedobp.cli.progress import round_progress
from fedobp.cli.settings import note_chosen
from fedobp.config import Config, number_type, settings
from fedobp.errors import FedobpError, Stopped, short, unknown

if TYPE_CHECKING:
    from fedobp.data import Dataset
    from fedobp.method import Method
    from fedobp.result import Failure
    from fedobp.saved_runs import SavedRun
    from fedobp.sweep_folder import Train
    from fedobp.sweep_plan import Outcome, Shard

_MOST_RUNS = 1_000  # from flags; a file may have more
_TEXTS = [spec.name for spec in settings() if number_type(spec) is None]  # a dataset may be called 2024


@dataclass(frozen=True)
class Asked:
    """The runs that a command names."""

    runs: Mapping[str, Mapping[str, Any]]  # settings by name
    launches: Sequence[Sequence[str]] | None = None
    memory: float | None = None  # GiB for clients' state, by which launches are planned
    unloadable: "Sequence[Failure]" = ()  # runs of methods that cannot be loaded
    dataset: "Dataset | None" = field(default=None, repr=False)  # of the first run, if it is read already


def runs_from_flags(
    given: Mapping[str, Any], methods: str, seeds: int, options: Mapping[str, Any], grid: Sequence[str] = ()
) -> Asked:
    """Return the runs of all methods, seeds and listed values. An option is given to every method that has it."""
    from fedobp.algorithms import names
    from fedobp.federation import read
    from fedobp.resolution import resolve
    from fedobp.sweep_file import expand

    first = given.get("seed", Config.seed)
    span = range(first, first + seeds)
    known = [spec.name for spec in settings() if spec.name not in ("method", "seed")]
    listed = _lists(grid, known)
    for name in listed:
        if name in options or (name in given and name != "save_models"):  # which has a value without a flag
            raise FedobpError(f"{name} is given by --grid and by a flag of its own: leave out one of them")
    varied = {name: values for name, values in listed.items() if name in known}
    options = {**options, **{name: values for name, values in listed.items() if name not in known}}
    count = len(names()) if methods == "all" else methods.count(",") + 1
    if count * seeds * math.prod(map(len, listed.values())) > _MOST_RUNS:
        raise FedobpError(
            f"--seeds {short(seeds)} of {count} methods{' and these values' * bool(listed)} are more than the "
            f"{_MOST_RUNS:,} runs that flags may ask for: use fewer, or a sweep file"
        )
    values = {**given, **{name: values[0] for name, values in varied.items()}}
    # An error that concerns all runs is raised here, once.
    asked = Config(**{**values, "seed": span[-1], "method": "fedavg"})
    loaded, failed = _load_methods(methods, span)
    fields = {name: [spec.name for spec in method.options()] for name, method in loaded.items()}
    if not failed:
        _check_options([option for option in options if option not in listed], fields)
        _check_options([option for option in options if option in listed], fields, known)
    dataset = None
    if not set(varied) & {"dataset", "data_dir"}:
        dataset = read(asked)
        common, _ = resolve(asked, dataset)
        note_chosen(values, common)
    chosen = {name: {option: options[option] for option in options if option in fields[name]} for name in loaded}
    tables = {"settings": {**given, **varied, "seed": list(span)}, "methods": chosen}
    return Asked(expand(tables, Path("the flags")) if chosen else {}, unloadable=failed, dataset=dataset)


def _lists(grid: Sequence[str], known: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values that --grid lists by name; a setting may be spelled as its flag is."""
    found: dict[str, list[Any]] = {}
    for one in grid:
        name, equals, values = one.partition("=")
        name = name.strip()
        name = underscored if (underscored := name.replace("-", "_")) in known else name
        is_text = name in _TEXTS
        listed = [value.strip() if is_text else _value(value.strip()) for value in values.split(",")]
        if not equals or not name or "" in listed:
            raise FedobpError(f"--grid {short(one)} must be written NAME=V1,V2,..., such as --grid q=0.9,0.99")
        if name in ("seed", "method"):
            raise FedobpError(f"--grid {short(one)}: use --{name}s instead")
        if len(set(listed)) < len(listed) or name in found:
            raise FedobpError(f"--grid {short(one)} lists a value or a name twice: leave it out")
        found[name] = listed
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


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


def _check_options(options: Iterable[str], fields: Mapping[str, Sequence[str]], known: Sequence[str] = ()) -> None:
    """Refuse an option that none of the methods has; where settings are `known`, it may have been meant as one."""
    for option in options:
        if not any(option in names for names in fields.values()):
            existing = sorted({name for names in fields.values() for name in names})
            if known:
                raise unknown("setting or option of these methods", option, [*existing, *known])
            if not existing:
                raise FedobpError(f"none of these methods has options, so '{short(option)}' cannot be set")
            raise unknown("option of these methods", option, existing)


def check_minutes(minutes: float | None) -> None:
    """Refuse a negative time, and one that is no number."""
    if minutes is not None and not minutes >= 0:
        raise FedobpError(f"--max-minutes must be at least 0, not {short(minutes)}")


def refuse_flags(context: typer.Context, what: str, *allowed: str) -> None:
    """Refuse all flags on the command line that are not allowed beside `what`."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in allowed:
            raise FedobpError(f"{what}: leave out {parameter.opts[0]}")


def train_and_print(
    asked: Asked,
    out: Path | None,
    name: str,
    *,
    minutes: float | None = None,
    shard: "Shard | None" = None,
    train: "Train | None" = None,
    checkpoint_every: int | None = None,
    track: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Train what a folder does not hold yet, print a table of all runs, and name what failed.

    `name` is "sweep" or "compare": that of the plan's file.
    """
    from fedobp.storage import new_run_folder
    from fedobp.sweep_folder import resume_sweep
    from fedobp.sweep_plan import Shard
    from fedobp.sweeps import SweepError
    from fedobp.trackers import trackers_named

    trackers = trackers_named(track or [])
    configs, refused = make_configs(asked.runs)
    if not configs:
        raise report_failures(SweepError([], [*asked.unloadable, *refused.values()]))
    folder = out or new_run_folder(f"{name}-{next(iter(configs.values())).dataset}")
    due = [run for run in configs if not (folder / run / "result.json").exists()]
    try:
        callbacks = [tracker(folder / tracker.subfolder) for tracker in trackers]
        with round_progress(len(due)) as advance, redirect_stdout(sys.stderr):  # what code of the user prints
            outcome = resume_sweep(
                folder,
                configs,
                file=f"{name}.toml",
                launches=asked.launches,
                memory=asked.memory,
                minutes=minutes,
                shard=shard or Shard(),
                dataset=asked.dataset,
                progress=lambda at: advance(f"{len(due)} runs", replace(at, accuracy=None)),
                callbacks=callbacks,
                checkpoint_every=checkpoint_every,
                train=train,
            )
    except Stopped:
        if (folder / f"{name}.toml").exists():
            print_note(f"fedobp sweep {shlex.quote(str(folder))} goes on with it")
        raise
    finally:
        if out is None:
            with suppress(OSError):  # the new folder is empty only if no run could start
                folder.rmdir()
    failed = {**refused, **outcome.failed}
    ordered = [*asked.unloadable, *(failed[run] for run in asked.runs if run in failed)]
    print_outcome(folder, name, replace(outcome, failed=failed), ordered, as_json)


def print_outcome(
    folder: Path, name: str, outcome: "Outcome", failed: "Sequence[Failure]", as_json: bool = False
) -> None:
    """Write the tables of a sweep, print its results, and end the command with what failed.

    The tables and the report are of all runs in the folder, also of those that this command did not ask for.
    """
    from fedobp.files import write_json
    from fedobp.report.choice import choice_notes, chosen_values
    from fedobp.report.page import write_report
    from fedobp.report.tables import compare_table, summarise
    from fedobp.sweep_folder import write_tables
    from fedobp.sweep_plan import read_plan
    from fedobp.sweeps import SweepError

    results = [run.to_result() for run in outcome.runs.values()]
    choices = chosen_values(results) if name == "sweep" else []
    content: dict[str, Any] = {"runs": [result.to_json() for result in results], "table": summarise(results)}
    content |= {"chosen": choices} if choices else {}
    content |= {"failed": [failure.to_json() for failure in failed]} if failed else {}
    content |= {"missing": outcome.missing} if outcome.missing else {}
    if results:
        plan = read_plan(folder / f"{name}.toml")
        others = plan.outcome([run for run in plan.configs if run not in outcome.runs], {}).runs
        found = {**outcome.runs, **others}
        saved = [found[run] for run in plan.configs if run in found]
        write_json(folder / f"{name}.json", content)
        write_tables(folder, saved)
        table = compare_table(results)
        table.notes += choice_notes(choices)
        page = write_report(folder / "report.html", saved, notes=choice_notes(choices) + _undone(outcome))
        print_result(content if as_json else table, f"Run folder: {folder}\nReport: {page}")
    elif as_json and not failed:
        print_result(content)
    for line in _left(outcome.missing) if folder.exists() else []:  # else no run could start
        print_note(f"{line} `{shlex.join(['fedobp', 'sweep', str(folder)])}` continues.")
    if failed:
        raise report_failures(SweepError(results, failed), outcome.bug)


def notes_of(folder: Path, runs: "Sequence[SavedRun]") -> list[str]:
    """Return the notes of a report: what the runs in a sweep's folder choose, and what of its plan is not there."""
    from fedobp.report.choice import choice_notes, chosen_values
    from fedobp.sweep_plan import plan_file, read_plan

    found = [run for run in runs if run.folder.resolve().parent == folder.resolve()]
    try:
        plan = read_plan(plan_file(folder))
        rest = plan.outcome([name for name in plan.configs if not (plan.path(name) / "result.json").exists()], {})
    except FedobpError:  # the folder of a run, or of runs without a plan
        return []
    choices = chosen_values([run.to_result() for run in found]) if plan.file.name == "sweep.toml" else []
    return choice_notes(choices) + _undone(rest)


def _undone(outcome: "Outcome") -> list[str]:
    return [*(f"{run}: {failure.error}" for run, failure in outcome.failed.items()), *_left(outcome.missing)]


def _left(missing: Sequence[str]) -> list[str]:
    """Return what is not trained yet, in a sentence."""
    return [f"Not trained yet: {len(missing)} run{'s' * (len(missing) > 1)}."] if missing else []


def make_configs(
    runs: Mapping[str, Mapping[str, Any]],
) -> "tuple[dict[str, Config], dict[str, Failure]]":
    """Return the valid configurations by name, and a failure for each invalid one."""
    from fedobp.result import Failure

    made: dict[str, Config] = {}
    failed: dict[str, Failure] = {}
    for name, run in runs.items():
        try:
            made[name] = Config(**run)
        except FedobpError as error:
            seed = run.get("seed", Config.seed)
            seed = seed if isinstance(seed, int) else None
            failed[name] = Failure(str(run.get("method", Config.method)), seed, str(error))
    return made, failed
