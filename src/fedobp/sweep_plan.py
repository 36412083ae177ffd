"""The plan of a sweep in a folder: which runs it has, resolved, and which of them share a launch.

The plan (`sweep.toml`, of a comparison `compare.toml`) is written once. A run's last bits depend on its launch, so
launches are never regrouped; runs that are added later get launches of their own.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedobp.config import TABLES, Config
from fedobp.data import Dataset
from fedobp.errors import FedobpError, short
from fedobp.federation import is_of, source_key, with_dataset
from fedobp.files import write
from fedobp.grouping import memory_for
from fedobp.plugins import label
from fedobp.resolution import absolute_path
from fedobp.result import Failure
from fedobp.saved_runs import SavedRun, read_run
from fedobp.storage import claim, provenance
from fedobp.sweep_file import check_count, check_name, read_sweep_file, to_toml
from fedobp.sweeps import plan_sweep

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


WHOLE = Shard()


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

    def part(self, names: Iterable[str], shard: Shard = WHOLE) -> list[Sequence[str]]:
        """Return the launches of a shard that have any of these runs."""
        asked = set(names)
        return [launch for at, launch in enumerate(self.launches) if shard.has(at) and not asked.isdisjoint(launch)]

    def _read(self, name: str) -> SavedRun:
        """Return a finished run, whose settings must be those of the plan, and its data that which is given now."""
        run = read_run(self.path(name))
        data = self.datasets.get(source_key(self.configs[name]))
        if data is not None and data.in_memory and not is_of(run.result.get("notes"), data):
            raise FedobpError(
                f"{short(run.folder, 200)} was trained with other data than what is given: give the same, or use "
                "another folder"
            )
        if not run.config.is_same(self.configs[name]):
            raise FedobpError(
                f"{short(run.folder, 200)} has other settings than {short(self.file.name)} says: put back the run or "
                "the plan, or remove the run's folder, and it is trained again"
            )
        return run

    def outcome(self, names: Sequence[str], others: Mapping[str, Failure], bug: BaseException | None = None) -> Outcome:
        """Return what has become of some runs; `others` are failures of runs that are not in the plan."""
        runs, failed, missing = {}, dict[str, Failure](), []
        for name in names:
            if name in others:
                failed[name] = others[name]
            elif name not in self.configs:
                missing.append(name)
            elif (self.path(name) / "result.json").exists():
                runs[name] = self._read(name)
            elif (self.path(name) / "failed.json").exists():
                failed[name] = read_failure(self.path(name) / "failed.json", self.configs[name])
            else:
                missing.append(name)
        return Outcome(runs, failed, missing, bug)


def plan_file(folder: Path) -> Path:
    """Return the plan in the folder of a sweep."""
    for name in PLAN_FILES:
        if (folder / name).is_file():
            return folder / name
    raise FedobpError(f"{short(folder, 200)} holds no sweep: give the folder of one, with its {PLAN_FILES[0]}")


def read_plan(file: Path) -> Sweep:
    """Return the plan of a folder."""
    found = read_sweep_file(file)
    if found.launches is None or found.memory is None:
        raise FedobpError(f"{short(file, 200)} is no plan of a sweep, it has no `launches`: choose another --out")
    return Sweep(file, {name: Config(**run) for name, run in found.runs.items()}, found.launches, found.memory)


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
    check_count(len(new) + len(known.configs if known else ()), f"the sweep in {short(file.parent, 200)}")
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


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def read_failure(path: Path, config: Config) -> Failure:
    """Return the failure of a run."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Failure(config.method, config.seed, short(found["error"], 1000), config)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FedobpError(f"{short(path, 200)} is damaged: remove it, and the run is trained again") from error
