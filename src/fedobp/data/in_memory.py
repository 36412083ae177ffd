"""Data that is given in memory: arrays, tensors, a DataFrame, ready-made shards, or a function of a client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedobp.data.dataset import Dataset, as_vector, check_inputs, check_shapes, parse
from fedobp.data.datasets import check_name
from fedobp.data.free_memory import memory_guard
from fedobp.data.lazy import LazyDataset, Made
from fedobp.data.registry import REGISTRY
from fedobp.errors import FedobpError, first_line, short
from fedobp.plugins import attributing_errors, label

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
    missing: str | None = None,
    drop: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    lazy: bool = False,
    classes: int | None = None,
    samples: Any = None,
) -> Dataset:
    """Return a dataset of what is in memory; it is checked as an import of the same arrays would be.

    `data` is one of these:

    - inputs, as an array or a tensor, with labels `y`; `client` has each sample's client, `test` says which samples of
      these clients are for test;
    - a DataFrame, whose columns `label` and `client` are named; `missing` (refuse, drop or impute), `drop` and
      `categories` are the options of an import of a table;
    - shards: a sequence, or a mapping by client name, with (x, y) or (x, y, x_test, y_test) for each client;
    - a function that returns such a shard for client 0, 1, ..., with the number of `clients`; with `lazy`, it is
      called when a client is needed, with labels 0 to `classes` - 1, and the size of each client in `samples`.

    With `tokens`, inputs are sequences of tokens below `vocabulary` (default: one more than the largest). Without
    labels, every next token is predicted.
    """
    check_name(name)
    if lazy:
        unused = (y, label, client, test, vocabulary, missing, drop, categories)
        if not callable(data) or tokens or any(value is not None for value in unused):
            raise FedobpError("`lazy` is for a function of a client: beside it give `clients`, `classes` and `samples`")
        return _lazy(data, name, clients, classes, samples)
    if classes is not None or samples is not None:
        raise FedobpError("`classes` and `samples` are of data that is made lazily: say `lazy=True`, or leave them out")
    with memory_guard("the data in memory"):
        columns = {"missing": missing, "drop": drop, "categories": categories}
        columns = {key: value for key, value in columns.items() if value is not None}
        if hasattr(data, "columns") and hasattr(data, "iloc"):
            others = {"y": y, "clients": clients, "test": test, "tokens": tokens or None, "vocabulary": vocabulary}
            arrays = _frame(data, label, client, columns, others)
        else:
            arrays = _arrays(data, y, {"label": label, **columns}, client, clients, test, tokens)
        if vocabulary is not None and not tokens:
            raise FedobpError("`vocabulary` is that of tokens: say `tokens=True`, or leave it out")
        if vocabulary is not None:
            arrays["vocabulary"] = np.asarray(vocabulary)
        return replace(parse(name, arrays), in_memory=True)


def _frame(data: Any, label: Any, client: Any, columns: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a DataFrame; `others` are what concerns other data."""
    if others["y"] is not None or label is None:
        raise FedobpError("a DataFrame has its labels in a column: name it with `label`, and leave `y` out")
    for key, value in others.items():
        if value is not None:
            raise FedobpError(f"`{key}` is not for a DataFrame: give arrays or shards instead, or leave it out")
    for key, value in (("label", label), ("client", client)):
        if hasattr(value, "__len__") and not isinstance(value, str):
            raise FedobpError(f"`{key}` must be the name of a column of the DataFrame, not a {type(value).__name__}")
    from fedobp.data.tables import frame_arrays

    return frame_arrays(data, label, client, **columns)


def _arrays(
    data: Any, y: Any, columns: Mapping[str, Any], client: Any, clients: int | None, test: Any, tokens: bool
) -> dict[str, Any]:
    for key, value in columns.items():
        if value is not None:
            raise FedobpError(f"`{key}` concerns the columns of a DataFrame, and the data is none: leave it out")
    whole = y is not None or (tokens and hasattr(data, "shape"))
    if not callable(data) and clients is not None:
        raise FedobpError("`clients` is the number of clients that a function is asked for: leave it out")
    if callable(data) and y is not None:
        raise FedobpError("a function returns the labels of its clients: leave `y` out")
    if whole:
        found = {"tokens" if tokens else "x": _inputs(data)}
        given = {"y": y, "client": client, "test": test}
        return found | {key: _names(key, value) for key, value in given.items() if value is not None}
    if client is not None or test is not None:
        raise FedobpError("shards say by themselves what each client has: leave `client` and `test` out")
    return _joined(_shards(data, clients, tokens), tokens)


