"""Everything a run depends on, in one checked, fully resolved object: what `config.toml` holds.

Its fields are the command line's flags; each carries its help text here, once. Importing this module is cheap: torch
is loaded when a `Config` is made.
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from fedobp.errors import FedobpError, unknown

Option = float | int | str

LrSchedule = Literal["constant", "cosine"]
Sampling = Literal["keyed", "published"]
ProtocolName = Literal["default", "paper"]
EngineName = Literal["auto", "serial"]
DeviceName = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "fp64"]
SaveModels = Literal["none", "global", "all"]


def _panel(panel: str) -> Callable[..., Any]:
    """Return what declares the settings of one panel of the help text.

    A default of None is decided by the dataset or by another setting, as the setting's help says.
    """

    def setting(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
        return field(default=default, metadata={"help": help, "low": low, "high": high, "panel": panel})

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
    clients: int = _federation(None, "Number of clients (default: 100; digits: 20)", low=1)
    partition: str = _federation("dirichlet", "How data falls on clients: dirichlet or iid")
    alpha: float = _federation(0.1, "The Dirichlet's concentration: the smaller, the more the clients differ", low=0)
    partition_seed: int = _federation(None, "Seed of the partition (default: the seed)", low=0, high=2**32 - 1)
    val_ratio: float = _federation(0.0, "Share of each client's training part for validation", low=0, high=0.9)
    model: str = _federation(None, "Model (default: cnn; digits: cnn-small; tables: mlp)")
    rounds: int = _training(None, "Number of rounds (default: 400; digits: 60)", low=1)
    participation: float = _training(None, "Share of clients in a round (default: 0.1; digits: 0.2)", low=0, high=1)
    epochs: int = _training(5, "Local epochs of a visit", low=1)
    batch_size: int = _training(32, "Samples in a batch; batches of one sample are skipped", low=2)
    lr: float = _training(0.01, "Learning rate of local SGD", low=0)
    momentum: float = _training(0.0, "Momentum of local SGD; it starts anew at each visit", low=0, high=1)
    weight_decay: float = _training(0.0, "Weight decay of local SGD", low=0)
    lr_schedule: LrSchedule = _training("constant", "Learning rate over the rounds")
    seed: int = _training(42, "Seed of initialisation, sampling and batches", low=0, high=2**32 - 1)
    sampling: Sampling = _training("keyed", "Clients of a round: by hash, or the authors' own stream (published)")
    protocol: ProtocolName = _evaluation("default", "Last round, or paper: best of rounds 100/200/300/400, pooled")
    eval_every: int = _evaluation(None, "Rounds between evaluations (default: a twentieth of the rounds)", low=1)
    finetune_epochs: int = _evaluation(0, "Also report every client's model after this many more local epochs", low=0)
    engine: EngineName = _machine("auto", "How clients are run")
    device: DeviceName = _machine("auto", "Where to compute; auto takes CUDA where there is one")
    precision: Precision = _machine("fp32", "Floating-point numbers of weights and arithmetic")
    save_models: SaveModels = _machine("all", "Which final models to write")

    def __post_init__(self) -> None:
        """Check what was given and decide the rest."""
        for spec in settings():
            value = getattr(self, spec.name)
            if value is not None:
                self._set(spec.name, _checked(spec, value))
        self._decide()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _decide(self) -> None:
        import torch

        from fedobp.algorithms import method_class
        from fedobp.data import KNOWN, PARTITIONS, data_dir, describe
        from fedobp.evaluation import protocol
        from fedobp.models import NETS

        info = describe(self.dataset, data_dir(self.data_dir))
        small = self.dataset == "digits"
        image_model = "cnn-small" if small else "cnn"
        decided: dict[str, object] = {
            "clients": 20 if small else 100,
            "participation": 0.2 if small else 0.1,
            "rounds": 60 if small else 400,
            "model": image_model if len(info.shape) > 1 else "mlp",
            "partition_seed": self.seed,
            "eval_every": max(1, (self.rounds or (60 if small else 400)) // 20),
        }
        for name, value in decided.items():
            if getattr(self, name) is None:
                self._set(name, value)
        for kind, name, known in (("partition", self.partition, PARTITIONS), ("model", self.model, NETS)):
            if name not in known:
                raise unknown(kind, name, known)
        if self.participation == 0 or self.lr == 0 or self.alpha == 0:
            zero = next(name for name in ("participation", "lr", "alpha") if getattr(self, name) == 0)
            raise FedobpError(f"--{zero} must be above 0")
        if self.momentum == 1:
            raise FedobpError("--momentum must be below 1")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise FedobpError("--device cuda needs a CUDA card that torch can use, and there is none: use --device cpu")
        if self.device == "auto":
            self._set("device", "cuda" if torch.cuda.is_available() else "cpu")
        self._set("engine", "serial")
        protocol(self.protocol, self.rounds)
        cls = method_class(self.method)
        options = dict(self.options)
        published = KNOWN[self.dataset].q if self.dataset in KNOWN else {}
        # The paper tuned q for its CNN under its partition; elsewhere the method's own default holds.
        tuned = self.model == "cnn" and self.partition == "dirichlet" and self.alpha in published
        if tuned and any(spec.name == "q" for spec in cls.options()):
            options.setdefault("q", published[self.alpha])
        method = cls.configure(options)
        self._set("options", {spec.name: getattr(method, spec.name) for spec in cls.options()})

    @property
    def cohort_size(self) -> int:
        """Clients in a round: the share, rounded, at least one."""
        return max(1, round(self.participation * self.clients))

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round (from 1): constant, or half a cosine from lr towards 0."""
        if self.lr_schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / self.rounds))

    def to_toml(self) -> str:
        """Return the settings as TOML, which `read_config` reads back."""
        plain = {spec.name: getattr(self, spec.name) for spec in settings()}
        lines = [f"{name} = {_toml(value)}" for name, value in plain.items() if value is not None]
        lines += ["", "[options]", *(f"{name} = {_toml(value)}" for name, value in self.options.items())]
        return "\n".join(lines) + "\n"


