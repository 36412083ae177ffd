"""Phases of several runs: which of them train together, and their clients as lanes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedobp.engine.client_pool import PoolJob
from fedobp.engine.protocol import Prepared
from fedobp.engine.sgd import Rule
from fedobp.method import Train
from fedobp.records import Sparse, Tensors
from fedobp.transfer import to_device


@dataclass(frozen=True)
class Phase:
    """A `Train` or a `Sweep` that the cohort of one run has reached in its program."""

    job: PoolJob
    item: Any
    client: Any  # a `Client` with a leading axis; None where only the batch order is computed
    keys: Tensor  # one a client, without the epoch
    prepared: Prepared | None = None  # batch orders that were computed in advance

    @property
    def options(self) -> Hashable:
        """What all training phases of a group have in common: the samples, and the terms of the step."""
        item = self.item
        terms = (item.mask is None, item.pull is None, item.drift is None)
        return (self.job.data.storage_key, item.part, *terms)

    @property
    def group(self) -> Hashable:
        """The key of phases that train together. Numbers, epochs and partitions may differ from lane to lane."""
        item, client = self.item, self.client
        if isinstance(item, Train) and item.loss is None:
            return self.options
        # A function may read all of a client, so all of it must have the same names and shapes.
        parts: dict[str, Mapping[str, Any]] = {name: getattr(client, name) for name in ("state", "download", "scratch")}
        seen = [(part, name, _shape(value)) for part, record in parts.items() for name, value in record.items()]
        same = replace(item, epochs=0) if isinstance(item, Train) else item
        terms = (type(item), *(_function(value) for value in vars(same).values()))
        return (self.job.data.storage_key, terms, tuple(client.hparams), tuple(seen))


class PhaseResult(NamedTuple):
    """The result of a phase."""

    scratch: Tensors  # changed values
    loss: Tensor  # mean losses; NaN for a client without a step
    steps: Tensor | None  # each client's batches; None: as planned
    processed: int  # samples of all clients that went through models


def _function(value: Any) -> Hashable:
    """Return a key that equal functions share; bound methods of equal objects are equal."""
    return (value.__func__, value.__self__) if hasattr(value, "__func__") else value


def _shape(value: Any) -> Hashable:
    return tuple(value.shape[1:]) if isinstance(value, Tensor) else ("sparse", *value.keep.shape[1:])


@dataclass(frozen=True)
class Lane:
    """One client in a phase; `row` is its position in the cohort."""

    phase: Phase
    index: int  # of the phase in its group
    row: int
    client: int
    n: int  # samples in use
    steps: int  # of training; in a sweep, of one epoch


def rows_of(lanes: Sequence[Lane], vector: Callable[[Phase], Tensor]) -> Tensor:
    """Return the lanes' rows of a cohort's tensor, stacked."""
    return torch.stack([vector(lane.phase)[lane.row] for lane in lanes])


def stacked_part(lanes: Sequence[Lane], part: str) -> Any:
    """Return lanes' records of one part of a `Client` (state, download, scratch, hparams, data), stacked."""

    def value(name: str) -> Any:
        if isinstance(getattr(lanes[0].phase.client, part)[name], Tensor):
            return rows_of(lanes, lambda phase: getattr(phase.client, part)[name])
        values = rows_of(lanes, lambda phase: getattr(phase.client, part)[name].values)
        return Sparse(values, rows_of(lanes, lambda phase: getattr(phase.client, part)[name].keep))

    return {name: value(name) for name in getattr(lanes[0].phase.client, part)}


def scaling_of(lanes: Sequence[Lane]) -> Tensors:
    """Return the constants that scale the lanes' inputs."""
    data = [lane.phase.job.data for lane in lanes]
    return {name: torch.stack([getattr(one, name) for one in data]) for name in ("mean", "std")}


def rule_of(lanes: Sequence[Lane], size: int, special: bool = True) -> Rule:
    """Return the update rule of a vector of lanes; mask, pull and drift are for a phase's first vector (`special`)."""
    like = lanes[0].phase.client.scratch[lanes[0].phase.item.learn[0]]

    def numbers(name: Callable[[Train], str]) -> Tensor:
        values = [lane.phase.job.hparams[name(lane.phase.item)] for lane in lanes]
        return to_device(values, like.device, like.dtype)[:, None]

    def used(name: str) -> bool:
        return any(lane.phase.job.hparams[name] for lane in lanes)

    item = lanes[0].phase.item
    momentum = numbers(lambda item: "momentum") if used("momentum") else None
    pull, drift, mask = (special and option is not None for option in (item.pull, item.drift, item.mask))

    def scratch(name: Callable[[Train], Any]) -> Tensor:
        return rows_of(lanes, lambda phase: phase.client.scratch[name(phase.item)])

    return Rule(
        lr=numbers(lambda item: item.lr),
        momentum=momentum,
        decay=numbers(lambda item: "weight_decay") if used("weight_decay") else None,
        pull=numbers(lambda item: (item.pull or ("", ""))[1]) if pull else None,
        anchor=scratch(lambda item: (item.pull or ("", ""))[0]) if pull else None,
        drift=scratch(lambda item: item.drift) if drift else None,
        moving=scratch(lambda item: item.mask) if mask else None,
        velocity=None if momentum is None else like.new_zeros(len(lanes), size),
    )
