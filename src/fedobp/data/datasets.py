"""Datasets: arrays of inputs and labels, stored as one npz file per name, read and written without pickle."""

import os
import random
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.free_memory import memory_guard
from fedobp.data.npz import npz_shapes, read_npz
from fedobp.data.registry import REGISTRY
from fedobp.data.sources import installed, read
from fedobp.errors import FedobpError, short, unknown
from fedobp.files import atomic_write, unwritable

EMBEDDED = "digits"
_MAX_NAME_LENGTH = 100  # characters; a dataset's name becomes part of file and run folder names


@dataclass(frozen=True)
class Info:
    """A dataset's summary for `fedobp data list`; `samples` is None if its file is absent."""

    name: str
    samples: int | None
    shape: tuple[int, ...]
    classes: int
    available: bool
    clients: int = 0  # number of natural clients; 0: none given


@dataclass(frozen=True)
class Dataset:
    """Inputs [N, H, W], [N, H, W, C] or [N, features], as uint8 or float32, and labels 0..classes-1."""

    name: str
    x: NDArray[Any]
    y: NDArray[np.int64]
    labels: tuple[str | int, ...]  # the names of label 0, 1, ... in the file
    n_train: int  # number of leading samples that form the official training split; 0: no official split
    clients: NDArray[np.int64] | None = None  # each sample's natural client, 0, 1, ..., if the file has them
    client_names: tuple[str, ...] = ()  # the names of client 0, 1, ... in the file

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input as models see it: channels first, or features."""
        shape = tuple(self.x.shape[1:])
        return shape if len(shape) == 1 else (1, *shape) if len(shape) == 2 else (shape[2], *shape[:2])

    @property
    def info(self) -> Info:
        """Name and sizes."""
        return Info(self.name, len(self.y), self.x.shape[1:], self.classes, True, len(self.client_names))


def data_dir(given: str | None = None) -> Path:
    """Return the folder that holds datasets: the given one, else FEDOBP_DATA, else the user's cache folder.

    An empty FEDOBP_DATA counts as not set.
    """
    if given == "":
        raise FedobpError("--data-dir is empty: give the folder that holds datasets, or leave it out")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedobp" / "data"
    folder = Path(given or os.environ.get("FEDOBP_DATA") or cache)
    if not str(folder).isprintable():
        raise FedobpError(f"the data folder must be readable text, not '{short(folder)}': rename it")
    try:
        return folder.expanduser()
    except RuntimeError as error:  # the home folder of a user that does not exist
        raise FedobpError(f"the data folder {short(folder)} has no home folder: write its whole path") from error


def dataset_names(folder: Path) -> list[str]:
    """Return the names of all registered and all imported datasets, the registered ones first."""
    try:
        imported = sorted(path.stem for path in folder.glob("*.npz"))
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte
        reason = getattr(error, "strerror", None) or error
        raise FedobpError(
            f"the data folder {short(folder, 200)} cannot be read ({reason}): give another --data-dir"
        ) from error
    return list(dict.fromkeys([*REGISTRY, *imported]))


def load(name: str, folder: Path) -> Dataset:
    """Load a dataset by name from its file; the digits come from scikit-learn."""
    if name == EMBEDDED:
        return _digits()
    with memory_guard(f"dataset '{name}'"):
        return parse(name, _open(name, folder))


def describe(name: str, folder: Path) -> Info:
    """Return a dataset's sizes; only the array headers and the labels are read."""
    if name == EMBEDDED:
        return _digits().info
    path = _find(name, folder)
    if path is None:
        facts, here = REGISTRY[name], bool(installed(name))
        return Info(name, facts.samples if here else None, facts.shape, facts.classes, available=here)
    with memory_guard(f"dataset '{name}'"):
        shapes, arrays = npz_shapes(path), read_npz(path, ("y", "client"))
        _check_shapes(name, shapes)
        samples, *shape = shapes["x"]
        labels, _ = _labels(name, _as_vector(arrays["y"]))
        client_names, _ = _clients(name, arrays["client"], samples) if "client" in arrays else ((), None)
    return Info(name, samples, tuple(shape), len(labels), True, len(client_names))


def list_datasets(folder: Path) -> list[Info]:
    """Return the sizes of all registered and all imported datasets; an unreadable file counts as absent."""
    found = []
    for name in dataset_names(folder):
        try:
            found.append(describe(name, folder))
        except FedobpError:
            facts = REGISTRY.get(name)
            found.append(Info(name, None, facts.shape if facts else (), facts.classes if facts else 0, available=False))
    return found


