"""A sweep in a folder: planned once (`sweep_plan.py`), trained launch by launch, continued after an interruption.

What is finished is skipped, and an unfinished launch goes on from its newest checkpoint. Several processes may work in
one folder: a launch that another one is training is left to it.
"""

import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from traceback import clear_frames

from fedobp.callbacks import Callback
from fedobp.checkpoint import NEVER, Interval
from fedobp.config import Config
from fedobp.csv_rows import write_rows
from fedobp.data import Dataset
from fedobp.errors import LESS_MEMORY, FedobpError, TryAgain, out_of_memory, short
from fedobp.files import folder_path, holder, lock, unwritable, write_json
from fedobp.launch import Progress, StopTraining
from fedobp.report.tidy import history_rows, tidy_rows
from fedobp.result import Failure, Result
from fedobp.saved_runs import SavedRun, read_run
from fedobp.storage import release, write_result
from fedobp.sweep_plan import WHOLE, Outcome, Shard, Sweep, plan_file, plan_folder, read_plan
from fedobp.sweeps import SweepPlan, plan_sweep, sweep

Train = Callable[..., Outcome]  # `train_launches`, or what does the same elsewhere


def write_tables(folder: Path, runs: Iterable[SavedRun]) -> None:
    """Write the results of all runs as tidy files."""
    runs = list(runs)
    write_rows(folder / "results.csv", [row for run in runs for row in tidy_rows(run)])
    write_rows(folder / "history.csv", [row for run in runs for row in history_rows(run)])


def resume_sweep(
    folder: str | Path,
    runs: Mapping[str, Config],
    *,
    file: str = "sweep.toml",
    launches: Sequence[Sequence[str]] | None = None,
    memory: float | None = None,
    minutes: float | None = None,
    most: int | None = None,
    shard: Shard = WHOLE,
    dataset: Dataset | None = None,
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint_every: int | None = None,
    train: Train | None = None,
) -> Outcome:
    """Train the runs that a folder does not hold yet, and return all of them.

    `launches` says which of them share a launch; otherwise all do that can, at most `most`, as many as fit into
    `memory` GiB (None: the configuration's); a folder that has a plan keeps the memory of that plan. After `minutes`,
    training stops with a checkpoint. A checkpoint is taken every minute, or every `checkpoint_every` rounds (0: none).
    `dataset` is that of the first run, if it is read already; one in memory is that of all runs.
    """
    folder, interval = folder_path(folder, "folder"), Interval(checkpoint_every)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    created, is_new = not folder.exists(), not (folder / file).exists()
    plan, refused, bug = plan_folder(folder / file, runs, launches, most, dataset, memory)
    if plan is None:
        return Outcome(failed=refused, bug=bug)
    plan.record()
    found = None
    try:
        chosen = train or partial(train_launches, interval=interval)
        found = chosen(plan, plan.part(runs, shard), deadline, progress, callbacks)
    finally:
        if is_new and shard.count == 1 and (found is None or found.failed):
            release(folder, file, list(plan.configs), created)  # if no run could start, the folder can be used again
    return plan.outcome(list(runs), {**refused, **found.failed}, bug or found.bug)


def train_launches(
    plan: Sweep,
    launches: Sequence[Sequence[str]],
    deadline: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    interval: Interval = NEVER,
) -> Outcome:
    """Train launches of a plan that are not done, one after the other; return failures and the first bug."""
    due = [launch for launch in launches if not all(map(plan.is_done, launch))]
    names = [name for launch in due for name in launch]
    places = {name: at for at, name in enumerate(names)}
    together = [[places[name] for name in launch] for launch in due]
    resolved = plan_sweep([plan.configs[name] for name in names], together, names=names, datasets=plan.datasets)
    failed = {names[run]: one for run, one in zip(sorted(resolved.failures), resolved.failed(), strict=True)}
    bug = resolved.bug()
    for launch in due:
        if deadline is not None and time.monotonic() >= deadline:
            break
        if not failed.keys().isdisjoint(launch):
            continue  # without a run that cannot start now, the others' bytes would not be those of the plan
        with lock(plan.lock_file(launch)) as is_mine:
            if not is_mine or all(map(plan.is_done, launch)):
                continue
            try:
                some, report = resolved.only([places[name] for name in launch]), _within(deadline, progress)
                results = _train(plan, some, report, callbacks, interval)
            except StopTraining:
                break
            except Exception as error:
                if not out_of_memory(error):
                    raise
                clear_frames(error.__traceback__)  # they hold what the next launch needs
                failed |= {name: _no_memory(plan, name, len(launch)) for name in launch if not plan.is_done(name)}
                continue
        for name, result in results.items():
            if isinstance(result, Failure):
                failed[name] = result
                is_bug = result.exception is not None and not isinstance(result.exception, FedobpError)
                bug = bug or (result.exception if is_bug else None)
    return Outcome(failed=failed, bug=bug)


