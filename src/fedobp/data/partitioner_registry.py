"""Partitioners by name: built-in ones, those of other packages, and functions of the user.

A function takes a `PartitionTask` and returns the sample ids of each client. Its keyword-only parameters with a number
or a text as default are its options.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any, ClassVar

import numpy as np

from fedobp.data.client_changes import ClientChange
from fedobp.data.partitioners import (
    Classes,
    Dirichlet,
    DirichletEqual,
    Iid,
    Indices,
    Natural,
    Partitioner,
    PartitionTask,
    Quantity,
    Shards,
)
from fedobp.data.shifts import Concept, Feature
from fedobp.errors import FedobpError, short, unknown
from fedobp.options import options_of
from fedobp.plugins import attributing_errors, declared, is_reference, label, load_entry_point, load_reference

PartitionFunction = Callable[..., Sequence[Any]]
GivenPartitioner = str | PartitionFunction | type[Partitioner]

PARTITIONERS: dict[str, type[Partitioner]] = {
    cls.name: cls for cls in (Dirichlet, DirichletEqual, Iid, Shards, Classes, Quantity, Feature, Concept, Natural)
}


def partitioner(given: GivenPartitioner) -> type[Partitioner]:
    """Return a partitioner by its name, by a reference (`package.module:function`), or of a function or class."""
    if not isinstance(given, str):
        return _made(given, label(given))
    if given in PARTITIONERS:
        return PARTITIONERS[given]
    if is_reference(given):
        return _made(load_reference("partition", given), given)
    found = declared("fedobp.partitions")
    if given not in found:
        raise unknown("partition", given, partitioner_names())
    return _made(load_entry_point("partition", given, found[given], _problem), given)


def partitioner_names() -> list[str]:
    """Return the names of all partitioners, also of those in other packages, which are not loaded here."""
    return list(dict.fromkeys([*PARTITIONERS, *declared("fedobp.partitions")]))


def assigned(maker: Partitioner, task: PartitionTask) -> list[Indices]:
    """Return each client's samples; what a partitioner of the user or of another package returns is checked."""
    with _attributed(maker):
        found = maker.assign(task)
    return found if type(maker) in PARTITIONERS.values() else _checked(found, maker.name, task)


def changes(maker: Partitioner, task: PartitionTask) -> list[ClientChange]:
    """Return each client's change, checked like what is assigned."""
    labels = int(task.y.max(initial=-1)) + 1
    with _attributed(maker):
        found = maker.client_changes(task)
        if not isinstance(found, Sequence) or len(found) != task.clients:
            raise FedobpError(f"`client_changes` of partition '{maker.name}' must return one change for each client")
        for client, change in enumerate(found):
            if not isinstance(change, ClientChange) or not change.is_valid(task.clients, labels):
                raise FedobpError(
                    f"partition '{maker.name}' gives client {client} the change {short(change, 200)}: return a "
                    f"`ClientChange` with values in their ranges, {labels} labels or none, and a group below "
                    f"{task.clients}"
                )
    # Code of the user may give the labels as an array, which has no truth value.
    return [one if isinstance(one.labels, tuple) else replace(one, labels=tuple(map(int, one.labels))) for one in found]


def _attributed(maker: Partitioner) -> AbstractContextManager[None]:
    return attributing_errors("partition", maker.name, getattr(maker, "function", type(maker)))


def _checked(found: Any, name: str, task: PartitionTask) -> list[Indices]:
    """Return assigned samples as vectors of ids, or say what is wrong with them."""
    if not isinstance(found, Sequence | np.ndarray) or len(found) != task.clients:
        got = f"{len(found)} parts" if isinstance(found, Sequence | np.ndarray) else f"a {type(found).__name__}"
        raise FedobpError(
            f"partition '{name}' returns {got} for {task.clients} clients: return a list of sample ids for each client"
        )
    parts = []
    for client, one in enumerate(found):
        try:
            ids = np.asarray(one)
        except ValueError as error:  # rows of several lengths
            raise FedobpError(f"partition '{name}' gives client {client} no vector: return its sample ids") from error
        if ids.size and ids.dtype.kind == "u" and ids.max() >= len(task.y):
            raise FedobpError(f"partition '{name}' assigns sample {ids.max()}, and samples are 0 to {len(task.y) - 1}")
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise FedobpError(
                f"partition '{name}' gives client {client} an array of shape {short(ids.shape)} and type "
                f"{short(ids.dtype)}: it must be a vector of whole numbers, the ids of its samples"
            )
        parts.append(ids.astype(np.int64))
    ids = np.concatenate(parts)
    if not len(ids):
        raise FedobpError(f"partition '{name}' gives no client a sample")
    if ids.min() < 0 or ids.max() >= len(task.y):
        wrong = ids[(ids < 0) | (ids >= len(task.y))][0]
        raise FedobpError(f"partition '{name}' assigns sample {wrong}, and samples are 0 to {len(task.y) - 1}")
    times = np.bincount(ids)
    if times.max() > 1:
        raise FedobpError(f"partition '{name}' assigns sample {int(times.argmax())} to {times.max()} clients' parts")
    return parts


def _made(given: Any, name: str) -> type[Partitioner]:
    """Return a class as it is, and a function as a partitioner whose `assign` calls it."""
    if problem := _problem(given):
        raise FedobpError(f"the partition '{name}' {problem}")
    if isinstance(given, type):
        own: type[Partitioner] = given
        return own
    options = options_of("partition", name, given)

    class Function(options, Partitioner):  # type: ignore[misc, valid-type]
        """A function of the user."""

        function: ClassVar[Any] = staticmethod(given)

        def assign(self, task: PartitionTask) -> list[Indices]:
            """Call the function with its options."""
            found: list[Indices] = given(task, **{spec.name: getattr(self, spec.name) for spec in fields(self)})
            return found

    return Function


def _problem(given: object) -> str | None:
    """Return why an object is no partitioner; None if it is."""
    if isinstance(given, type):
        if not issubclass(given, Partitioner):
            return "is a class that is no subclass of `Partitioner`"
        return None if isinstance(getattr(given, "name", None), str) else "has no text `name`"
    try:
        inspect.signature(given)  # type: ignore[arg-type]
    except (ValueError, TypeError):  # it cannot be called, or is a function in C
        return "is no function of a task that returns the sample ids of each client"
    return None
