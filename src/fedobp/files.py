"""Files: only ordinary ones are read, and none is found half written (they are written beside and then renamed)."""

import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedobp.errors import FedobpError, short

_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def regular(path: Path) -> Path:
    """Return the path of an ordinary file; anything else is refused without opening it, which could wait for ever."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte
        reason = getattr(error, "strerror", None) or error
        raise FedobpError(f"cannot read {short(path, 200)} ({reason}): give the path of a file") from error
    if kind != stat.S_IFREG:
        raise FedobpError(
            f"{short(path, 200)} is {_FILE_TYPES.get(kind, 'something else')}, not a file: put an ordinary file there"
        )
    return path


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the path's place when it is complete, and vanishes if it does not get there."""
    temporary = _temporary_path(path)
    try:
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def write(path: Path, content: bytes) -> None:
    """Write a whole file, or nothing."""
    with atomic_write(path) as file:
        file.write(content)


def write_new(path: Path, content: bytes) -> None:
    """Write a whole file where there is none; of several processes that try, one succeeds.

    A run's folder is claimed this way, by the file that says what runs there.
    """
    temporary = _temporary_path(path)
    try:
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links: as exclusive, though a reader may find half of it
                with path.open("xb") as file:
                    file.write(content)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        raise taken(path) from error
    except OSError as error:
        raise unwritable(path, error) from error


def _temporary_path(path: Path) -> Path:
    """Return a name in the same folder that nobody else writes to."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file for people and machines."""
    write(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def taken(path: Path) -> FedobpError:
    """Return the error for a folder that holds a file of a run."""
    return FedobpError(
        f"{short(path.parent, 200)} already holds a run ({path.name}): choose another --out, nothing was overwritten"
    )


def unwritable(path: Path, error: OSError | ValueError) -> FedobpError:
    """Return the error for a file or folder that cannot be written."""
    reason = getattr(error, "strerror", None) or error  # a ValueError: no path has such characters
    return FedobpError(f"cannot write {short(path, 200)} ({reason}): choose another place, or make room there")
