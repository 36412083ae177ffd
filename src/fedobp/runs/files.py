"""Writing files so that a reader never finds half of one: beside the target, then renamed."""

import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a whole file, or nothing."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
