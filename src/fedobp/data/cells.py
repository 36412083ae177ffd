"""The cells of a table: which are missing, which are numbers, and which are dates."""

import re
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

# Texts that count as missing in a CSV file: pandas' list, and the question mark of the UCI repository. In typed tables
# only an empty text does. NaN counts as missing everywhere, in any case.
CSV_MISSING = frozenset(
    ["", "?", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
     "None", "n/a", "null"]
)  # fmt: skip
TYPED_MISSING = frozenset([""])
_NAN = ("nan", "+nan", "-nan")

# Canonical 64-bit integers, also as pandas writes a column with missing values: 7 and 7.0, but not 007.
WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})(\.0+)?")
_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity)", re.IGNORECASE)
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?", re.ASCII)

_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = re.compile(
    r"[12]\d{3}([-/.])(0?[1-9]|1[0-2])\1(0?[1-9]|[12]\d|3[01])([t ].*)?"  # 2020-01-02 10:30
    r"|(19|20)\d\d[-/](0[1-9]|1[0-2])"  # 2020-01
    r"|\d{8}t\d{4,6}z?"  # 20200102T1030
    r"|\d{1,2}([-/.])\d{1,2}\7(\d{4}|\d\d)([t ,].*)?"  # 2.1.2020, 1/2/20 10:30
    r"|\d{1,2}:\d\d(:\d\d(\.\d+)?)?( ?[ap]m)?"  # 10:30:00
    rf"|(\d{{1,2}}(st|nd|rd|th)?[ -])?{_MONTH}[ -](\d{{1,2}}(st|nd|rd|th)?,? )?(\d{{4}}|\d\d)([t ,].*)?",  # 2 Jan 2020
    re.ASCII | re.IGNORECASE,
)
_NUMBER_TYPES = (int, float, Decimal, np.integer, np.floating, np.bool_)  # bool is an int


def is_missing(cell: Any, texts: frozenset[str]) -> bool:
    """Return whether a cell has no value: a null, NaN, or one of `texts`."""
    if isinstance(cell, str):
        text = cell.strip()
        return text in texts or text.lower() in _NAN
    if isinstance(cell, float | np.floating):
        return bool(cell != cell)
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")  # pandas' NA and NaT; pandas need not be there


def may_be_number(kind: type) -> bool:
    """Return whether cells of a type can be numbers; texts can."""
    return issubclass(kind, (str, type(None), *_NUMBER_TYPES))


def is_number(cell: Any) -> bool:
    """Return whether a cell that is not missing is a number; 1_2 is a name and not 12."""
    return bool(_NUMBER.fullmatch(cell.strip())) if isinstance(cell, str) else isinstance(cell, _NUMBER_TYPES)


def is_date(cell: Any) -> bool:
    """Return whether a cell is a date, a time or a duration."""
    return bool(_DATE.fullmatch(cell.strip())) if isinstance(cell, str) else isinstance(cell, date | time | timedelta)
