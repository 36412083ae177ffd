"""Everything a run depends on, in one checked, fully resolved object: what `config.toml` holds.

Its fields are the command line's flags; each carries its help text here, once. Importing this module is cheap: torch
is loaded when a `Config` is made.
"""

import math
import re
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from fedobp.errors import FedobpError, short, unknown
from fedobp.options import LARGEST, Option

_LONGEST = 2**20  # bytes of a configuration file
# Settings that are tables of options, and those that a partition is made with.
_TABLES = ("options", "partition_options")
_DEALT = ("clients", "partition", "partition_options", "alpha", "partition_seed", "val_ratio", "holdout_clients")

_SIDE_BY_SIDE = "# Trained side by side, in this order:"

LrSchedule = Literal["constant", "cosine"]
Sampling = Literal["keyed", "published"]
Normalize = Literal["dataset", "train", "none", "as-published"]
ProtocolName = Literal["default", "paper"]
EngineName = Literal["auto", "serial", "lanes"]
DeviceName = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "fp64", "tf32", "bf16"]
SaveModels = Literal["none", "global", "all"]


def _panel(panel: str) -> Callable[..., Any]:
    """Return what declares the settings of one panel of the help text.

    A default of None is decided by the dataset, a saved partition or another setting, as the setting's help says.
    Bounds are `low` and `high`, which are allowed, and `above` and `below`, which are not.
    """

    def setting(default: Any, help: str, **bounds: float) -> Any:
        return field(default=default, metadata={"help": help, "panel": panel, "bounds": bounds})

    return setting


