"""The columns of a table with labels: the role of each column, and its cells as arrays.

Every column except those of the label and the client is a feature and must hold numbers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.free_memory import memory_guard, require_free_memory
from fedobp.data.images import ImageArray
from fedobp.errors import FedobpError, short, unknown

# Canonical 64-bit integers, also as pandas writes a column with missing values: 7 and 7.0, but not 007.
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})(\.0+)?")
_NUMBER_TYPES = {
    str,
    float,
    int,
    bool,
    Decimal,
    type(None),
}  # the types of cells in columns that NumPy does not store as numbers

Chunk = Mapping[str, Sequence[Any] | NDArray[Any]]


class Columns:
    """The roles of a table's columns: label, client, features."""

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
        """Return a dataset's arrays from chunks of rows; with `images`, the only feature is a column of images."""
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
                require_free_memory(f"{self.where}, of which {row:,} rows are read,", size)  # for the concatenation
            for name, cells in names.items():
                cells.extend(chunk[name])
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
        """Return a feature's cells as float32; a cell that is no finite number is a user error."""
        try:
            with np.errstate(over="ignore"):
                found = np.asarray(_reject_non_numbers(cells), np.float32)
        except (ValueError, TypeError, OverflowError):
            # If Python accepts all cells as numbers and NumPy does not, report the first cell.
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
        """Return labels or clients: integers if all of them are whole numbers, else texts."""
        listed = ["" if cell is None else str(cell).strip() for cell in cells[column]]
        with memory_guard(
            f"the {what}s of {self.where}", 4 * len(listed) * max(map(len, listed))
        ):  # NumPy stores all texts at the width of the longest
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
    """Return names as integers if all of them are whole numbers, so that they sort by value."""
    found, at = np.unique(names, return_inverse=True)
    if not all(_WHOLE.fullmatch(text) for text in found.tolist()):
        return names
    return np.array([int(text.partition(".")[0]) for text in found.tolist()])[at]


def _reject_non_numbers(cells: Sequence[Any] | NDArray[Any]) -> Sequence[Any] | NDArray[Any]:
    """Return a feature's cells; raise ValueError for dates and for texts with an underscore.

    NumPy would accept both as numbers: Python skips underscores, but 1_2 is a name and not 12.
    """
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "biuf":
        return cells
    if not set(map(type, cells)) <= _NUMBER_TYPES or "_" in "".join(map(str, cells)):
        raise ValueError
    return cells


def _is_number(cell: Any) -> bool:
    """Return whether a cell is a number; a missing cell counts as one, because it is reported separately."""
    if cell is None:
        return True
    try:
        float(cell)
    except (ValueError, TypeError):
        return False
    return type(cell) in _NUMBER_TYPES and "_" not in str(cell)