def _shards(data: Any, clients: int | None, tokens: bool) -> "dict[str | int, tuple[_Part, _Part | None]]":
    """Return each client's training part, or all of its samples, and its test part, if it has one."""
    if callable(data):
        if not isinstance(clients, int | np.integer) or clients < 1:
            raise FedobpError("a function needs the number of clients that it is asked for: give `clients`")
        return {at: _parts(at, _asked(data, at), tokens) for at in range(int(clients))}
    if isinstance(data, Mapping):
        given: Mapping[Any, Any] = data
    elif isinstance(data, Sequence) and not isinstance(data, str):
        given = dict(enumerate(data))
    else:
        raise FedobpError(
            f"data of type {type(data).__name__} needs labels: give `y`, or shards with (x, y) for each client"
        )
    if not given:
        raise FedobpError("there are no shards: give (x, y) for at least one client")
    return {key: _parts(key, one, tokens) for key, one in given.items()}


def _lazy(function: Any, name: str, clients: int | None, classes: int | None, samples: Any) -> LazyDataset:
    """Return the dataset of a function that is called when a client is needed; client 0 is made at once."""
    if name in REGISTRY:
        raise FedobpError(f"'{name}' is a dataset that fedobp knows: give data that is made lazily another `name`")
    for key, value, least in (("clients", clients, 1), ("classes", classes, 2)):
        if not isinstance(value, int | np.integer) or value < least:
            raise FedobpError(f"data that is made lazily needs `{key}`, a whole number of at least {least}: give it")
    assert clients is not None
    assert classes is not None
    make = partial(_made, function, int(classes))
    first = make(0)
    sizes, test_sizes = _sizes(samples, int(clients), first)
    return LazyDataset(
        name, first.x, first.y, tuple(range(int(classes))), 0, in_memory=True,
        function=make, sizes=sizes, test_sizes=test_sizes, made_by=label(function),
    )  # fmt: skip


def _made(function: Any, classes: int, client: int) -> Made:
    """Return the samples that a function makes for a client, checked by themselves."""
    what = f"client {client}"
    parts = [part for part in _parts(client, _asked(function, client), tokens=False) if part is not None]
    for part in parts:
        check_shapes(what, {"x": part.x.shape, "y": () if part.y is None else part.y.shape})
    if len({(part.x.shape[1:], part.x.dtype) for part in parts}) > 1:
        raise FedobpError(f"{what} has other inputs for test than for training: give both the same shape and type")
    x, y = np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts if part.y is not None])
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= classes:
        raise FedobpError(f"{what} has labels that are not 0 to {classes - 1}: number them, or give more `classes`")
    return Made(check_inputs(what, x), y.astype(np.int64), len(parts[1].x) if len(parts) > 1 else None)


def _sizes(samples: Any, clients: int, first: Made) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the samples of each client, and those for test: as given, or as many as client 0 has."""
    if samples is None:
        test = None if first.test is None else np.broadcast_to(np.int64(first.test), clients)
        return np.broadcast_to(np.int64(len(first.y)), clients), test
    given = np.asarray(samples)
    shape = (clients,) if first.test is None else (clients, 2)
    if given.shape != shape or given.dtype.kind not in "iu" or given.min() < 1:
        each = "the number of its samples" if first.test is None else "the numbers of its samples for training and test"
        raise FedobpError(f"`samples` must have {each} for each of {clients} clients, at least 1: it has {given.shape}")
    given = given.astype(np.int64)
    return (given, None) if first.test is None else (given.sum(axis=1), given[:, 1])


def _asked(function: Any, client: int) -> Any:
    """Return what a function of the user returns for a client."""
    with attributing_errors(f"client {client} of", label(function), function):
        return function(client)


def _parts(client: Any, shard: Any, tokens: bool) -> tuple[_Part, _Part | None]:
    """Return a shard's parts, which come in one of the forms that are allowed."""
    arrays = [shard] if tokens and hasattr(shard, "shape") else shard
    is_list = isinstance(arrays, Sequence) and not isinstance(arrays, str)
    if is_list and len(arrays) == 2 and all(isinstance(one, tuple | list) and len(one) == 2 for one in arrays):
        arrays = [*arrays[0], *arrays[1]]
    if is_list:
        found = [_inputs(one) if at % 2 == 0 else _array(one) for at, one in enumerate(arrays)]
        if tokens and len(found) <= 2 and all(one.ndim == 2 for one in found):
            if (
                len(found) == 2
                and found[0].shape == found[1].shape
                and np.array_equal(found[0][:, 1:], found[1][:, :-1])
            ):
                raise FedobpError(
                    f"the shard of client {short(client)} has its next tokens as labels: give all tokens, [N, length + "
                    "1], without labels"
                )
            return _Part(found[0], None), _Part(found[1], None) if len(found) == 2 else None
        if len(found) in (2, 4):
            train, *rest = (
                _Part(found[at], as_vector(_names(f"labels of client {short(client)}", arrays[at + 1])))
                for at in range(0, len(found), 2)
            )
            return train, rest[0] if rest else None
    raise FedobpError(f"the shard of client {short(client)} must be (x, y), or (x, y, x_test, y_test)")


