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
_NUMBER = re.compile(r"[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf|infinity)", re.IGNORECASE)
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?", re.ASCII)
POINT_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?", re.ASCII)  # where commas are the decimal points

# Dates, times and durations as texts. Each number is in its range, so that 25:61 and 2020-13 are names.
_YEAR, _M, _D = r"(?!0000)\d{4}", r"(0?[1-9]|1[0-2])", r"(0?[1-9]|[12]\d|3[01])"
_RECENT = r"(19|20)\d\d"  # beside a month only: 5-1000 is a range
_YEAR_2 = rf"({_YEAR}|\d\d)"
_DAY = rf"{_D}(st|nd|rd|th)?"
_MONTH = (
    r"(jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|nov(ember)?"
    r"|dec(ember)?)\.?"
)
_WEEKDAY = r"((mon|tue(s)?|wed(nes)?|thu(rs)?|fri|sat(ur)?|sun)(day)?\.?,? +)?"
_TIME = r"([01]?\d|2[0-3]):[0-5]\d(:([0-5]\d|60)([.,]\d+)?)?( ?[ap]m)?( ?(z|utc|gmt|[+-]\d\d(:?\d\d)?))?"
_REST = r"([t ,].*)?"  # a time in any form
_NUMERIC = [
    form.replace("~", mark)
    for mark in ("-", "/", r"\.")
    for form in (rf"{_YEAR}~{_M}~{_D}{_REST}", rf"({_D}~{_M}|{_M}~{_D})~{_YEAR_2}{_REST}")
]
_DATE = re.compile(
    "|".join([
        *_NUMERIC,  # 2020-01-02 10:30, 2.1.2020, 1/2/20
        rf"{_RECENT}[-/]{_M}|{_M}[-/]{_RECENT}",  # 2020-01, 01/2020
        rf"{_RECENT}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])t\d{{4,6}}z?",  # 20200102T1030
        rf"{_RECENT}[- ]?q[1-4]|q[1-4][-/ ]?{_RECENT}",  # 2020Q1, Q1 2020
        rf"{_RECENT}-?w(0[1-9]|[1-4]\d|5[0-3])(-?[1-7])?",  # 2020-W05
        rf"{_WEEKDAY}{_DAY}[-/. ]*{_MONTH}[-/, ]*{_YEAR_2}{_REST}",  # 2 Jan 2020, 02Jan2020, Thu, 02 Jan 2020 10:00 GMT
        rf"{_WEEKDAY}{_MONTH}[-/ ]+{_DAY}[-/, ]+({_TIME} )?{_YEAR_2}{_REST}",  # Jan 2, 2020
        rf"{_YEAR}[-/. ]?{_MONTH}[-/. ]?{_DAY}{_REST}",  # 2020-Jan-02
        rf"{_MONTH}([-/ ]{_YEAR_2}|{_YEAR})|{_YEAR}[-/ ]?{_MONTH}",  # January 2020, Jan-20, 2020-Jan
        _TIME,  # 10:30:00Z
        rf"[+-]?\d+ days?([ ,]+[+-]?{_TIME})?",  # 0 days 10:30:00
    ]),
    re.ASCII | re.IGNORECASE,
)  # fmt: skip
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
