"""Readers of tables with a label column: CSV, Parquet, and Hugging Face datasets on disk.

If a column holds images, as in Hugging Face datasets, they are the inputs, and other features are ignored.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from fedobp.data.cells import CSV_MISSING
from fedobp.data.columns import Arrays, Chunk, Columns, TableRules, TableSummary
from fedobp.data.csv_format import CsvFormat, csv_format, skip_mark, undecodable
from fedobp.data.features import Cells, flag
from fedobp.data.images import ImageArray
from fedobp.data.registry import REGISTRY
from fedobp.errors import FedobpError, first_line, short
from fedobp.files import regular

_CHUNK_ROWS = 4096  # rows read at once

Progress = Callable[[str, float], None]


def read_csv(path: Path, rules: TableRules, progress: Progress) -> tuple[Arrays, TableSummary]:
    """Read a CSV file with column names in the first line."""
    found = csv_format(path, rules)
    try:
        with path.open("rb") as raw, io.TextIOWrapper(raw, encoding=found.encoding, newline="") as text:
            skip_mark(text)
            rows = found.rows(text)
            names = [name.strip() for name in next(rows, [])]
            if not names:
                raise FedobpError(f"{short(path, 200)} is empty: there is nothing to import")
            if "" in names:
                raise FedobpError(
                    f"{short(path, 200)} has no name for column {names.index('') + 1}: name it, or remove it (pandas "
                    "leaves its index out with to_csv(index=False))"
                )
            size = path.stat().st_size
            columns = Columns(path, names, rules, missing_texts=CSV_MISSING, decimal=found.decimal)
            chunks = _csv_chunks(
                columns, names, rows, found, lambda: progress(f"reading {path.name}", raw.tell() / size)
            )
            return columns.to_arrays(chunks)
    except UnicodeError as error:
        raise undecodable(path, found) from error
    except csv.Error as error:
        raise FedobpError(f"{short(path, 200)} {error}") from error
    except OSError as error:
        raise FedobpError(
            f"{short(path, 200)} cannot be read as a CSV file ({first_line(error)}): make all of it readable"
        ) from error


def _csv_chunks(
    columns: Columns, names: Sequence[str], rows: Iterator[list[str]], found: CsvFormat, on_chunk: Callable[[], None]
) -> Iterator[Chunk]:
    done = 0
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        for at, row in enumerate(chunk, done + 1):
            if len(row) != len(names):
                raise FedobpError(
                    f"{columns.where} has {len(row)} cells in row {at} and {len(names)} columns: put texts with "
                    f"{found.separators} into quotes, and fill in what is missing, or give another --separator"
                )
        yield dict(zip(names, zip(*chunk, strict=True), strict=True))
        done += len(chunk)
        on_chunk()


def frame_arrays(
    frame: Any,
    label: Any,
    client: Any = None,
    *,
    missing: str = "refuse",
    drop: str | Sequence[Any] = (),
    categories: str | Sequence[Any] = (),
) -> Arrays:
    """Return a dataset's arrays from a pandas DataFrame, the same as an import of the same table.

    Column names that are no texts are used as texts. Columns of pandas' type `category` hold categories, whatever they
    are; the index is no column.
    """
    rules = TableRules(str(label), None if client is None else str(client), missing, drop, categories)
    names = {str(name): name for name in frame.columns}
    columns = Columns("the DataFrame", [str(name) for name in frame.columns], rules)
    chunk = {name: frame[names[name]] for name in [*columns.named, *columns.features]}
    categorical = [name for name, column in chunk.items() if hasattr(column.dtype, "categories")]
    cells = {name: _frame_cells(column) for name, column in chunk.items()}
    temporal = [name for name, column in chunk.items() if _is_period(column)]
    arrays, _ = columns.to_arrays([cells], categorical=categorical, temporal=temporal)
    return arrays


def _frame_cells(column: Any) -> NDArray[Any]:
    """Return a column's cells, dates and durations as Python objects; categories of any type are texts, as in a CSV."""
    if hasattr(column.dtype, "categories") or _is_period(column):
        column = column.astype(object).map(str, na_action="ignore")
    cells: NDArray[Any] = column.to_numpy()
    return cells.astype(f"{cells.dtype.kind}8[us]").astype(object) if cells.dtype.kind in "mM" else cells


def _is_period(column: Any) -> bool:
    """Return whether a column of a DataFrame has pandas' type for periods; pandas need not be there."""
    return type(column.dtype).__name__ == "PeriodDtype"