def settings() -> list[Field[Any]]:
    """Return the fields of `Config` that are plain settings: all but the method's options."""
    return [spec for spec in fields(Config) if spec.name != "options"]


def flag(name: str) -> str:
    """Return a setting's name as a command-line flag."""
    return "--" + name.replace("_", "-")


def read_config(path: Path) -> dict[str, Any]:
    """Return what a TOML file sets, its names checked; values are checked when the `Config` is made."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FedobpError(f"cannot read the configuration {path} ({error}): give a run's config.toml") from error
    except tomllib.TOMLDecodeError as error:
        raise FedobpError(f"{path} is not valid TOML ({error}): compare it with a run's config.toml") from error
    known = [spec.name for spec in fields(Config)]
    for name in given:
        if name not in known:
            raise unknown(f"setting in {path}", name, known)
    if not isinstance(given.get("options", {}), dict):
        raise FedobpError(f"`options` in {path} must be a table of the method's options: write [options]")
    return given


def _checked(spec: Field[Any], value: Any) -> Any:
    """Return a setting's value in its declared type, or say what it should be."""
    choices = get_args(spec.type)
    if choices and isinstance(choices[0], str):
        if value not in choices:
            raise unknown(f"value of {flag(spec.name)}", str(value), choices)
        return value
    if spec.type in (int, float):
        right = isinstance(value, int if spec.type is int else (int, float)) and not isinstance(value, bool)
        if not right or not math.isfinite(value):
            noun = "whole number" if spec.type is int else "number"
            raise FedobpError(f"{flag(spec.name)} must be a {noun}, not {value!r}")
        low, high = spec.metadata["low"], spec.metadata["high"]
        if (low is not None and value < low) or (high is not None and value > high):
            span = f"between {low} and {high}" if high is not None else f"at least {low}"
            raise FedobpError(f"{flag(spec.name)} must be {span}, not {value}")
        return spec.type(value)
    if not isinstance(value, str):
        raise FedobpError(f"{flag(spec.name)} must be a text, not {value!r}")
    return value


def _toml(value: Option) -> str:
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\' or ord(c) == 127 else c for c in value)
        return f'"{escaped}"'
    return repr(value)
