"""CSV files that fedobp writes, and reads again."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedobp.errors import FedobpError, short
from fedobp.files import regular, write


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows; columns are in the order in which they first occur, and what is None is an empty cell.

    Bytes of a folder's name that are not UTF-8 are written as escapes.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write(path, text.getvalue().encode(errors="backslashreplace"))


def read_rows(path: Path, texts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a file: an empty cell is None; what reads as a number is one, except in columns `texts`."""
    try:
        text = regular(path).read_text(encoding="utf-8")
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        return [{name: _cell(row[name], name in texts) for name in rows.fieldnames or ()} for row in rows]
    except (ValueError, csv.Error) as error:
        raise FedobpError(f"{short(path, 200)} is damaged ({short(error, 120)}): write it again") from error


def _cell(text: str | None, is_text: bool) -> Any:
    if not text or is_text:
        return text or None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
