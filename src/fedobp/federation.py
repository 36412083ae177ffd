"""A federation: clients with their data, and the model they train, to run any number of methods on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedobp.algorithms import METHODS, is_declared, method_class, register_method
from fedobp.callbacks import Callback, check_callbacks
from fedobp.checkpoint import Interval
from fedobp.config import Config, run_name
from fedobp.data import (
    Dataset,
    FederatedData,
    LazyDataset,
    LazyFederatedData,
    Shard,
    data_dir,
    dataset_from_data,
    load,
    load_partition,
    partition,
    partition_hash,
    with_client_changes,
)
from fedobp.engine import dtype_of
from fedobp.errors import FedobpError, short
from fedobp.files import folder_path
from fedobp.grouping import samples_key
from fedobp.launch import Progress, RunPlan, train_side_by_side
from fedobp.method import Method, Option
from fedobp.models import Model, network
from fedobp.plugins import is_importable, label
from fedobp.resolution import check_names, model_for, resolve, with_method
from fedobp.result import Result


def read(config: Config) -> Dataset:
    """Read the dataset that settings name; what is wrong with the settings alone is refused before."""
    check_names(config)
    return load(config.dataset, data_dir(config.data_dir))


def assign(config: Config, dataset: Dataset) -> tuple[Dataset, list[Shard]]:
    """Assign a dataset's samples to clients: by a saved partition, or by a new one from the resolved settings.

    Where the partition changes clients' inputs or labels, the dataset that comes back has the changed ones.
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
            test=dataset.test,
        )
    return with_client_changes(dataset, shards), shards


class Federation:
    """Clients with their data, and the model they train: built once, to run any number of methods on.

    `config` is the resolved form of what was asked. A `dataset` in memory takes the place of the one that the settings
    name. Made `beside` another one of the same dataset, a federation shares its samples in memory instead of reading
    them again.
    """

    config: Config
    method: Method
    source: Dataset
    data: FederatedData
    partition: str  # its hash
    model: Model

    def __init__(
        self, config: Config | None = None, *, dataset: Dataset | None = None, beside: "Federation | None" = None
    ) -> None:
        config = with_dataset(Config() if config is None else config, dataset)
        if dataset is None:
            is_read = beside and not beside.source.in_memory and source_key(beside.config) == source_key(config)
            dataset = beside.source if beside and is_read else read(config)
        self._build(dataset, *resolve(config, dataset), beside)

    @classmethod
    def from_data(cls, data: Any, y: Any = None, *, config: Config | None = None, **about: Any) -> "Federation":
        """Return a federation on data in memory: arrays, tensors, a DataFrame, shards, or a function of a client.

        `data`, `y` and `about` are those of `Dataset.from_data`. Where the data says which client has a sample, these
        are the clients; otherwise the settings say how samples are assigned to clients.
        """
        return cls(config, dataset=dataset_from_data(data, y, **about))

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
        self.model = beside.model if beside and _model_key(beside) == _model_key(self) else model_for(config, dataset)

    def _assigned(self, beside: "Federation | None") -> tuple[FederatedData, str]:
        """Return the clients' data and the hash of their partition."""
        config = self.config
        shares = beside and beside.source is self.source and samples_key(beside.config) == samples_key(config)
        if beside is not None and shares and _partition_key(beside.config) == _partition_key(config):
            return beside.data, beside.partition
        if isinstance(self.source, LazyDataset):
            made = LazyFederatedData(
                self.source, config.clients, dtype_of(config.precision), seed=config.partition_seed,
                val_ratio=config.val_ratio, holdout=config.holdout_clients,
            )  # fmt: skip
            return made, made.partition_hash
        dataset, shards = assign(config, self.source)
        found = partition_hash(self.source, shards)
        if beside is not None and shares:
            return beside.data.repartitioned(dataset, shards, config.normalize), found
        device, dtype = torch.device(config.device), dtype_of(config.precision)
        return FederatedData(dataset, shards, device, dtype, config.normalize), found

    def __repr__(self) -> str:
        name, clients, size = self.config.dataset, self.config.clients, self.model.layout.size
        return f"Federation({name}, {clients:,} clients, {self.model.name} of {size:,} parameters)"

    def plan(self, config: Config, method: Method, out: Path | None = None, name: str = "") -> RunPlan:
        """Return the plan of a run on these clients; `config` is resolved."""
        notes = tuple(notes_of(config, self.source))
        name, source = name or run_name(config), self.source
        return RunPlan(
            config, method, self.model, self.data, self.partition, out, notes, name, lambda: source.content_hash
        )

    def run(
        self,
        method: str | type[Method] | None = None,
        *,
        out: str | Path | None = None,
        progress: Callable[[Progress], None] | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint_every: int | None = None,
        resume: bool = False,
        **options: Option,
    ) -> Result:
        """Train a method (the configuration's, unless another is given, by name or as a class) and return its result.

        `options` are the method's own, such as `q=0.999`. With `out`, the run is written to that folder, with a
        checkpoint every minute, or every `checkpoint_every` rounds (0: none); with `resume`, a run that was interrupted
        goes on in it. `callbacks` are called after every round and at the end.
        """
        folder, interval = None if out is None else folder_path(out, "out"), Interval(checkpoint_every)
        if resume and folder is None:
            raise FedobpError("`resume` goes on with a run in its folder: name the folder with `out`")
        method = register_method(method) if isinstance(method, type) else method
        callbacks = check_callbacks(callbacks)
        config, configured = self.config, self.method
        if options or method not in (None, config.method):
            kept = config.options if method in (None, config.method) else {}
            config = replace(config, method=method or config.method, options={**kept, **options})
            config, configured = with_method(config, self.source)
        plan = self.plan(config, configured, folder)
        shown = progress or (lambda _: None)
        [result] = train_side_by_side([plan], shown, callbacks=callbacks, interval=interval, resume=resume)
        if isinstance(result, BaseException):
            raise result
        return result


