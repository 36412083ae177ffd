"""Resolves settings once the dataset is read: every default is decided, every name checked."""

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fedobp.algorithms import attributing_errors, method_class
from fedobp.averaged import averaged
from fedobp.compression import compressed
from fedobp.config import PARTITION_SETTINGS, TABLES, Config, check_setting, flag
from fedobp.data import (
    PARTITIONERS,
    REGISTRY,
    Dataset,
    LazyDataset,
    Partitioner,
    data_dir,
    default_clients_and_alpha,
    normalization_for,
    partition_settings,
    partitioner,
)
from fedobp.engine import vectorises
from fedobp.errors import FedobpError, short
from fedobp.evaluation import make_protocol
from fedobp.label_prior import label_prior
from fedobp.method import Method
from fedobp.models import Model, network, network_options
from fedobp.options import Options
from fedobp.plugins import is_ours


def check_names(config: Config) -> None:
    """Refuse what is wrong whatever the dataset is; called before it is read, and for what it decides."""
    if config.model is not None:
        network_options(config.model).check_options(config.model_options)
    assigns = _partitioner(config)
    if assigns is not None and config.partition_file is None:
        assigns.check_options(config.partition_options)
    if config.rounds is not None:
        make_protocol(config.protocol, config.rounds)
    _machine(config)
    method = method_class(config.method)
    with attributing_errors(method):
        method.check_options(config.options)


def resolve(config: Config, dataset: Dataset) -> tuple[Config, Method]:
    """Return complete settings for a dataset, and the method with its options; a resolved `Config` stays as it is."""
    if isinstance(dataset, LazyDataset):
        config = _for_lazy_data(config)
    if config.data_dir is not None:
        config = replace(config, data_dir=str(data_dir(config.data_dir).absolute()))
    if config.partition_file is not None:
        config = _with_partition_file(config, absolute_path("partition_file", config.partition_file))
    config = _with_defaults(replace(config, dataset=dataset.name), dataset)
    check_names(config)
    config = _machine(replace(config, engine=_engine(config, dataset)))
    normalize = normalization_for(config.dataset, config.normalize, tokens=bool(dataset.vocabulary))
    assigns, partition_options = _partitioner(config), config.partition_options
    config = replace(
        config,
        partition_options=partition_options if assigns is None else _all_options(assigns, partition_options),
        model_options=_all_options(network_options(config.model), config.model_options),
        normalize=cast(Any, normalize),
    )
    if config.trainers < 1:
        raise FedobpError(
            f"--holdout-clients {config.holdout_clients} leaves none of {config.clients} clients to train: hold out "
            "fewer"
        )
    if config.eval_clients is not None and config.eval_clients > config.trainers:
        raise FedobpError(
            f"--eval-clients {config.eval_clients} is more than the {config.trainers} clients that train: use fewer, "
            "or leave it out"
        )
    return with_method(config, dataset)


def _for_lazy_data(config: Config) -> Config:
    """Return settings for samples that are made when they are needed; what needs all of them is refused."""
    if config.partition not in (None, "natural") or config.partition_file is not None:
        raise FedobpError("data that is made lazily comes with its clients: leave the partition out")
    if config.normalize not in (None, "none"):
        raise FedobpError(
            f"--normalize {config.normalize} needs all clients' samples, and they are made lazily: leave it out, and "
            "scale inputs in the function"
        )
    if config.device == "cuda":
        raise FedobpError("data that is made lazily trains on the CPU alone: use --device cpu, or leave out lazy=True")
    return replace(config, device="cpu", normalize="none")


def model_for(config: Config, dataset: Dataset) -> Model:
    """Return the model of complete settings, for the inputs of a dataset."""
    return Model(
        config.model,
        dataset.input_shape,
        dataset.classes,
        config.model_options,
        vocabulary=dataset.vocabulary,
        every_position=dataset.every_position,
    )


def _partitioner(config: Config) -> type[Partitioner] | None:
    """Return what assigns samples to clients; None: a saved partition by code of the user, which is not needed."""
    given = "dirichlet" if config.partition is None else config.partition
    saved = config.partition_file is not None and isinstance(given, str) and given not in PARTITIONERS
    return None if saved else partitioner(given)


