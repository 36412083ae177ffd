"""One feature column of a table: its numbers, or its categories, which become one column each (one-hot)."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.cells import (
    DECIMAL_COMMA,
    POINT_THOUSANDS,
    THOUSANDS,
    WHOLE,
    is_date,
    is_missing,
    is_number,
    may_be_number,
)  # fmt: skip
from fedobp.errors import FedobpError, short

# What is known of a column before it is read: nothing, its type, or that the user accepts any number of categories.
UNKNOWN, CATEGORIES, DATES, ANY_CATEGORIES = "unknown", "categories", "dates", "any categories"
MAX_CATEGORIES = 100
_LARGEST = int(np.finfo(np.float32).max)
_FEW_CATEGORIES = 20  # more than these, and more than half of the rows, are ids or free text

Cells = Sequence[Any] | NDArray[Any]


@dataclass(frozen=True)
class Feature:
    """What became of a column: the names of its features, and how its missing cells were filled."""

    column: str
    kind: str  # number or category
    names: tuple[str, ...]
    missing: int  # cells without a value
    median: float | None = None  # what replaces them in a column of numbers

    @property
    def categories(self) -> int:
        """Number of categories; 0 for numbers."""
        return len(self.names) - (self.missing > 0) if self.kind == "category" else 0


@dataclass(frozen=True)
class EncodedColumn:
    """A column's values, or the numbers of its categories in the order of the features."""

    feature: Feature
    values: NDArray[Any]

    def write_to(self, out: NDArray[np.float32]) -> None:
        """Fill an array [rows, features]."""
        if self.feature.kind == "category":
            out[:] = self.values[:, None] == np.arange(out.shape[1])
            return
        out[:, 0] = self.values
        if self.feature.missing:
            out[:, 1] = missing = np.isnan(self.values)
            out[missing, 0] = self.feature.median