_federation, _training = _panel("Federation"), _panel("Training")
_evaluation, _machine = _panel("Evaluation"), _panel("Machine and output")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run. What is not given is decided here, so a Config is always complete and valid."""

    method: str = _training("fedobp", "Method to train; `fedobp methods` lists them")
    options: Mapping[str, Option] = field(default_factory=dict)
    dataset: str = _federation("digits", "Dataset; `fedobp data list` lists them")
    data_dir: str | None = _federation(None, "Folder that holds datasets (default: $FEDOBP_DATA, or the cache folder)")
    clients: int = _federation(
        None, "Number of clients (default: 100; digits: 20; natural: all; your own data: by its size)", low=1
    )
    partition: str = _federation(
        None,
        "How data falls on clients: dirichlet, dirichlet-equal, iid, shards, classes, quantity, feature or natural "
        "(default: dirichlet)",
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
    holdout_clients: int = _federation(None, "Clients that never train, to see how a new one fares (default: 0)", low=0)
    partition_file: str | None = _federation(None, "A partition that `fedobp partition --save` has written")
    normalize: Normalize = _federation(
        None, "Scaling: by constants, by the training parts, ... (default: dataset for the paper's eight; else train)"
    )
    model: str = _federation(None, "Model (default: cnn; images below 16x16: cnn-small; tables: mlp)")
    rounds: int = _training(None, "Number of rounds (default: 400; digits: 60)", low=1, high=1_000_000)
    participation: float = _training(None, "Share of clients in a round (default: 0.1; digits: 0.2)", above=0, high=1)
    epochs: int = _training(5, "Local epochs of a visit", low=1, high=1_000)
    batch_size: int = _training(32, "Samples in a batch; batches of one sample are skipped", low=2)
    lr: float = _training(0.01, "Learning rate of local SGD", above=0)
    momentum: float = _training(0.0, "Momentum of local SGD; it starts anew at each visit", low=0, below=1)
    weight_decay: float = _training(0.0, "Weight decay of local SGD", low=0)
    lr_schedule: LrSchedule = _training("constant", "Learning rate over the rounds")
    seed: int = _training(42, "Seed of initialisation, sampling and batches", low=0, high=2**32 - 1)
    sampling: Sampling = _training("keyed", "Clients of a round: by hash, or the authors' own stream (published)")
    protocol: ProtocolName = _evaluation("default", "Last round, or paper: best of rounds 100/200/300/400, pooled")
    eval_every: int = _evaluation(None, "Rounds between evaluations (default: a twentieth of the rounds)", low=1)
    finetune_epochs: int = _evaluation(
        0, "Also report every client's model after this many more local epochs", low=0, high=1_000
    )
    engine: EngineName = _machine("auto", "How clients are run: all at once (lanes, auto's choice), or one by one")
    device: DeviceName = _machine("auto", "Where to compute; auto takes CUDA where there is one")
    precision: Precision = _machine(
        None, "Arithmetic; tf32 and bf16 keep weights and sums in fp32 (default: bf16 for lanes on CUDA, else fp32)"
    )
    lane_memory: float = _machine(0.0, "GiB that clients in training may take; 0: half of the machine's", low=0)
    store_memory: float = _machine(0.0, "GiB for clients' state, then a file; 0: a quarter of the machine's", low=0)
    save_models: SaveModels = _machine("all", "Which final models to write")

    def __post_init__(self) -> None:
        """Check what was given and decide the rest."""
        for spec in settings():
            value = getattr(self, spec.name)
            if value is not None or spec.default is not None:
                self._set(spec.name, _checked(spec, value))
        self._fill_in()
        self._settle_machine()
        self._settle_method()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _fill_in(self) -> None:
        """Decide what depends on the dataset, and check names that only their rooms know."""
        from fedobp.data import (
            PARTITIONERS,
            REGISTRY,
            data_dir,
            default_clients_and_alpha,
            describe,
            label_sizes,
            normalization_for,
        )
        from fedobp.evaluation import protocol
        from fedobp.models import NETS

        if self.data_dir is not None:
            self._set("data_dir", str(data_dir(self.data_dir).absolute()))
        folder = data_dir(self.data_dir)
        info = describe(self.dataset, folder)
        if self.partition_file is not None:
            self._take_partition(_path("partition_file", self.partition_file))
        defaults: dict[str, object] = {"partition": "dirichlet", "alpha": 0.1, "val_ratio": 0.0, "holdout_clients": 0}
        if self.dataset == "digits":
            defaults |= {"clients": 20, "participation": 0.2, "rounds": 60, "model": "cnn-small"}
        else:
            defaults |= {"clients": 100, "participation": 0.1, "rounds": 400, "model": _model_for(info.shape)}
        if self.partition == "natural" and info.clients:
            defaults["clients"] = info.clients
        elif self.dataset not in REGISTRY and None in (self.clients, self.alpha):
            clients, alpha = default_clients_and_alpha(label_sizes(self.dataset, folder), self.clients, self.alpha)
            defaults |= {"clients": clients, "alpha": alpha}
        rounds: Any = self.rounds or defaults["rounds"]
        for name, value in {**defaults, "partition_seed": self.seed, "eval_every": max(1, rounds // 20)}.items():
            if getattr(self, name) is None:
                self._set(name, value)
        for kind, name, known in (("partition", self.partition, PARTITIONERS), ("model", self.model, NETS)):
            if name not in known:
                raise unknown(kind, name, known)
        dealt = PARTITIONERS[self.partition].configure(self.partition_options)
        self._set("partition_options", {spec.name: getattr(dealt, spec.name) for spec in dealt.options()})
        if self.trainers < 1:
            raise FedobpError(
                f"--holdout-clients {self.holdout_clients} leaves nobody of {self.clients} clients to train: hold out "
                "fewer"
            )
        self._set("normalize", normalization_for(self.dataset, self.normalize))
        protocol(self.protocol, self.rounds)

    def _take_partition(self, path: Path) -> None:
        """Take over what a saved partition was made with; what is asked for otherwise must not contradict it."""
        from fedobp.data import partition_settings

        self._set("partition_file", str(path))
        saved = partition_settings(path)
        for spec in fields(Config):
            if spec.name not in _DEALT:
                continue
            if spec.name not in saved or (spec.name in _TABLES and not isinstance(saved[spec.name], dict)):
                raise FedobpError(f"the partition {short(path, 200)} does not say its {spec.name}: save it anew")
            given, value = getattr(self, spec.name), saved[spec.name]
            if given not in (None, {}, value):
                asked = f"--partition-set {_pairs(given)}" if spec.name in _TABLES else f"{flag(spec.name)} {given}"
                made = (_pairs(value) or "no options") if isinstance(value, dict) else value
                raise FedobpError(
                    f"{short(asked)} is not what the partition {short(path, 200)} was made with ({short(made)}): leave "
                    "it out"
                )
            self._set(spec.name, value if spec.name in _TABLES else _checked(spec, value))

    def _settle_machine(self) -> None:
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise FedobpError("--device cuda needs a CUDA card that torch can use, and there is none: use --device cpu")
        if self.device == "auto":
            self._set("device", "cuda" if torch.cuda.is_available() else "cpu")
        if self.engine == "auto":
            self._set("engine", "lanes")
        if cast(str | None, self.precision) is None:
            fast = (self.device, self.engine) == ("cuda", "lanes")
            self._set("precision", "bf16" if fast and torch.cuda.is_bf16_supported(False) else "fp32")
        if self.device == "cpu" and self.precision == "tf32":
            raise FedobpError("--precision tf32 is arithmetic of CUDA cards: use --precision fp32 on the CPU")

    def _settle_method(self) -> None:
        """Resolve the method's options; the paper tuned q for its CNN under its partition, and only there."""
        from fedobp.algorithms import blaming, method_class
        from fedobp.data import REGISTRY

        method = method_class(self.method)
        names = [spec.name for spec in method.options()]
        options = dict(self.options)
        if "q" in names and self.model == "cnn" and self.partition == "dirichlet" and self.dataset in REGISTRY:
            published = REGISTRY[self.dataset].q.get(self.alpha)
            options = options if published is None else {"q": published, **options}
        with blaming(method):
            configured = method.configure(options)
        self._set("options", {name: getattr(configured, name) for name in names})

    @property
    def cohort_size(self) -> int:
        """Clients in a round: the share of those that train, rounded, at least one."""
        return max(1, round(self.participation * self.trainers))

    @property
    def trainers(self) -> int:
        """Clients that train: all but those that are held out."""
        return self.clients - self.holdout_clients

    @property
    def dealt(self) -> dict[str, Any]:
        """What a partition is made with."""
        return {name: getattr(self, name) for name in _DEALT}

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round (from 1): constant, or half a cosine from lr towards 0."""
        if self.lr_schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / self.rounds))

    def changed(self, other: "Config") -> dict[str, Any]:
        """Return the settings of another configuration that are not the same as here."""
        names = [spec.name for spec in fields(self)]
        return {name: getattr(other, name) for name in names if getattr(other, name) != getattr(self, name)}

    def to_toml(self) -> str:
        """Return the settings as TOML, which `read_config` reads back."""
        lines = toml_lines({spec.name: getattr(self, spec.name) for spec in settings()})
        for table in _TABLES:
            lines += ["", f"[{table}]", *toml_lines(getattr(self, table))]
        return "\n".join(lines) + "\n"


def settings() -> list[Field[Any]]:
    """Return the fields of `Config` that are plain settings: all but the method's and the partition's options."""
    return [spec for spec in fields(Config) if spec.name not in _TABLES]


def flag(name: str) -> str:
    """Return a setting's name as a command-line flag."""
    return "--" + name.replace("_", "-")