def _all_options(owner: type[Options], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a network or partition: the given ones, checked, and the defaults."""
    configured = owner.configure(given)
    return {spec.name: getattr(configured, spec.name) for spec in owner.options()}


def with_method(config: Config, dataset: Dataset) -> tuple[Config, Method]:
    """Return settings with all options of their method, and that method with the parts that they name.

    The paper tuned q for its CNN under its partition, and only there.
    """
    method = method_class(config.method)
    names = [spec.name for spec in method.options()]
    options = dict(config.options)
    if "q" in names and config.model == "cnn" and config.partition == "dirichlet" and config.dataset in REGISTRY:
        published = REGISTRY[config.dataset].q.get(config.alpha)
        options = options if published is None else {"q": published, **options}
    if method.one_label and dataset.every_position:
        raise FedobpError(
            f"{method.name} needs one label a sample, and '{dataset.name}' predicts every next token: choose another "
            "--method"
        )
    with attributing_errors(method):
        configured = method.configure(options)
        own = configured.hparams()
    config = replace(config, options={name: getattr(configured, name) for name in names})
    for name in ("lr", "momentum", "weight_decay"):
        if name in own and getattr(config, name) != getattr(Config, name):
            raise FedobpError(f"{method.name} has a {name} of its own ({own[name]:g}): leave out {flag(name)}")
    if dataset.every_position and (config.prior != "off" or config.calibrate != "off"):
        raise FedobpError(
            f"--prior and --calibrate need one label a sample, and '{dataset.name}' predicts every next token: leave "
            "them out"
        )
    whole = label_prior(averaged(configured, config.average), config.prior, config.calibrate)
    return config, compressed(whole, config.compress_down, config.compress_up)


def _with_defaults(config: Config, dataset: Dataset) -> Config:
    """Return settings with what depends on the dataset, or on one another."""
    defaults: dict[str, Any] = {"alpha": 0.1, "val_ratio": 0.0, "holdout_clients": 0}
    defaults["partition"] = _partition_for(dataset)
    if dataset.every_position:
        defaults["metrics"] = "loss,perplexity"
    if config.dataset == "digits":
        defaults |= {"clients": 20, "participation": 0.2, "rounds": 60, "model": "cnn-small"}
    else:
        defaults |= {"clients": 100, "participation": 0.1, "rounds": 400, "model": _model_for(dataset)}
    if (config.partition or defaults["partition"]) == "natural" and dataset.natural_clients:
        defaults["clients"] = dataset.natural_clients
    elif dataset.every_position:
        defaults["clients"], _ = default_clients_and_alpha([len(dataset.y)], config.clients, 1.0)
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
    if config.kernels == "on" and engine == "serial":
        raise FedobpError("--kernels on needs the engine lanes: leave out --engine serial, or use --kernels auto")
    precision = config.precision
    if cast(str | None, precision) is None:
        fast = (device, engine) == ("cuda", "lanes")
        precision = "bf16" if fast and torch.cuda.is_bf16_supported(False) else "fp32"
    if device == "cpu" and precision == "tf32":
        raise FedobpError("--precision tf32 is arithmetic of CUDA cards: use --precision fp32 on the CPU")
    return replace(config, device=cast(Any, device), engine=cast(Any, engine), precision=precision)


def _engine(config: Config, dataset: Dataset) -> Any:
    """Return the engine: lanes, unless none is asked for and the network of the user cannot be vectorised."""
    if config.engine == "serial" or is_ours(network(config.model)):
        return config.engine
    problem = vectorises(model_for(config, dataset))
    if problem is None:
        return "lanes"
    if config.engine == "lanes":
        raise FedobpError(f"{problem}: use --engine serial, or another --model")
    _warn_once(f"{problem}: clients train one after another, with --engine serial")
    return "serial"


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _partition_for(dataset: Dataset) -> str:
    """Return the default partition: the clients that the data comes with, if it is for them, else the paper's."""
    if dataset.natural_clients and (dataset.in_memory or dataset.every_position or dataset.test is not None):
        return "natural"
    return "iid" if dataset.every_position else "dirichlet"


def _model_for(dataset: Dataset) -> str:
    """Return the default model for a dataset: the paper's CNN, and where an image is too small for it, less."""
    if dataset.vocabulary:
        return "lstm"
    shape = dataset.x.shape[1:]
    side = min(shape[:2]) if len(shape) > 1 else 0
    return "cnn" if side >= 16 else "cnn-small" if side >= 4 else "mlp"


def absolute_path(name: str, given: str) -> Path:
    """Return the whole path that a setting names."""
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError as error:  # no such user
        raise FedobpError(f"{flag(name)} {short(given)} has no home folder: write its whole path") from error


def _pairs(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())