def source_key(config: Config) -> tuple[object, ...]:
    """Return what a dataset is read from."""
    return config.dataset, str(data_dir(config.data_dir).absolute())


def with_dataset(config: Config, dataset: Dataset | None) -> Config:
    """Return settings for a dataset in memory; those that name another dataset are refused."""
    if not isinstance(config, Config):
        raise FedobpError(f"settings must be a fedobp.Config, not a {type(config).__name__}: write fedobp.Config(...)")
    if not isinstance(dataset, Dataset | None):
        raise FedobpError(f"`dataset` must be a fedobp.Dataset, not a {type(dataset).__name__}: make it with from_data")
    if dataset is None:
        return config
    if config.dataset not in (Config.dataset, dataset.name):
        raise FedobpError(
            f"the settings name the dataset '{short(config.dataset)}', and data is given: leave `dataset` out of them"
        )
    return replace(config, dataset=dataset.name)


def is_of(notes: object, dataset: Dataset) -> bool:
    """Return whether the notes of a finished run name this data, which was in memory; lazy data is not compared."""
    return isinstance(dataset, LazyDataset) or f"SHA-256 {dataset.content_hash})" in str(notes)


def notes_of(config: Config, dataset: Dataset) -> list[str]:
    """Return what of a run its folder does not hold, one sentence each."""
    notes = []
    if isinstance(dataset, LazyDataset):
        notes.append(
            f"The data of {dataset.natural_clients:,} clients was made by {dataset.made_by} when it was needed, and is "
            "not part of this folder."
        )
    elif dataset.in_memory:
        size = f"{len(dataset.y):,} samples of shape {'x'.join(map(str, dataset.x.shape[1:]))}"
        about = f"{size}, SHA-256 {dataset.content_hash}"
        notes.append(f"The data was in memory ({about}) and is not part of this folder.")
    for what, given in (("model", config.model), ("partition", config.partition)):
        if not isinstance(given, str) and not is_importable(given):
            notes.append(f"The {what} is {label(given)}, which cannot be imported: this folder cannot repeat it.")
    method = method_class(config.method)
    if method is not METHODS.get(config.method) and not is_declared(config.method):
        notes.append(f"The method is {label(method)}, which no package declares: this folder cannot repeat it.")
    return notes


def _model_key(federation: "Federation") -> tuple[object, ...]:
    config, source = federation.config, federation.source
    inputs = source.input_shape, source.classes, source.vocabulary, source.every_position
    return network(config.model), config.model_options, label(config.model), *inputs


def _partition_key(config: Config) -> tuple[object, ...]:
    return config.partition_settings, config.partition_file, config.normalize
