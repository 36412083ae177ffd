"""Phases of several runs that stand at the same kind of work, and their clients as lanes."""

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
    """A `Train` or a `Sweep` at which one run's cohort stands."""

    job: PoolJob
    item: Any
    client: Any  # a `Client` with a leading axis; None where only the order of samples is asked for
    keys: Tensor  # one a client; the epoch is not yet in it
    prepared: Prepared | None = None  # orders of samples that were computed ahead

    @property
    def options(self) -> Hashable:
        """What every kind of training must share: the samples, and which terms its step has."""
        item = self.item
        terms = (item.mask is None, item.pull is None, item.drift is None)
        return (self.job.clients.data.x.data_ptr(), item.part, *terms)

    @property
    def kind(self) -> Hashable:
        """Phases of one kind train together. What differs from lane to lane is not in it: numbers, epochs, data."""
        item, client = self.item, self.client
        if isinstance(item, Train) and item.loss is None:
            return self.options
        # A function may look at everything that a client has, so all of it must have the same names and shapes.
        parts: dict[str, Mapping[str, Any]] = {name: getattr(client, name) for name in ("state", "download", "scratch")}
        seen = [(part, name, _shape(value)) for part, record in parts.items() for name, value in record.items()]
        same = replace(item, epochs=0) if isinstance(item, Train) else item
        terms = (type(item), *(_function(value) for value in vars(same).values()))
        return (self.job.clients.data.x.data_ptr(), terms, tuple(client.hparams), tuple(seen))


class PhaseResult(NamedTuple):
    """What came out of a phase."""

    scratch: Tensors  # changed values
    loss: Tensor  # mean losses; NaN: none
    steps: Tensor | None  # each client's batches, where they were not known beforehand
    processed: int  # samples of all clients that went through models


def _function(value: Any) -> Hashable:
    """Return what makes functions the same: a method is, on equal objects."""
    return (value.__func__, value.__self__) if hasattr(value, "__func__") else value


def _shape(value: Any) -> Hashable:
    return tuple(value.shape[1:]) if isinstance(value, Tensor) else ("sparse", *value.keep.shape[1:])


@dataclass(frozen=True)
class Lane:
    """One client in a phase; `row` is its place in the cohort."""

    phase: Phase
    index: int  # of the phase among those that are carried out together
    row: int
    client: int
    n: int  # samples in use
    steps: int  # of training; in a sweep, of one epoch


def rows_of(lanes: Sequence[Lane], vector: Callable[[Phase], Tensor]) -> Tensor:
    """Return lanes' rows of a vector, stacked anew."""
    return torch.stack([vector(lane.phase)[lane.row] for lane in lanes])


def stacked_part(lanes: Sequence[Lane], part: str) -> Any:
    """Return lanes' records of one part of a `Client` (state, download, scratch, hparams, data), stacked anew."""

    def value(name: str) -> Any:
        if isinstance(getattr(lanes[0].phase.client, part)[name], Tensor):
            return rows_of(lanes, lambda phase: getattr(phase.client, part)[name])
        values = rows_of(lanes, lambda phase: getattr(phase.client, part)[name].values)
        return Sparse(values, rows_of(lanes, lambda phase: getattr(phase.client, part)[name].keep))

    return {name: value(name) for name in getattr(lanes[0].phase.client, part)}


def scaling_of(lanes: Sequence[Lane]) -> Tensors:
    """Return how lanes' inputs are scaled."""
    data = [lane.phase.job.clients.data for lane in lanes]
    return {name: torch.stack([getattr(one, name) for one in data]) for name in ("mean", "std")}


def rule_of(lanes: Sequence[Lane], size: int, special: bool = True) -> Rule:
    """Return how a vector of lanes moves; only a phase's first vector (`special`) is masked, pulled or pushed."""
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
