"""A federation of clients, and the loop that walks runs of methods through their rounds."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from fedobp.algorithms import Option
from fedobp.config import Config
from fedobp.course import Run
from fedobp.data import (
    Dataset,
    FederatedData,
    Shard,
    changed,
    data_dir,
    digest,
    load,
    load_partition,
    partition,
)
from fedobp.engine import Budget, Engine, Lanes, Serial, dtype_of, memory_of
from fedobp.errors import FedobpError
from fedobp.models import Model
from fedobp.result import Result
from fedobp.runs import claim

_LARGE_BATCH = 1024  # whose padding no machine minds


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
        if isinstance(result, FedobpError):
            raise result
        return result


def sweep(
    configs: Iterable[Config],
    *,
    out: Sequence[str | Path] | None = None,
    progress: Callable[[Progress], None] | None = None,
    keep_models: bool = True,
) -> list[Result]:
    """Run many configurations, as many as possible at once, and return their results in the same order.

    Runs that share dataset, model, batch size and machine settings share a launch: their clients train side by side,
    whatever their seeds, partitions, methods and numbers. With `out`, each run is written to a folder of its own.
    Without `keep_models`, results hold the global model only, and not every client's.
    """
    configs = list(configs)
    if out is not None:
        out = _folders(out, len(configs))
    results: dict[int, Result] = {}
    failures: list[FedobpError] = []
    for alike in _alike(configs):
        federation = Federation(configs[alike[0]])
        most = _room(federation, [configs[run] for run in alike])
        for at in range(0, len(alike), most):
            together = alike[at : at + most]
            plans = []
            for run in together:
                federation = Federation(configs[run], beside=federation)
                plans.append((federation, configs[run], Path(out[run]) if out else None))

            def report(at: Progress, together: list[int] = together) -> None:
                if progress:
                    progress(replace(at, run=together[at.run]))

            for run, result in zip(together, _launch(plans, report, keep_models), strict=True):
                if isinstance(result, FedobpError):
                    failures.append(_named(configs[run], result))
                else:
                    # Whole personal models of every run would fill the memory.
                    results[run] = result if keep_models else replace(result, models=result.models.without_clients())
    if failures:
        raise failures[0]  # when all others have finished and are written down
    return [results[run] for run in range(len(configs))]


def _named(config: Config, failure: FedobpError) -> FedobpError:
    return FedobpError(f"{config.method}, seed {config.seed}: {failure}")


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


def _alike(configs: Sequence[Config]) -> list[list[int]]:
    """Group the runs that can share a launch."""
    groups: dict[object, list[int]] = {}
    for run, config in enumerate(configs):
        machine = (config.engine, config.precision, config.lane_memory, config.store_memory)
        groups.setdefault((_samples(config), config.model, config.batch_size, machine), []).append(run)
    return list(groups.values())


def _room(federation: Federation, configs: Sequence[Config]) -> int:
    """Return how many runs find room for their clients' state at once.

    That is up to three vectors a client: its record on the server, its own, and its last model.
    """
    vector = federation.model.layout.size * federation.data.dtype.itemsize
    most = max(config.clients for config in configs)
    return max(1, int(memory_for(federation.config, "store") / (3 * vector * most)))


def memory_for(config: Config, what: Literal["lane", "store"]) -> float:
    """Return a budget in bytes: the stated one, or a share of the machine's memory."""
    stated = config.lane_memory if what == "lane" else config.store_memory
    return stated * 2**30 or memory_of(torch.device(config.device)) / (2 if what == "lane" else 4)


def engine_for(config: Config, model: Model, batch: int | None = None) -> Engine:
    """Return the engine that a configuration names, with its batch size unless another is given."""
    batch = batch or config.batch_size
    if config.engine == "serial":
        return Serial(model, batch, config.precision)
    return Lanes(model, batch, config.precision, memory_for(config, "lane"))


def batch_for(config: Config, data: Iterable[FederatedData]) -> int:
    """Return the batch size, or the largest client's samples where it is far beyond them: engines pad batches."""
    largest = max(one.size(client, "train") for one in data for client in range(one.clients))
    return min(config.batch_size, max(_LARGE_BATCH, largest))


def _launch(
    plans: Sequence[tuple[Federation, Config, Path | None]],
    progress: Callable[[Progress], None],
    keep_models: bool = True,
) -> list[Result | FedobpError]:
    """Train runs side by side, round by round; one that fails leaves the others alone."""
    last = time.perf_counter()
    first, config, _ = plans[0]
    engine = engine_for(config, first.model, batch_for(config, (federation.data for federation, _, _ in plans)))
    budget = Budget(memory_for(config, "store"))
    runs = [
        Run(config, federation.model, federation.data, budget, engine, federation.partition, out, keep_models)
        for federation, config, out in plans
    ]
    failures: dict[int, FedobpError] = {}
    for round in range(1, max(run.config.rounds for run in runs) + 1):
        clock, before = time.perf_counter(), engine.counters
        going = {at: run for at, run in enumerate(runs) if round <= run.config.rounds and at not in failures}
        if not going:
            break
        for run in going.values():
            run.begin_round(round)
        while turning := [run for run in going.values() if run.turns]:
            tasks = [run.begin_turn() for run in turning]
            for run, answer in zip(turning, engine.train(tasks), strict=True):
                run.end_turn(answer)
        engine.prepare([run.next_task(round + 1) for run in going.values() if round < run.config.rounds])
        trained, done = time.perf_counter() - clock, engine.counters - before
        for at, run in going.items():
            try:
                run.evaluate_and_log()
            except FedobpError as error:
                failures[at] = error
            progress(Progress(run.config.method, round, run.config.rounds, run.accuracy, at))
        now = time.perf_counter()
        times = {"round": round, "train": trained, "all": now - clock, "runs": len(going)}
        for run in going.values():
            run.log_times({**times, "occupancy": done.occupancy})
            run.seconds += (now - last) / len(going)  # side by side, each has an equal share
        last = now
    return [failures[at] if at in failures else run.finish() for at, run in enumerate(runs)]
