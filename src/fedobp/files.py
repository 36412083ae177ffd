"""File access: only regular files are read, and writes are atomic (a temporary file is renamed)."""

import hashlib
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedobp.errors import FedobpError, TryAgain, short

_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def user_cache() -> Path:
    """Return fedobp's folder in the user's cache; `~` is not expanded, because not every user has a home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedobp"


def folder_path(given: object, name: str) -> Path:
    """Return the argument `name` of a function, a folder of the user, as a path; an empty one is refused."""
    if not isinstance(given, str | os.PathLike):
        raise FedobpError(f"`{name}` must be the path of a folder, a text or a pathlib.Path, not {short(repr(given))}")
    if not str(given).strip():
        raise FedobpError(f"`{name}` is empty: give the path of a folder")
    return Path(given)


def regular(path: Path) -> Path:
    """Return the path of a regular file; anything else is a user error and is not opened, because that could block."""
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
    """Open a temporary file that replaces the path at the end of the block, and is removed if the block fails."""
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
    """Write a file atomically."""
    with atomic_write(path) as file:
        file.write(content)


def write_new(path: Path, content: bytes) -> None:
    """Write a file atomically if it does not exist; of several processes that try, one succeeds.

    A run claims its folder this way, by writing its configuration.
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
            except OSError:  # a file system without hard links: exclusive too, but not atomic for readers
                with path.open("xb") as file:
                    file.write(content)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        raise taken(path) from error
    except OSError as error:
        raise unwritable(path, error) from error


@contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Hold a lock for the block; yields False if another process holds it. A process that dies loses its locks."""
    if sys.platform == "win32":  # it has no flock
        yield True
        return
    import fcntl

    while True:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("ab", buffering=0))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_file(path, file.fileno()):
                    continue  # who held it has removed the file
                stack.callback(path.unlink, missing_ok=True)
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                raise unwritable(path, error) from error
            yield True
            return


def holder(path: Path) -> str:
    """Return who holds a lock, in words."""
    try:
        return f"process {int(path.read_text(encoding='utf-8'))}"
    except (OSError, ValueError):
        return "another process"


def _is_file(path: Path, descriptor: int) -> bool:
    """Return whether a path still names an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _temporary_path(path: Path) -> Path:
    """Return a path in the same folder that no other process or thread writes to."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")


def write_json(path: Path, value: object) -> None:
    """Write a value as an indented JSON file."""
    write(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


JSON_FORMAT = 1


def write_checked_json(path: Path, value: Mapping[str, Any], version: int = JSON_FORMAT) -> None:
    """Write a JSON object with a format version, and a checksum of all that it holds."""
    write_json(path, with_checksum(value, version))


def with_checksum(value: Mapping[str, Any], version: int = JSON_FORMAT) -> dict[str, Any]:
    """Return a JSON object with a format version and a checksum."""
    content = {**json.loads(json.dumps(value)), "format": version}  # as it will be read: keys are texts
    return {**content, "sha256": _json_checksum(content)}


def read_checked_json(path: Path, newest: int = JSON_FORMAT) -> dict[str, Any]:
    """Return a JSON object that is as it was written; what is not JSON raises a ValueError.

    Formats from 1 to the `newest` are read. One of an older version has no checksum, and is read as it is.
    """
    where, content = short(path, 200), json.loads(regular(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    version, checksum = content.get("format"), content.pop("sha256", None)
    if version is None and checksum is None:
        return content
    if version is not None and version not in range(JSON_FORMAT, newest + 1):
        read = JSON_FORMAT if newest == JSON_FORMAT else f"{JSON_FORMAT} to {newest}"
        raise FedobpError(f"{where} has format {short(version)}, and this fedobp reads {read}: use a newer fedobp")
    if checksum != _json_checksum(content):
        raise FedobpError(f"{where} is damaged: its checksum is not that of its content; take another copy")
    content.pop("format", None)
    return content


def _json_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def taken(path: Path) -> FedobpError:
    """Return the user error for a folder that already holds a run."""
    return FedobpError(
        f"{short(path.parent, 200)} already holds a run ({path.name}): choose another --out, nothing was overwritten"
    )


def unwritable(path: Path, error: OSError | ValueError) -> TryAgain:
    """Return the user error for a file or folder that cannot be written."""
    reason = getattr(error, "strerror", None) or error  # ValueError: characters that no path can have
    return TryAgain(f"cannot write {short(path, 200)} ({reason}): choose another place, or free space there")
