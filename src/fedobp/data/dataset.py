"""A dataset: arrays of inputs and labels, checked, with what is said about its samples."""

import hashlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.free_memory import memory_guard
from fedobp.data.registry import REGISTRY
from fedobp.errors import FedobpError, short

_MOST_TOKENS = 10_000_000  # of a vocabulary: each is a class, or a row of the embedding


@dataclass(frozen=True)
class Info:
    """A dataset's summary for `fedobp data list`; `samples` is None if its file is absent."""

    name: str
    samples: int | None
    shape: tuple[int, ...]
    classes: int
    available: bool
    clients: int = 0  # number of natural clients; 0: none given


@dataclass(frozen=True, repr=False, eq=False)
class Dataset:
    """Inputs [N, H, W], [N, H, W, C] or [N, features], as uint8 or float32, and labels 0..classes-1.

    With a `vocabulary`, inputs are sequences of tokens [N, length], of any integer type. Labels are [N]; where every
    next token is predicted, they are [N, length].
    """

    name: str
    x: NDArray[Any]
    y: NDArray[np.int64]
    labels: Sequence[str | int]  # the names of label 0, 1, ... in the file
    n_train: int  # number of leading samples that form the official training split; 0: no official split
    clients: NDArray[np.int64] | None = None  # each sample's natural client, 0, 1, ..., if the file has them
    client_names: tuple[str, ...] = ()  # the names of client 0, 1, ... in the file
    test: NDArray[np.bool_] | None = None  # which samples are for test, if the data says so for its natural clients
    vocabulary: int = 0  # number of tokens; 0: inputs are no tokens
    in_memory: bool = False  # given as arrays, so that no file holds it

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.labels)

    @property
    def natural_clients(self) -> int:
        """Number of clients that the data comes from; 0: it does not say."""
        return len(self.client_names)

    @property
    def every_position(self) -> bool:
        """Whether a sample has a label for each of its positions: its next token."""
        return self.y.ndim == 2

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input as models see it: channels first, features, or a length."""
        shape = tuple(self.x.shape[1:])
        return shape if len(shape) == 1 else (1, *shape) if len(shape) == 2 else (shape[2], *shape[:2])

    @cached_property
    def content_hash(self) -> str:
        """The SHA-256 hash of its inputs and labels."""
        made = hashlib.sha256(f"{self.x.dtype.str} {self.x.shape} {self.y.shape}".encode())
        made.update(np.ascontiguousarray(self.x).data)
        made.update(np.ascontiguousarray(self.y, "<i8").data)
        return made.hexdigest()

    @staticmethod
    def from_data(data: Any, y: Any = None, **about: Any) -> "Dataset":
        """Return a dataset of arrays, tensors, a DataFrame, shards or a function: see `dataset_from_data`."""
        from fedobp.data.in_memory import dataset_from_data  # which imports this module

        return dataset_from_data(data, y, **about)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.x.shape[1:]))
        clients = f", {len(self.client_names):,} clients" if self.client_names else ""
        return f"Dataset({self.name}: {len(self.y):,} samples of shape {shape}, {self.classes} labels{clients})"

    @property
    def info(self) -> Info:
        """Name and sizes."""
        return Info(self.name, len(self.y), self.x.shape[1:], self.classes, True, len(self.client_names))


def parse(name: str, arrays: Mapping[str, NDArray[Any]], labels: Sequence[str | int] | None = None) -> Dataset:
    """Check arrays `x`, `y` and optionally `n_train`, `client` and `test`, and return them as a dataset.

    `tokens` instead of `x` are sequences of tokens; without `y`, every next token is to be predicted. With `labels`,
    these are the dataset's, in their order, whether they occur or not.
    """
    if "tokens" in arrays:
        return _parse_tokens(name, arrays, labels)
    check_shapes(f"dataset '{name}'", {key: np.shape(array) for key, array in arrays.items()})
    x, y = arrays["x"], as_vector(arrays["y"])
    # The float32 copy, and the mask of finite values.
    with memory_guard(f"dataset '{name}'", 5 * x.size if x.dtype.kind == "f" else 0):
        x = check_inputs(f"dataset '{name}'", x)
    facts = REGISTRY.get(name)
    if facts and x.shape[1:] not in (facts.shape, (*facts.shape, 1)):
        raise FedobpError(
            f"dataset '{name}' has samples of shape {x.shape[1:]}, and {name} has {facts.shape}: import it under "
            "another name"
        )
    names, numbered = number_labels(name, y, labels)
    return _with_roles(Dataset(name, x, numbered, names, 0), arrays)


def check_inputs(what: str, x: NDArray[Any]) -> NDArray[Any]:
    """Return inputs as uint8 or float32; `what` has them, if they are wrong."""
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] > 4:
        raise FedobpError(
            f"{what} has x of shape {x.shape}, which has its channels first: they must come last, as in "
            "x.transpose(0, 2, 3, 1)"
        )
    if x.dtype != np.uint8:
        if x.dtype.kind != "f":
            tokens = ", or give it as tokens" if x.dtype.kind in "iu" and x.ndim == 2 else ""
            raise FedobpError(f"{what} has x of type {short(x.dtype)}: convert it to uint8 or float32{tokens}")
        with np.errstate(over="ignore"):
            rounded = x.astype(np.float32, copy=False)
            finite = np.isfinite(rounded).all()
        if not finite:
            raise FedobpError(f"{what} has NaN or infinite values in x: remove or replace those samples")
        if x.ndim == 2 and x.dtype.itemsize > 4:
            _warn_of_lost_digits(what, x)
        x = rounded
    return x


def _warn_of_lost_digits(what: str, x: NDArray[Any]) -> None:
    """Warn of columns whose values differ by little more than the spacing of float32 there, as time stamps may."""
    spread, spacing = x.std(axis=0), np.abs(x).max(axis=0, initial=0.0) * 2.0**-23
    if (lost := np.flatnonzero((spread > 0) & (spread < 8 * spacing))).size:
        warnings.warn(
            f"{what} has {lost.size} column(s), the first is {lost[0]}, whose values differ by little more than what "
            "float32 can tell apart: subtract a constant from them, such as their mean",
            stacklevel=2,
        )


def _parse_tokens(name: str, arrays: Mapping[str, NDArray[Any]], known: Sequence[str | int] | None) -> Dataset:
    """Return a dataset of sequences: with labels `y` [N], or with each position's next token as its label."""
    tokens, every_position = arrays["tokens"], "y" not in arrays
    if "x" in arrays or name in REGISTRY:
        what = "both x and tokens" if "x" in arrays else "tokens, and the dataset of that name has none"
        raise FedobpError(f"dataset '{name}' has {what}: give tokens alone, under a name of its own")
    if (
        tokens.ndim != 2
        or tokens.dtype.kind not in "iu"
        or 0 in tokens.shape
        or (every_position and tokens.shape[1] < 2)
    ):
        least = "at least two tokens each" if every_position else "of one length"
        raise FedobpError(
            f"dataset '{name}' has tokens of shape {short(tokens.shape)} and type {short(tokens.dtype)}: they must be "
            f"whole numbers [N, length], {least}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if high >= _MOST_TOKENS:
        raise FedobpError(
            f"dataset '{name}' has a token {high}, and a vocabulary has at most {_MOST_TOKENS:,}: number tokens from 0"
        )
    vocabulary = _whole(name, arrays, "vocabulary", high + 1)
    if not 1 <= vocabulary <= _MOST_TOKENS:
        raise FedobpError(
            f"dataset '{name}' has a vocabulary of {vocabulary}: give 1 to {_MOST_TOKENS:,}, or leave it out"
        )
    if low < 0 or high >= vocabulary:
        raise FedobpError(
            f"dataset '{name}' has tokens from {low} to {high}, and a vocabulary of {vocabulary}: tokens are 0 to "
            f"{vocabulary - 1}"
        )
    # torch indexes few integer types: the smallest of them that holds the vocabulary.
    kinds = ((2**8, np.uint8), (2**15, np.int16), (2**31, np.int32))
    kind = next((kind for most, kind in kinds if vocabulary <= most), np.int64)
    tokens = tokens.astype(kind, copy=False)
    if every_position:
        if vocabulary < 2:
            raise FedobpError(f"dataset '{name}' has only the token {low}: there is nothing to learn")
        x, y = tokens[:, :-1], tokens[:, 1:].astype(np.int64)
        labels: Sequence[str | int] = range(vocabulary)  # a file may name millions of tokens that do not occur
    else:
        check_shapes(f"dataset '{name}'", {"x": tokens.shape, "y": np.shape(arrays["y"])})
        x, (labels, y) = tokens, number_labels(name, as_vector(arrays["y"]), known)
    return _with_roles(Dataset(name, x, y, labels, 0, vocabulary=vocabulary), arrays)


def _with_roles(dataset: Dataset, arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    """Return a dataset with what is said about its samples: the official split, natural clients, test samples."""
    name, samples = dataset.name, len(dataset.y)
    n_train = _whole(name, arrays, "n_train", 0)
    if not 0 <= n_train <= samples:
        raise FedobpError(f"dataset '{name}' has n_train {n_train} of {samples} samples: give 0 where it is not known")
    client_names, clients = number_clients(name, arrays["client"], samples) if "client" in arrays else ((), None)
    test = None
    if "test" in arrays:
        test = as_vector(arrays["test"])
        if clients is None or test.dtype != np.bool_ or test.shape != (samples,):
            raise FedobpError(
                f"dataset '{name}' has test of type {short(test.dtype)} and shape {test.shape}: it must be a truth "
                "value for each sample, beside client"
            )
    return replace(dataset, n_train=n_train, clients=clients, client_names=client_names, test=test)


def _whole(name: str, arrays: Mapping[str, NDArray[Any]], key: str, otherwise: int) -> int:
    """Return a whole number that is stored as an array."""
    given = np.asarray(arrays.get(key, otherwise))
    if given.dtype.kind not in "iu" or given.size != 1:
        instead = "give 0 where it is not known" if key == "n_train" else "give one, or leave it out"
        raise FedobpError(
            f"dataset '{name}' has {'an' if key[0] in 'n' else 'a'} {key} that is no whole number: {instead}"
        )
    return int(given.item())


def check_shapes(owner: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a user error if arrays of these shapes cannot form a dataset; `owner` has them."""
    for key in ("x", "y"):
        if key not in shapes:
            found = short(", ".join(shapes) or "nothing", 200)
            raise FedobpError(f"{owner} has no array '{key}' (it has {found}): save x and y with np.savez")
    x, y = shapes["x"], shapes["y"]
    column = len(y) == 1 or (len(y) == 2 and y[1] == 1)
    if len(x) not in (2, 3, 4) or not column or x[0] != y[0] or 0 in x:
        raise FedobpError(
            f"{owner} has x of shape {short(x)} and y of shape {short(y)}: x must be [N, features], [N, H, W] or "
            "[N, H, W, channels], and y [N]"
        )


def as_vector(column: NDArray[Any]) -> NDArray[Any]:
    """Return a column [N, 1] as [N]; other arrays stay as they are."""
    return column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column


def number_labels(
    name: str, y: NDArray[Any], known: Sequence[str | int] | None = None
) -> tuple[tuple[str | int, ...], NDArray[np.int64]]:
    """Return the label names and each sample's label number.

    Names are those that are `known`, all of a registered dataset, or those that occur.
    """
    y = _check_names(name, "labels", "y", y)
    if known is not None:
        places = {label: at for at, label in enumerate(known)}
        occurring, numbered = np.unique(y, return_inverse=True)
        if others := [label for label in occurring.tolist() if label not in places]:
            raise FedobpError(f"'{name}' has the label '{short(others[0])}', which the federation has not: remove it")
        return tuple(known), np.array([places[label] for label in occurring.tolist()], np.int64)[numbered]
    if name in REGISTRY:
        classes = REGISTRY[name].classes
        low, high = (min(y), max(y)) if y.dtype.kind == "U" else (y.min(), y.max())
        if y.dtype.kind == "U" or low < 0 or high >= classes:
            raise FedobpError(
                f"dataset '{name}' has labels from {short(low)} to {short(high)}, and {name} has 0 to {classes - 1}: "
                "import it under another name"
            )
        return tuple(range(classes)), y
    occurring, numbered = np.unique(y, return_inverse=True)
    if len(occurring) < 2:
        raise FedobpError(f"dataset '{name}' has only the label {short(occurring[0])}: there is nothing to learn")
    return tuple(occurring.tolist()), numbered.astype(np.int64)


def number_clients(name: str, client: NDArray[Any], samples: int) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the names of client 0, 1, ... and each sample's client."""
    client = as_vector(client)
    if client.shape != (samples,):
        raise FedobpError(f"dataset '{name}' has client of shape {client.shape} and {samples} samples: it must be [N]")
    occurring, numbered = np.unique(_check_names(name, "clients", "client", client), return_inverse=True)
    return tuple(map(str, occurring.tolist())), numbered.astype(np.int64)


def _check_names(name: str, what: str, key: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return names as texts or as signed 64-bit integers; other types are a user error."""
    if values.dtype.kind == "U":
        native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        codes = native.view(np.uint32)
        if codes.max(initial=0) > sys.maxunicode or ((codes >= 0xD800) & (codes < 0xE000)).any():  # surrogates: no text
            raise FedobpError(f"dataset '{name}' has names in {key} that are no text: save it again")
        if not np.char.strip(values).all():
            raise FedobpError(f"dataset '{name}' has samples without a name in {key}: name them, or leave them out")
        return values
    if values.dtype.kind not in "iu":
        raise FedobpError(
            f"dataset '{name}' has {what} of type {short(values.dtype)}: {key} must hold integers or texts"
        )
    if values.size and values.max() > np.iinfo(np.int64).max:
        raise FedobpError(
            f"dataset '{name}' has a number of {values.max()} in {key}: it must fit into 64 bits with a sign"
        )
    return values.astype(np.int64)
