"""What a federation's server and nodes share: its settings in one file, and where a client stands.

`federation.toml` holds the resolved settings of a run, what its inputs look like (no node sees another's data, so the
constants of scaling are here), and the server's rules. Both sides build the same method and model from it.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedobp.algorithms import attributing_errors
from fedobp.config import Config, check_settings
from fedobp.data import Dataset, FederatedData
from fedobp.engine import dtype_of, refuse_programs
from fedobp.errors import FedobpError, short
from fedobp.method import InitialState, Method
from fedobp.models import Model
from fedobp.resolution import model_for, resolve
from fedobp.run import context_of
from fedobp.toml import read_toml, toml_lines
from fedobp.wrapped import inner_of

# Where a client's last accepted training stands: its round, and which of the client's turns in that round it was.
Visit = tuple[int, int]
NO_VISIT: Visit = (0, 0)


_LARGEST_SIDE, _MOST_TOKENS = 1 << 20, 10_000_000


def _rule(default: Any, about: str) -> Any:
    """Declare a rule of the server: `about` stands beside it in `federation.toml`."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Rules:
    """What the server does about nodes that are late, absent or wrong."""

    deadline: float = _rule(600.0, "seconds that the nodes of a cohort have to answer")
    min_replies: float = _rule(0.5, "share of a cohort that must have answered, or the cohort is skipped")
    retries: int = _rule(1, "how often a node is asked again that answered with an error")
    start_nodes: int = _rule(0, "nodes that must be there before the first round; 0: all")
    wait: float = _rule(600.0, "seconds to wait for them")


@dataclass(frozen=True)
class Inputs:
    """What the samples of all nodes look like, and how they are scaled: (x / unit - mean) / std."""

    shape: tuple[int, ...]  # of one stored input: H x W, H x W x C, features, or a length
    labels: tuple[str | int, ...]
    unit: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vocabulary: int = 0
    every_position: bool = False

    @classmethod
    def of(cls, dataset: Dataset, data: FederatedData) -> "Inputs":
        """Return those of a dataset that is here."""
        mean, std = (tuple(value.double().flatten().tolist()) for value in (data.mean, data.std))
        shape, labels = tuple(dataset.x.shape[1:]), () if dataset.every_position else tuple(dataset.labels)
        return cls(shape, labels, float(data.unit), mean, std, dataset.vocabulary, dataset.every_position)

    @property
    def names(self) -> Sequence[str | int]:
        """The labels; where every next token is one, all tokens."""
        return range(self.vocabulary) if self.every_position else self.labels

    def no_samples(self, name: str) -> Dataset:
        """Return a dataset of such samples that has none: settings and model are resolved with it."""
        kind = np.int64 if self.vocabulary else np.float32
        y = np.zeros((0, *self.shape) if self.every_position else 0, np.int64)
        return Dataset(name, np.zeros((0, *self.shape), kind), y, self.names, 0, vocabulary=self.vocabulary)


@dataclass(frozen=True)
class FederationSettings:
    """A federation, as its file says: complete settings, the method, its inputs and the server's rules."""

    config: Config
    method: Method
    inputs: Inputs
    rules: Rules
    id: str  # a hash of settings and inputs: nodes keep their state under it

    @cached_property
    def model(self) -> Model:
        """The model that all clients share."""
        return model_for(self.config, self.inputs.no_samples(self.config.dataset))

    @cached_property
    def initial(self) -> tuple[Tensor, InitialState]:
        """Theta^0 and the state before round 1, which server and nodes compute alike."""
        theta = self.model.initial(self.config.seed).to(dtype_of(self.config.precision))
        return theta, self.method.init(self.model, theta, self.config.seed)


def make_settings(config: Config, inputs: Inputs, rules: Rules) -> FederationSettings:
    """Return the federation of complete settings."""
    config, method = resolve(config, inputs.no_samples(config.dataset))
    if config.holdout_clients:
        raise FedobpError("nodes cannot be held out as new clients: leave out --holdout-clients")
    if config.eval_clients is not None or config.partition_file is not None:
        raise FedobpError("all nodes are evaluated, on their own data: leave out --eval-clients and --partition-file")
    if rules.start_nodes > config.clients:
        raise FedobpError(f"start_nodes is {rules.start_nodes}, and there are {config.clients} clients: use fewer")
    if config.precision in ("bf16", "tf32"):
        raise FedobpError(f"nodes compute in fp32 or fp64, not in {config.precision}: choose another --precision")
    content = json.dumps([config.hash, _plain(inputs)], sort_keys=True)
    made = FederationSettings(config, method, inputs, rules, hashlib.sha256(content.encode()).hexdigest()[:16])
    with attributing_errors(type(inner_of(method))):
        _refuse_unsuited(made)
    return made