def _no_memory(plan: Sweep, name: str, runs: int) -> Failure:
    """Return a failure that is not recorded: called again, the sweep goes on with this run."""
    config, folder = plan.configs[name], shlex.quote(str(plan.folder))
    what, less = "this run", LESS_MEMORY
    if runs > 1:
        what, less = f"{runs} runs side by side", "make a new sweep with a smaller --store-memory"
    error = f"there is not enough memory for {what}: free some and call `fedobp sweep {folder}`, or {less}"
    return Failure(config.method, config.seed, error, config)


def _train(
    plan: Sweep,
    launch: SweepPlan,
    progress: Callable[[Progress], None],
    callbacks: Sequence[Callback],
    interval: Interval,
) -> dict[str, Result | Failure]:
    """Train one launch, from its checkpoints if there are any; runs that have finished are not written again."""
    folders = [plan.path(name) for name in launch.names]
    results = sweep(
        launch,
        out=folders,
        progress=progress,
        callbacks=callbacks,
        keep_models=False,
        interval=interval,
        resume=True,
        failures="return",
    )
    for folder, result in zip(folders, results, strict=True):
        if isinstance(result, Failure) and not (folder / "result.json").exists():
            folder.mkdir(exist_ok=True)
            write_json(folder / "failed.json", result.to_json())
    return dict(zip(launch.names, results, strict=True))


def _within(deadline: float | None, progress: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
    """Return a function that passes progress on, and stops training after the deadline."""

    def report(at: Progress) -> None:
        if progress:
            progress(at)
        if deadline is not None and time.monotonic() >= deadline:
            raise StopTraining

    return report


def estimate(plan: Sweep, launches: Iterable[Sequence[str]]) -> Iterator[float]:
    """Yield about how many seconds each launch takes, from three of its rounds; nothing is written.

    Launches that differ in seeds only are measured once.
    """
    known: dict[object, float] = {}
    for launch in launches:
        configs = [plan.configs[name] for name in launch]
        kind = tuple(replace(config, seed=0, partition_seed=0) for config in configs)
        if kind not in known:
            known[kind] = _measure(configs)
        yield known[kind]


def _measure(configs: Sequence[Config]) -> float:
    """Return about how many seconds a launch takes: the first round compiles, the third one is evaluated."""
    short_runs = [replace(one, rounds=3, eval_every=3, protocol="default", save_models="none") for one in configs]
    times = [time.perf_counter()]

    def report(at: Progress) -> None:
        if at.round == len(times):
            times.append(time.perf_counter())

    sweep(short_runs, launches=[list(range(len(configs)))], progress=report, keep_models=False, failures="return")
    if len(times) < 4:
        return math.nan
    first, second, third = (after - before for before, after in pairwise(times))
    rounds = max(config.rounds for config in configs)
    evaluations = max(math.ceil(config.rounds / config.eval_every) for config in configs)
    return max(0.0, first - second) + rounds * second + evaluations * max(0.0, third - second)


def collect(folder: Path, sources: Sequence[Path]) -> Sweep:
    """Bring the finished runs of one sweep's parts into one folder, and return its plan."""
    plans = [read_plan(plan_file(source)) for source in sources]
    first = max(plans, key=lambda plan: len(plan.configs))
    for plan in plans:
        if not first.extends(plan):
            raise FedobpError(
                f"{short(first.folder, 200)} and {short(plan.folder, 200)} are not of one sweep: their plans differ"
            )
    target = replace(first, file=folder / first.file.name)
    known = read_plan(target.file) if target.file.exists() else None
    if known and known.extends(first):
        target = known  # it has got more runs since
    elif known and not first.extends(known):
        raise FedobpError(f"{short(folder, 200)} holds another sweep, whose plan differs: choose another folder")
    else:
        target.record()
    for plan in plans:
        if plan.folder.resolve() != folder.resolve():
            for launch in plan.launches:
                _collect_launch(plan, target, launch)
    return target


def _collect_launch(plan: Sweep, target: Sweep, launch: Sequence[str]) -> None:
    """Copy what is finished of a launch and not in the target, unless a process is training it there."""

    def due() -> list[str]:
        return [name for name in launch if plan.is_done(name) and not (target.path(name) / "result.json").exists()]

    if not due():
        return
    with lock(target.lock_file(launch)) as is_mine:
        if not is_mine:
            who, run = holder(target.lock_file(launch)), short(target.path(launch[0]), 200)
            raise TryAgain(f"{who} trains {run}: wait until it ends, or end it, and collect again")
        for name in due():
            copy_run(plan.path(name), target.path(name))


def copy_run(source: Path, target: Path) -> None:
    """Copy a run's folder; the copy appears whole."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part)
        if (part / "result.json").exists():
            write_result(part, {**read_run(source).result, "out": str(target)})
        shutil.rmtree(target, ignore_errors=True)
        part.replace(target)
    except FedobpError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    except OSError as error:
        raise unwritable(target, error) from error