def store(name: str, arrays: Mapping[str, NDArray[Any]], folder: Path) -> Dataset:
    """Check arrays and store them in the folder under a name; an existing dataset is never overwritten."""
    target = new_dataset_path(name, folder)
    dataset = parse(name, arrays)
    y = np.array(dataset.labels)[dataset.y]
    kept: dict[str, Any] = {"x": dataset.x, "y": y, "n_train": np.int64(dataset.n_train)}
    if "client" in arrays:
        kept["client"] = _as_vector(arrays["client"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    with atomic_write(target) as file:
        np.savez(file, **kept)
    return dataset


def new_dataset_path(name: str, folder: Path) -> Path:
    """Return the path for a new dataset; a name that is invalid or taken is a user error."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) or len(name) > _MAX_NAME_LENGTH:
        raise FedobpError(
            f"'{short(name)}' cannot name a dataset: use lower-case letters, digits, '-', '_' and '.', at most "
            f"{_MAX_NAME_LENGTH} of them"
        )
    if name == EMBEDDED:
        raise FedobpError(f"dataset '{name}' is built in: import under another name")
    target = folder / f"{name}.npz"
    if os.path.lexists(target):
        raise FedobpError(
            f"dataset '{name}' exists already: import under another name, or remove {short(target, 200)} first"
        )
    return target


def parse(name: str, arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    """Check arrays `x`, `y` and optionally `n_train` and `client`, and return them as a dataset."""
    _check_shapes(name, {key: np.shape(array) for key, array in arrays.items()})
    x, y = arrays["x"], _as_vector(arrays["y"])
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] > 4:
        raise FedobpError(
            f"dataset '{name}' has x of shape {x.shape}, which has its channels first: they must come last, as in "
            "x.transpose(0, 2, 3, 1)"
        )
    if x.dtype != np.uint8:
        if x.dtype.kind != "f":
            raise FedobpError(f"dataset '{name}' has x of type {short(x.dtype)}: convert it to uint8 or float32")
        with (
            memory_guard(f"dataset '{name}'", 5 * x.size),
            np.errstate(over="ignore"),
        ):  # float32 copy and the mask of finite values
            x = x.astype(np.float32, copy=False)
            finite = np.isfinite(x).all()
        if not finite:
            raise FedobpError(f"dataset '{name}' has NaN or infinite values in x: remove or replace those samples")
    facts = REGISTRY.get(name)
    if facts and x.shape[1:] not in (facts.shape, (*facts.shape, 1)):
        raise FedobpError(
            f"dataset '{name}' has samples of shape {x.shape[1:]}, and {name} has {facts.shape}: import it under "
            "another name"
        )
    labels, numbered = _labels(name, y)
    given = np.asarray(arrays.get("n_train", 0))
    if given.dtype.kind not in "iu" or given.size != 1:
        raise FedobpError(f"dataset '{name}' has an n_train that is no whole number: give 0 where it is not known")
    n_train = int(given.item())
    if not 0 <= n_train <= len(y):
        raise FedobpError(f"dataset '{name}' has n_train {n_train} of {len(y)} samples: give 0 where it is not known")
    client_names, clients = _clients(name, arrays["client"], len(y)) if "client" in arrays else ((), None)
    return Dataset(name, x, numbered, labels, n_train, clients, client_names)


def _check_shapes(name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a user error if arrays of these shapes cannot form a dataset."""
    for key in ("x", "y"):
        if key not in shapes:
            found = short(", ".join(shapes) or "nothing", 200)
            raise FedobpError(f"dataset '{name}' has no array '{key}' (it has {found}): save x and y with np.savez")
    x, y = shapes["x"], shapes["y"]
    column = len(y) == 1 or (len(y) == 2 and y[1] == 1)
    if len(x) not in (2, 3, 4) or not column or x[0] != y[0] or 0 in x:
        raise FedobpError(
            f"dataset '{name}' has x of shape {short(x)} and y of shape {short(y)}: x must be [N, features], "
            "[N, H, W] or [N, H, W, channels], and y [N]"
        )


def _as_vector(column: NDArray[Any]) -> NDArray[Any]:
    return column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column


def _labels(name: str, y: NDArray[Any]) -> tuple[tuple[str | int, ...], NDArray[np.int64]]:
    """Return the label names (all of a registered dataset, else those that occur) and each sample's label number."""
    y = _check_names(name, "labels", "y", y)
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


def _clients(name: str, client: NDArray[Any], samples: int) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the names of client 0, 1, ... and each sample's client."""
    client = _as_vector(client)
    if client.shape != (samples,):
        raise FedobpError(f"dataset '{name}' has client of shape {client.shape} and {samples} samples: it must be [N]")
    occurring, numbered = np.unique(_check_names(name, "clients", "client", client), return_inverse=True)
    return tuple(map(str, occurring.tolist())), numbered.astype(np.int64)


def _check_names(name: str, what: str, key: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return names as texts or as signed 64-bit integers; other types are a user error."""
    if values.dtype.kind == "U":
        native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        if native.view(np.uint32).max(initial=0) > sys.maxunicode:
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


def _find(name: str, folder: Path) -> Path | None:
    """Return the path of a dataset's file; None for a registered dataset without a file."""
    names = dataset_names(folder)
    if name not in names:
        raise unknown("dataset", name, names)
    path = folder / f"{name}.npz"
    return path if os.path.lexists(path) else None  # a broken link counts as an unreadable file


def _open(name: str, folder: Path) -> dict[str, NDArray[Any]]:
    path = _find(name, folder)
    if path is not None:
        return read_npz(path, mmap=True)
    files = installed(name)
    if not files:
        place = shlex.quote(str(folder))
        raise FedobpError(
            f"dataset '{name}' is not in {short(folder, 200)}: run `fedobp data fetch {name} --data-dir {place}`, or "
            f"point --data-dir to where {name}.npz is"
        )
    return read(name, files)


def _digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8x8, 16 grey levels (UCI ML hand-written digits, test part)."""
    state = random.getstate()
    from sklearn.datasets import load_digits  # its import draws from Python's global generator

    random.setstate(state)
    x, y = load_digits(return_X_y=True)
    return parse(EMBEDDED, {"x": x.reshape(-1, 8, 8).astype(np.uint8), "y": y.astype(np.int64)})
