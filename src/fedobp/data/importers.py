"""Import of user data: a file or a folder becomes NAME.npz in the data folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.columns import Arrays, TableRules, TableSummary
from fedobp.data.dataset import Dataset, parse
from fedobp.data.datasets import new_dataset_path, store
from fedobp.data.features import numbers_or_texts
from fedobp.data.free_memory import memory_guard
from fedobp.data.images import read_images
from fedobp.data.npz import read_npz
from fedobp.data.tables import read_csv, read_huggingface, read_parquet
from fedobp.errors import FedobpError, first_line, short, unknown
from fedobp.files import regular


def import_dataset(
    name: str,
    source: Path,
    folder: Path,
    *,
    label: str | None = None,
    client: str | None = None,
    missing: str = "refuse",
    drop: str | Sequence[str] = (),
    categories: str | Sequence[str] = (),
    separator: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    progress: Callable[[str, float], None] = lambda what, share: None,
    on_table: Callable[[TableSummary], None] = lambda summary: None,
) -> Dataset:
    """Read data from a file or folder, check it, and store it in the data folder under a name.

    The source is an npz, CSV or Parquet file, a folder of images by class, or a Hugging Face dataset that was saved to
    disk. `label` and `client` name the columns (in an npz, the arrays) with a sample's label and its client; without
    `client`, samples have no natural client.

    Of a table, the columns in `drop` are left out, and those in `categories` are categories although they hold
    numbers. Rows with missing cells are refused; with `missing="drop"` they are left out, and with `missing="impute"`
    the cells are filled and marked. `separator`, `decimal` and `encoding` describe a CSV file; by default its first
    lines tell them.

    `progress` is called with the current step and the share that is done, `on_table` with what became of a table's
    rows and columns.
    """
    new_dataset_path(name, folder)
    texts = {
        "label": label, "client": client, "missing": missing, "separator": separator, "decimal": decimal,
        "encoding": encoding,
    }  # fmt: skip
    for key, value in texts.items():
        if not isinstance(value, str | None):
            raise FedobpError(f"{key} is {short(value)}, which is no text: give a text, such as '{short(value)}'")
    rules = TableRules(label or "label", client, missing, drop, categories, separator, decimal, encoding)
    with memory_guard(f"importing {short(source, 200)}"):
        arrays, summary = _read_all(name, source, label, rules, progress)
        progress("checking and writing", 1.0)
        dataset = store(name, arrays, folder)
    if summary:
        on_table(summary)
    return dataset


def read_own(source: Path, labels: Sequence[str | int], vocabulary: int = 0) -> Dataset | None:
    """Read the data of one client from a file or folder as `import_dataset` does; None if it has no samples.

    Its labels are among those of the federation, some of which may not occur. A table must hold numbers: one client
    does not know the categories of the others.
    """
    with memory_guard(f"reading {short(source, 200)}"):
        arrays, summary = _read_all("data", source, None, TableRules("label"), lambda what, share: None)
        if summary and (texts := [one.column for one in summary.features if one.categories]):
            raise FedobpError(
                f"{short(source, 200)} has texts in the column '{short(texts[0])}', which every node would number its "
                "own way: encode them as numbers on all nodes"
            )
        if any(len(arrays[key]) == 0 for key in ("x", "tokens") if key in arrays and arrays[key].ndim):
            return None
        return parse("data", arrays if not vocabulary else {"vocabulary": np.array(vocabulary), **arrays}, labels)


def _read_all(
    name: str, source: Path, label: str | None, rules: TableRules, progress: Callable[[str, float], None]
) -> tuple[Arrays, TableSummary | None]:
    try:
        return _read(name, source, label, rules, progress)
    except OSError as error:
        raise FedobpError(
            f"{short(source, 200)} cannot be imported ({first_line(error)}): make all of it readable"
        ) from error


def _read(
    name: str, source: Path, label: str | None, rules: TableRules, progress: Callable[[str, float], None]
) -> tuple[Arrays, TableSummary | None]:
    shown = short(source, 200)
    csv_flags = [flag for flag in ("separator", "decimal", "encoding") if getattr(rules, flag) is not None]
    if any((source / file).is_file() for file in ("state.json", "dataset_dict.json")):
        _check_unused(shown, csv_flags, "no CSV file")
        return read_huggingface(name, source, rules, progress)
    if not source.exists():
        raise FedobpError(f"there is no file or folder {shown}: give the path of what to import")
    table_flags = ["missing"] * (rules.missing != "refuse") + ["drop"] * bool(rules.drop)
    table_flags += ["categories"] * bool(rules.categories) + csv_flags
    if source.is_dir():
        if label or rules.client:
            raise FedobpError(
                f"{shown} is a folder of images, which has no columns: leave out --label (the folders' names are the "
                "labels) and --client"
            )
        _check_unused(shown, table_flags, "a folder of images and no table")
        x, classes, n_train = read_images(source, progress)
        found: Arrays = {"x": x, "y": numbers_or_texts(classes)}
        return found if n_train is None else {**found, "n_train": np.array(n_train)}, None
    suffix = regular(source).suffix.lower()
    if suffix == ".npz":
        _check_unused(shown, table_flags, "an npz file and no table")
        return _select_arrays(source, read_npz(source), label, rules.client), None
    if suffix == ".parquet":
        _check_unused(shown, csv_flags, "no CSV file")
        return read_parquet(source, rules, progress)
    if suffix in (".csv", ".tsv", ".txt"):
        return read_csv(source, rules, progress)
    raise FedobpError(
        f"{shown} cannot be imported: give a file that ends in .npz, .csv or .parquet (.tsv and .txt are read as "
        ".csv), a folder of images by class, or the folder of a Hugging Face dataset"
    )


def _check_unused(shown: str, flags: Sequence[str], what: str) -> None:
    if flags:
        raise FedobpError(f"{shown} is {what}: leave out {' and '.join(f'--{flag}' for flag in flags)}")


def _select_arrays(
    source: Path, arrays: dict[str, NDArray[Any]], label: str | None, client: str | None
) -> dict[str, NDArray[Any]]:
    """Return an npz file's arrays, with the arrays that `label` and `client` name stored as `y` and `client`."""
    for key, given in (("y", label), ("client", client)):
        if given is not None:
            if given not in arrays:
                raise unknown(f"array in {short(source, 200)}", given, arrays)
            arrays[key] = arrays[given]
    return arrays
