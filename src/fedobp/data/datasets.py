"""Datasets: arrays of inputs and labels, kept as one npz per name, read and written without pickle."""

import math
import os
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.known import KNOWN
from fedobp.data.sources import installed, read
from fedobp.errors import FedobpError, unknown
from fedobp.files import replacing, unwritable

EMBEDDED = "digits"
# What zipfile, zlib and NumPy raise on a damaged file.
_DAMAGE = (OSError, ValueError, KeyError, IndexError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Info:
    """What `fedobp data list` says of a dataset; `samples` is None while its file is not there."""

    name: str
    samples: int | None
    shape: tuple[int, ...]
    classes: int
    available: bool
    clients: int = 0  # how many clients its samples came from; 0: not known


@dataclass(frozen=True)
class Dataset:
    """Inputs [N, H, W], [N, H, W, C] or [N, features], as uint8 or float32, and labels 0..classes-1."""

    name: str
    x: NDArray[Any]
    y: NDArray[np.int64]
    labels: tuple[str | int, ...]  # what label 0, 1, ... was called in the file
    n_train: int  # how many leading samples are the official training split; 0: not known
    clients: NDArray[np.int64] | None = None  # whose each sample is, 0, 1, ..., where that is known
    client_names: tuple[str, ...] = ()  # what client 0, 1, ... was called in the file

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return len(self.labels)

    @property
    def info(self) -> Info:
        """Name and sizes."""
        return Info(self.name, len(self.y), self.x.shape[1:], self.classes, True, len(self.client_names))


def data_dir(given: str | None = None) -> Path:
    """Return the folder that holds datasets: the given one, else FEDOBP_DATA, else the user's cache folder."""
    if given or os.environ.get("FEDOBP_DATA"):
        return Path(given or os.environ["FEDOBP_DATA"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedobp" / "data"


def names(folder: Path) -> list[str]:
    """Return the names of all known and all imported datasets, the paper's first."""
    return list(dict.fromkeys([*KNOWN, *sorted(path.stem for path in folder.glob("*.npz"))]))


def load(name: str, folder: Path) -> Dataset:
    """Return a dataset by name, from its file or, for the digits, from scikit-learn."""
    if name == EMBEDDED:
        return _digits()
    return parse(name, _open(name, folder))


def describe(name: str, folder: Path) -> Info:
    """Return a dataset's sizes; of a large file only the array headers and the labels are read."""
    if name == EMBEDDED:
        return _digits().info
    path = _find(name, folder)
    if path is None:
        known, here = KNOWN[name], bool(installed(name))
        return Info(name, known.samples if here else None, known.shape, known.classes, available=here)
    try:
        with zipfile.ZipFile(path) as archive, archive.open("x.npy") as member:
            shape, _, _ = _header(member)
            if len(shape) not in (2, 3, 4):
                raise ValueError(f"x has shape {shape}")
        with np.load(path, allow_pickle=False) as arrays:
            labels, _ = _labels(name, np.asarray(arrays["y"]))
            clients = len(np.unique(arrays["client"])) if "client" in arrays else 0
        info = Info(name, shape[0], tuple(shape[1:]), len(labels), True, clients)
    except _DAMAGE as error:
        raise _unreadable(path, error) from error
    return info


def catalogue(folder: Path) -> list[Info]:
    """Return the sizes of all known and all imported datasets; a file that cannot be read counts as not there."""
    found = []
    for name in names(folder):
        try:
            found.append(describe(name, folder))
        except FedobpError:
            known = KNOWN.get(name)
            found.append(Info(name, None, known.shape if known else (), known.classes if known else 0, available=False))
    return found


def store(name: str, arrays: Mapping[str, NDArray[Any]], folder: Path) -> Dataset:
    """Check arrays and keep them in the folder under a name; nothing is ever overwritten."""
    target = vacant(name, folder)
    dataset = parse(name, arrays)
    y = np.array(dataset.labels)[dataset.y]
    kept: dict[str, Any] = {"x": dataset.x, "y": y, "n_train": np.int64(dataset.n_train)}
    if "client" in arrays:
        kept["client"] = _flat(arrays["client"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    with replacing(target) as file:
        np.savez(file, **kept)
    return dataset


def vacant(name: str, folder: Path) -> Path:
    """Return where a dataset of that name will lie, or say why there cannot be one."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise FedobpError(f"'{name}' cannot name a dataset: use lower-case letters, digits, '-', '_' and '.'")
    target = folder / f"{name}.npz"
    if name == EMBEDDED:
        raise FedobpError(f"dataset '{name}' is built in: import under another name")
    if target.exists():
        raise FedobpError(f"dataset '{name}' exists already: import under another name, or remove {target} first")
    return target


def parse(name: str, arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    """Check arrays `x`, `y` and, where they are given, `n_train` and `client`, and return them as a dataset."""
    missing = [key for key in ("x", "y") if key not in arrays]
    if missing:
        found = ", ".join(arrays) or "nothing"
        raise FedobpError(f"dataset '{name}' has no array '{missing[0]}' (it has {found}): save x and y with np.savez")
    x, y = arrays["x"], _flat(arrays["y"])
    if x.ndim not in (2, 3, 4) or y.ndim != 1 or len(x) != len(y) or not x.size:
        raise FedobpError(
            f"dataset '{name}' has x of shape {x.shape} and y of shape {y.shape}: x must be [N, features], [N, H, W] "
            "or [N, H, W, channels], and y [N]"
        )
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] > 4:
        raise FedobpError(
            f"dataset '{name}' has x of shape {x.shape}, which has its channels first: they must come last, as in "
            "x.transpose(0, 2, 3, 1)"
        )
    if x.dtype != np.uint8:
        if not np.issubdtype(x.dtype, np.floating):
            raise FedobpError(f"dataset '{name}' has x of type {x.dtype}: convert it to uint8 or float32")
        with np.errstate(over="ignore"):
            x = x.astype(np.float32, copy=False)
        if not np.isfinite(x).all():
            raise FedobpError(f"dataset '{name}' has NaN or infinite values in x: remove or replace those samples")
    known = KNOWN.get(name)
    if known and x.shape[1:] not in (known.shape, (*known.shape, 1)):
        raise FedobpError(
            f"dataset '{name}' has samples of shape {x.shape[1:]}, and {name} has {known.shape}: import it under "
            "another name"
        )
    labels, numbered = _labels(name, y)
    given = np.asarray(arrays.get("n_train", 0))
    if not np.issubdtype(given.dtype, np.integer) or given.size != 1:
        raise FedobpError(f"dataset '{name}' has an n_train that is no whole number: give 0 where it is not known")
    n_train = int(given.item())
    if not 0 <= n_train <= len(y):
        raise FedobpError(f"dataset '{name}' has n_train {n_train} of {len(y)} samples: give 0 where it is not known")
    owners, clients = _clients(name, arrays["client"], len(y)) if "client" in arrays else ((), None)
    return Dataset(name, x, numbered, labels, n_train, clients, owners)


def _flat(column: NDArray[Any]) -> NDArray[Any]:
    return column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column


def _labels(name: str, y: NDArray[Any]) -> tuple[tuple[str | int, ...], NDArray[np.int64]]:
    """Return what label 0, 1, ... is called (all of a known set's, or those that occur), and each sample's number."""
    y = _named(name, "labels", "y", y)
    if name in KNOWN:
        classes = KNOWN[name].classes
        low, high = (min(y), max(y)) if y.dtype.kind == "U" else (y.min(), y.max())
        if y.dtype.kind == "U" or low < 0 or high >= classes:
            raise FedobpError(
                f"dataset '{name}' has labels from {low} to {high}, and {name} has 0 to {classes - 1}: import it under "
                "another name"
            )
        return tuple(range(classes)), y
    occurring, numbered = np.unique(y, return_inverse=True)
    if len(occurring) < 2:
        raise FedobpError(f"dataset '{name}' has only the label {occurring[0]}: there is nothing to learn")
    return tuple(occurring.tolist()), numbered.astype(np.int64)


def _clients(name: str, client: NDArray[Any], samples: int) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return what client 0, 1, ... is called, and whose each sample is."""
    client = _flat(client)
    if client.shape != (samples,):
        raise FedobpError(f"dataset '{name}' has client of shape {client.shape} and {samples} samples: it must be [N]")
    occurring, numbered = np.unique(_named(name, "clients", "client", client), return_inverse=True)
    return tuple(map(str, occurring.tolist())), numbered.astype(np.int64)


def _named(name: str, what: str, key: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return names as texts or as signed 64-bit integers, or say why they are neither."""
    if values.dtype.kind == "U":
        if not np.char.strip(values).all():
            raise FedobpError(f"dataset '{name}' has samples without a name in {key}: name them, or leave them out")
        return values
    if not np.issubdtype(values.dtype, np.integer):
        raise FedobpError(f"dataset '{name}' has {what} of type {values.dtype}: {key} must hold integers or texts")
    if values.size and values.max() > np.iinfo(np.int64).max:
        raise FedobpError(
            f"dataset '{name}' has a number of {values.max()} in {key}: it must fit into 64 bits with a sign"
        )
    return values.astype(np.int64)


def _find(name: str, folder: Path) -> Path | None:
    """Return a dataset's file; None where a known one is absent."""
    path = folder / f"{name}.npz"
    known = names(folder)
    if name not in known:
        raise unknown("dataset", name, known)
    return path if path.exists() else None


def _open(name: str, folder: Path) -> dict[str, NDArray[Any]]:
    path = _find(name, folder)
    if path is not None:
        return read_npz(path, mapped=True)
    files = installed(name)
    if not files:
        raise FedobpError(
            f"dataset '{name}' is not in {folder}: run `fedobp data fetch {name} --data-dir {folder}`, or point "
            f"--data-dir to where {name}.npz is"
        )
    return read(name, files)


def read_npz(path: Path, *, mapped: bool = False) -> dict[str, NDArray[Any]]:
    """Return all arrays of an npz file, read without pickle; `mapped` leaves x in the file until it is used."""
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("one bare array")
            with arrays:
                x = _mapped(path, "x.npy") if mapped and "x" in arrays.files else None
                found = {key: arrays[key] if x is None or key != "x" else x for key in arrays.files}
            for key, value in found.items():
                if not isinstance(value, np.ndarray):  # NumPy gives what it does not know as bytes
                    raise ValueError(f"{key} is no array")
            return found
    except _DAMAGE as error:
        raise _unreadable(path, error) from error


def _mapped(path: Path, name: str) -> NDArray[np.uint8] | None:
    """Return an array of bytes as it lies in the file, to be read when it is used; None if it lies there otherwise."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(name)
        with archive.open(member) as stream:
            shape, transposed, dtype = _header(stream)
            before = stream.tell()
    if member.compress_type != zipfile.ZIP_STORED or dtype != np.uint8 or transposed or 0 in shape:
        return None
    if before + math.prod(shape) != member.file_size:
        raise ValueError(f"{name} is not as long as it says")
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)  # where a member says how long its name and its extra field are
        offset = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))) + before
        # Copy on write: the file never changes, and PyTorch is given memory that it may write to.
        return np.asarray(np.memmap(file, np.uint8, "c", offset, shape))


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, the order (whether Fortran's) and the type of an array in npy format."""
    if np.lib.format.read_magic(stream) == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    return np.lib.format.read_array_header_2_0(stream)


def _unreadable(path: Path, error: Exception) -> FedobpError:
    if isinstance(error, PermissionError):
        return FedobpError(f"{path} may not be read ({error.strerror}): ask its owner, or change its permissions")
    if not zipfile.is_zipfile(path):
        reason = "it is not one, or damaged"
    elif "allow_pickle" in str(error):
        reason = "it holds pickled objects, which are never read"
    else:
        reason = f"damaged or incomplete: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    fetched = path.stem in KNOWN
    remedy = f"save it anew, or remove it and run `fedobp data fetch {path.stem}`" if fetched else "save it anew"
    return FedobpError(f"{path} cannot be read as an npz file of plain arrays ({reason}): {remedy}")


def _digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8x8, 16 grey levels (UCI ML hand-written digits, test part)."""
    state = random.getstate()
    from sklearn.datasets import load_digits  # draws from Python's global generator while it is loaded

    random.setstate(state)
    x, y = load_digits(return_X_y=True)
    return parse(EMBEDDED, {"x": x.reshape(-1, 8, 8).astype(np.uint8), "y": y.astype(np.int64)})
