"""Datasets by name: one npz file each, read and written without pickle."""

import os
import random
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.dataset import Dataset, Info, as_vector, check_shapes, number_clients, number_labels, parse
from fedobp.data.free_memory import memory_guard
from fedobp.data.npz import npz_shapes, read_npz
from fedobp.data.registry import REGISTRY
from fedobp.data.sources import installed, read
from fedobp.errors import FedobpError, short, unknown
from fedobp.files import atomic_write, unwritable, user_cache

EMBEDDED = "digits"
_MAX_NAME_LENGTH = 100  # characters; a dataset's name becomes part of file and run folder names


def data_dir(given: str | None = None) -> Path:
    """Return the folder that holds datasets: the given one, else FEDOBP_DATA, else the user's cache folder.

    An empty FEDOBP_DATA counts as not set.
    """
    if given == "":
        raise FedobpError("--data-dir is empty: give the folder that holds datasets, or leave it out")
    folder = Path(given or os.environ.get("FEDOBP_DATA") or user_cache() / "data")
    if not str(folder).isprintable():
        raise FedobpError(f"the data folder must be readable text, not '{short(folder)}': rename it")
    try:
        return folder.expanduser()
    except RuntimeError as error:  # the home folder of a user that does not exist
        message = f"the data folder {short(folder)} has no home folder: give --data-dir or FEDOBP_DATA its whole path"
        raise FedobpError(message) from error


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
        shapes = npz_shapes(path)
        if "tokens" in shapes:
            return parse(name, read_npz(path)).info
        arrays = read_npz(path, ("y", "client"))
        check_shapes(f"dataset '{name}'", shapes)
        samples, *shape = shapes["x"]
        labels, _ = number_labels(name, as_vector(arrays["y"]))
        client_names, _ = number_clients(name, arrays["client"], samples) if "client" in arrays else ((), None)
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
    kept: dict[str, Any] = {"n_train": np.int64(dataset.n_train)}
    if dataset.vocabulary:
        kept |= {"tokens": arrays["tokens"], "vocabulary": np.int64(dataset.vocabulary)}
    else:
        kept["x"] = dataset.x
    if not dataset.every_position:
        kept["y"] = np.array(dataset.labels)[dataset.y]
    if dataset.test is not None:
        kept["test"] = dataset.test
    if "client" in arrays:
        kept["client"] = as_vector(arrays["client"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    with atomic_write(target) as file:
        np.savez(file, **kept)
    return dataset


def check_name(name: str) -> None:
    """Refuse what cannot name a dataset."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) or len(name) > _MAX_NAME_LENGTH:
        raise FedobpError(
            f"'{short(name)}' cannot name a dataset: use lower-case letters, digits, '-', '_' and '.', at most "
            f"{_MAX_NAME_LENGTH} of them"
        )
    if name == EMBEDDED:
        raise FedobpError(f"dataset '{name}' is built in: import under another name")


def new_dataset_path(name: str, folder: Path) -> Path:
    """Return the path for a new dataset; a name that is invalid or taken is a user error."""
    check_name(name)
    target = folder / f"{name}.npz"
    if os.path.lexists(target):
        raise FedobpError(
            f"dataset '{name}' exists already: import under another name, or remove {short(target, 200)} first"
        )
    return target


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
