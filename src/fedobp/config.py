"""The settings of a run, as given by the user: checked value by value, without reading a file.

Its fields are the command line's flags; each carries its help text here, once. What is not given is None until the
dataset is read: `resolution.resolve` decides it, and `config.toml` holds the resolved form. Importing this module, and
making a `Config`, loads neither torch nor numpy.
"""

import hashlib
import math
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from fedobp.errors import FedobpError, short, unknown
from fedobp.options import (
    LARGEST,
    Calibrate,
    Compression,
    KernelMode,
    MetricName,
    Option,
    Precision,
    Prior,
    broken_bound,
)
from fedobp.toml import read_toml, toml_lines

if TYPE_CHECKING:
    from fedobp.data import GivenPartitioner
    from fedobp.models import Network

# Settings that are tables of options, and those that a partition is made with.
TABLES = ("options", "partition_options", "model_options")
PARTITION_SETTINGS = (
    "clients",
    "partition",
    "partition_options",
    "alpha",
    "partition_seed",
    "val_ratio",
    "holdout_clients",
)

# Settings and options that are younger than the first checkpoints, and what an option was before there was one.
_YOUNGER = ("compress_down", "compress_up", "prior", "calibrate", "average")
_YOUNGER_OPTIONS: dict[str, dict[str, Option]] = {
    "options": {"rule": "quantile", "c": 20.0, "warmup": 0, "soft": 0.0},
    "partition_options": {"strength": 0.8, "groups": 0, "labels": "iid"},
}

_SIDE_BY_SIDE = "# Trained side by side, in this order:"

LrSchedule = Literal["constant", "cosine"]
Sampling = Literal["keyed", "published"]
Normalize = Literal["dataset", "train", "none", "as-published"]
ProtocolName = Literal["default", "paper"]
EngineName = Literal["auto", "serial", "lanes"]
DeviceName = Literal["auto", "cpu", "cuda"]
SaveModels = Literal["none", "global", "all"]


def _panel(panel: str) -> Callable[..., Any]:
    """Return what declares the settings of one panel of the help text.

    A default of None is decided by the dataset, a saved partition or another setting, as the setting's help says.
    Bounds are `low` and `high`, which are allowed, and `above` and `below`, which are not.
    """

    def setting(default: Any, help: str, *, path: bool = False, code: bool = False, **bounds: float) -> Any:
        """Declare a setting: `path`: it may be a `Path`; `code`: it may be a function or a class."""
        about = {"help": help, "panel": panel, "bounds": bounds, "path": path, "code": code}
        return field(default=default, metadata=about)

    return setting


_federation, _training = _panel("Federation"), _panel("Training")
_evaluation, _machine = _panel("Evaluation"), _panel("Machine and output")


