"""Import of tables and arrays, and its user errors."""

import csv
import datetime
import decimal
import tomllib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from importer_cases import arrow, imported, refused
from pyarrow import parquet

from fedobp.data import import_dataset, tables
from fedobp.errors import FedobpError

# CSV.

WARDS = "age, sugar ,outcome,ward\n40,1.5,ill,B\n50,-2e1,well,A\n\n60,0,ill,B\n"


def test_a_csv_table_becomes_float32_features_with_names_for_labels_and_clients(folder, source):
    found = imported("mine", source(WARDS), folder, label="outcome", client="ward")
    assert found.x.dtype == np.float32
    assert found.x.tolist() == [[40, 1.5], [50, -20], [60, 0]]
    assert (found.y.tolist(), found.labels) == ([0, 1, 0], ("ill", "well"))
    assert (found.clients.tolist(), found.client_names) == ([1, 0, 1], ("A", "B"))
    assert found.n_train == 0
    assert found.info.clients == 2


def test_the_default_label_column_is_label(folder, source):
    found = imported("mine", source("label,a\n0,1\n1,2\n"), folder)
    assert (found.x.tolist(), found.y.tolist(), found.clients) == ([[1], [2]], [0, 1], None)


def test_a_byte_order_mark_and_quotes_are_parsed(folder, source):
    found = imported("mine", source('label,a\n"yes, or so",1\n"no ""really""",2\n', "utf-8-sig"), folder)
    assert found.labels == ('no "really"', "yes, or so")


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (["10", "9", "-1"], (-1, 9, 10)),
        (["1.0", "2.0", "1.0"], (1, 2)),
        (["007", "7", "8"], ("007", "7", "8")),
        (["1", "b", "10"], ("1", "10", "b")),
        (["9" * 25, "1", "2"], ("1", "2", "9" * 25)),
        (["True", "False", "True"], ("False", "True")),
    ],
    ids=["whole numbers", "whole numbers as floats", "leading zeros", "mixed", "too long for 64 bits", "truth"],
)
def test_labels_are_numbers_where_all_of_them_are_whole_numbers(folder, source, texts, labels):
    found = imported("mine", source("label,a\n" + "".join(f"{text},0\n" for text in texts)), folder)
    assert found.labels == labels
    assert [str(found.labels[at]) for at in found.y] == [text.removesuffix(".0") for text in texts]


def test_clients_that_are_numbers_are_in_the_order_of_numbers(folder, source):
    found = imported("mine", source("label,a,who\n0,1,10\n1,2,9\n0,3,10\n"), folder, client="who")
    assert (found.clients.tolist(), found.client_names) == ([1, 0, 1], ("9", "10"))


