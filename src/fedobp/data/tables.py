"""Tables with a label column: CSV, Parquet, and Hugging Face datasets on disk.

Every column but those of the label and the client is a feature, and must hold numbers. Where a column holds images, as
in Hugging Face datasets, these are the inputs, and other columns are left out.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.free_memory import memory_guard, require_free_memory
from fedobp.data.images import ImageArray
from fedobp.data.registry import REGISTRY
from fedobp.errors import FedobpError, first_line, short, unknown
from fedobp.files import regular

_CHUNK_ROWS = 4096  # read together
# Canonical whole numbers of 64 bits, also as pandas writes them where some are missing: 7 and 7.0, but not 007.
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})(\.0+)?")
_NUMBER_TYPES = {str, float, int, bool, Decimal, type(None)}  # what a cell may be, unless NumPy has them as numbers

Progress = Callable[[str, float], None]
Chunk = Mapping[str, Sequence[Any] | NDArray[Any]]


class _Columns:
    """Which of a table's columns are what."""

    def __init__(self, where: Path, names: Sequence[str], label: str, client: str | None) -> None:
        self.where, self.label, self.client = short(where, 200), label, client
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise FedobpError(f"{self.where} has two columns called '{short(twice[0])}': rename one")
        for flag, name in (("--label", label), ("--client", client)):
            if name is not None and name not in names:
                raise unknown(f"column for {flag} in {self.where}", name, names)
        if label == client:
            raise FedobpError(f"--label and --client are both '{short(label)}': name two columns")
        self.named = [label] if client is None else [label, client]
        self.features = [name for name in names if name not in self.named]
        if not self.features:
            besides = " and ".join(map(short, self.named))
            raise FedobpError(f"{self.where} has no columns besides {besides}: there are no inputs")

    def to_arrays(self, chunks: Iterable[Chunk], images: ImageArray | None = None) -> dict[str, NDArray[Any]]:
        """Return a dataset's arrays from its rows; with `images`, the one feature is a column of them."""
        x: list[NDArray[np.float32]] = []
        names: dict[str, list[Any]] = {name: [] for name in self.named}
        size = 0
        for chunk in chunks:
            row = len(names[self.label]) + 1
            if images:
                self._add_images(images, chunk[self.features[0]], row)
            else:
                x.append(np.stack([self._feature_column(name, chunk[name], row) for name in self.features], axis=1))
                size += x[-1].nbytes
                require_free_memory(
                    f"{self.where}, of which {row:,} rows are read,", size
                )  # to join the parts in the end
            for name, known in names.items():
                known.extend(chunk[name])
        if not names[self.label]:
            raise FedobpError(f"{self.where} has no rows: there is nothing to import")
        found = {"x": images.x if images else np.concatenate(x), "y": self._name_column("label", self.label, names)}
        return found if self.client is None else {**found, "client": self._name_column("client", self.client, names)}

    def _add_images(self, images: ImageArray, cells: Sequence[Any] | NDArray[Any], row: int) -> None:
        for at, cell in enumerate(cells, row):
            where = f"the image in row {at} of {self.where}"
            found = None if cell is None else cell.get("path") if cell["bytes"] is None else cell["bytes"]
            if found is None:
                raise FedobpError(f"{where} is missing: remove the row")
            if not isinstance(found, str | bytes):
                raise FedobpError(f"{where} is neither bytes nor the path of a file: save the images anew")
            images.add(where, Path(found) if isinstance(found, str) else found)

    def _feature_column(self, name: str, cells: Sequence[Any] | NDArray[Any], row: int) -> NDArray[np.float32]:
        """Return a feature's cells as float32, or say which of them is no number."""
        try:
            with np.errstate(over="ignore"):
                found = np.asarray(_reject_non_numbers(cells), np.float32)
        except (ValueError, TypeError, OverflowError):
            # What Python takes for a number, and NumPy does not, is the first of its kind.
            wrong = ((at, cell) for at, cell in enumerate(cells, row) if not _is_number(cell))
            at, cell = next(wrong, (row, cells[0]))
            shown = "nothing" if cell == "" else f"'{short(cell)}'"
            raise FedobpError(
                f"{self.where} has {shown} in row {at} of column '{short(name)}', which is no number: turn the column "
                "into numbers, or remove it"
            ) from None
        if not np.isfinite(found).all():
            at = row + int(np.argmin(np.isfinite(found)))
            raise FedobpError(
                f"{self.where} has a missing, NaN or infinite value in row {at} of column '{short(name)}': fill it "
                "in, or remove the row"
            )
        return found

    def _name_column(self, what: str, column: str, cells: Mapping[str, list[Any]]) -> NDArray[Any]:
        """Return labels or clients: integers where all of them are whole numbers, else texts."""
        listed = ["" if cell is None else str(cell).strip() for cell in cells[column]]
        with memory_guard(
            f"the {what}s of {self.where}", 4 * len(listed) * max(map(len, listed))
        ):  # all as wide as one
            texts = np.array(listed)
        found, first = np.unique(texts, return_index=True)
        occurring: list[str] = found.tolist()
        for text, at in zip(occurring, first.tolist(), strict=True):
            if text.lower() in ("", "nan"):
                raise FedobpError(
                    f"{self.where} has no {what} in row {at + 1} of column '{short(column)}': fill it in, or remove "
                    "the row"
                )
        if what == "label" and all(map(_is_number, occurring)):
            fractions = [text for text in occurring if not float(text).is_integer()]
            if fractions:
                raise FedobpError(
                    f"{self.where} has numbers with fractions in the label column '{short(column)}', such as "
                    f"{short(fractions[0])}: labels must be whole numbers or names of classes"
                )
        return numbers_or_texts(texts)


