"""Resolves settings once the dataset is read: every default is decided, every name checked."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fedobp.algorithms import attributing_errors, method_class
from fedobp.config import PARTITION_SETTINGS, TABLES, Config, check_setting, flag
from fedobp.data import (
    PARTITIONERS,
    REGISTRY,
    Dataset,
    data_dir,
    default_clients_and_alpha,
    normalization_for,
    partition_settings,
)
from fedobp.errors import FedobpError, short, unknown
from fedobp.evaluation import make_protocol
from fedobp.method import Method
from fedobp.models import NETS


def check_names(config: Config) -> None:
    """Refuse what is wrong whatever the dataset is; called before it is read, and for what it decides."""
    if config.model is not None and config.model not in NETS:
        raise unknown("model", config.model, NETS)
    partition = "dirichlet" if config.partition is None else config.partition
    if partition not in PARTITIONERS:
        raise unknown("partition", partition, PARTITIONERS)
    if config.partition_file is None:
        PARTITIONERS[partition].check_options(config.partition_options)
    if config.rounds is not None:
        make_protocol(config.protocol, config.rounds)
    _machine(config)
    method = method_class(config.method)
    with attributing_errors(method):
        method.check_options(config.options)


def resolve(config: Config, dataset: Dataset) -> tuple[Config, Method]:
    """Return complete settings for a dataset, and the method with its options; a resolved `Config` stays as it is."""
    if config.data_dir is not None:
        config = replace(config, data_dir=str(data_dir(config.data_dir).absolute()))
    if config.partition_file is not None:
        config = _with_partition_file(config, _path("partition_file", config.partition_file))
    config = _machine(_with_defaults(config, dataset))
    check_names(config)
    partitioner = PARTITIONERS[config.partition].configure(config.partition_options)
    options = {spec.name: getattr(partitioner, spec.name) for spec in partitioner.options()}
    config = replace(
        config, partition_options=options, normalize=cast(Any, normalization_for(config.dataset, config.normalize))
    )
    if config.trainers < 1:
        raise FedobpError(
            f"--holdout-clients {config.holdout_clients} leaves none of {config.clients} clients to train: hold out "
            "fewer"
        )
    return with_method(config)


def with_method(config: Config) -> tuple[Config, Method]:
    """Return settings with all options of their method, and that method.

    The paper tuned q for its CNN under its partition, and only there.
    """
    method = method_class(config.method)
    names = [spec.name for spec in method.options()]
    options = dict(config.options)
    if "q" in names and config.model == "cnn" and config.partition == "dirichlet" and config.dataset in REGISTRY:
        published = REGISTRY[config.dataset].q.get(config.alpha)
        options = options if published is None else {"q": published, **options}
    with attributing_errors(method):
        configured = method.configure(options)
    return replace(config, options={name: getattr(configured, name) for name in names}), configured


def _with_defaults(config: Config, dataset: Dataset) -> Config:
    """Return settings with what depends on the dataset, or on one another."""
    defaults: dict[str, Any] = {"partition": "dirichlet", "alpha": 0.1, "val_ratio": 0.0, "holdout_clients": 0}
    if config.dataset == "digits":
        defaults |= {"clients": 20, "participation": 0.2, "rounds": 60, "model": "cnn-small"}
    else:
        shape = dataset.x.shape[1:]
        defaults |= {"clients": 100, "participation": 0.1, "rounds": 400, "model": _model_for(shape)}
    if config.partition == "natural" and dataset.client_names:
        defaults["clients"] = len(dataset.client_names)
    elif config.dataset not in REGISTRY and None in (config.clients, config.alpha):
        sizes = [int(size) for size in np.bincount(dataset.y)]
        defaults["clients"], defaults["alpha"] = default_clients_and_alpha(sizes, config.clients, config.alpha)
    rounds = config.rounds or defaults["rounds"]
    defaults |= {"partition_seed": config.seed, "eval_every": max(1, rounds // 20)}
    return replace(config, **{name: value for name, value in defaults.items() if getattr(config, name) is None})


def _with_partition_file(config: Config, path: Path) -> Config:
    """Take over what a saved partition was made with; what is asked for otherwise must not contradict it."""
    saved = partition_settings(path)
    taken: dict[str, Any] = {"partition_file": str(path)}
    for spec in fields(Config):
        if spec.name not in PARTITION_SETTINGS:
            continue
        if spec.name not in saved or (spec.name in TABLES and not isinstance(saved[spec.name], dict)):
            raise FedobpError(f"the partition {short(path, 200)} does not say its {spec.name}: save it again")
        given, value = getattr(config, spec.name), saved[spec.name]
        if given not in (None, {}, value):
            asked = f"--partition-set {_pairs(given)}" if spec.name in TABLES else f"{flag(spec.name)} {given}"
            made = (_pairs(value) or "no options") if isinstance(value, dict) else value
            raise FedobpError(
                f"{short(asked)} is not what the partition {short(path, 200)} was made with ({short(made)}): leave "
                "it out"
            )
        taken[spec.name] = value if spec.name in TABLES else check_setting(spec, value)
    return replace(config, **taken)


def _machine(config: Config) -> Config:
    """Return settings with the device, engine and precision that this machine has."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise FedobpError("--device cuda needs a CUDA card that torch can use, and there is none: use --device cpu")
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    engine = config.engine if config.engine != "auto" else "lanes"
    precision = config.precision
    if cast(str | None, precision) is None:
        fast = (device, engine) == ("cuda", "lanes")
        precision = "bf16" if fast and torch.cuda.is_bf16_supported(False) else "fp32"
    if device == "cpu" and precision == "tf32":
        raise FedobpError("--precision tf32 is arithmetic of CUDA cards: use --precision fp32 on the CPU")
    return replace(config, device=cast(Any, device), engine=cast(Any, engine), precision=precision)


def _model_for(shape: tuple[int, ...]) -> str:
    """Return the default model for inputs of a shape: the paper's CNN, and where an image is too small for it, less."""
    side = min(shape[:2]) if len(shape) > 1 else 0
    return "cnn" if side >= 16 else "cnn-small" if side >= 4 else "mlp"


def _path(name: str, given: str) -> Path:
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError as error:  # no such user
        raise FedobpError(f"{flag(name)} {short(given)} has no home folder: write its whole path") from error


def _pairs(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())