def test_rows_beyond_the_first_part_are_read_and_counted(folder, source, monkeypatch):
    monkeypatch.setattr(tables, "_CHUNK_ROWS", 3)
    rows = [f"{row % 2},{row}\n" for row in range(10)]
    assert imported("mine", source("label,a\n" + "".join(rows)), folder).x[:, 0].tolist() == list(range(10))
    rows[7] = "1,many\n"
    with pytest.raises(FedobpError, match="has 'many' in row 8 of column 'a'"):
        import_dataset("other", source("label,a\n" + "".join(rows)), folder)
    rows[7] = "1\n"
    with pytest.raises(FedobpError, match="has 1 cells in row 8 and 2 columns"):
        import_dataset("other", source("label,a\n" + "".join(rows)), folder)


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=8)
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(NAMES, NUMBERS, NUMBERS), min_size=2, max_size=8))
def test_any_names_and_numbers_are_preserved(tmp_path, rows):
    names = ["x" + name for name, *_ in rows]  # no name is a number
    assume(len(set(names)) > 1)
    with (tmp_path / "any.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("label", "a", "b"), *((f"x{name}", *numbers) for name, *numbers in rows)])
    (tmp_path / "data/mine.npz").unlink(missing_ok=True)
    found = imported("mine", tmp_path / "any.csv", tmp_path / "data")
    assert [found.labels[at] for at in found.y] == names
    np.testing.assert_array_equal(found.x, np.array([row[1:] for row in rows], np.float32))


BAD_TABLES = {
    "no such label": ("Outcome,a\n1,2\n", r"unknown column for --label in .*table.csv 'label': choose from Outcome, a"),
    "a near miss": ("Lable,a\n1,2\n", "did you mean 'Lable'"),
    "no rows": ("label,a\n", "table.csv has no rows"),
    "an empty file": ("", "table.csv is empty: there is nothing to import"),
    "empty lines": ("\n\n", "table.csv is empty"),
    "no features": ("label\n1\n0\n", "no columns besides label: there are no inputs"),
    "a column twice": ("label,a,a\n0,1,2\n", "two columns called 'a'"),
    "pandas' index": (",label,a\n0,1,2\n", r"no name for column 1: .*index=False"),
    "a text among numbers": ("label,a\n0,1\n1,red\n", "has 'red' in row 2 of column 'a', which is no number"),
    "an empty cell": ("label,a\n0,1\n1,\n", "has a missing value in row 2 of column 'a': fill it in"),
    "an underscore": ("label,a\n0,1_2\n1,1\n", "has '1_2' in row 1 of column 'a', which is no number"),
    "NaN": ("label,a\n0,1\n1,NaN\n", r"has a missing value \('NaN'\) in row 2 of column 'a'"),
    "infinite": ("label,a\n0,-inf\n1,1\n", "has '-inf' in row 1 of column 'a', which is infinite or too large"),
    "too large for float32": ("label,a\n0,1e39\n1,1\n", "has '1e39' in row 1 of column 'a', which is infinite or"),
    "no label in a row": ("label,a\n0,1\n ,1\n", "has no label in row 2 of column 'label': fill it in, or remove"),
    "a NaN for a label": ("label,a\n0,1\nnan,1\n", "has no label in row 2"),
    "a regression": ("label,a\n0.5,1\n2,1\n", "fractions in the label column 'label', such as 0.5: labels must be"),
    "one class": ("label,a\nyes,1\nyes,2\n", "'mine' has only the label yes: there is nothing to learn"),
    "too many cells": ("label,a\n0,1,2\n", "has 3 cells in row 1 and 2 columns: put texts with commas into quotes"),
    "an open quote": ('label,a\n0,"1\n', "has a quote in row 1 that is not closed"),
}


@pytest.mark.parametrize(("text", "sentence"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_bad_table_is_refused_with_its_row_and_column(folder, source, text, sentence):
    refused(sentence, source(text), folder)


def test_empty_lines_are_skipped_before_the_names_too(folder, source):
    assert imported("mine", source("\n\nlabel,a\n0,1\n\n1,2\n"), folder).x.tolist() == [[1], [2]]


def test_text_that_is_not_utf8_is_refused(folder, source):
    refused("cannot be read as a CSV file .* in UTF-8", source("label,a\nä,1\nö,2\n", "latin-1"), folder)


def test_a_missing_client_is_refused(folder, source):
    refused("has no client in row 2 of column 'who'", source("label,a,who\n0,1,A\n1,2,\n"), folder, client="who")
    refused("unknown column for --client", source("label,a\n0,1\n"), folder, client="who")
    refused("are both 'label'", source("label,a\n0,1\n"), folder, client="label")


def test_a_client_may_be_called_by_a_fraction(folder, source):
    assert imported("mine", source("label,a,who\n0,1,0.5\n1,2,7\n"), folder, client="who").client_names == ("0.5", "7")


# Parquet.


def test_a_parquet_table_is_the_same_as_the_csv(folder, tmp_path, source):
    columns = {"age": [40, 50, 60], "sugar": [1.5, -20.0, 0.0], "outcome": ["ill", "well", "ill"], "ward": [9, 10, 9]}
    found = imported("mine", arrow(tmp_path / "t.parquet", **columns), folder, label="outcome", client="ward")
    text = "\n".join([",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))])
    other = imported("other", source(text), folder, label="outcome", client="ward")
    assert found.x.dtype == other.x.dtype
    assert found.x.tolist() == other.x.tolist() == [[40, 1.5], [50, -20], [60, 0]]
    assert found.labels == other.labels == ("ill", "well")
    assert found.y.tolist() == other.y.tolist() == [0, 1, 0]
    assert found.clients.tolist() == other.clients.tolist() == [0, 1, 0]
    assert found.client_names == other.client_names == ("9", "10")


def test_every_number_type_is_accepted(folder, tmp_path):
    columns = {
        "bytes": pyarrow.array([1, 2], pyarrow.uint8()),
        "truth": [True, False],
        "decimal": [decimal.Decimal("0.25"), decimal.Decimal(3)],
        "text": ["1.5", "2"],
        "__index_level_0__": [17, 4],  # pandas' index
        "label": pyarrow.array(["b", "a"]).dictionary_encode(),
    }
    found = imported("mine", arrow(tmp_path / "t.parquet", **columns), folder)
    assert found.x.tolist() == [[1, 1, 0.25, 1.5], [2, 0, 3, 2]]
    assert [found.labels[at] for at in found.y] == ["b", "a"]


DATE = datetime.datetime(2020, 1, 2)
BAD_COLUMNS = {
    "a missing number": ([1, None], "has a missing value in row 2 of column 'a'"),
    "a missing truth": ([True, None], "has a missing value in row 2 of column 'a'"),
    "NaN": ([1.0, float("nan")], "has a missing value in row 2 of column 'a'"),
    "infinite": ([1.0, float("inf")], "has 'inf' in row 2 of column 'a', which is infinite"),
    "text": (["1", "red"], "has 'red' in row 2 of column 'a', which is no number"),
    "an underscore": (["1", "1_2"], "has '1_2' in row 2 of column 'a', which is no number"),
    "dates": ([None, DATE], "has '2020-01-02.* in row 2 of column 'a', which is no number but a date or a time"),
    "days": ([DATE.date(), DATE.date()], "has '2020-01-02' in row 1 of column 'a', which is no number but a date"),
    "times": ([DATE.time(), DATE.time()], "has '00:00:00.000000' in row 1 of column 'a', which is no number but"),
    "durations": ([DATE - DATE, None], "has '0:00:00' in row 1 of column 'a', which is no number but a date or a time"),
    "nanoseconds": (pyarrow.array([1, 2], pyarrow.timestamp("ns", "UTC")), "in row 1 of column 'a', .* but a date"),
    "lists": ([[1, 2], [3, 4]], "lists in column 'a': give each number a column, or import an npz"),
    "bytes": ([b"1", b"2"], "in row 1 of column 'a', which is no number"),
}


@pytest.mark.parametrize(("cells", "sentence"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_a_bad_parquet_column_is_refused(folder, tmp_path, cells, sentence):
    refused(sentence, arrow(tmp_path / "t.parquet", a=cells, label=[0, 1]), folder)


@pytest.mark.parametrize(
    ("cells", "sentence"),
    [
        (["a", None], "no label in row 2"),
        ([1.0, None], "no label in row 2"),
        ([[1], [2]], "lists in column 'label'"),
        ([0.5, 1.0], "such as 0.5: labels must be whole numbers or names"),
    ],
)
def test_bad_parquet_labels_are_refused(folder, tmp_path, cells, sentence):
    refused(sentence, arrow(tmp_path / "t.parquet", a=[1, 2], label=cells), folder)


def test_a_parquet_column_twice_is_refused(folder, tmp_path):
    for names in (["a", "a", "label"], ["a", "label", "label"]):
        parquet.write_table(pyarrow.table([[1, 2], [3, 4], [5, 6]], names=names), tmp_path / "t.parquet")
        refused(f"two columns called '{names[1]}': rename one", tmp_path / "t.parquet", folder)


def test_whole_floats_are_labels(folder, tmp_path):
    assert imported("mine", arrow(tmp_path / "t.parquet", a=[1, 2], label=[3.0, 1.0]), folder).labels == (1, 3)


@pytest.mark.parametrize("content", [b"", b"PAR1 and then something else PAR1"])
def test_a_damaged_parquet_file_is_refused(folder, tmp_path, content):
    (tmp_path / "t.parquet").write_bytes(content)
    refused(r"t.parquet cannot be read as a Parquet file \(.*\): save it again", tmp_path / "t.parquet", folder)


# npz.


def test_arrays_of_an_npz_can_be_named(folder, tmp_path):
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    names = {"kind": np.array(["b", "a", "b", "a"]), "user": np.array([[10], [9], [9], [10]])}
    np.savez(tmp_path / "mine.npz", x=x, **names)
    found = imported("mine", tmp_path / "mine.npz", folder, label="kind", client="user")
    assert (found.y.tolist(), found.labels) == ([1, 0, 1, 0], ("a", "b"))
    assert (found.clients.tolist(), found.client_names) == ([1, 0, 0, 1], ("9", "10"))
    with np.load(folder / "mine.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["client", "n_train", "x", "y"]
        assert arrays["y"].tolist() == ["b", "a", "b", "a"]
    with pytest.raises(FedobpError, match=r"unknown array in .*mine.npz 'users': did you mean 'user'"):
        import_dataset("other", tmp_path / "mine.npz", folder, client="users")


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (np.arange(3), r"client of shape \(3,\) and 4 samples"),
        (np.arange(8).reshape(4, 2), r"client of shape \(4, 2\)"),
        (np.arange(4) / 2, "clients of type float64: client must hold integers or texts"),
        (np.array(["a", "b", " ", "c"]), "samples without a name in client"),
    ],
)
def test_bad_clients_of_an_npz_are_refused(folder, tmp_path, client, sentence):
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 2), np.float32), y=np.arange(4) % 2, client=client)
    refused(sentence, tmp_path / "mine.npz", folder)


def test_registered_datasets_have_no_label_names(folder, tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((2, 28, 28), np.uint8), y=np.array(["boot", "shirt"]))
    with pytest.raises(FedobpError, match="has labels from boot to shirt, and fmnist has 0 to 9: import it under"):
        import_dataset("fmnist", tmp_path / "mine.npz", folder)


# Sources and progress.


@pytest.mark.parametrize("name", ["table.xlsx", "table"])
def test_other_sources_are_refused(folder, tmp_path, name):
    (tmp_path / name).touch()
    refused(rf"{name} cannot be imported: give a file that ends in .npz, .csv or .parquet", tmp_path / name, folder)


@pytest.mark.parametrize("name", ["absent.csv", "absent.parquet", "absent.npz", "absent"])
def test_a_source_that_is_not_there_is_refused(folder, tmp_path, name):
    refused(f"there is no file or folder .*{name}: give the path", tmp_path / name, folder)


RULES = ["label", "client", "missing", "separator", "decimal", "encoding", "drop", "categories"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [0, 2, 1.5])
def test_arguments_that_are_no_texts_are_refused(folder, source, rule, value):
    refused(f"^{rule} is {value}.*: give", source("label,a\n0,1\n1,2\n"), folder, **{rule: value})


def test_a_name_that_is_taken_is_refused_before_anything_is_read(folder, tmp_path, source):
    import_dataset("mine", source("label,a\n0,1\n1,2\n"), folder)
    before = (folder / "mine.npz").read_bytes()
    with pytest.raises(FedobpError, match="'mine' exists already"):
        import_dataset("mine", tmp_path / "absent.csv", folder)
    assert (folder / "mine.npz").read_bytes() == before


def test_progress_grows_to_one(folder, source, monkeypatch):
    monkeypatch.setattr(tables, "_CHUNK_ROWS", 100)
    calls = []
    text = "label,a\n" + "".join(f"{row % 2},{row}\n" for row in range(3000))
    import_dataset("mine", source(text), folder, progress=lambda what, share: calls.append((what, share)))
    shares = [share for _, share in calls]
    assert shares == sorted(shares)
    assert (calls[0][0], calls[-1]) == ("reading table.csv", ("checking and writing", 1.0))
    assert len(set(shares)) > 2


# On the command line.


def test_a_table_with_wards_is_imported_shown_and_trained(command):
    draw = np.random.RandomState(0)
    rows = [f"{draw.randn():.3f},{draw.randn():.3f},{('ill', 'well')[row % 2]},ward {row % 4}" for row in range(200)]
    Path("wards.csv").write_text("\n".join(["age,sugar,outcome,ward", *rows]))
    said = command("data", "import", "wards", "wards.csv", "--label", "outcome", "--client", "ward")
    assert said.code == 0
    assert "Next: fedobp run --dataset wards --partition natural" in said.out
    row = {"name": "wards", "samples": 200, "shape": [2], "classes": 2, "available": True, "clients": 4}
    assert command("data", "show", "wards", "--json").json == row
    shown = command("partition", "--dataset", "wards", "--clients", 3, "--json").json["clients"]
    assert set().union(*(client["labels"] for client in shown)) == {"ill", "well"}
    said = command("run", "--dataset", "wards", "--clients", 3, "--rounds", 1, "--epochs", 1, "--out", "here")
    assert said.code == 0
    config = tomllib.loads(Path("here/config.toml").read_text())
    assert (config["model"], config["normalize"]) == ("mlp", "train")


def test_a_wrong_column_is_one_sentence(command):
    Path("wards.csv").write_text("a,outcome\n1,ill\n2,well\n")
    said = command("data", "import", "wards", "wards.csv", "--label", "outcom")
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        "error: unknown column for --label in wards.csv 'outcom': did you mean 'outcome'? choose from a, outcome\n"
    )