def _refuse_unsuited(settings: FederationSettings) -> None:
    """Refuse before anything is written or started what the server or a node would refuse in the first round.

    That is a method and a model that do not go together, and a method that needs what only a simulation has.
    """
    ctx = context_of(settings.config, settings.model, 1, torch.zeros(1, dtype=torch.int64))
    _, initial = settings.initial
    refuse_programs(settings.method, ctx)
    settings.method.download(ctx, initial.server, {name: value[None] for name, value in initial.record.items()})


def write_settings(settings: FederationSettings) -> str:
    """Return the text of `federation.toml`."""
    rules = [
        f"{line}   # {spec.metadata['about']}"
        for line, spec in zip(toml_lines(_plain(settings.rules)), fields(Rules), strict=True)
    ]
    lines = [
        "", "# What the samples of all nodes look like; inputs are scaled by (x / unit - mean) / std.",
        "[inputs]", *toml_lines(_plain(settings.inputs)),
        "", "# What the server does about nodes that are late, absent or wrong: only this table may be changed later.",
        "[server]", *rules,
    ]  # fmt: skip
    return settings.config.to_toml() + "\n".join(lines) + "\n"


def _plain(table: Inputs | Rules) -> dict[str, Any]:
    values = {spec.name: getattr(table, spec.name) for spec in fields(table)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_settings(path: Path) -> FederationSettings:
    """Read `federation.toml`."""
    where = short(path, 200)
    _, given = read_toml(path, "a federation.toml that `fedobp deploy init` wrote")
    tables = {name: given.pop(name, None) for name in ("inputs", "server")}
    check_settings(given, path, [spec.name for spec in fields(Config)])
    try:
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in tables["inputs"].items()}
        inputs, rules = Inputs(**values), Rules(**tables["server"])
        check_values(inputs, rules)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise FedobpError(f"{where} does not describe a federation ({short(error, 120)}): make it anew") from error
    return make_settings(Config(**given), inputs, rules)


def check_values(inputs: Inputs, rules: Rules) -> None:
    """Raise a ValueError for numbers that describe no federation."""
    numbers = (inputs.unit, *inputs.mean, *inputs.std, rules.deadline, rules.min_replies, rules.wait)
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
        raise ValueError("a number is none, or not finite")
    sizes, labels = inputs.shape, inputs.labels
    if not 1 <= len(sizes) <= 3 or not all(type(size) is int and 0 < size <= _LARGEST_SIDE for size in sizes):
        raise ValueError(f"shape must have one to three sides, from 1 to {_LARGEST_SIDE}")
    if type(inputs.vocabulary) is not int or not 0 <= inputs.vocabulary <= _MOST_TOKENS:
        raise ValueError(f"vocabulary must be a whole number, at most {_MOST_TOKENS}")
    known = all(isinstance(label, str | int) for label in labels) and len(set(labels)) == len(labels)
    if not known or len(inputs.names) < 2 or not isinstance(inputs.every_position, bool):
        raise ValueError("there must be at least two labels, each once")
    channels = 1 if inputs.vocabulary or len(inputs.shape) == 2 else inputs.shape[-1]
    if {len(inputs.mean), len(inputs.std)} - {1, channels}:
        raise ValueError("mean and std must have one value, or one for each channel or feature")
    if not all(isinstance(value, int) and value >= 0 for value in (rules.retries, rules.start_nodes)):
        raise ValueError("retries and start_nodes must be whole numbers from 0 on")
    if inputs.unit <= 0 or min(inputs.std) <= 0 or rules.deadline <= 0 or not 0 <= rules.min_replies <= 1:
        raise ValueError("unit, std and deadline must be above 0, min_replies between 0 and 1")


def visit_of(values: Sequence[Any]) -> Visit:
    """Return a visit from its plain form."""
    number, turn = values
    return int(number), int(turn)
