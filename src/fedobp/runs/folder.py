"""A run is a folder: what was asked, what was measured round by round, what came out.

`config.toml` re-runs it; `metrics.jsonl` grows by one line a round; `models/` holds the final models. These three are
equal, byte for byte, for two runs of one configuration on one machine. Times are kept apart, in `timings.jsonl`;
`result.json` is what `fedobp run --json` prints.
"""

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fedobp._version import __version__
from fedobp.errors import FedobpError
from fedobp.files import unwritable, write, write_json

_OURS = ("config.toml", "metrics.jsonl", "timings.jsonl", "result.json", "compare.json", "compare.toml", "models")


def claim(folder: Path) -> Path:
    """Make a folder for a run; one that already holds a run is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ours = [folder / name for name in _OURS]
        taken = [path for path in [*ours, *folder.glob("*/config.toml")] if path.exists()]
    except OSError as error:
        raise unwritable(folder, error) from error
    if taken:
        raise FedobpError(
            f"{folder} already holds a run ({taken[0].name}): choose another --out, nothing was overwritten"
        )
    return folder


def fresh(label: str) -> Path:
    """Make a new folder under `runs/`, named by time and label."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{label}"
    runs = Path("runs")
    try:
        runs.mkdir(exist_ok=True)
        for attempt in count(1):
            folder = runs / (stem if attempt == 1 else f"{stem}-{attempt}")
            with suppress(FileExistsError):  # taken, perhaps by a run that started this very second
                folder.mkdir()
                return folder
    except OSError as error:
        raise unwritable(runs, error) from error
    raise AssertionError("count has no end")


def made_by() -> str:
    """Return a comment with all versions and the number of threads: results may depend on them."""
    versions = f"fedobp {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"# Made by {versions}, {torch.get_num_threads()} threads\n"


class RunFolder:
    """Writes one run's files into a folder that is its own."""

    def __init__(self, folder: Path, config: str) -> None:
        self.path = claim(folder)
        head = f"# Run again with: fedobp run --config config.toml\n{made_by()}"
        write(self.path / "config.toml", (head + config).encode())

    def log(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl` or `timings.jsonl`; it is on disk before this returns."""
        path = self.path / f"{name}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(path, error) from error

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`."""
        write_json(self.path / "result.json", result)
