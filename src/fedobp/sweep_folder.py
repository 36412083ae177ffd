"""A sweep in a folder: planned once, trained launch by launch, and continued after an interruption.

The plan (`sweep.toml`, of a comparison `compare.toml`) holds every run and the launches. A run's last bits depend on
its launch, so launches are never regrouped: what is finished is skipped, an unfinished launch goes on from its newest
checkpoint, and runs that are added later get launches of their own. Several processes may work in one folder: a
launch that another one is training is left to it.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedobp.callbacks import Callback
from fedobp.checkpoint import NEVER, Interval
from fedobp.config import TABLES, Config
from fedobp.csv_rows import write_rows
from fedobp.data import Dataset
from fedobp.errors import FedobpError, short
from fedobp.federation import folder_path, source_key, with_dataset
from fedobp.files import lock, unwritable, write, write_json
from fedobp.grouping import memory_for
from fedobp.launch import Progress, StopTraining
from fedobp.plugins import label
from fedobp.report.tidy import history_rows, tidy_rows
from fedobp.resolution import absolute_path
from fedobp.result import Failure, Result
from fedobp.saved_runs import SavedRun, read_run
from fedobp.storage import claim, provenance, release, write_result
from fedobp.sweep_file import check_name, read_sweep_file, to_toml
from fedobp.sweeps import SweepPlan, plan_sweep, sweep

GIB = 2**30
PLAN_FILES = ("sweep.toml", "compare.toml")


@dataclass(frozen=True)
class Outcome:
    """What has become of the runs of a sweep, by name."""

    runs: dict[str, SavedRun] = field(default_factory=dict)  # finished
    failed: dict[str, Failure] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # not done: out of time, another shard's, or another process'
    bug: BaseException | None = None  # the first failure that is no user error


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` (from 1) of a sweep's launches."""

    index: int = 1
    count: int = 1

    def has(self, launch: int) -> bool:
        """Say whether a launch belongs to this part."""
        return launch % self.count == self.index - 1