class FrozenOptions(dict[str, Option]):
    """A table of options that cannot be changed, so that a `Config` can be hashed."""

    def _refuse(self, *given: object, **more: object) -> NoReturn:
        raise TypeError("the options of a Config cannot be changed: make another one with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return FrozenOptions, (dict(self),)


@dataclass(frozen=True, kw_only=True, repr=False)
class Config:
    """The settings of a run. A resolved one, such as `Federation.config`, is complete.

    `method` may be given as a class, `model` and `partition` as functions, numbers as NumPy's, folders as a `Path`, the
    device as a `torch.device`.
    """

    method: str = _training("fedobp", "Method to train; `fedobp methods` lists them", code=True)
    options: Mapping[str, Option] = field(default_factory=dict)
    dataset: str = _federation("digits", "Dataset; `fedobp data list` lists them")
    data_dir: str | None = _federation(
        None, "Folder that holds datasets (default: $FEDOBP_DATA, or the cache folder)", path=True
    )
    clients: int = _federation(
        None, "Number of clients (default: 100; digits: 20; natural: all; your own data: by its size)", low=1
    )
    partition: "GivenPartitioner" = _federation(
        None,
        "Assignment of samples to clients: dirichlet, dirichlet-equal, iid, shards, classes, quantity, feature, "
        "concept, natural, or package.module:function (default: dirichlet; next tokens: natural or iid)",
        code=True,
    )
    partition_options: Mapping[str, Option] = field(default_factory=dict)
    alpha: float = _federation(
        None,
        "The Dirichlet's concentration: the smaller, the more the clients differ (default: 0.1; your own data: by its "
        "size)",
        above=0,
    )
    partition_seed: int = _federation(None, "Seed of the partition (default: the seed)", low=0, high=2**32 - 1)
    val_ratio: float = _federation(
        None, "Share of each client's training part for validation (default: 0.0)", low=0, high=0.9
    )
    holdout_clients: int = _federation(None, "Clients that never train, to evaluate new clients (default: 0)", low=0)
    partition_file: str | None = _federation(None, "A partition that `fedobp partition --save` has written", path=True)
    normalize: Normalize = _federation(
        None, "Scaling: by constants, by the training parts, ... (default: dataset for the paper's eight; else train)"
    )
    model: "str | Network" = _federation(
        None,
        "Model (`fedobp models` lists them), or package.module:function (default: cnn; images below 16x16: cnn-small; "
        "tables: mlp; tokens: lstm)",
        code=True,
    )
    model_options: Mapping[str, Option] = field(default_factory=dict)
    rounds: int = _training(None, "Number of rounds (default: 400; digits: 60)", low=1, high=1_000_000)
    participation: float = _training(None, "Share of clients in a round (default: 0.1; digits: 0.2)", above=0, high=1)
    epochs: int = _training(5, "Local epochs per round", low=1, high=1_000)
    batch_size: int = _training(32, "Samples in a batch; batches of one sample are skipped", low=2)
    lr: float = _training(0.01, "Learning rate of local SGD", above=0)
    momentum: float = _training(0.0, "Momentum of local SGD; reset at the start of each training phase", low=0, below=1)
    weight_decay: float = _training(0.0, "Weight decay of local SGD", low=0)
    lr_schedule: LrSchedule = _training("constant", "Learning rate over the rounds")
    seed: int = _training(42, "Seed of initialisation, sampling and batches", low=0, high=2**32 - 1)
    sampling: Sampling = _training("keyed", "Clients of a round: by hash, or the authors' own stream (published)")
    compress_down: Compression = _training(
        "none", "Code messages to clients: as 8-bit or about 4-bit differences, or 8-bit ones of the largest sixteenth"
    )
    compress_up: Compression = _training("none", "Code messages to the server; what a code leaves out is sent later")
    prior: Prior = _training(
        "off", "Put each client's label distribution into its model's bias: where it is used, or also in training"
    )
    calibrate: Calibrate = _training(
        "off", "Fit the last layer before use, in one forward pass: its bias, or also entries that a score test chooses"
    )
    average: float = _training(
        0.0, "Serve an average of the last global models, of this share of the rounds, such as 0.05 (0: the newest)",
        low=0, high=1,
    )  # fmt: skip
    protocol: ProtocolName = _evaluation("default", "Last round, or paper: best of rounds 100/200/300/400, pooled")
    eval_every: int = _evaluation(None, "Rounds between evaluations (default: a twentieth of the rounds)", low=1)
    eval_clients: int | None = _evaluation(
        None, "Clients to evaluate, a sample drawn by the seed (default: all that train)", low=1
    )
    finetune_epochs: int = _evaluation(
        0, "Also report every client's model after this many more local epochs", low=0, high=1_000
    )
    metrics: str | None = _evaluation(
        None, f"Also report these, separated by commas: {', '.join(get_args(MetricName))} (default: none)"
    )
    engine: EngineName = _machine("auto", "How clients are run: all at once (lanes, auto's choice), or one by one")
    device: DeviceName = _machine("auto", "Where to compute; auto takes CUDA where there is one")
    precision: Precision = _machine(
        None, "Arithmetic; tf32 and bf16 keep weights and sums in fp32 (default: bf16 for lanes on CUDA, else fp32)"
    )
    kernels: KernelMode = _machine(
        "auto", "Fused CUDA kernels of the paper's CNN: on where all checks pass (auto), on or an error, or off"
    )
    lane_memory: float = _machine(0.0, "GiB that clients in training may take; 0: half of the machine's", low=0)
    store_memory: float = _machine(0.0, "GiB for clients' state, then a file; 0: a quarter of the machine's", low=0)
    save_models: SaveModels = _machine("all", "Which final models to write")

    def __post_init__(self) -> None:
        """Check each value against its type and bounds; nothing is read or decided here."""
        for spec in settings():
            value = getattr(self, spec.name)
            if value is not None or spec.default is not None:
                object.__setattr__(self, spec.name, check_setting(spec, value))
        for table in TABLES:
            object.__setattr__(self, table, _check_table(table, getattr(self, table)))

    def __repr__(self) -> str:
        """Return what differs from the defaults."""
        given = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        defaults = {spec.name: spec.default for spec in settings()}
        shown = {name: value for name, value in given.items() if value != defaults.get(name, {})}
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def cohort_size(self) -> int:
        """Clients in a round: the share of those that train, rounded, at least one."""
        return max(1, round(self.participation * self.trainers))

    @property
    def trainers(self) -> int:
        """Clients that train: all but those that are held out."""
        return self.clients - self.holdout_clients

    @property
    def evaluated(self) -> str:
        """Which clients are evaluated, as a protocol names them."""
        return "all" if self.eval_clients is None else f"{self.eval_clients:,} of {self.trainers:,}"

    @property
    def metric_names(self) -> tuple[MetricName, ...]:
        """The metrics beyond accuracy that are reported."""
        return tuple(name for name in get_args(MetricName) if name in (self.metrics or "").split(","))

    @property
    def partition_settings(self) -> dict[str, Any]:
        """What a partition is made with."""
        return {name: getattr(self, name) for name in PARTITION_SETTINGS}

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round (from 1): constant, or half a cosine from lr towards 0."""
        if self.lr_schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / self.rounds))

    def changed(self, other: "Config") -> dict[str, Any]:
        """Return the settings of another configuration that are not the same as here."""
        names = [spec.name for spec in fields(self)]
        return {name: getattr(other, name) for name in names if getattr(other, name) != getattr(self, name)}

    @property
    def hash(self) -> str:
        """What tells these settings from others: of all but where data is read and whether models are written.

        Settings that are younger than others count only if they are set, so that older checkpoints can be resumed.
        """
        tables: dict[str, Any] = {
            table: {name: value for name, value in getattr(self, table).items() if younger.get(name) != value}
            for table, younger in _YOUNGER_OPTIONS.items()
        }
        kept = replace(self, data_dir=None, save_models="all", **tables).to_toml()
        for spec in settings():
            if spec.name in _YOUNGER and getattr(self, spec.name) == spec.default:
                [line] = toml_lines({spec.name: spec.default})
                kept = kept.replace(f"{line}\n", "", 1)
        return hashlib.sha256(kept.encode()).hexdigest()[:16]

    def is_same(self, other: "Config") -> bool:
        """Say whether another configuration has these settings; the order of options, which the hash has, is free."""
        return _in_order(self).hash == _in_order(other).hash

    def to_toml(self) -> str:
        """Return the settings as TOML, which `read_config` reads back."""
        lines = toml_lines({spec.name: getattr(self, spec.name) for spec in settings()})
        for table in TABLES:
            if getattr(self, table) or table != "model_options":
                lines += ["", f"[{table}]", *toml_lines(getattr(self, table))]
        return "\n".join(lines) + "\n"


def settings() -> list[Field[Any]]:
    """Return the fields of `Config` that are plain settings: all but the tables of options."""
    return [spec for spec in fields(Config) if spec.name not in TABLES]


def flag(name: str) -> str:
    """Return a setting's name as a command-line flag."""
    return "--" + name.replace("_", "-")


def _in_order(config: Config) -> Config:
    """Return settings whose options are sorted by name."""
    tables: dict[str, Any] = {table: dict(sorted(getattr(config, table).items())) for table in TABLES}
    return replace(config, **tables)


def read_config(path: Path) -> dict[str, Any]:
    """Return what a TOML file sets, its names checked; values are checked when the `Config` is made."""
    text, given = read_toml(path, "a run's config.toml")
    check_settings(given, path, [spec.name for spec in fields(Config)])
    if any(line.startswith(_SIDE_BY_SIDE) for line in text.splitlines()):
        files = [path.absolute().parent.parent / name for name in ("compare.toml", "sweep.toml")]
        found = next((file for file in files if file.is_file()), None)
        how = f"fedobp sweep {shlex.quote(str(found))} repeats" if found else "the same sweep would repeat"
        warnings.warn(
            f"{short(path, 200)} is of a run that trained side by side with others; alone its last bits may differ, "
            f"{how} it",
            stacklevel=2,
        )
    return given


def check_settings(given: Mapping[str, Any], path: Path, known: Sequence[str]) -> None:
    """Refuse names of settings that are not known, and tables of options that are none."""
    where = short(path, 200)
    for name in given:
        if name not in known:
            raise unknown(f"setting in {where}", name, known)
    for table in TABLES:
        if not isinstance(given.get(table, {}), dict):
            raise FedobpError(f"`{table}` in {where} must be a table of options: write [{table}]")


def run_name(config: Config) -> str:
    """Return what a run is called among those of a comparison; its folder there has this name."""
    return f"{config.method}-seed{config.seed}"


def side_by_side(launch: Sequence[str]) -> str:
    """Return the comment of a `config.toml` that names the runs of a launch, if there are several."""
    return f"{_SIDE_BY_SIDE} {', '.join(launch)}\n" if len(launch) > 1 else ""


def number_type(spec: Field[Any]) -> Any:
    """Return the type of a setting that is a number, int or float; None: it is none."""
    found = [kind for kind in (int, float) if spec.type in (kind, kind | None)]
    return found[0] if found else None


def check_setting(spec: Field[Any], value: Any) -> Any:
    """Return a setting's value in its declared type, or say what it should be."""
    if spec.metadata["path"] and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if spec.metadata["code"] and callable(value):
        return _registered(value) if spec.name == "method" else value
    if spec.name == "device":
        value = _check_device(value)
    if spec.name == "metrics" and isinstance(value, list | tuple | set | frozenset):
        if not value:
            return None
        value = ",".join(map(str, value))
    number = number_type(spec)
    choices = get_args(spec.type) if number is None and not spec.metadata["code"] else ()
    if choices and isinstance(choices[0], str):
        if value not in choices:
            raise unknown(f"value of {flag(spec.name)}", short(value), choices)
        return value
    if number is not None:
        value = _plain_number(value)
        right = isinstance(value, Integral if number is int else Real) and not isinstance(value, bool)
        if not right or (number is float and not abs(value) <= sys.float_info.max):
            noun = "whole number" if number is int else "number"
            raise FedobpError(f"{flag(spec.name)} must be a {noun}, not '{short(value)}'")
        bounds = dict(spec.metadata["bounds"])
        bounds.setdefault("high", 2**31 - 1 if number is int else LARGEST)
        if bound := broken_bound(value, **bounds):
            raise FedobpError(f"{flag(spec.name)} must be {bound}")
        return number(value)
    if not isinstance(value, str):
        raise FedobpError(f"{flag(spec.name)} must be a text, not '{short(value)}'")
    if not value.isprintable():
        raise FedobpError(f"{flag(spec.name)} must be readable text, not '{short(value)}'")
    if not value.strip():
        raise FedobpError(f"{flag(spec.name)} must not be empty: give it a value, or leave it out")
    return _metrics_in_order(value) if spec.name == "metrics" else value


def _metrics_in_order(text: str) -> str:
    """Return names of metrics in their usual order, each once."""
    names, known = [name.strip() for name in text.split(",")], get_args(MetricName)
    for name in names:
        if name not in known:
            raise unknown("metric", name, known)
    return ",".join(name for name in known if name in names)


def _registered(method: Any) -> str:
    """Return the name of a method's class, under which it is found from now on."""
    from fedobp.algorithms import register_method  # loads torch, which a class of a method has loaded already

    return register_method(method)


def _check_device(value: Any) -> Any:
    """Return a `torch.device`, or its text, by its type: the card is chosen outside."""
    kind, _, index = str(value).partition(":")
    if index not in ("", "0") and kind == "cuda":
        raise FedobpError(f"--device {short(value)} names a card: set CUDA_VISIBLE_DEVICES={short(index)} and use cuda")
    return kind if kind in get_args(DeviceName) else value


def _check_table(table: str, given: Any) -> FrozenOptions:
    """Return a table of options that cannot be changed; NumPy's numbers become Python's."""
    if not isinstance(given, Mapping):
        raise FedobpError(f"`{table}` must be a mapping from names to values, not '{short(given)}'")
    plain = {name: _plain_number(value) for name, value in given.items()}
    for name, value in plain.items():
        if not isinstance(name, str) or not isinstance(value, Option):
            raise FedobpError(f"`{table}` must hold numbers and texts by name, not {short(name)}={short(value)}")
    return FrozenOptions({str(name): str(value) if isinstance(value, str) else value for name, value in plain.items()})


def _plain_number(value: Any) -> Any:
    """Return a number of another library, such as NumPy's, as Python's; all else stays as it is."""
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
