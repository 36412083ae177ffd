"""Data that is given in memory: arrays, tensors, a DataFrame, ready-made shards, or a function of a client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedobp.data.dataset import Dataset, parse
from fedobp.data.datasets import check_name
from fedobp.data.free_memory import memory_guard
from fedobp.errors import FedobpError, short

NAME = "in-memory"


class _Part(NamedTuple):
    """Samples of one client: for training or for test."""

    x: NDArray[Any]
    y: NDArray[Any] | None


def dataset_from_data(
    data: Any,
    y: Any = None,
    *,
    label: str | None = None,
    client: Any = None,
    clients: int | None = None,
    test: Any = None,
    tokens: bool = False,
    vocabulary: int | None = None,
    name: str = NAME,
    **columns: Any,
) -> Dataset:
    """Return a dataset of what is in memory; it is checked as an import of the same arrays would be.

    `data` is one of these:

    - inputs, as an array or a tensor, with labels `y`; `client` has each sample's client, `test` says which samples of
      these clients are for test;
    - a DataFrame, whose columns `label` and `client` are named; `columns` are the options of an import of a table;
    - shards: a sequence, or a mapping by client name, with (x, y) or (x, y, x_test, y_test) for each client;
    - a function that returns such a shard for client 0, 1, ..., with the number of `clients`.

    With `tokens`, inputs are sequences of tokens below `vocabulary` (default: one more than the largest). Without
    labels, every next token is predicted.
    """
    check_name(name)
    with memory_guard("the data in memory"):
        arrays = _arrays(data, y, label, client, clients, test, tokens, columns)
        if vocabulary is not None:
            arrays["vocabulary"] = np.asarray(vocabulary)
        return replace(parse(name, arrays), in_memory=True)


def _arrays(
    data: Any,
    y: Any,
    label: str | None,
    client: Any,
    clients: int | None,
    test: Any,
    tokens: bool,
    columns: Mapping[str, Any],
) -> dict[str, Any]:
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        if label is None or y is not None:
            raise FedobpError("a DataFrame has its labels in a column: name it with `label`, and leave `y` out")
        from fedobp.data.tables import frame_arrays

        return frame_arrays(data, label, client, **columns)
    for key, value in {"label": label, **columns}.items():
        if value is not None:
            raise FedobpError(f"`{key}` concerns the columns of a DataFrame, and the data is none: leave it out")
    whole = y is not None or (tokens and hasattr(data, "shape"))
    if not callable(data) and clients is not None:
        raise FedobpError("`clients` is the number of clients that a function is asked for: leave it out")
    if whole:
        found = {"tokens" if tokens else "x": _array(data)}
        given = {"y": y, "client": client, "test": test}
        return found | {key: _names(value) for key, value in given.items() if value is not None}
    if client is not None or test is not None:
        raise FedobpError("shards say by themselves what each client has: leave `client` and `test` out")
    return _joined(_shards(data, clients, tokens), tokens)


def _shards(data: Any, clients: int | None, tokens: bool) -> "dict[str | int, tuple[_Part, _Part | None]]":
    """Return each client's training part, or all of its samples, and its test part, if it has one."""
    if callable(data):
        if not isinstance(clients, int | np.integer) or clients < 1:
            raise FedobpError("a function needs the number of clients that it is asked for: give `clients`")
        given: Mapping[Any, Any] = {at: data(at) for at in range(int(clients))}
    elif isinstance(data, Mapping):
        given = data
    elif isinstance(data, Sequence) and not isinstance(data, str):
        given = dict(enumerate(data))
    else:
        raise FedobpError(
            f"data of type {type(data).__name__} needs labels: give `y`, or shards with (x, y) for each client"
        )
    if not given:
        raise FedobpError("there are no shards: give (x, y) for at least one client")
    return {key: _parts(key, one, tokens) for key, one in given.items()}


def _parts(client: Any, shard: Any, tokens: bool) -> tuple[_Part, _Part | None]:
    """Return a shard's parts, which come in one of the forms that are allowed."""
    arrays = [shard] if tokens and hasattr(shard, "shape") else shard
    is_list = isinstance(arrays, Sequence) and not isinstance(arrays, str)
    if is_list and len(arrays) == 2 and all(isinstance(one, tuple | list) and len(one) == 2 for one in arrays):
        arrays = [*arrays[0], *arrays[1]]
    if is_list:
        found = [_array(one) for one in arrays]
        if tokens and len(found) <= 2 and all(one.ndim == 2 for one in found):
            return _Part(found[0], None), _Part(found[1], None) if len(found) == 2 else None
        if len(found) in (2, 4):
            train, *rest = (_Part(found[at], _names(found[at + 1])) for at in range(0, len(found), 2))
            return train, rest[0] if rest else None
    raise FedobpError(f"the shard of client {short(client)} must be (x, y), or (x, y, x_test, y_test)")


def _joined(shards: "Mapping[str | int, tuple[_Part, _Part | None]]", tokens: bool) -> dict[str, Any]:
    """Return the arrays of all clients' samples, in the order of the clients."""
    first = next(iter(shards.values()))
    pieces: list[_Part] = []
    clients: list[str | int] = []
    tests: list[bool] = []
    for client, (train, test) in shards.items():
        if (test is None) != (first[1] is None):
            raise FedobpError(f"the shard of client {short(client)} must have a test part if the others have one")
        for part, is_test in ((train, False), (test, True)):
            if part is None:
                continue
            if part.x.dtype != first[0].x.dtype or part.x.shape[1:] != first[0].x.shape[1:] or not part.x.ndim:
                raise FedobpError(
                    f"the shard of client {short(client)} has inputs of shape {part.x.shape} and type {part.x.dtype}, "
                    f"and the first one {first[0].x.shape} and {first[0].x.dtype}: give all clients the same"
                )
            if part.y is not None and part.y.shape[:1] != part.x.shape[:1]:
                raise FedobpError(
                    f"the shard of client {short(client)} has {len(part.x)} inputs and labels of shape {part.y.shape}: "
                    "give one label for each"
                )
            pieces.append(part)
            clients += [client] * len(part.x)
            tests += [is_test] * len(part.x)
        if not len(train.x):
            raise FedobpError(f"the shard of client {short(client)} has no samples: leave it out")
    found: dict[str, Any] = {
        "tokens" if tokens else "x": np.concatenate([part.x for part in pieces]),
        "client": _names(clients if all(isinstance(one, int) for one in shards) else list(map(str, clients))),
    }
    labels = [part.y for part in pieces if part.y is not None]
    if labels:
        if len(labels) < len(pieces):
            raise FedobpError("some shards have labels and some have none: give all clients the same")
        found["y"] = np.concatenate(labels)
    return found if first[1] is None else {**found, "test": np.array(tests)}


def _array(given: Any) -> NDArray[Any]:
    """Return an array or a tensor as an array of its own: what the user changes later does not change a run.

    Tensors of images are channels first, as torch has them.
    """
    if callable(getattr(given, "detach", None)):
        given = given.detach().cpu()
        given = given.float() if str(given.dtype) in ("torch.bfloat16", "torch.float16") else given
        array = np.array(given.numpy())
        if array.ndim == 4 and array.shape[1] in (1, 3) and array.shape[3] > 4:
            array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
        return array
    try:
        return np.array(given)
    except ValueError as error:  # rows of several lengths
        raise FedobpError(f"the data in memory is no array ({short(error, 100)}): give rows of one length") from error


def _names(given: Any) -> NDArray[Any]:
    """Return labels or clients; a column of Python texts or numbers gets their type."""
    array = _array(given)
    return np.array(array.tolist()) if array.dtype == object else array