@dataclass(frozen=True)
class Sweep:
    """The recorded plan of a sweep, with its runs resolved."""

    file: Path
    configs: Mapping[str, Config]
    launches: Sequence[Sequence[str]]
    memory: float  # GiB
    datasets: Mapping[tuple[object, ...], Dataset] = field(default_factory=dict, repr=False, compare=False)  # opened

    @property
    def folder(self) -> Path:
        """The folder that holds the runs."""
        return self.file.parent

    def path(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.folder / name

    def lock_file(self, launch: Sequence[str]) -> Path:
        """Return the file that is locked while a launch is trained."""
        return self.folder / f".{launch[0]}.lock"

    def is_done(self, name: str) -> bool:
        """Say whether a run has finished or failed."""
        return any((self.path(name) / file).exists() for file in ("result.json", "failed.json"))

    def to_toml(self) -> str:
        """Return the plan's file, with a head."""
        return f"# Repeat with: fedobp sweep {self.file.name}\n{provenance()}" + to_toml(
            self.configs, self.launches, self.memory
        )

    def record(self) -> None:
        """Write the plan into its folder; of several processes that begin a sweep, one does."""
        text = self.to_toml()
        if not self.file.exists():
            try:
                claim(self.folder, self.file.name, text)
            except FedobpError:
                if not self.file.exists():  # the folder holds something else
                    raise
        if _without_comments(self.file.read_text(encoding="utf-8")) != _without_comments(text):
            if not self.extends(read_plan(self.file)):
                raise FedobpError(
                    f"another process has planned {short(self.file, 200)} otherwise: give both the same runs and "
                    "--store-memory, or each an --out of its own"
                )
            write(self.file, text.encode())

    def extends(self, other: "Sweep") -> bool:
        """Say whether this plan has all of another one, with its launches first."""
        own = {name: config.hash for name, config in self.configs.items()}
        same = all(own.get(name) == config.hash for name, config in other.configs.items())
        return same and list(self.launches[: len(other.launches)]) == list(other.launches)

    def part(self, names: Iterable[str], shard: Shard = Shard()) -> list[Sequence[str]]:
        """Return the launches of a shard that have any of these runs."""
        asked = set(names)
        return [launch for at, launch in enumerate(self.launches) if shard.has(at) and not asked.isdisjoint(launch)]

    def outcome(self, names: Sequence[str], others: Mapping[str, Failure], bug: BaseException | None = None) -> Outcome:
        """Return what has become of some runs; `others` are failures of runs that are not in the plan."""
        runs, failed, missing = {}, dict[str, Failure](), []
        for name in names:
            if name in others:
                failed[name] = others[name]
            elif name not in self.configs:
                missing.append(name)
            elif (self.path(name) / "result.json").exists():
                runs[name] = read_run(self.path(name))
            elif (self.path(name) / "failed.json").exists():
                failed[name] = _read_failure(self.path(name) / "failed.json", self.configs[name])
            else:
                missing.append(name)
        return Outcome(runs, failed, missing, bug)


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
    shard: Shard = Shard(),
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
    folder = folder_path(folder)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    created, is_new = not folder.exists(), not (folder / file).exists()
    plan, refused, bug = plan_folder(folder / file, runs, launches, most, dataset, memory)
    if plan is None:
        return Outcome(failed=refused, bug=bug)
    plan.record()
    found = None
    try:
        chosen = train or partial(train_launches, interval=Interval(checkpoint_every))
        found = chosen(plan, plan.part(runs, shard), deadline, progress, callbacks)
    finally:
        if is_new and shard.count == 1 and (found is None or found.failed):
            release(folder, file, list(plan.configs), created)  # if no run could start, the folder can be used again
    return plan.outcome(list(runs), {**refused, **found.failed}, bug or found.bug)


def plan_folder(
    file: Path,
    runs: Mapping[str, Config],
    launches: Sequence[Sequence[str]] | None = None,
    most: int | None = None,
    dataset: Dataset | None = None,
    memory: float | None = None,
) -> tuple[Sweep | None, dict[str, Failure], BaseException | None]:
    """Return the plan of a folder with all runs that can start (None: none can), and failures of those that cannot."""
    for name in runs:
        check_name(name, "the list of runs")
    if dataset and dataset.in_memory:
        runs = {name: with_dataset(config, dataset) for name, config in runs.items()}
    known = read_plan(file) if file.exists() else None
    new = {name: config for name, config in runs.items() if known is None or name not in known.configs}
    if known:
        asked = {name: config for name, config in runs.items() if name in known.configs}
        for name, config in asked.items():
            _check_same(file, name, config, known.configs[name])
        configs = {**known.configs, **{name: _with_code(known.configs[name], asked[name]) for name in asked}}
        known = replace(known, configs=configs)
    if known and dataset:
        read = list(runs.values())[: None if dataset.in_memory else 1]
        known = replace(known, datasets={source_key(config): dataset for config in read})
    if not new:
        return known, {}, None
    names = list(new)
    places = None
    if launches is not None:
        kept = ([names.index(name) for name in launch if name in new] for launch in launches)
        places = [launch for launch in kept if launch]
    memory = known.memory if known else memory
    found = plan_sweep(new.values(), places, dataset, names=names, memory=memory and memory * GIB, most=most)
    refused = {names[run]: one for run, one in zip(sorted(found.failures), found.failed(), strict=True)}
    if not found.configs:
        return known, refused, found.bug()
    configs = {names[run]: config for run, config in found.configs.items()}
    memory = memory or memory_for(next(iter(configs.values())), "store") / GIB
    grouped = [[names[run] for run in launch] for launch in found.launches]
    if known:
        configs, grouped = {**known.configs, **configs}, [*map(list, known.launches), *grouped]
    return Sweep(file, configs, grouped, memory, found.datasets), refused, found.bug()


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
        for name, result in results.items():
            if isinstance(result, Failure):
                failed[name] = result
                is_bug = result.exception is not None and not isinstance(result.exception, FedobpError)
                bug = bug or (result.exception if is_bug else None)
    return Outcome(failed=failed, bug=bug)


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


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def read_plan(file: Path) -> Sweep:
    """Return the plan of a folder."""
    found = read_sweep_file(file)
    if found.launches is None or found.memory is None:
        raise FedobpError(f"{short(file, 200)} is no plan of a sweep, it has no `launches`: choose another --out")
    return Sweep(file, {name: Config(**run) for name, run in found.runs.items()}, found.launches, found.memory)


_FREE = ("data_dir", "save_models")  # settings that may differ between two calls


def _check_same(file: Path, name: str, asked: Config, known: Config) -> None:
    """Refuse a run whose settings are not those that the plan has; what is not given is decided by the plan."""
    given = {spec.name: getattr(asked, spec.name) for spec in fields(Config) if spec.name not in (*TABLES, *_FREE)}
    pairs = [(key, value, getattr(known, key)) for key, value in given.items() if value not in (None, "auto")]
    for table in TABLES:
        pairs += [(key, value, getattr(known, table).get(key)) for key, value in getattr(asked, table).items()]
    for key, value, recorded in pairs:
        if not _is_same(key, value, recorded):
            raise FedobpError(
                f"{short(file.parent, 200)} has the run {name} with {key} = {short(_plain(recorded))}, not "
                f"{short(_plain(value))}: choose another --out"
            )


def _is_same(key: str, value: Any, recorded: Any) -> bool:
    """Say whether a given value is the recorded one: flags give options as texts, and a file by any path."""
    if isinstance(value, str) and isinstance(recorded, int | float):
        with suppress(ValueError):
            return float(value) == recorded
    if key == "partition_file" and recorded is not None:
        return absolute_path(key, value) == Path(recorded)
    return bool(_plain(value) == _plain(recorded))


def _with_code(known: Config, asked: Config) -> Config:
    """Return recorded settings with the functions that are given again: not every one can be imported."""
    given = {name: getattr(asked, name) for name in ("model", "partition")}
    return replace(known, **{name: value for name, value in given.items() if callable(value)})


def _plain(value: Any) -> Any:
    """Return a setting's value; a function is a reference to it."""
    return label(value) if callable(value) else value


def _read_failure(path: Path, config: Config) -> Failure:
    """Return the failure of a run."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Failure(config.method, config.seed, short(found["error"], 1000), config)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FedobpError(f"{short(path, 200)} is damaged: remove it, and the run is trained again") from error


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
        if plan.folder.resolve() == folder.resolve():
            continue
        for name in plan.configs:
            if plan.is_done(name) and not (target.path(name) / "result.json").exists():
                copy_run(plan.path(name), target.path(name))
    return target


def plan_file(folder: Path) -> Path:
    """Return the plan in the folder of a sweep."""
    for name in PLAN_FILES:
        if (folder / name).is_file():
            return folder / name
    raise FedobpError(f"{short(folder, 200)} holds no sweep: give the folder of one, with its {PLAN_FILES[0]}")


def copy_run(source: Path, target: Path) -> None:
    """Copy a run's folder; the copy appears whole."""
    part = target.with_name(f".{target.name}.part")
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
