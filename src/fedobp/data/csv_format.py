"""The format of a CSV file: encoding, separator and decimal point, told by its first lines if not given."""

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from fedobp.data.cells import DECIMAL_COMMA, THOUSANDS, is_number
from fedobp.data.columns import TableRules
from fedobp.errors import FedobpError, short

_HEAD_BYTES, _HEAD_ROWS = 1 << 20, 20  # what is looked at
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_MARK = "\ufeff"  # the byte order mark as a character
_ESCAPE, _ESCAPED = "fedobp.escape", "\udc80"  # what replaces undecodable bytes, of any encoding; no file can hold it
_MARKS = {  # UTF-32's mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


@dataclass(frozen=True)
class CsvFormat:
    """How a CSV file is written."""

    encoding: str
    separator: str
    decimal: str

    @property
    def separators(self) -> str:
        """The separator in words, in the plural."""
        return _SEPARATORS.get(self.separator, f"'{short(self.separator)}'")

    def rows(self, lines: TextIO, *, strict: bool = True) -> Iterator[list[str]]:
        """Return the rows of a file that is open as text; empty lines are skipped.

        The csv module's error becomes one that says in which row the failing record begins, and what to do.
        """
        done = 0
        try:
            for row in filter(None, csv.reader(lines, delimiter=self.separator, skipinitialspace=True, strict=strict)):
                yield row
                done += 1
        except csv.Error as error:
            raise csv.Error(_csv_problem(f"row {done}" if done else "the line of column names", str(error))) from error


def _csv_problem(place: str, reason: str) -> str:
    if "unexpected end" in reason:
        return f"has a quote in {place} that is not closed: close it, or write a quote within a text twice"
    if "expected after" in reason:
        return (
            f"has characters after a closing quote in {place}: put the whole cell into quotes, and write a quote "
            "within it twice"
        )
    if "field larger" in reason:
        return (
            f"has a cell of more than {csv.field_size_limit():,} characters in {place}: close its quote if one is "
            "open, or remove the column"
        )
    return f"cannot be read as a CSV file from {place} on ({reason}): save it again"


def skip_mark(text: TextIO) -> None:
    """Move a file that was just opened behind its byte order mark; not every encoding skips it."""
    if text.read(1) != _MARK:
        text.seek(0)


def csv_format(path: Path, rules: TableRules) -> CsvFormat:
    """Return the format of a CSV file."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        whole = not file.read(1)
    encoding = _encoding(head, rules.encoding)
    try:
        text = head.decode(encoding, errors="replace").removeprefix(_MARK)
    except UnicodeError as error:  # some encodings, such as punycode, cannot replace
        raise undecodable(path, CsvFormat(encoding, ",", ".")) from error
    if "\0" in text:
        raise FedobpError(
            f"{short(path, 200)} has NUL characters in its first lines: give its encoding, such as --encoding utf-16-le"
        )
    if not whole and "\n" in text:
        text = text[: text.rindex("\n") + 1]  # the last line may be cut
    if rules.decimal not in (None, ".", ","):
        raise FedobpError(f"--decimal is '{short(rules.decimal)}': give . or ,")
    separator = _given_separator(rules.separator) if rules.separator is not None else _separator(text, rules.label)
    if rules.decimal is None:
        return CsvFormat(encoding, separator, _decimal(_head_rows(text, separator), separator))
    return CsvFormat(encoding, separator, rules.decimal)


def undecodable(path: Path, found: CsvFormat) -> FedobpError:
    """Return the user error for a file that has bytes which its encoding does not have."""
    place = ""
    with (
        suppress(csv.Error, UnicodeError),
        path.open(encoding=found.encoding, errors=_ESCAPE, newline="") as f,
    ):
        rows = found.rows(f, strict=False)
        names = next(rows, [])
        cells = ((number, name, cell) for number, row in enumerate(rows, 1) for name, cell in zip(names, row))  # noqa: B905
        if any(map(_has_escapes, names)):
            place = " in the line of its column names"
        elif first := next(((number, name) for number, name, cell in cells if _has_escapes(cell)), None):
            place = f" in row {first[0]} of column '{short(first[1].strip())}'"
    shown = "UTF-8" if found.encoding == "utf-8-sig" else short(found.encoding)
    return FedobpError(
        f"{short(path, 200)} cannot be read as a CSV file in {shown} (a character that is not{place}): give its "
        "encoding, such as --encoding latin-1 or --encoding cp1252, or save it again, in UTF-8"
    )


def _has_escapes(text: str) -> bool:
    """Return whether a text holds bytes that could not be decoded."""
    return _ESCAPED in text


def _escape(error: UnicodeError) -> tuple[str, int]:
    if isinstance(error, UnicodeDecodeError):
        return _ESCAPED, error.end
    raise error


codecs.register_error(_ESCAPE, _escape)


def _encoding(head: bytes, given: str | None) -> str:
    if given is None:
        return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8-sig")
    try:
        b"a".decode(given, errors="replace")
        return "utf-8-sig" if codecs.lookup(given).name == "utf-8" else given
    except (LookupError, ValueError) as error:
        raise FedobpError(
            f"--encoding is '{short(given)}', which Python does not know: give a name such as utf-8, latin-1 or cp1252"
        ) from error


def _given_separator(given: str) -> str:
    found = "\t" if given in ("tab", "\\t") else given
    if len(found) != 1 or found in '\r\n"':
        raise FedobpError(f"--separator is '{short(given)}': give one character, such as ; or |, or the word tab")
    return found


def _separator(text: str, label: str) -> str:
    """Return the separator that makes a column of the label's name, else the one that makes the most columns.

    The csv module's Sniffer counts characters, and takes letters for separators.
    """

    def rank(separator: str) -> tuple[bool, int]:
        names = next(iter(_head_rows(text, separator)), [])
        return len(names) > 1 and label in map(str.strip, names), len(names)

    return max(_SEPARATORS, key=rank)  # the first of equals


def _decimal(rows: Sequence[Sequence[str]], separator: str) -> str:
    """Return a comma if no number in the first rows has a decimal point, and one can only have a decimal comma."""
    cells = [cell.strip() for row in rows[1:] for cell in row] if separator != "," else []
    commas = [cell for cell in cells if DECIMAL_COMMA.fullmatch(cell)]
    points = [cell for cell in cells if "." in cell and is_number(cell)]
    return "," if not points and any(not THOUSANDS.fullmatch(cell) for cell in commas) else "."


def _head_rows(text: str, separator: str) -> list[list[str]]:
    rows = CsvFormat("", separator, "").rows(io.StringIO(text, newline=""), strict=False)
    with suppress(csv.Error):  # it is reported when the whole file is read
        return list(islice(rows, _HEAD_ROWS))
    return []
