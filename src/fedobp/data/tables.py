"""Readers of tables with a label column: CSV, Parquet, and Hugging Face datasets on disk.

If a column holds images, as in Hugging Face datasets, they are the inputs, and other features are ignored.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.columns import Chunk, Columns
from fedobp.data.images import ImageArray
from fedobp.data.registry import REGISTRY
from fedobp.errors import FedobpError, first_line, short
from fedobp.files import regular

_CHUNK_ROWS = 4096  # rows read at once

Progress = Callable[[str, float], None]


def read_csv(path: Path, label: str, client: str | None, progress: Progress) -> dict[str, NDArray[Any]]:
    """Read a CSV file: UTF-8, separated by commas, with column names in the first line."""
    try:
        with path.open("rb") as raw:
            lines = csv.reader(io.TextIOWrapper(raw, encoding="utf-8-sig", newline=""), strict=True)
            rows = filter(None, lines)
            names = [name.strip() for name in next(rows, [])]
            if not names:
                raise FedobpError(f"{short(path, 200)} is empty: there is nothing to import")
            if "" in names:
                raise FedobpError(
                    f"{short(path, 200)} has no name for column {names.index('') + 1}: name it, or remove it (pandas "
                    "leaves its index out with to_csv(index=False))"
                )
            if len(names) == 1 and re.search(r"[;\t|]", names[0]):
                raise FedobpError(
                    f"{short(path, 200)} separates its columns with something else: separate them with commas"
                )
            size = path.stat().st_size
            chunks = _csv_chunks(path, names, rows, lambda: progress(f"reading {path.name}", raw.tell() / size))
            return Columns(path, names, label, client).to_arrays(chunks)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedobpError(
            f"{short(path, 200)} cannot be read as a CSV file ({first_line(error)}): save it again, in UTF-8"
        ) from error


def _csv_chunks(
    path: Path, names: Sequence[str], rows: Iterator[list[str]], on_chunk: Callable[[], None]
) -> Iterator[Chunk]:
    done = 0
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        for at, row in enumerate(chunk, done + 1):
            if len(row) != len(names):
                raise FedobpError(
                    f"{short(path, 200)} has {len(row)} cells in row {at} and {len(names)} columns: put texts with "
                    "commas into quotes, and fill in what is missing"
                )
        yield dict(zip(names, zip(*chunk, strict=True), strict=True))
        done += len(chunk)
        on_chunk()


def read_parquet(path: Path, label: str, client: str | None, progress: Progress) -> dict[str, NDArray[Any]]:
    """Read a Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise FedobpError("Parquet needs pyarrow: pip install 'fedobp[tables]'") from error
    with _arrow_errors(path, "a Parquet file", "save it again"), parquet.ParquetFile(path) as file:
        tables = (pyarrow.Table.from_batches([batch]) for batch in file.iter_batches(_CHUNK_ROWS))
        rows = file.metadata.num_rows
        return _read_arrow(path, file.schema_arrow, rows, tables, label, client, progress)


def read_huggingface(
    name: str, path: Path, label: str, client: str | None, progress: Progress
) -> dict[str, NDArray[Any]]:
    """Read a Hugging Face dataset written by `save_to_disk`; the split `train` comes before the others."""
    try:
        import datasets
    except ImportError as error:
        raise FedobpError("a Hugging Face dataset needs its library: pip install 'fedobp[hf]'") from error
    for file in path.rglob("*"):
        if not file.is_dir():
            regular(file)
    with _arrow_errors(path, "a Hugging Face dataset", "save it again with save_to_disk"):
        loaded = datasets.load_from_disk(str(path))
        splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"": loaded}
        ordered = sorted(splits, key=lambda split: split != "train")
        first = splits[ordered[0]]
        for split in ordered:
            if splits[split].features != first.features:
                raise FedobpError(
                    f"{short(path, 200)} has other columns in '{short(split)}' than in '{short(ordered[0])}': import "
                    "one of them alone"
                )
        tables = (table for split in ordered for table in splits[split].with_format("arrow").iter(_CHUNK_ROWS))
        # A registered dataset keeps its label numbers; other datasets get the label names of their ClassLabel.
        classes = getattr(first.features.get(label), "names", None) if name not in REGISTRY else None
        rows = sum(map(len, splits.values()))
        found = _read_arrow(path, first.features.arrow_schema, rows, tables, label, client, progress, classes)
    return found if "train" not in splits else {**found, "n_train": np.array(len(splits["train"]))}


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
    label: str,
    client: str | None,
    progress: Progress,
    classes: Sequence[str] | None = None,
) -> dict[str, NDArray[Any]]:
    """Read Arrow tables; `classes` names labels stored as numbers, and a number without a name is missing."""
    from pyarrow import types

    # pandas writes its index as a column of this name; it is not a feature.
    names = [name for name in schema.names if not re.fullmatch(r"__index_level_\d+__", name)]
    columns = Columns(path, names, label, client)
    arrow_types = {name: _storage_type(schema.field(name).type) for name in names}
    image_columns = [name for name in columns.features if _holds_images(arrow_types[name])]
    if len(image_columns) > 1:
        both = short(" and ".join(image_columns), 200)
        raise FedobpError(f"{columns.where} has images in {both}: remove all but one of these columns")
    columns.features = image_columns or columns.features
    for name in columns.named:
        if types.is_nested(arrow_types[name]):
            what = "images" if _holds_images(arrow_types[name]) else "lists"
            raise FedobpError(
                f"{columns.where} has {what} in column '{short(name)}': labels and clients are whole numbers or names"
            )
    for name in columns.features:
        if types.is_nested(arrow_types[name]) and not image_columns:
            raise FedobpError(
                f"{columns.where} has lists in column '{short(name)}': give each number a column, or import an npz"
            )

    def chunks() -> Iterator[Chunk]:
        done = 0
        for table in tables:
            table.validate(full=True)  # offsets in a damaged file may point anywhere
            chunk: dict[str, Any] = {name: table.column(name).to_pylist() for name in [*columns.named, *image_columns]}
            if not image_columns:
                chunk |= {name: table.column(name).to_numpy() for name in columns.features}
            if classes:
                chunk[label] = [
                    None if at is None or not 0 <= at < len(classes) else classes[at] for at in chunk[label]
                ]
            yield chunk
            done += len(table)
            progress(f"reading {path.name}", done / rows)

    return columns.to_arrays(chunks(), ImageArray(rows) if image_columns else None)


def _storage_type(arrow_type: Any) -> Any:
    """Return the storage type of an Arrow type: Hugging Face's array types are stored as lists."""
    return getattr(arrow_type, "storage_type", arrow_type)


def _holds_images(arrow_type: Any) -> bool:
    from pyarrow import types

    return bool(types.is_struct(arrow_type)) and arrow_type.get_field_index("bytes") >= 0