class FeatureColumn:
    """The cells of one column, added chunk by chunk; a cell that cannot be an input is a user error.

    All cells that are not missing are numbers, or all are texts: the categories. A column that is known to hold
    categories does, whatever its cells are.
    """

    def __init__(self, where: str, name: str, missing_texts: frozenset[str], known: str, decimal: str) -> None:
        self.name = name
        self._where, self._missing_texts, self._known, self._decimal = where, missing_texts, known, decimal
        self._pieces: list[NDArray[Any]] = []  # numbers with NaN for missing cells, or codes with -1
        self._codes: dict[str, int] = {}
        self._first_number: tuple[int, Any] | None = None  # row and cell
        self._first_text: tuple[int, Any] | None = None

    def add(self, cells: Cells, row: int) -> NDArray[np.bool_]:
        """Add the cells from a row on; return which of them are missing."""
        if self._decimal == "," and self._known == UNKNOWN:
            cells = self._with_points(cells, row)
        values = self._numbers(cells) if self._known == UNKNOWN else None
        piece = self._add_texts(cells, row) if values is None else self._add_numbers(values, cells, row)
        self._pieces.append(piece)
        return _missing(piece)

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Which rows have no value."""
        return np.concatenate([_missing(piece) for piece in self._pieces])

    def encode(self, kept: NDArray[np.bool_]) -> EncodedColumn:
        """Return the column of the kept rows."""
        missing = self.missing[kept]
        if missing.all():
            raise self.no_value()
        if not self._codes:
            return self._encode_numbers(np.concatenate(self._pieces)[kept], missing)
        # A piece of floats has missing cells only: the column's other pieces hold codes.
        pieces = [np.full(len(p), -1, np.int32) if p.dtype == np.float32 else p for p in self._pieces]
        codes, texts = np.concatenate(pieces)[kept], np.array(list(self._codes))
        if self._known == UNKNOWN and {text.lower() for text in self._codes} <= {"true", "false"}:
            truth = np.char.lower(texts) == "true"
            return self._encode_numbers(np.where(missing, np.float32(np.nan), truth[codes].astype(np.float32)), missing)
        return self._encode_categories(codes, texts, missing)

    def no_value(self) -> FedobpError:
        """Return the user error for a column whose cells are all missing."""
        return FedobpError(
            f"{self._where} has no value in column '{short(self.name)}', from row 1 to the last: leave it out with "
            f"{flag('--drop', self.name)}"
        )

    def _encode_numbers(self, values: NDArray[np.float32], missing: NDArray[np.bool_]) -> EncodedColumn:
        count = int(missing.sum())
        if not count:
            return EncodedColumn(Feature(self.name, "number", (self.name,), 0), values)
        names = (self.name, f"{self.name}_missing")
        median = float(np.float32(np.nanmedian(values.astype(np.float64))))
        return EncodedColumn(Feature(self.name, "number", names, count, median), values)

    def _encode_categories(
        self, codes: NDArray[np.int32], texts: NDArray[np.str_], missing: NDArray[np.bool_]
    ) -> EncodedColumn:
        used = np.unique(codes[~missing])
        categories, order = np.unique(numbers_or_texts(texts[used]), return_inverse=True)
        if self._known != ANY_CATEGORIES and len(categories) > max(_FEW_CATEGORIES, len(codes) / 2):
            raise self._too_many(len(categories))
        names, count = [f"{self.name}={category}" for category in categories.tolist()], int(missing.sum())
        if count:
            names.append(f"{self.name}_missing")
        places = np.full(len(texts), -1)
        places[used] = order
        found = np.where(missing, len(categories), places[codes])
        return EncodedColumn(Feature(self.name, "category", tuple(names), count), found)

    def _numbers(self, cells: Cells) -> NDArray[np.float32] | None:
        """Return cells as float32, NaN where they are missing; None if some are no numbers."""
        with np.errstate(over="ignore"):
            if isinstance(cells, np.ndarray) and cells.dtype.kind in "biuf":
                return cells.astype(np.float32)
            if (found := _as_floats(cells)) is not None:
                return found
            return _as_floats([None if is_missing(cell, self._missing_texts) else cell for cell in cells])

    def _add_numbers(self, values: NDArray[np.float32], cells: Cells, row: int) -> NDArray[np.float32]:
        if np.isinf(values).any():
            at = int(np.argmax(np.isinf(values)))
            raise FedobpError(
                f"{self._at(row + at, cells[at])}, which is infinite or too large for float32: correct it, or leave "
                "out the row"
            )
        if self._first_number is None and not np.isnan(values).all():
            at = int(np.argmin(np.isnan(values)))
            self._first_number = row + at, cells[at]
            self._check_not_mixed()
        return values

    def _add_texts(self, cells: Cells, row: int) -> NDArray[np.int32]:
        present = [(at, cell) for at, cell in enumerate(cells, row) if not is_missing(cell, self._missing_texts)]
        if self._known == UNKNOWN:
            text = next(((at, cell) for at, cell in present if not is_number(cell)), None)
            number = next(((at, cell) for at, cell in present if is_number(cell)), None)
            self._first_text, self._first_number = self._first_text or text, self._first_number or number
            if text:
                self._check_text(*text)
            self._check_not_mixed()
        elif present and not self._first_text:
            self._first_text = present[0]
        codes = np.full(len(cells), -1, np.int32)
        for at, cell in present:
            name = str(cell).strip()
            if name not in self._codes:
                self._check_category(at, cell)
                self._codes[name] = len(self._codes)
            codes[at - row] = self._codes[name]
        return codes

    def _check_category(self, row: int, cell: Any) -> None:
        if self._known in (UNKNOWN, DATES):
            self._check_text(row, cell)
        elif not (may_be_number(type(cell)) or is_date(cell)):
            raise FedobpError(f"{self._at(row, cell)}, which is neither a number nor a text: {self._remedy}")
        if self._known != ANY_CATEGORIES and len(self._codes) == MAX_CATEGORIES:
            raise self._too_many(MAX_CATEGORIES + 1)

    def _check_text(self, row: int, cell: Any) -> None:
        """Raise a user error if a cell that is no number cannot be a category."""
        if self._known == DATES or is_date(cell):
            raise FedobpError(
                f"{self._at(row, cell)}, which is no number but a date or a time: turn it into a number, such as the "
                f"days since a fixed day, leave the column out with {flag('--drop', self.name)}, or keep the texts as "
                f"categories with {flag('--categories', self.name)}"
            )
        if not isinstance(cell, str):
            raise FedobpError(f"{self._at(row, cell)}, which is no number: {self._remedy}")
        text = cell.strip()
        if any(pattern.fullmatch(text) for pattern in (DECIMAL_COMMA, THOUSANDS, POINT_THOUSANDS)):
            commas = self._decimal == "," or POINT_THOUSANDS.fullmatch(text)
            remedy = "" if commas else ", or give --decimal , if commas are the decimal points"
            raise FedobpError(f"{self._at(row, cell)}, which is no number: remove separators of thousands{remedy}")

    def _check_not_mixed(self) -> None:
        if self._first_text is None or self._first_number is None:
            return
        row, number = self._first_number
        raise FedobpError(
            f"{self._at(*self._first_text)}, which is no number, and '{short(number)}' in row {row}: correct the "
            f"column, or give {flag('--categories', self.name)} if it holds names, or {flag('--drop', self.name)}"
        )

    def _with_points(self, cells: Cells, row: int) -> Cells:
        """Return texts like 3,5 as 3.5; a number with a decimal point is a user error, because 1.234 may be 1234."""
        for at, cell in enumerate(cells, row):
            if isinstance(cell, str) and "." in cell:
                if is_number(cell):
                    raise FedobpError(
                        f"{self._at(at, cell)}, although commas are the decimal points: write it with a comma, or give "
                        "--decimal . if they are not"
                    )
                if POINT_THOUSANDS.fullmatch(cell.strip()):
                    self._check_text(at, cell)
        return with_points(cells)

    def _too_many(self, count: int) -> FedobpError:
        row, cell = self._first_text or (1, "")
        shown = f"more than {MAX_CATEGORIES}" if count > MAX_CATEGORIES else count
        return FedobpError(
            f"{self._where} has {shown} different texts in column '{short(self.name)}', the first '{short(cell)}' in "
            f"row {row}: leave out ids and free text with {flag('--drop', self.name)}, or give "
            f"{flag('--categories', self.name)} if each is a category"
        )

    def _at(self, row: int, cell: Any) -> str:
        return f"{self._where} has '{short(cell)}' in row {row} of column '{short(self.name)}'"

    @property
    def _remedy(self) -> str:
        return f"turn the column into numbers or texts, or leave it out with {flag('--drop', self.name)}"


def flag(name: str, column: str) -> str:
    """Return a flag with a column, as it is written in a shell."""
    return f"{name} {shlex.quote(short(column))}"


def with_points(cells: Cells) -> list[Any]:
    """Return cells with texts like 3,5 as 3.5."""
    return [
        cell.replace(",", ".") if isinstance(cell, str) and DECIMAL_COMMA.fullmatch(cell.strip()) else cell
        for cell in cells
    ]


def numbers_or_texts(names: NDArray[Any]) -> NDArray[Any]:
    """Return names as integers if all of them are whole numbers, so that they sort by value."""
    found, at = np.unique(names, return_inverse=True)
    if not all(WHOLE.fullmatch(text) for text in found.tolist()):
        return names
    return np.array([int(text.partition(".")[0]) for text in found.tolist()], np.int64)[at]


def _as_floats(cells: Cells) -> NDArray[np.float32] | None:
    """Return cells as float32; None if some are no numbers. NumPy would skip underscores and accept dates."""
    if not all(map(may_be_number, set(map(type, cells)))) or any(
        "_" in cell for cell in cells if isinstance(cell, str)
    ):
        return None
    try:
        return np.asarray(cells, np.float32)
    except OverflowError:  # an integer that no float holds
        return _as_floats([np.inf if isinstance(cell, int) and abs(cell) > _LARGEST else cell for cell in cells])
    except (ValueError, TypeError):
        return None


def _missing(piece: NDArray[Any]) -> NDArray[np.bool_]:
    return np.isnan(piece) if piece.dtype == np.float32 else piece < 0