def _joined(shards: "Mapping[str | int, tuple[_Part, _Part | None]]", tokens: bool) -> dict[str, Any]:
    """Return the arrays of all clients' samples, in the order of the clients."""
    first = next(iter(shards.values()))
    numbers = all(isinstance(one, Integral) for one in shards)
    names = {client: int(client) if numbers else str(client).strip("\0") for client in shards}
    if len(set(names.values())) < len(names):
        raise FedobpError("two clients have the same name: give each client one of its own")
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
        if not len(train.x) and (test is None or not len(test.x)):
            raise FedobpError(f"the shard of client {short(client)} has no samples: leave it out")
    found: dict[str, Any] = {
        "tokens" if tokens else "x": np.concatenate([part.x for part in pieces]),
        "client": np.array([names[client] for client in clients]),
    }
    labels = [part.y for part in pieces if part.y is not None]
    if labels:
        if len(labels) < len(pieces):
            raise FedobpError("some shards have labels and some have none: give all clients the same")
        found["y"] = np.concatenate(labels)
    return found if first[1] is None else {**found, "test": np.array(tests)}


def _inputs(given: Any) -> NDArray[Any]:
    """Return inputs as an array; tensors of images are channels first, as torch has them."""
    array = _array(given)
    if array.ndim != 4 or not _is_tensor(given):
        return array
    if array.shape[3] in (1, 3) and array.shape[1] not in (1, 3):
        raise FedobpError(
            f"the tensor of images has shape {array.shape}, which has its channels last: give x.permute(0, 3, 1, 2)"
        )
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1))


def _array(given: Any) -> NDArray[Any]:
    """Return an array or a tensor as an array of its own: what the user changes later does not change a run."""
    try:
        if _is_tensor(given):
            given = given.detach().cpu().resolve_conj()
            return np.array((given.float() if given.itemsize < 4 and given.is_floating_point() else given).numpy())
        array = np.array(given)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of several lengths, a sparse tensor
        raise FedobpError(f"the data in memory is no array ({first_line(error)}): give rows of one length") from error
    if np.ma.is_masked(given):
        raise FedobpError("the data in memory has masked values: fill them in, or leave their samples out")
    return array


def _is_tensor(given: Any) -> bool:
    return callable(getattr(given, "detach", None))


def _names(what: str, given: Any) -> NDArray[Any]:
    """Return labels or clients; a column of Python texts or numbers gets their type, and none may be missing."""
    array = _array(given)
    if array.dtype != object and not (array.dtype.kind == "U" and not hasattr(given, "dtype")):
        return array
    try:
        cells = list(given)
    except TypeError as error:  # None, for one
        raise FedobpError(
            f"`{what}` is {short(repr(given))}: give a list or an array with a value for each sample, or leave it out"
        ) from error
    for row, cell in enumerate(cells, 1):
        if cell is None or cell != cell or str(cell) in ("<NA>", "NaT"):  # NaN is not itself
            raise FedobpError(f"`{what}` has no value in row {row}: fill it in, or leave the sample out")
    if len({isinstance(cell, str) for cell in cells}) > 1:
        raise FedobpError(f"`{what}` mixes texts and numbers: give one of them")
    return np.array(cells)
