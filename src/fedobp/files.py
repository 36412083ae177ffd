"""Writing files so that a reader never finds half of one: beside the target, then renamed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedobp.errors import FedobpError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the path's place when it is complete, and vanishes if it does not get there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with beside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def write(path: Path, content: bytes) -> None:
    """Write a whole file, or nothing."""
    with replacing(path) as file:
        file.write(content)


def write_json(path: Path, value: object) -> None:
    """Write a value as a JSON file for people and machines."""
    write(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def unwritable(path: Path, error: OSError) -> FedobpError:
    """Return the error for a file or folder that cannot be written."""
    return FedobpError(f"cannot write {path} ({error.strerror or error}): choose another place, or make room there")