def read_parquet(path: Path, rules: TableRules, progress: Progress) -> tuple[Arrays, TableSummary]:
    """Read a Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise FedobpError("Parquet needs pyarrow: pip install 'fedobp[tables]'") from error
    with _arrow_errors(path, "a Parquet file", "save it again"), parquet.ParquetFile(path) as file:
        tables = (pyarrow.Table.from_batches([batch]) for batch in file.iter_batches(_CHUNK_ROWS))
        return _read_arrow(path, file.schema_arrow, file.metadata.num_rows, tables, rules, progress)


def read_huggingface(name: str, path: Path, rules: TableRules, progress: Progress) -> tuple[Arrays, TableSummary]:
    """Read a Hugging Face dataset written by `save_to_disk`; the split `train` comes before the others."""
    try:
        import datasets
    except ImportError as error:
        raise FedobpError("a Hugging Face dataset needs its library: pip install 'fedobp[hf]'") from error
    for file in path.rglob("*"):
        if not file.is_dir():
            regular(file)
    with _arrow_errors(path, "a Hugging Face dataset", "save it again with save_to_disk"):
        splits = _saved_splits(path)
        if not splits:
            raise FedobpError(f"{short(path, 200)} has no rows: there is nothing to import")
        ordered = sorted(splits, key=lambda split: split != "train")
        first = splits[ordered[0]]
        for split in ordered:
            if splits[split].features != first.features:
                raise FedobpError(
                    f"{short(path, 200)} has other columns in '{short(split)}' than in '{short(ordered[0])}': import "
                    "one of them alone"
                )
        tables = (table for split in ordered for table in splits[split].with_format("arrow").iter(_CHUNK_ROWS))
        # Numbers of a ClassLabel are read as its names; but a registered dataset keeps its label numbers.
        classes = {
            column: kind.names for column, kind in first.features.items() if isinstance(kind, datasets.ClassLabel)
        }
        if name in REGISTRY:
            classes.pop(rules.label, None)
        n_train = len(splits["train"]) if "train" in splits else None
        rows = sum(map(len, splits.values()))
        return _read_arrow(path, first.features.arrow_schema, rows, tables, rules, progress, classes, n_train)


def _saved_splits(path: Path) -> dict[str, Any]:
    """Return the splits that have rows; `datasets` saves an empty split without a file, and then cannot load it."""
    import datasets

    folders = {"": path}
    if not (path / "state.json").is_file():
        folders = {name: path / name for name in json.loads((path / "dataset_dict.json").read_text())["splits"]}
    states = {name: json.loads((folder / "state.json").read_text()) for name, folder in folders.items()}
    saved = [name for name, state in states.items() if state["_data_files"]]
    loaded = {name: datasets.load_from_disk(str(folders[name])) for name in saved}
    return {name: rows for name, rows in loaded.items() if len(rows)}


@contextmanager
def _arrow_errors(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Turn any exception into a user error: damaged files make pyarrow and `datasets` raise nearly anything."""
    try:
        yield
    except (FedobpError, MemoryError):
        raise
    except Exception as error:
        raise FedobpError(f"{short(path, 200)} cannot be read as {what} ({first_line(error)}): {remedy}") from error


def _read_arrow(
    path: Path,
    schema: Any,
    rows: int,
    tables: Iterable[Any],
    rules: TableRules,
    progress: Progress,
    classes: Mapping[str, Sequence[str]] = MappingProxyType({}),
    n_train: int | None = None,
) -> tuple[Arrays, TableSummary]:
    """Read Arrow tables; `classes` names categories stored as numbers, and a number without a name is missing."""
    from pyarrow import types

    # pandas writes its index as a column of this name; it is not a feature.
    names = [name for name in schema.names if not re.fullmatch(r"__index_level_\d+__", name)]
    columns = Columns(path, names, rules)
    arrow_types = {name: _storage_type(schema.field(name).type) for name in names}
    image_columns = [name for name in columns.features if _holds_images(arrow_types[name])]
    if len(image_columns) > 1:
        both = short(" and ".join(image_columns), 200)
        raise FedobpError(f"{columns.where} has images in {both}: leave out all but one of these columns with --drop")
    columns.features = image_columns or columns.features
    for name in columns.named:
        if types.is_nested(arrow_types[name]):
            what = "images" if _holds_images(arrow_types[name]) else "lists"
            raise FedobpError(
                f"{columns.where} has, from row 1 on, {what} in column '{short(name)}': labels and clients are whole "
                "numbers or names"
            )
    for name in columns.features:
        if types.is_nested(arrow_types[name]) and not image_columns:
            raise FedobpError(
                f"{columns.where} has, from row 1 on, lists in column '{short(name)}': give each number a column, or "
                f"import an npz, or leave the column out with {flag('--drop', name)}"
            )

    def chunks() -> Iterator[Chunk]:
        done = 0
        for table in tables:
            table.validate(full=True)  # offsets in a damaged file may point anywhere
            chunk = {name: _arrow_cells(table.column(name)) for name in [*columns.named, *columns.features]}
            for name in chunk.keys() & classes.keys():
                chunk[name] = [_class_name(at, classes[name]) for at in chunk[name]]
            yield chunk
            done += len(table)
            progress(f"reading {path.name}", done / rows)

    categorical = [name for name in columns.features if types.is_dictionary(arrow_types[name])]
    temporal = [name for name in columns.features if _is_temporal(schema.field(name))]
    images = ImageArray(rows) if image_columns else None
    return columns.to_arrays(
        chunks(), categorical=[*categorical, *classes], temporal=temporal, images=images, n_train=n_train
    )


def _storage_type(arrow_type: Any) -> Any:
    """Return the storage type of an Arrow type: Hugging Face's array types are stored as lists."""
    return getattr(arrow_type, "storage_type", arrow_type)


def _is_temporal(field: Any) -> bool:
    """Return whether a column's type is one for dates, times, durations or pandas' periods."""
    from pyarrow import types

    # Without pandas, pyarrow knows the type of periods by the field's metadata only.
    name = (
        getattr(field.type, "extension_name", "") or (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    )
    return bool(types.is_temporal(field.type)) or name == "pandas.period"


def _holds_images(arrow_type: Any) -> bool:
    from pyarrow import types

    return bool(types.is_struct(arrow_type)) and arrow_type.get_field_index("bytes") >= 0


def _arrow_cells(column: Any) -> Cells:
    """Return a column's cells: an array of numbers, or a list of Python objects, with durations but no dates in it."""
    from pyarrow import duration, string, types

    if types.is_temporal(column.type):
        column = column.cast(duration("us") if types.is_duration(column.type) else string(), safe=False)
    numbers = types.is_floating(column.type) or types.is_integer(column.type)
    cells: Cells = column.to_numpy() if numbers and not column.null_count else column.to_pylist()
    return cells


def _class_name(at: float | None, names: Sequence[str]) -> str | None:
    return names[int(at)] if at is not None and 0 <= at < len(names) else None
