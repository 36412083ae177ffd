"""Finished runs, read from their folders."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedobp.config import Config, read_config
from fedobp.csv_rows import read_rows
from fedobp.errors import FedobpError, short
from fedobp.files import regular


@dataclass(frozen=True)
class SavedRun:
    """A finished run: its settings and its result; longer files are read when they are asked for."""

    folder: Path
    config: Config
    result: Mapping[str, Any] = field(repr=False)  # result.json

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.absolute().name

    @property
    def history(self) -> list[tuple[int, float, float]]:
        """(round, pooled, client mean) of each evaluation, as in `Result.history`."""
        return [(int(number), float(pooled), float(mean)) for number, pooled, mean in self.result["history"]]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, one a round."""
        return _read_lines(self.folder / "metrics.jsonl")

    def timings(self) -> list[dict[str, Any]]:
        """Return the lines of `timings.jsonl`, one a round; [] if there is none."""
        return _read_lines(self.folder / "timings.jsonl")

    def clients(self) -> list[dict[str, Any]]:
        """Return the rows of `clients.csv`, None where a cell is empty; [] if there is no such file."""
        return read_rows(self.folder / "clients.csv") if (self.folder / "clients.csv").exists() else []


def read_run(folder: Path) -> SavedRun:
    """Read a finished run."""
    result = _parsed(folder / "result.json", json.loads)
    wanted = {"method": str, "accuracy": dict, "history": list, "personal": dict, "bytes": dict, "compute": dict}
    if not isinstance(result, dict) or not all(isinstance(result.get(name), kind) for name, kind in wanted.items()):
        raise FedobpError(f"{short(folder / 'result.json', 200)} is not the result of a run: give the folder of a run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it trained side by side with others matters to who repeats it
        return SavedRun(folder, Config(**read_config(folder / "config.toml")), result)


def find_runs(paths: Sequence[Path]) -> list[SavedRun]:
    """Return the finished runs of some folders: each is that of a run, or of a comparison or sweep."""
    found: dict[Path, SavedRun] = {}
    for path in paths:
        if not path.is_dir():
            raise FedobpError(f"there is no folder {short(path, 200)}: give the folder of a run, comparison or sweep")
        folders = [path] if (path / "result.json").exists() else [one.parent for one in path.glob("*/result.json")]
        if not folders:
            raise FedobpError(f"there is no finished run in {short(path, 200)}: a finished one has a result.json")
        for folder in sorted(folders):
            found.setdefault(folder.resolve(), read_run(folder))
    return list(found.values())


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the values of a file of JSON lines."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = _parsed(path, lambda text: [json.loads(line) for line in _lines(text)])
    return lines


def _lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip())


def _parsed(path: Path, parse: Any) -> Any:
    """Return what a file holds, or say that it is damaged."""
    try:
        return parse(regular(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FedobpError(f"{short(path, 200)} is damaged ({short(error, 120)}): run it again") from error
