"""Reading of untrusted npz files: without pickle, and with headers checked before anything is allocated.

The size in an array's header must match the archive and fit into free memory.
"""

import io
import math
import shlex
import struct
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.free_memory import memory_guard
from fedobp.data.registry import REGISTRY
from fedobp.errors import FedobpError, first_line, short
from fedobp.files import regular

_MAX_HEADER = 1 << 14  # bytes in which a header must end; NumPy allows 10,000 characters


class _PickledArray(ValueError):
    """An array of Python objects."""


@dataclass(frozen=True)
class _Member:
    """An array in an archive, by its header."""

    file: zipfile.ZipInfo
    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    start: int  # offset of the values, after the header

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def npz_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all arrays in an npz file; only the headers are read."""
    with _open_archive(path) as archive:
        return {key: member.shape for key, member in _members(archive).items()}


def read_npz(path: Path, keys: Collection[str] | None = None, *, mmap: bool = False) -> dict[str, NDArray[Any]]:
    """Return an npz file's arrays, or only those in `keys`; `mmap` maps x into memory instead of reading it."""
    with _open_archive(path) as archive:
        chosen = {key: member for key, member in _members(archive).items() if keys is None or key in keys}
        found = {}
        if mmap and "x" in chosen and (x := _memory_map(path, chosen["x"])) is not None:
            found["x"] = x
        left = {key: member for key, member in chosen.items() if key not in found}
        with memory_guard(f"reading {short(path, 200)}", sum(member.size for member in left.values())):
            for key, member in left.items():
                with archive.open(member.file) as stream:
                    found[key] = np.lib.format.read_array(stream, allow_pickle=False)
        return {key: found[key] for key in chosen}


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; any exception becomes a user error: damaged files make zipfile and NumPy raise anything."""
    try:
        with zipfile.ZipFile(regular(path)) as archive:
            yield archive
    except (FedobpError, MemoryError):
        raise
    except Exception as error:
        raise _unreadable(path, error) from error


def _members(archive: zipfile.ZipFile) -> dict[str, _Member]:
    found = {}
    for file in archive.infolist():
        key = file.filename.removesuffix(".npy")
        with archive.open(file) as stream:
            head = io.BytesIO(stream.read(_MAX_HEADER))
        if key == file.filename or not head.getvalue().startswith(b"\x93NUMPY"):
            raise ValueError(f"{short(key)} is no array")
        first = np.lib.format.read_magic(head) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        member = _Member(file, *read(head), head.tell())
        if member.dtype.hasobject:
            raise _PickledArray
        if (
            min(member.shape, default=0) < 0
            or not member.dtype.itemsize
            or member.start + member.size != file.file_size
        ):
            raise ValueError(f"{short(file.filename)} is not as long as it says")
        found[key] = member
    return found


def _memory_map(path: Path, member: _Member) -> NDArray[np.uint8] | None:
    """Return a memory map of an uncompressed uint8 array; None if the array is stored in another form."""
    stored = member.file.compress_type == zipfile.ZIP_STORED
    if not stored or member.dtype != np.uint8 or member.fortran_order or not member.size:
        return None
    with path.open("rb") as file:
        file.seek(member.file.header_offset + 26)  # the lengths of the name and of the extra field
        offset = member.file.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))) + member.start
        # Copy-on-write: the file never changes, and PyTorch gets writable memory.
        return np.asarray(np.memmap(file, np.uint8, "c", offset, member.shape))


def _unreadable(path: Path, error: Exception) -> FedobpError:
    if isinstance(error, PermissionError):
        return FedobpError(
            f"{short(path, 200)} may not be read ({error.strerror}): ask its owner, or change its permissions"
        )
    if isinstance(error, _PickledArray):
        reason = "it holds pickled objects, which are never read"
    elif not zipfile.is_zipfile(path):
        reason = "it is not one, or damaged"
    else:
        reason = f"damaged or incomplete: {first_line(error)}"
    remedy = "save it again"
    if path.stem in REGISTRY:
        remedy += f", or remove it and run `fedobp data fetch {path.stem} --data-dir {shlex.quote(str(path.parent))}`"
    return FedobpError(f"{short(path, 200)} cannot be read as an npz file of plain arrays ({reason}): {remedy}")
