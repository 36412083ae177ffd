"""Which runs train side by side, and what engine and memory they get."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Literal

import torch

from fedobp.config import Config
from fedobp.data import PARTITIONERS, Dataset, FederatedData, partitioner
from fedobp.engine import Engine, Lanes, Serial, caught, dtype_of, memory_of
from fedobp.errors import FedobpError
from fedobp.method import Method, RoundContext, Sweep, Train
from fedobp.models import Model
from fedobp.resolution import model_for

Kind = Literal["plain", "custom", "sequential"]


def memory_for(config: Config, what: Literal["lane", "store"]) -> float:
    """Return a budget in bytes: the stated one, or a share of the machine's memory."""
    stated = config.lane_memory if what == "lane" else config.store_memory
    return stated * 2**30 or memory_of(torch.device(config.device)) / (2 if what == "lane" else 4)


def batch_size_for(config: Config, data: Iterable[FederatedData]) -> int:
    """Return the most samples that a batch can hold: the batch size, or all training samples of the largest client."""
    most = max(one.largest("train") for one in data)
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
    return Lanes(model, batch, config.precision, memory_for(config, "lane"), config.kernels)


def samples_key(config: Config) -> tuple[object, ...]:
    """Return what the samples in memory depend on; a partition that changes samples has its own."""
    own = (*config.partition_settings.values(), config.partition_file) if _changes_samples(config) else None
    return config.dataset, config.data_dir, config.device, dtype_of(config.precision), own


def _changes_samples(config: Config) -> bool:
    """Return whether a partition may change clients' samples; a saved one of the user's may."""
    if config.partition_file is not None and config.partition not in PARTITIONERS:
        return True
    return partitioner(config.partition).changes_samples()


def _launch_key(config: Config) -> tuple[object, ...]:
    """Return what runs of one launch must have in common."""
    machine = (config.engine, config.precision, config.kernels, config.lane_memory, config.store_memory)
    return samples_key(config), config.model, config.model_options, config.batch_size, machine


def group_launches(
    configs: Sequence[Config],
    methods: Sequence[Method],
    dataset: Callable[[Config], Dataset],
    memory: float | None = None,
    most: int | None = None,
) -> list[list[int]]:
    """Return which runs share a launch: all that can, as many at once as have memory for their clients' state.

    Methods of different kinds are kept apart: what trains in many short steps would hold up all others. `memory` is in
    bytes, by default that of the configuration; `most` is the most runs in a launch.
    """
    groups: dict[object, list[int]] = {}
    for run, (config, method) in enumerate(zip(configs, methods, strict=True)):
        groups.setdefault((_launch_key(config), _kind(config, method)), []).append(run)
    launches = []
    for group in groups.values():
        members = [configs[run] for run in group]
        room = caught(partial(_runs_at_once, members, dataset(members[0]), memory or memory_for(members[0], "store")))
        size = 1 if isinstance(room, BaseException) else room  # then each of these runs fails with that error
        size = min(size, most or size)
        launches += [group[at : at + size] for at in range(0, len(group), size)]
    return launches


def _kind(config: Config, method: Method) -> Kind:
    """Return how a method trains: clients in turn, with functions of its own, or as the engine does best."""
    if method.sequential:
        return "sequential"
    clients = torch.arange(2)
    ctx = RoundContext(_small_model(), 1, config.rounds, len(clients), config.epochs, clients)
    program = caught(lambda: [*method.client_update(ctx), *method.personalize(ctx)])
    if isinstance(program, BaseException):  # a plugin that needs more than this context: it will say so in its run
        return "custom"
    custom = any(isinstance(item, Sweep) or (isinstance(item, Train) and item.loss is not None) for item in program)
    return "custom" if custom else "plain"


@cache
def _small_model() -> Model:
    return Model("mlp", (4,), 2)


def check_launches(launches: Sequence[Sequence[int]], configs: Mapping[int, Config]) -> None:
    """Refuse launches of runs that cannot train side by side."""
    for launch in launches:
        for run in launch[1:]:
            if _launch_key(configs[run]) != _launch_key(configs[launch[0]]):
                first, other = configs[launch[0]], configs[run]
                raise FedobpError(
                    f"{first.method}, seed {first.seed}, and {other.method}, seed {other.seed}, cannot share a launch: "
                    "their samples, model, batch size or machine settings differ"
                )


def _runs_at_once(configs: Sequence[Config], dataset: Dataset, memory: float) -> int:
    """Return how many runs have memory for their clients' state at once.

    That is up to three vectors a client: its record on the server, its state, and its last model.
    """
    config = configs[0]
    vector = model_for(config, dataset).layout.size * dtype_of(config.precision).itemsize
    most = max(one.clients for one in configs)
    return max(1, int(memory / (3 * vector * most)))