def numbers_or_texts(names: NDArray[Any]) -> NDArray[Any]:
    """Return names as integers where all of them are whole numbers, which are then in the order of numbers."""
    found, at = np.unique(names, return_inverse=True)
    if not all(_WHOLE.fullmatch(text) for text in found.tolist()):
        return names
    return np.array([int(text.partition(".")[0]) for text in found.tolist()])[at]


def _reject_non_numbers(cells: Sequence[Any] | NDArray[Any]) -> Sequence[Any] | NDArray[Any]:
    """Return a feature's cells, or raise ValueError for those that NumPy would take for numbers, and people would not.

    These are dates, and texts with an underscore, which Python skips in numbers: 1_2 is a name, not 12.
    """
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "biuf":
        return cells
    if not set(map(type, cells)) <= _NUMBER_TYPES or "_" in "".join(map(str, cells)):
        raise ValueError
    return cells


def _is_number(cell: Any) -> bool:
    """Say whether a single cell is a number; a missing one is not a wrong one."""
    if cell is None:
        return True
    try:
        float(cell)
    except (ValueError, TypeError):
        return False
    return type(cell) in _NUMBER_TYPES and "_" not in str(cell)


def read_csv(path: Path, label: str, client: str | None, progress: Progress) -> dict[str, NDArray[Any]]:
    """Read a CSV file: UTF-8, separated by commas, the columns' names in the first line."""
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
            return _Columns(path, names, label, client).to_arrays(chunks)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedobpError(
            f"{short(path, 200)} cannot be read as a CSV file ({first_line(error)}): save it anew, in UTF-8"
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
    with _arrow_errors(path, "a Parquet file", "save it anew"), parquet.ParquetFile(path) as file:
        tables = (pyarrow.Table.from_batches([batch]) for batch in file.iter_batches(_CHUNK_ROWS))
        rows = file.metadata.num_rows
        return _read_arrow(path, file.schema_arrow, rows, tables, label, client, progress)


def read_huggingface(
    name: str, path: Path, label: str, client: str | None, progress: Progress
) -> dict[str, NDArray[Any]]:
    """Read a Hugging Face dataset that `save_to_disk` wrote; of several splits, the one called train comes first."""
    try:
        import datasets
    except ImportError as error:
        raise FedobpError("a Hugging Face dataset needs its library: pip install 'fedobp[hf]'") from error
    for file in path.rglob("*"):
        if not file.is_dir():
            regular(file)
    with _arrow_errors(path, "a Hugging Face dataset", "save it anew with save_to_disk"):
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
        # A known dataset's labels are its numbers; any other's are called as the dataset calls them.
        classes = getattr(first.features.get(label), "names", None) if name not in REGISTRY else None
        rows = sum(map(len, splits.values()))
        found = _read_arrow(path, first.features.arrow_schema, rows, tables, label, client, progress, classes)
    return found if "train" not in splits else {**found, "n_train": np.array(len(splits["train"]))}


@contextmanager
def _arrow_errors(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Say in a sentence that a file is damaged: that makes pyarrow and Hugging Face's library raise nearly anything."""
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
    """Read Arrow tables; `classes` are the names of labels that are stored as numbers; others, such as -1, are none."""
    from pyarrow import types

    # pandas writes its index as a column of this name: it is no feature.
    names = [name for name in schema.names if not re.fullmatch(r"__index_level_\d+__", name)]
    columns = _Columns(path, names, label, client)
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
    """Return how a type is stored: Hugging Face's arrays are lists by another name."""
    return getattr(arrow_type, "storage_type", arrow_type)


def _holds_images(arrow_type: Any) -> bool:
    from pyarrow import types

    return bool(types.is_struct(arrow_type)) and arrow_type.get_field_index("bytes") >= 0
