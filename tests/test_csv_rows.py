"""CSV files: what is written is read back, and damaged files are refused in a sentence."""

from pathlib import Path

import pytest

from fedobp import FedobpError
from fedobp.csv_rows import read_rows, write_rows


def test_values_come_back(tmp_path: Path):
    rows = [
        {"run": 'a, "b"\nc', "seed": 42, "pooled": 87.25, "mode": None},
        {"run": "12e4", "seed": 43, "pooled": 1e-9, "mode": "faithful", "late": 7},
    ]
    write_rows(tmp_path / "rows.csv", rows)
    found = read_rows(tmp_path / "rows.csv", ["run"])
    assert found == [{**rows[0], "late": None}, rows[1]]
    assert isinstance(found[0]["seed"], int)


def test_columns_are_in_the_order_of_their_first_row(tmp_path: Path):
    write_rows(tmp_path / "rows.csv", [{"b": 1}, {"a": 2, "b": 3}])
    assert (tmp_path / "rows.csv").read_text() == "b,a\n1,\n3,2\n"


def test_a_name_that_is_not_utf_8_is_written_with_an_escape(tmp_path: Path):
    write_rows(tmp_path / "rows.csv", [{"run": "a\udcff"}])
    assert read_rows(tmp_path / "rows.csv") == [{"run": r"a\udcff"}]


@pytest.mark.parametrize("content", [b"a,b\n\xff,2\n", b'a,b\n"1,2\n'])
def test_a_damaged_file_is_a_user_error(tmp_path: Path, content: bytes):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(FedobpError, match=r"rows\.csv is damaged .*: write it again"):
        read_rows(tmp_path / "rows.csv")
