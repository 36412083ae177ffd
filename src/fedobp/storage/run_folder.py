"""A run is a folder: what was asked, what was measured round by round, what came out.

`config.toml` re-runs it; `metrics.jsonl` grows by one line a round; `models/` holds the final models. These three are
equal, byte for byte, for two runs of one configuration on one machine. Times are kept apart, in `timings.jsonl`;
`result.json` is what `fedobp run --json` prints.
"""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fedobp._version import __version__
from fedobp.files import taken, unwritable, write_json, write_new

_OURS = ("config.toml", "compare.toml", "metrics.jsonl", "timings.jsonl", "result.json", "compare.json", "models")


def claim(folder: Path, name: str = "", content: str = "") -> Path:
    """Make a folder for a run; one that already holds a run is refused.

    With the file that says what runs there (its `name` and `content`) the folder is taken: of several processes, one
    succeeds. Without it, it is only looked at.
    """
    found = _ours(folder)
    if not found and name:
        write_new(folder / name, content.encode())
        found = [path for path in _ours(folder) if path != folder / name]  # a comparison beside a run, just now
        if found:
            (folder / name).unlink()
    if found:
        raise taken(found[0])
    return folder


def release(folder: Path, name: str, runs: Iterable[str], made: bool) -> bool:
    """Give a folder back that was claimed for several runs, if none of them has started; say whether it was so.

    A folder that was `made` for them is removed.
    """
    own = [folder / run for run in runs]
    if any((one / "config.toml").exists() for one in own):
        return False
    (folder / name).unlink(missing_ok=True)
    for path in (*own, folder) if made else own:
        with suppress(OSError):  # it is not there, or somebody's
            path.rmdir()
    return True


def _ours(folder: Path) -> list[Path]:
    """Return which files of runs are in a folder; it is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [path for path in [*(folder / name for name in _OURS), *folder.glob("*/config.toml")] if path.exists()]
    except (OSError, ValueError) as error:
        raise unwritable(folder, error) from error


def new_run_folder(label: str) -> Path:
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


def provenance() -> str:
    """Return a comment with all versions and the number of threads: results may depend on them."""
    versions = f"fedobp {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"# Made by {versions}, {torch.get_num_threads()} threads\n"


class RunFolder:
    """Writes one run's files into a folder that is its own."""

    def __init__(self, folder: Path, config: str) -> None:
        head = f"# Run again with: fedobp run --config config.toml\n{provenance()}"
        self.path = claim(folder, "config.toml", head + config)

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
