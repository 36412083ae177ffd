"""Phases of several runs that stand at the same kind of work, and their clients as lanes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedobp.algorithms import Tensors, Train
from fedobp.engine.fit import Rule
from fedobp.engine.interface import Task
from fedobp.transfer import send


@dataclass(frozen=True)
class Phase:
    """A `Train` or a `Sweep` at which one run's cohort stands."""

    task: Task
    item: Any
    client: Any  # a `Client` with a leading axis; None where only the order of samples is asked for
    keys: Tensor  # one a client; the epoch is not yet in it

    @property
    def options(self) -> Hashable:
        """What every kind of training must share: the samples, and which terms its step has."""
        item = self.item
        terms = (item.mask is None, item.pull is None, item.drift is None)
        return (self.task.people.data.x.data_ptr(), item.part, *terms)

    @property
    def kind(self) -> Hashable:
        """Phases of one kind train together. What differs from lane to lane is not in it: numbers, epochs, data."""
        item, client = self.item, self.client
        if isinstance(item, Train) and item.loss is None:
            return self.options
        # A function may look at everything that a client has, so all of it must have the same names and shapes.
        homes: dict[str, Mapping[str, Any]] = {"own": client.own, "down": client.down, "work": client.work}
        seen = [(home, name, _shape(value)) for home, record in homes.items() for name, value in record.items()]
        same = replace(item, epochs=0) if isinstance(item, Train) else item
        terms = (type(item), *(_function(value) for value in vars(same).values()))
        return (self.task.people.data.x.data_ptr(), terms, tuple(client.hp), tuple(seen))


class Done(NamedTuple):
    """What a phase gave."""

    work: Tensors  # changed scratch values
    loss: Tensor  # mean losses; NaN: none
    steps: Tensor | None  # each client's batches, where they were not known beforehand
    seen: int  # samples of all clients


def _function(value: Any) -> Hashable:
    """Return what makes functions the same: a method is, on equal objects."""
    return (value.__func__, value.__self__) if hasattr(value, "__func__") else value


def _shape(value: Any) -> Hashable:
    return tuple(value.shape[1:]) if isinstance(value, Tensor) else ("sparse", *value.keep.shape[1:])


@dataclass(frozen=True)
class Lane:
    """One client in a phase; `row` is its place in the cohort."""

    phase: Phase
    row: int
    client: int
    n: int  # samples in use
    steps: int  # of training; in a sweep, of one epoch


def rows_of(lanes: Sequence[Lane], vector: Callable[[Phase], Tensor]) -> Tensor:
    """Return lanes' rows of a vector, stacked anew."""
    return torch.stack([vector(lane.phase)[lane.row] for lane in lanes])


def stacked_home(lanes: Sequence[Lane], home: str) -> Any:
    """Return lanes' records of one home (own, down, work, hp), stacked anew."""
    names = list(getattr(lanes[0].phase.client, home))

    def value(name: str) -> Any:
        first = getattr(lanes[0].phase.client, home)[name]
        if isinstance(first, Tensor):
            return rows_of(lanes, lambda phase: getattr(phase.client, home)[name])
        values = rows_of(lanes, lambda phase: getattr(phase.client, home)[name].values)
        return type(first)(values, rows_of(lanes, lambda phase: getattr(phase.client, home)[name].keep))

    return {name: value(name) for name in names}


def scaling_of(lanes: Sequence[Lane]) -> Tensors:
    """Return how lanes' inputs are scaled."""
    data = [lane.phase.task.people.data for lane in lanes]
    return {name: torch.stack([getattr(one, name) for one in data]) for name in ("mean", "std")}


def rule_of(lanes: Sequence[Lane], size: int, special: bool = True) -> Rule:
    """Return how a vector of lanes moves; only a phase's first vector (`special`) is masked, pulled or pushed."""
    like = lanes[0].phase.client.work[lanes[0].phase.item.learn[0]]

    def numbers(name: Callable[[Train], str]) -> Tensor:
        values = [lane.phase.task.hp[name(lane.phase.item)] for lane in lanes]
        return send(values, like.device, like.dtype)[:, None]

    def used(name: str) -> bool:
        return any(lane.phase.task.hp[name] for lane in lanes)

    item = lanes[0].phase.item
    momentum = numbers(lambda item: "momentum") if used("momentum") else None
    pull, drift, mask = (special and option is not None for option in (item.pull, item.drift, item.mask))

    def work(name: Callable[[Train], Any]) -> Tensor:
        return rows_of(lanes, lambda phase: phase.client.work[name(phase.item)])

    return Rule(
        lr=numbers(lambda item: item.lr),
        momentum=momentum,
        decay=numbers(lambda item: "weight_decay") if used("weight_decay") else None,
        pull=numbers(lambda item: (item.pull or ("", ""))[1]) if pull else None,
        anchor=work(lambda item: (item.pull or ("", ""))[0]) if pull else None,
        drift=work(lambda item: item.drift) if drift else None,
        moving=work(lambda item: item.mask) if mask else None,
        velocity=None if momentum is None else like.new_zeros(len(lanes), size),
    )
