"""A run folder: the configuration, the metrics of each round, the result and the models of one run.

`config.toml` repeats the run; `metrics.jsonl` has one line per round; `clients.csv` has one row per client; `models/`
holds the final models. These four are byte-equal for two runs of one configuration on one machine. Times are not, so
they are in a file of their own, `timings.jsonl`. `result.json` is what `fedobp run --json` prints, with checksums of
the other files and its own.
"""

import hashlib
import json
import os
import platform
import shutil
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fedobp._version import __version__
from fedobp.csv_rows import write_rows
from fedobp.errors import TryAgain, short
from fedobp.files import holder, lock, sha256_of, taken, unwritable, write, write_checked_json, write_new

_RUN_FILES = (
    "config.toml", "compare.toml", "sweep.toml", "metrics.jsonl", "timings.jsonl", "clients.csv", "result.json",
    "failed.json", "compare.json", "sweep.json", "models", "checkpoint",
)  # fmt: skip


def claim(folder: Path, name: str = "", content: str = "") -> Path:
    """Create a folder for a run; a folder that already holds a run is refused.

    With a `name`, the file of that name and `content` claims the folder: of several processes, one succeeds. Without,
    the folder is only checked.
    """
    found = _run_files(folder)
    if not found and name:
        write_new(folder / name, content.encode())
        # Not empty if a run and a comparison claim the folder at the same time.
        found = [path for path in _run_files(folder) if path != folder / name]
        if found:
            (folder / name).unlink()
    if found:
        raise taken(found[0])
    return folder


def release(folder: Path, name: str, runs: Iterable[str], created: bool) -> bool:
    """Undo the claim of a folder for several runs if none of them has started; return whether it was undone.

    With `created`, the folder is removed too.
    """
    folders = [folder / run for run in runs]
    if any((one / "config.toml").exists() for one in folders):
        return False
    (folder / name).unlink(missing_ok=True)
    for one in folders:
        (one / "failed.json").unlink(missing_ok=True)
    for path in (*folders, folder) if created else folders:
        with suppress(OSError):  # it does not exist, or is not empty
            path.rmdir()
    return True


def clear(folder: Path) -> None:
    """Remove the files of a run that did not finish."""
    for path in [folder / name for name in _RUN_FILES] + _parts(folder):
        _remove(path)


def _parts(folder: Path) -> list[Path]:
    """Return temporary files of a run, which a process that was killed has left."""
    return [*folder.glob(".*.part"), *folder.glob("checkpoint/.*.part")]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run_files(folder: Path) -> list[Path]:
    """Return the files of runs in a folder; the folder is created if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [*(folder / name for name in _RUN_FILES), *folder.glob("*/config.toml")]
        return [path for path in paths if path.exists()]
    except (OSError, ValueError) as error:
        raise unwritable(folder, error) from error


def new_run_folder(label: str) -> Path:
    """Create a folder under `runs/`, named by time and label."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{label}"
    runs = Path("runs")
    try:
        runs.mkdir(exist_ok=True)
        for attempt in count(1):
            folder = runs / (stem if attempt == 1 else f"{stem}-{attempt}")
            with suppress(FileExistsError):  # another run started in the same second
                folder.mkdir()
                return folder
    except OSError as error:
        raise unwritable(runs, error) from error
    raise AssertionError("count is infinite")


def versions() -> dict[str, str | None]:
    """Return the versions that results may depend on."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {"fedobp": __version__, "torch": torch.__version__, "triton": triton, "python": platform.python_version()}


def provenance(engine: str = "") -> str:
    """Return a comment with what results may depend on: versions, the number of threads, and what the engine says."""
    made_by = f"fedobp {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"# Made by {made_by}, {torch.get_num_threads()} threads{engine and f', {engine}'}\n"


_CHECKED = ("config.toml", "metrics.jsonl", "clients.csv")  # what a result stands beside; models have their own


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write `result.json`, with the checksums of the files beside it and its own."""
    files = {name: sha256_of(folder / name) for name in _CHECKED if (folder / name).exists()}
    write_checked_json(folder / "result.json", {"files": files, **result})  # a copied result has those of its source


class RunFolder:
    """Writes one run's files into its folder."""

    def __init__(self, folder: Path, config: str, engine: str = "", continued_at: int | None = None) -> None:
        """Take a folder for a run with the settings `config`.

        A run that was interrupted goes on in its folder after a round, or anew (0): what was written later is removed.
        Another process that trains there keeps all its files.
        """
        _run_files(folder)  # makes the folder
        self.path, held = folder, lock(folder / ".lock")
        if not held.__enter__():
            raise TryAgain(f"{holder(folder / '.lock')} trains in {short(folder, 200)}: wait until it ends, or end it")
        self._release = weakref.finalize(self, held.__exit__, None, None, None)
        try:
            if continued_at is not None and (folder / "result.json").exists():  # it was not when this run was planned
                raise TryAgain(f"another process has finished the run in {short(folder, 200)}: nothing was changed")
            if continued_at:
                self._cut(continued_at)
            else:
                if continued_at == 0:
                    clear(folder)
                head = f"# Run again with: fedobp run --config config.toml\n{provenance(engine)}"
                claim(folder, "config.toml", head + config)
            path = folder / "metrics.jsonl"
            self._metrics = hashlib.sha256(path.read_bytes() if path.exists() else b"")
        except BaseException:
            self._release()
            raise

    @property
    def metrics_checksum(self) -> str:
        """The SHA-256 of what `metrics.jsonl` must hold: all lines so far."""
        return self._metrics.hexdigest()

    def _cut(self, number: int) -> None:
        """Remove what was written after a round, and what a process that was killed left half written."""
        for name in ("metrics", "timings"):
            path = self.path / f"{name}.jsonl"
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            if len(lines) > number:
                write(path, b"".join(lines[:number]))
        for path in [self.path / name for name in ("clients.csv", "failed.json", "models")] + _parts(self.path):
            _remove(path)

    def log(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl` or `timings.jsonl`; it is on disk before this returns."""
        path, text = self.path / f"{name}.jsonl", (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            with path.open("ab") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(path, error) from error
        if name == "metrics":
            self._metrics.update(text)

    def finish(self, result: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> None:
        """Write `clients.csv`, and last `result.json`: a folder that has one holds a finished run."""
        if clients:
            write_rows(self.path / "clients.csv", clients)
        write_result(self.path, result)

    def close(self) -> None:
        """Leave the folder to others."""
        self._release()
