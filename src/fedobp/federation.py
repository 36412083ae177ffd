"""A federation: clients with their data, and the model they train, to run any number of methods on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedobp.callbacks import Callback, check_callbacks
from fedobp.config import Config
from fedobp.data import (
    Dataset,
    FederatedData,
    Shard,
    data_dir,
    load,
    load_partition,
    partition,
    partition_hash,
    with_client_inputs,
)
from fedobp.engine import dtype_of
from fedobp.errors import FedobpError
from fedobp.launch import Progress, RunPlan, samples_key, train_side_by_side
from fedobp.method import Method, Option
from fedobp.models import Model
from fedobp.resolution import check_names, resolve, with_method
from fedobp.result import Result


def read(config: Config) -> Dataset:
    """Read the dataset that settings name; what is wrong with the settings alone is refused before."""
    check_names(config)
    return load(config.dataset, data_dir(config.data_dir))


def assign(config: Config, dataset: Dataset) -> tuple[Dataset, list[Shard]]:
    """Assign a dataset's samples to clients: by a saved partition, or by a new one from the resolved settings.

    Where the partition changes clients' inputs, the dataset that comes back has the changed ones.
    """
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
    return with_client_inputs(dataset, shards), shards


class Federation:
    """Clients with their data, and the model they train: built once, to run any number of methods on.

    `config` is the resolved form of what was asked. Made `beside` another one of the same dataset, a federation shares
    its samples in memory instead of reading them again.
    """

    config: Config
    method: Method
    source: Dataset
    data: FederatedData
    partition: str  # its hash
    model: Model

    def __init__(self, config: Config | None = None, *, beside: "Federation | None" = None) -> None:
        config = config or Config()
        dataset = beside.source if beside and source_key(beside.config) == source_key(config) else read(config)
        self._build(dataset, *resolve(config, dataset), beside)

    @classmethod
    def resolved(
        cls, dataset: Dataset, config: Config, method: Method, beside: "Federation | None" = None
    ) -> "Federation":
        """Return the federation of settings that are resolved already."""
        federation = cls.__new__(cls)
        federation._build(dataset, config, method, beside)
        return federation

    def _build(self, dataset: Dataset, config: Config, method: Method, beside: "Federation | None") -> None:
        self.source, self.config, self.method = dataset, config, method
        self.data, self.partition = self._assigned(beside)
        self.model = Model(config.model, self.data.shape, self.data.classes)

    def _assigned(self, beside: "Federation | None") -> tuple[FederatedData, str]:
        """Return the clients' data and the hash of their partition."""
        config = self.config
        shares = beside is not None and samples_key(beside.config) == samples_key(config)
        if beside is not None and shares and _partition_key(beside.config) == _partition_key(config):
            return beside.data, beside.partition
        dataset, shards = assign(config, self.source)
        if beside is not None and shares:
            return beside.data.repartitioned(dataset, shards, config.normalize), partition_hash(dataset, shards)
        device, dtype = torch.device(config.device), dtype_of(config.precision)
        return FederatedData(dataset, shards, device, dtype, config.normalize), partition_hash(dataset, shards)

    def __repr__(self) -> str:
        name, clients, size = self.config.dataset, self.config.clients, self.model.layout.size
        return f"Federation({name}, {clients:,} clients, {self.model.name} of {size:,} parameters)"

    def plan(self, config: Config, method: Method, out: Path | None = None) -> RunPlan:
        """Return the plan of a run on these clients; `config` is resolved."""
        return RunPlan(config, method, self.model, self.data, self.partition, out)

    def run(
        self,
        method: str | None = None,
        *,
        out: str | Path | None = None,
        progress: Callable[[Progress], None] | None = None,
        callbacks: Sequence[Callback] = (),
        **options: Option,
    ) -> Result:
        """Train a method (the configuration's, unless another is named) and return its result.

        `options` are the method's own, such as `q=0.999`. With `out`, the run is written to that folder.
        `callbacks` are called after every round and at the end.
        """
        callbacks = check_callbacks(callbacks)
        config, configured = self.config, self.method
        if options or method not in (None, config.method):
            kept = config.options if method in (None, config.method) else {}
            config = replace(config, method=method or config.method, options={**kept, **options})
            config, configured = with_method(config)
        plan = self.plan(config, configured, None if out is None else folder_path(out))
        [result] = train_side_by_side([plan], progress or (lambda _: None), callbacks=callbacks)
        if isinstance(result, BaseException):
            raise result
        return result


def source_key(config: Config) -> tuple[object, ...]:
    """Return what a dataset is read from."""
    return config.dataset, str(data_dir(config.data_dir).absolute())


def _partition_key(config: Config) -> tuple[object, ...]:
    return config.partition_settings, config.partition_file, config.normalize


def folder_path(out: str | Path) -> Path:
    """Return a run's folder as a path; an empty one is refused."""
    if not str(out).strip():
        raise FedobpError("`out` is empty: name a folder, or leave it out")
    return Path(out)
