"""Finished runs, read from their folders."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from fedobp.config import Config, read_config, settings
from fedobp.csv_rows import read_rows
from fedobp.errors import FedobpError, short
from fedobp.evaluation import Accuracy, Metrics, NewClients, Personal, make_protocol, metric_from_json
from fedobp.files import folder_path, read_checked_json, regular, sha256_of
from fedobp.result import Compute, Result, Results, Traffic

_COLUMNS = {"client", "train", "test", "entropy", "served", "last", "personal"}  # of clients.csv, at least
_WHOLE = ("client", "train", "test", "visits", "personal")
_TABLES = {"personal": Personal, "bytes": Traffic, "compute": Compute}  # of result.json, which all results have
_DECIDED = [  # settings that every run's config.toml has
    spec.name for spec in settings() if spec.name not in ("data_dir", "partition_file", "eval_clients", "metrics")
]


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
        try:
            return [(int(number), float(pooled), float(mean)) for number, pooled, mean in self.result["history"]]
        except (TypeError, ValueError, OverflowError) as error:
            raise _no_result(self.folder / "result.json") from error

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, one a round."""
        path = self.folder / "metrics.jsonl"
        _verify(self.folder, self.result, path.name)
        lines = _read_lines(path)
        if not all(
            _is_number(line.get("round")) and _are_numbers(line.get("personal_by_tensor", {})) for line in lines
        ):
            raise _damaged(path, "a line has no numbers where they must be")
        return lines

    def timings(self) -> list[dict[str, Any]]:
        """Return the lines of `timings.jsonl`, one a round; [] if there is none."""
        path = self.folder / "timings.jsonl"
        lines = _read_lines(path)
        if not all(
            _is_number(line.get(name)) for line in lines for name in ("round", "train", "all", "runs")
        ) or not all(line["runs"] >= 1 for line in lines):
            raise _damaged(path, "a line has no numbers where they must be")
        return lines

    def messages(self) -> list[dict[str, Any]]:
        """Return the lines of `messages.jsonl`, one a message to a node; [] if the run was simulated."""
        return _read_lines(self.folder / "messages.jsonl")

    def clients(self) -> list[dict[str, Any]]:
        """Return the rows of `clients.csv`, None where a cell is empty; [] if there is no such file."""
        path = self.folder / "clients.csv"
        _verify(self.folder, self.result, "clients.csv")
        rows = read_rows(path) if path.exists() else []
        for row in rows:
            numbers = all(value is None or _is_number(value) for value in row.values())
            whole = all(
                isinstance(row[name], int | None) for name in row if name in _WHOLE or name.startswith("personal.")
            )
            if not row.keys() >= _COLUMNS or not numbers or not whole or None in (row["client"], row["personal"]):
                raise _damaged(path, "a row is not of numbers, or has too few")
        return rows

    def to_result(self) -> Result:
        """Return the result as the run returned it, except for models, which stay in the folder.

        Accuracies of single clients are not saved for validation parts and new clients.
        """
        config, found = self.config, self.result
        metrics: Mapping[str, Any] = found.get("metrics", {})
        new, clients = found.get("new_clients"), self.clients()

        def column(name: str, key: str) -> Accuracy | None:
            per_client = tuple(row.get(name) for row in clients)
            return _accuracy(found[key], metrics.get(name), per_client) if found.get(key) else None

        try:
            return Result(
                config=config,
                protocol=make_protocol(config.protocol, config.rounds, config.evaluated),
                accuracy=cast(Accuracy, column("served", "accuracy")),
                last=cast(Accuracy, column("last", "last")),
                finetuned=column("finetuned", "finetuned"),
                validation=_accuracy(found["validation"], metrics.get("validation")) if "validation" in found else None,
                new_clients=NewClients(
                    **{name: _accuracy(new[name], metrics.get(f"new_clients_{name}")) for name in new}
                )
                if new
                else None,
                history=self.history,
                personal=Personal(**found["personal"]),
                bytes=Traffic(**found["bytes"]),
                compute=Compute(**found["compute"]),
                seconds=found["seconds"],
                models=None,
                parameters=found["parameters"],
                partition=found["partition"],
                out=self.folder,
                launch=tuple(replace(config, **other) for other in found.get("launch", [{}])),
                labels=tuple(found.get("labels", ())),
                notes=tuple(found.get("notes", ())),
                clients=tuple(clients),
                provenance=dict(found["provenance"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise _no_result(self.folder / "result.json") from error


def _has_numbers(result: Mapping[str, Any]) -> bool:
    """Return whether a result has numbers and texts where what is made of it needs them."""
    tables = [(result[name], {spec.name for spec in fields(kind)}) for name, kind in _TABLES.items()]
    names = {spec.name for spec in fields(Accuracy)} - {"metrics", "per_client"}
    new = result.get("new_clients") or {}
    columns = [result.get(name) for name in ("last", "finetuned", "validation")]
    columns += new.values() if isinstance(new, dict) else [new]
    tables += [(column, names) for column in (result["accuracy"], *columns) if column is not None]
    origin = result.get("provenance") or {}
    return (
        all(_are_numbers(table) and table.keys() == known for table, known in tables)
        and all(_is_number(result[name]) for name in ("seconds", "parameters") if name in result)
        and len(result["history"]) > 0
        and isinstance(result.get("partition", ""), str)
        and isinstance(origin, dict)
        and isinstance(origin.get("config") or "", str)
        and all(isinstance(name, str) for name in _listed(origin.get("beside")))
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] * (value is not None)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(map(_is_number, values.values()))


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number, of which sums fit into 64 bits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53


def _accuracy(
    values: Mapping[str, float], metrics: Mapping[str, Any] | None, per_client: tuple[float | None, ...] = ()
) -> Accuracy:
    read = {name: metric_from_json(name, found) for name, found in (metrics or {}).items()}
    return Accuracy(**values, metrics=cast(Metrics, read), per_client=per_client)


def _no_result(path: Path) -> FedobpError:
    return FedobpError(
        f"{short(path, 200)} is not the result of a run of this version: remove its folder, and run it again"
    )


def read_run(folder: Path) -> SavedRun:
    """Read a finished run."""
    result = _read(folder / "result.json", read_checked_json)
    wanted = {"method": str, "accuracy": dict, "history": list, "personal": dict, "bytes": dict, "compute": dict}
    if not all(isinstance(result.get(name), kind) for name, kind in wanted.items()):
        raise _no_result(folder / "result.json")
    if not _has_numbers(result):
        raise _no_result(folder / "result.json")
    _verify(folder, result, "config.toml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it trained side by side with others matters to who repeats it
        config = Config(**read_config(folder / "config.toml"))
    if unset := [name for name in _DECIDED if getattr(config, name) is None]:
        raise _damaged(folder / "config.toml", f"it has no {unset[0]}")
    return SavedRun(folder, config, result)


def _verify(folder: Path, result: Mapping[str, Any], name: str) -> None:
    """Refuse a file that is not as its run wrote it. Runs of older versions have no checksums."""
    path, known = folder / name, result.get("files")
    if not isinstance(known, dict) or name not in known:
        return
    if not path.exists():
        raise FedobpError(f"{short(path, 200)} is lost: take a whole copy of its folder, or run it again")
    if sha256_of(path) != known[name]:
        raise FedobpError(
            f"{short(path, 200)} is damaged: its checksum is not that in result.json (an editor, or git, may have "
            "changed its line ends); take another copy, or run it again"
        )


def find_runs(paths: Sequence[Path]) -> list[SavedRun]:
    """Return the finished runs of some folders: each is that of a run, or of a comparison or sweep."""
    found: dict[Path, SavedRun] = {}
    for path in paths:
        if not path.is_dir():
            raise FedobpError(f"there is no folder {short(path, 200)}: give the folder of a run, comparison or sweep")
        inside = [one.parent for one in path.glob("*/result.json") if not one.parent.name.startswith(".")]
        folders = [path] if (path / "result.json").exists() else inside
        if not folders:
            raise FedobpError(f"there is no finished run in {short(path, 200)}: a finished one has a result.json")
        for folder in sorted(folders):
            found.setdefault(folder.resolve(), read_run(folder))
    return list(found.values())


def load_results(*folders: str | Path) -> Results[Result]:
    """Return the results of finished runs: of each folder of a run, a comparison or a sweep."""
    if not folders:
        raise FedobpError("load_results has no folder to read: give that of a run, a comparison or a sweep")
    return Results(run.to_result() for run in find_runs([folder_path(one, "folder") for one in folders]))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the values of a file of JSON lines."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = _read(path, lambda path: [json.loads(line) for line in _lines(path)])
    if not all(isinstance(line, dict) for line in lines):
        raise _damaged(path, "a line is no table of values")
    return lines


def _lines(path: Path) -> Iterator[str]:
    return (line for line in regular(path).read_text(encoding="utf-8").splitlines() if line.strip())


def _read(path: Path, parse: Any) -> Any:
    """Return what a file holds, or say that it is damaged."""
    try:
        return parse(path)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, problem: str) -> FedobpError:
    return FedobpError(
        f"{short(path, 200)} is damaged ({short(problem, 120)}): remove the folder of the run, and run it again"
    )
