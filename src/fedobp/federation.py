"""A federation of clients, and the loop that walks runs of methods through their rounds."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from traceback import clear_frames, walk_tb
from typing import Literal, TypeVar

import torch

from fedobp.algorithms import Option, blaming, method_class
from fedobp.config import Config
from fedobp.course import Run
from fedobp.data import (
    Dataset,
    FederatedData,
    Shard,
    changed,
    data_dir,
    describe,
    digest,
    load,
    load_partition,
    partition,
)
from fedobp.engine import Budget, Engine, Lanes, Serial, caught, dtype_of, memory_of
from fedobp.errors import FedobpError, described
from fedobp.models import Model
from fedobp.result import Result
from fedobp.storage import claim

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """Where a run is: passed to the caller after every round."""

    method: str
    round: int
    rounds: int
    accuracy: float | None  # pooled, of the newest evaluation
    run: int = 0  # which of several runs


def deal(config: Config, dataset: Dataset | None = None) -> tuple[Dataset, list[Shard]]:
    """Load a dataset, unless it is given, and deal it out to clients: as a saved partition says, or anew.

    Where the partition changes clients' inputs, the dataset that comes back has the changed ones.
    """
    dataset = dataset or load(config.dataset, data_dir(config.data_dir))
    if config.partition_file:
        shards = load_partition(Path(config.partition_file), dataset)
    else:
        shards = partition(
            dataset.y,
            config.clients,
            kind=config.partition,
            options=config.partition_options,
            alpha=config.alpha,
            seed=config.partition_seed,
            val_ratio=config.val_ratio,
            holdout=config.holdout_clients,
            natural=dataset.clients,
        )
    return changed(dataset, shards), shards


class Federation:
    """Clients with their data, and the model they train: built once, to run any number of methods on.

    Made `beside` another one of the same dataset, it shares that one's samples instead of loading them again.
    """

    _dataset: Dataset
    data: FederatedData
    partition: str  # its hash

    def __init__(self, config: Config | None = None, *, beside: "Federation | None" = None) -> None:
        self.config = config = config or Config()
        device, dtype = torch.device(config.device), dtype_of(config.precision)
        if beside and _samples(beside.config) == _samples(config):
            self._dataset, self.data, self.partition = beside._dataset, beside.data, beside.partition
            if _partition(beside.config) != _partition(config):
                _, shards = deal(config, self._dataset)
                self.data = beside.data.dealt_again(self._dataset, shards, config.normalize)
                self.partition = digest(self._dataset, shards)
        else:
            self._dataset, shards = deal(config)
            self.data = FederatedData(self._dataset, shards, device, dtype, config.normalize)
            self.partition = digest(self._dataset, shards)
        self.model = Model(config.model, self.data.shape, self.data.classes)

    def run(
        self,
        method: str | None = None,
        *,
        out: str | Path | None = None,
        progress: Callable[[Progress], None] | None = None,
        **options: Option,
    ) -> Result:
        """Train a method (the configuration's, unless another is named) and return what it gave.

        `options` are the method's own, such as `q=0.999`. With `out`, the run is written to that folder.
        """
        config, method = self.config, method or self.config.method
        kept = config.options if method == config.method else {}
        config = replace(config, method=method, options={**kept, **options})
        [result] = _launch([(self, config, None if out is None else _folder(out))], progress or (lambda _: None))
        if isinstance(result, BaseException):
            raise result
        return result


@dataclass(frozen=True)
class Failure:
    """A run that failed, and why, in one sentence."""

    method: str
    seed: int | None  # None: a method of which no run could be planned
    error: str


class SweepError(FedobpError):
    """Some runs of a sweep failed; all others have finished.

    `results` has None in the place of each run that failed, `failed` says what went wrong, run by run. The text has a
    line for each cause.
    """

    def __init__(self, results: Sequence[Result | None], failed: Sequence[Failure]) -> None:
        self.results, self.failed = list(results), list(failed)
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        causes: dict[tuple[str, str], list[int | None]] = {}
        for one in self.failed:
            causes.setdefault((one.method, one.error), []).append(one.seed)
        if not any(self.results) and len({error for _, error in causes}) == 1:
            return [self.failed[0].error]  # what concerns every run is said once
        return [f"{method}{_seeds(seeds)}: {error}" for (method, error), seeds in causes.items()]


def _seeds(seeds: Sequence[int | None]) -> str:
    known = [str(seed) for seed in seeds if seed is not None]
    return f", seed{'s' * (len(known) > 1)} {', '.join(known)}" if known else ""


def sweep(
    configs: Iterable[Config],
    *,
    out: Sequence[str | Path] | None = None,
    progress: Callable[[Progress], None] | None = None,
    keep_models: bool = True,
    launches: Sequence[Sequence[int]] | None = None,
) -> list[Result]:
    """Run many configurations, as many as possible at once, and return their results in the same order.

    Runs that share dataset, model, batch size and machine settings share a launch: their clients train side by side,
    whatever their seeds, partitions, methods and numbers. With `out`, each run is written to a folder of its own.
    Without `keep_models`, results hold the global model only, and not every client's. `launches` says which runs share
    a launch, by their positions in `configs`, instead of `launches_of`. A run that fails does not end the others: when
    they have finished, `SweepError` is raised, which holds their results.
    """
    configs = list(configs)
    launches = launches_of(configs) if launches is None else _checked_launches(launches, configs)
    if out is not None:
        out = _folders(out, len(configs))
    results: list[Result | None] = [None] * len(configs)
    failures: dict[int, BaseException] = {}
    federation: Federation | None = None
    for launch in launches:
        plans = {}
        for run in launch:
            made = caught(partial(Federation, configs[run], beside=federation))
            if isinstance(made, BaseException):
                failures[run] = made
            else:
                federation = made
                plans[run] = made, configs[run], Path(out[run]) if out else None

        def report(at: Progress, runs: Sequence[int] = tuple(plans)) -> None:
            if progress:
                progress(replace(at, run=runs[at.run]))

        for run, result in zip(plans, _launch(list(plans.values()), report, keep_models), strict=True):
            if isinstance(result, BaseException):
                failures[run] = result
            else:
                # Whole personal models of every run would fill the memory.
                results[run] = result if keep_models else replace(result, models=result.models.without_clients())
    if failures:
        bugs = [error for error in failures.values() if not isinstance(error, FedobpError)]
        failed = [
            Failure(configs[run].method, configs[run].seed, _sentence(error)) for run, error in sorted(failures.items())
        ]
        raise SweepError(results, failed) from (bugs[0] if bugs else None)
    return [result for result in results if result is not None]


def _sentence(error: BaseException) -> str:
    """Return what to say about a run's end; a bug of the library is named by its place."""
    if isinstance(error, FedobpError):
        return str(error)
    *_, (frame, line) = walk_tb(error.__traceback__)
    return f"{described(error)} ({frame.f_code.co_filename}:{line})"


def _folder(out: str | Path) -> Path:
    if not str(out).strip():
        raise FedobpError("`out` is empty: name a folder, or leave it out")
    return Path(out)


def _folders(out: Sequence[str | Path], runs: int) -> list[Path]:
    """Return the folders of a sweep's runs, each of its own and free, or say what is wrong with them."""
    if isinstance(out, str | Path) or len(out) != runs:
        raise FedobpError(f"`out` must name a folder for each of the {runs} runs")
    folders = [_folder(one) for one in out]
    if len(set(folders)) < runs:
        raise FedobpError("`out` names a folder twice: give each run one of its own")
    return [claim(folder) for folder in folders]


def _samples(config: Config) -> tuple[object, ...]:
    """Return what the samples in memory depend on; a partition by features makes samples of its own."""
    own = str((config.dealt, config.partition_file)) if config.partition == "feature" else None
    return config.dataset, config.data_dir, config.device, dtype_of(config.precision), own


def _partition(config: Config) -> tuple[object, ...]:
    return config.dealt, config.partition_file, config.normalize


def _machine(config: Config) -> tuple[object, ...]:
    """Return what runs of one launch must have in common."""
    machine = (config.engine, config.precision, config.lane_memory, config.store_memory)
    return _samples(config), config.model, config.batch_size, machine


def launches_of(configs: Sequence[Config]) -> list[list[int]]:
    """Return which runs share a launch: all that can, as many at once as find room for their clients' state."""
    groups: dict[object, list[int]] = {}
    for run, config in enumerate(configs):
        groups.setdefault(_machine(config), []).append(run)
    launches = []
    for group in groups.values():
        room = caught(partial(_room, [configs[run] for run in group]))
        most = 1 if isinstance(room, BaseException) else room  # then each of these runs fails with that error
        launches += [group[at : at + most] for at in range(0, len(group), most)]
    return launches


def _checked_launches(launches: Sequence[Sequence[int]], configs: Sequence[Config]) -> list[list[int]]:
    """Return launches that name every run once, and together only runs that can train side by side."""
    if sorted(run for launch in launches for run in launch) != list(range(len(configs))):
        raise FedobpError(f"`launches` must name each of the {len(configs)} runs once")
    for launch in launches:
        for run in launch[1:]:
            if _machine(configs[run]) != _machine(configs[launch[0]]):
                first, other = configs[launch[0]], configs[run]
                raise FedobpError(
                    f"{first.method}, seed {first.seed}, and {other.method}, seed {other.seed}, cannot share a launch: "
                    "their samples, model, batch size or machine settings differ"
                )
    return [list(launch) for launch in launches]


def _room(configs: Sequence[Config]) -> int:
    """Return how many runs find room for their clients' state at once.

    That is up to three vectors a client: its record on the server, its own, and its last model.
    """
    config = configs[0]
    info = describe(config.dataset, data_dir(config.data_dir))
    *sides, channels = info.shape if len(info.shape) == 3 else (*info.shape, 1)
    model = Model(config.model, info.shape if len(info.shape) == 1 else (channels, *sides), info.classes)
    vector = model.layout.size * dtype_of(config.precision).itemsize
    most = max(one.clients for one in configs)
    return max(1, int(memory_for(config, "store") / (3 * vector * most)))


def memory_for(config: Config, what: Literal["lane", "store"]) -> float:
    """Return a budget in bytes: the stated one, or a share of the machine's memory."""
    stated = config.lane_memory if what == "lane" else config.store_memory
    return stated * 2**30 or memory_of(torch.device(config.device)) / (2 if what == "lane" else 4)


def batch_size_for(config: Config, data: Iterable[FederatedData]) -> int:
    """Return the most samples that a batch can hold: the batch size, or all training samples of the largest client."""
    most = max(one.size(client, "train") for one in data for client in range(one.clients))
    if most >= config.batch_size:
        return config.batch_size
    warnings.warn(
        f"--batch-size {config.batch_size} is more than any client's training samples: they are one batch",
        stacklevel=2,
    )
    return max(2, most)


def engine_for(config: Config, model: Model, batch: int | None = None) -> Engine:
    """Return the engine that a configuration names; `batch` is the most samples that a batch can hold."""
    batch = config.batch_size if batch is None else batch
    if config.engine == "serial":
        return Serial(model, batch, config.precision)
    return Lanes(model, batch, config.precision, memory_for(config, "lane"))


def _launch(
    plans: Sequence[tuple[Federation, Config, Path | None]],
    progress: Callable[[Progress], None],
    keep_models: bool = True,
) -> list[Result | BaseException]:
    """Train runs side by side, round by round; one that fails leaves the others alone."""
    if not plans:
        return []
    last = time.perf_counter()
    first, config, _ = plans[0]
    engine = engine_for(config, first.model, batch_size_for(config, [federation.data for federation, _, _ in plans]))
    budget = Budget(memory_for(config, "store"))
    launch = [config for _, config, _ in plans]
    runs: dict[int, Run] = {}
    ended: dict[int, Result | BaseException] = {}

    def attempt(at: int, step: Callable[[], T]) -> T | None:
        """Take a step of a run; what it raises ends this run alone."""

        def blame() -> T:
            with blaming(method_class(launch[at].method)):
                return step()

        done = caught(blame)
        if not isinstance(done, BaseException):
            return done
        runs.pop(at, None)
        ended[at] = done
        if len(plans) > 1:  # the others need the memory that its frames hold
            for error in (done, done.__cause__):
                clear_frames(error.__traceback__ if error else None)
        return None

    def going(round: int) -> list[tuple[int, Run]]:
        return [(at, run) for at, run in runs.items() if round <= run.config.rounds]

    for at, (federation, config, out) in enumerate(plans):
        given = (
            config,
            federation.model,
            federation.data,
            budget,
            engine,
            federation.partition,
            out,
            keep_models,
            launch,
        )
        if run := attempt(at, partial(Run, *given)):
            runs[at] = run
    for round in range(1, max(config.rounds for config in launch) + 1):
        if not going(round):
            break
        clock, before = time.perf_counter(), engine.counters
        for at, run in going(round):
            attempt(at, partial(run.begin_round, round))
        while turning := [(at, run) for at, run in going(round) if run.turns]:
            tasks = {at: task for at, run in turning if (task := attempt(at, run.begin_turn))}
            for at, answer in zip(tasks, engine.attempt(list(tasks.values())), strict=True):
                attempt(at, partial(runs[at].end_turn, answer))
        coming = [attempt(at, partial(run.next_task, round + 1)) for at, run in going(round + 1)]
        engine.prepare([task for task in coming if task])
        trained, done = time.perf_counter() - clock, engine.counters - before
        for at, run in going(round):
            attempt(at, run.evaluate_and_log)
        now = time.perf_counter()
        times = {"round": round, "train": trained, "all": now - clock, "runs": len(going(round))}
        for at, run in going(round):
            attempt(at, partial(run.log_times, {**times, "occupancy": done.occupancy}))
            run.seconds += (now - last) / times["runs"]  # side by side, each has an equal share
            progress(Progress(run.config.method, round, run.config.rounds, run.accuracy, at))
        last = now
    for at, run in list(runs.items()):
        if result := attempt(at, run.finish):
            ended[at] = result
    return [ended[at] for at in range(len(plans))]