def read_config(path: Path) -> dict[str, Any]:
    """Return what a TOML file sets, its names checked; values are checked when the `Config` is made."""
    text, given = read_toml(path, "a run's config.toml")
    check_settings(given, path, [spec.name for spec in fields(Config)])
    if any(line.startswith(_SIDE_BY_SIDE) for line in text.splitlines()):
        compared = path.absolute().parent.parent / "compare.toml"
        repeat = f"fedobp compare --config {shlex.quote(str(compared))} repeats"
        how = repeat if compared.is_file() else "the same sweep would repeat"
        warnings.warn(
            f"{short(path, 200)} is of a run that trained side by side with others; alone its last bits may differ, "
            f"{how} it",
            stacklevel=2,
        )
    return given


def read_toml(path: Path, kind: str) -> tuple[str, dict[str, Any]]:
    """Return a TOML file's text and what it holds; `kind` says which file is meant."""
    where = short(path, 200)
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise FedobpError(f"the configuration {where} is no file: give {kind}")
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise FedobpError(f"the configuration {where} is longer than any: give {kind}")
        text = content.decode()
        return text, tomllib.loads(text)
    except OSError as error:
        raise FedobpError(f"cannot read the configuration {where} ({error.strerror}): give {kind}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of thousands of digits, deep nesting
        raise FedobpError(f"{where} is not valid TOML ({short(error, 120)}): compare it with {kind}") from error


def check_settings(given: Mapping[str, Any], path: Path, known: Sequence[str]) -> None:
    """Refuse names of settings that are not known, and tables of options that are none."""
    where = short(path, 200)
    for name in given:
        if name not in known:
            raise unknown(f"setting in {where}", name, known)
    for table in _TABLES:
        if not isinstance(given.get(table, {}), dict):
            raise FedobpError(f"`{table}` in {where} must be a table of options: write [{table}]")


def run_name(config: Config) -> str:
    """Return what a run is called among those of a comparison; its folder there has this name."""
    return f"{config.method}-seed{config.seed}"


def side_by_side(launch: Sequence[Config]) -> str:
    """Return the comment of a `config.toml` that names the runs of a launch, if there are several."""
    return f"{_SIDE_BY_SIDE} {', '.join(map(run_name, launch))}\n" if len(launch) > 1 else ""


def _checked(spec: Field[Any], value: Any) -> Any:
    """Return a setting's value in its declared type, or say what it should be."""
    choices = get_args(spec.type)
    if choices and isinstance(choices[0], str):
        if value not in choices:
            raise unknown(f"value of {flag(spec.name)}", short(value), choices)
        return value
    if spec.type in (int, float):
        right = isinstance(value, int if spec.type is int else (int, float)) and not isinstance(value, bool)
        if not right or (spec.type is float and not abs(value) <= sys.float_info.max):
            noun = "whole number" if spec.type is int else "number"
            raise FedobpError(f"{flag(spec.name)} must be a {noun}, not '{short(value)}'")
        bounds = dict(spec.metadata["bounds"])
        bounds.setdefault("high", 2**31 - 1 if spec.type is int else LARGEST)
        broken = {
            "low": lambda bound: value < bound,
            "above": lambda bound: value <= bound,
            "high": lambda bound: value > bound,
            "below": lambda bound: value >= bound,
        }
        words = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
        for name, bound in bounds.items():
            if broken[name](bound):
                raise FedobpError(f"{flag(spec.name)} must be {words[name]} {bound}")
        return spec.type(value)
    if not isinstance(value, str):
        raise FedobpError(f"{flag(spec.name)} must be a text, not '{short(value)}'")
    if not value.isprintable():
        raise FedobpError(f"{flag(spec.name)} must be readable text, not '{short(value)}'")
    if not value.strip():
        raise FedobpError(f"{flag(spec.name)} must not be empty: give it a value, or leave it out")
    return value


def _model_for(shape: tuple[int, ...]) -> str:
    """Return the default model for inputs of a shape: the paper's CNN, and where an image is too small for it, less."""
    side = min(shape[:2]) if len(shape) > 1 else 0
    return "cnn" if side >= 16 else "cnn-small" if side >= 4 else "mlp"


def _path(name: str, given: str) -> Path:
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError as error:  # the home folder of nobody
        raise FedobpError(f"{flag(name)} {short(given)} has no home folder: write its whole path") from error


def _pairs(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Return lines of TOML; what is None is left out."""
    return [f"{toml_key(name)} = {toml_value(value)}" for name, value in values.items() if value is not None]


def toml_key(name: str) -> str:
    """Return a name as a key in TOML."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: Option) -> str:
    """Return a value in TOML."""
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\' or ord(c) == 127 else c for c in value)
        return f'"{escaped}"'
    return repr(value)
