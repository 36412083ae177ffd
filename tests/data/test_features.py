"""Categories and missing values in tables, from each kind of source."""

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importer_cases import arrow, imported, refused

from fedobp.data import import_dataset, tables
from fedobp.errors import FedobpError

datasets.disable_progress_bars()


@pytest.fixture
def summaries(folder, source):
    """A function that imports a CSV table and returns its inputs, and what became of its columns."""

    def read(text, **rules):
        found = []
        dataset = import_dataset("mine", source(text), folder, on_table=found.append, **rules)
        [summary] = found
        return dataset, summary

    return read


def names(summary):
    return [name for feature in summary.features for name in feature.names]


# Categories.


def test_each_category_is_a_column_in_alphabetical_order(summaries):
    found, summary = summaries("a,colour,label,sex\n1, red,0,m\n2,blue,1,f\n3,red,0,f\n")
    assert names(summary) == ["a", "colour=blue", "colour=red", "sex=f", "sex=m"]
    assert found.x.dtype == np.float32
    assert found.x.tolist() == [[1, 0, 1, 0, 1], [2, 1, 0, 1, 0], [3, 0, 1, 1, 0]]
    assert [(f.column, f.kind, f.missing, f.median) for f in summary.features] == [
        ("a", "number", 0, None), ("colour", "category", 0, None), ("sex", "category", 0, None),
    ]  # fmt: skip
    assert (summary.rows, summary.dropped_rows, summary.dropped_columns) == (3, 0, ())


@pytest.mark.parametrize("texts", [("True", "False"), ("true", "FALSE")])
def test_true_and_false_are_numbers_as_in_typed_tables(folder, tmp_path, source, texts):
    found = imported("mine", source("label,a\n" + "".join(f"{at},{text}\n" for at, text in enumerate(texts))), folder)
    other = imported("other", arrow(tmp_path / "t.parquet", a=[True, False], label=[0, 1]), folder)
    assert found.x.tolist() == other.x.tolist() == [[1], [0]]


def test_true_and_false_are_categories_where_the_user_says_so(summaries):
    found, summary = summaries("label,a\n0,True\n1,False\n", categories="a")
    assert (names(summary), found.x.tolist()) == (["a=False", "a=True"], [[0, 1], [1, 0]])


def test_yes_and_no_are_categories(summaries):
    found, summary = summaries("label,a\n0,yes\n1,no\n")
    assert (names(summary), found.x.tolist()) == (["a=no", "a=yes"], [[0, 1], [1, 0]])


def test_numbers_are_categories_where_the_user_says_so(summaries):
    found, summary = summaries("label,zip,ward,a\n0,01,10,5\n1,02,9,6\n0,01,9.0,7\n", categories="zip,ward")
    assert names(summary) == ["zip=01", "zip=02", "ward=9", "ward=10", "a"]
    assert found.x.tolist() == [[1, 0, 0, 1, 5], [0, 1, 1, 0, 6], [1, 0, 1, 0, 7]]


def test_types_for_categories_are_categories(folder, tmp_path):
    codes = pyarrow.array(["10", "9", "10", None]).dictionary_encode()
    found = imported("mine", arrow(tmp_path / "t.parquet", a=codes, label=[0, 1, 0, 1]), folder, missing="drop")
    assert found.x.tolist() == [[0, 1], [1, 0], [0, 1]]
    features = datasets.Features(
        {"a": datasets.ClassLabel(names=["10", "9", "unused"]), "label": datasets.Value("int64")}
    )
    saved = datasets.Dataset.from_dict({"a": [0, 1, 0], "label": [0, 1, 0]}, features=features)
    saved.save_to_disk(tmp_path / "saved")
    assert imported("other", tmp_path / "saved", folder).x.tolist() == [[0, 1], [1, 0], [0, 1]]


@pytest.mark.parametrize("chunk", [2, 4096])
@pytest.mark.parametrize(
    ("cells", "sentence"),
    [
        (["1", "2", "3", "red"], "has 'red' in row 4 of column 'a', which is no number, and '1' in row 1: correct"),
        (["red", "", "blue", "7"], "has 'red' in row 1 of column 'a', which is no number, and '7' in row 4"),
        (["True", "False", "", "1"], "has 'True' in row 1 of column 'a', which is no number, and '1' in row 4"),
        (["1", "3", "2", "2020-01-02"], "has '2020-01-02' in row 4 of column 'a', which is no number but a date"),
        (["red", "red", "red", "2/1/20"], "has '2/1/20' in row 4 of column 'a', which is no number but a date"),
        (["red", "red", "red", "1,5"], "has '1,5' in row 4 of column 'a', which is no number: .* give --decimal ,"),
        (["1", "2", "3", "1,500.5"], "has '1,500.5' in row 4 of column 'a', which is no number: remove separators"),
    ],
)
def test_a_column_is_all_numbers_or_all_names(folder, source, monkeypatch, chunk, cells, sentence):
    monkeypatch.setattr(tables, "_CHUNK_ROWS", chunk)
    text = "label,a\n" + "".join(f'{at % 2},"{cell}"\n' for at, cell in enumerate(cells))
    refused(sentence, source(text), folder, missing="impute")
    assert imported("mine", source(text), folder, missing="impute", categories=["a"]).x.sum() == 4


def unique(count, rows):
    return "label,name\n" + "".join(f"{row % 2},p{row % count:03}\n" for row in range(rows))


def test_ids_and_free_text_are_refused(folder, source):
    assert imported("hundred", source(unique(100, 200)), folder).x.shape == (200, 100)
    assert imported("few", source(unique(20, 20)), folder).x.shape == (20, 20)
    assert imported("half", source(unique(21, 42)), folder).x.shape == (42, 21)
    for count, rows, shown in ((101, 5000, "more than 100"), (21, 41, "21")):
        text = source("label,name\n0,NA\n" + unique(count, rows).partition("\n")[2])
        with pytest.raises(
            FedobpError,
            match=f"has {shown} different texts in column 'name', the first 'p000' in row 2: leave out ids and free "
            "text with --drop name, or give --categories name",
        ):
            import_dataset("mine", text, folder, missing="drop")
    assert imported("mine", source(unique(101, 150)), folder, categories=["name"]).x.shape == (150, 101)


def test_a_type_for_categories_does_not_lift_the_limit(folder, tmp_path):
    ids = pyarrow.array([str(row % 101) for row in range(500)]).dictionary_encode()
    path = arrow(tmp_path / "t.parquet", a=ids, label=[row % 2 for row in range(500)])
    refused("more than 100 different texts in column 'a', the first '0' in row 1", path, folder)


def test_cells_that_are_neither_numbers_nor_texts_are_no_categories(folder, tmp_path):
    path = arrow(tmp_path / "t.parquet", a=[b"1", b"2"], label=[0, 1])
    refused("row 1 of column 'a', which is neither a number nor a text", path, folder, categories="a")


# Missing values.

GAPS = "age,label,sex,ward\n30,0,m,A\n,1,f,A\n50,0,NA,B\n10,1,m,B\n"


def test_missing_values_are_imputed_and_marked(summaries):
    found, summary = summaries(GAPS, client="ward", missing="impute")
    assert names(summary) == ["age", "age_missing", "sex=f", "sex=m", "sex_missing"]
    assert found.x.tolist() == [[30, 0, 0, 1, 0], [30, 1, 1, 0, 0], [50, 0, 0, 0, 1], [10, 0, 0, 1, 0]]
    assert [(f.missing, f.median) for f in summary.features] == [(1, 30), (1, None)]
    assert str(summary).splitlines() == [
        "Inputs: 5 features from 2 columns, 1 of numbers and 1 of categories (sex: 2).",
        "Missing values, imputed and marked by a feature NAME_missing: age: 1, sex: 1.",
    ]


def test_rows_with_missing_values_are_dropped(summaries):
    found, summary = summaries(GAPS, client="ward", missing="drop")
    assert (names(summary), found.x.tolist()) == (["age", "sex=m"], [[30, 1], [10, 1]])
    assert (found.y.tolist(), found.client_names) == ([0, 1], ("A", "B"))
    assert str(summary).splitlines() == [
        "Inputs: 2 features from 2 columns, 1 of numbers and 1 of categories (sex: 1).",
        "Left out: 2 of 4 rows, which have missing values.",
    ]


def test_missing_labels_and_clients_are_dropped_but_never_imputed(folder, source):
    text = "a,label,ward\n1,x,A\n2,?,A\n3,y,\n4,y,B\n"
    for missing in ("refuse", "impute"):
        rules = {"client": "ward", "missing": missing}
        refused(r"has no label in row 2 of column 'label' \('\?'\)", source(text), folder, **rules)
        refused("has no client in row 3 of", source(text.replace("?", "x")), folder, **rules)
    found = imported("mine", source(text), folder, client="ward", missing="drop")
    assert (found.x.tolist(), found.labels, found.client_names) == ([[1], [4]], ("x", "y"), ("A", "B"))


@pytest.mark.parametrize(
    "text", ["", " ", "NA", "N/A", "n/a", "null", "NULL", "None", "NaN", "nan", "?", "<NA>", "#N/A"]
)
@pytest.mark.parametrize("others", ["12", "xy"])
def test_what_counts_as_missing_in_a_csv_file(folder, source, text, others):
    path = source(f"label,a,b\n0,{others[0]},1\n1,{text},1\n1,{others[1]},1\n")
    refused("has a missing value.* in row 2 of column 'a': fill it in, choose --missing drop", path, folder)
    assert len(imported("mine", path, folder, missing="drop").y) == 2


def test_none_is_a_name_in_a_typed_table(folder, tmp_path):
    path = arrow(tmp_path / "t.parquet", a=["None", "NA", "?"], label=["None", "some", "None"])
    found = imported("mine", path, folder)
    assert (found.x.shape, found.labels) == ((3, 3), ("None", "some"))


def test_columns_and_tables_without_values_are_refused(folder, source):
    text = source("label,a,b\n0,,1\n1,,\n")
    for rules in ({}, {"categories": "a"}):
        refused("has no value in column 'a', .*: leave it out with --drop a", text, folder, missing="impute", **rules)
    refused("has no value in column 'a', .*: leave it out with --drop a", text, folder, missing="drop")
    refused("in row 1 of column 'a': .* or leave the column out with --drop a", text, folder)
    assert imported("mine", text, folder, missing="impute", drop=["a"]).x.tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("0,,1,A 1,2,,A", "a missing value in every row, .*--drop, or choose --missing impute$"),
        ("0,,1,A ,2,3,A", "a missing value in every row, .*: fill some in, or leave out columns with --drop$"),
        ("0,,1,A 1,2,3,", "a missing value in every row, .*: fill some in, or leave out columns with --drop$"),
        (",1,1,A ,2,3,A", "has no label in column 'label', from row 1 to the last: name another column with --label"),
        ("0,1,1, 1,2,3,", "has no client in column 'ward', from row 1 to the last: name another .* with --client"),
    ],
)
def test_a_table_without_complete_rows_names_what_helps(folder, source, rows, sentence):
    text = "label,a,b,ward\n" + rows.replace(" ", "\n") + "\n"
    refused(sentence, source(text), folder, client="ward", missing="drop")


@pytest.mark.parametrize(
    ("text", "name"), [("label,a,a_missing\n0,,1\n1,2,0\n", "a_missing"), ("label,a=x,a\n0,1,x\n1,2,y\n", "a=x")]
)
def test_two_features_of_one_name_are_refused(folder, source, text, name):
    sentence = rf"makes two features called '{name}', from columns '.*' and '.*': rename one of these columns"
    refused(sentence, source(text), folder, missing="impute")


def test_chunks_of_missing_cells_fit_numbers_and_names(folder, source, monkeypatch):
    monkeypatch.setattr(tables, "_CHUNK_ROWS", 2)
    text = "label,a,b\n0,,\n1,,\n0,1,x\n1,3,y\n"
    found = imported("mine", source(text), folder, missing="impute")
    assert found.x.tolist() == [[2, 1, 0, 0, 1], [2, 1, 0, 0, 1], [1, 0, 1, 0, 0], [3, 0, 0, 1, 0]]


@settings(max_examples=50, derandomize=True)
@given(
    values=st.lists(st.none() | st.integers(-9, 9), min_size=1, max_size=9),
    colours=st.lists(st.none() | st.sampled_from("rgb"), min_size=9, max_size=9),
    chunk=st.integers(1, 9),
)
def test_any_gaps_in_any_chunks(tmp_path_factory, values, colours, chunk):
    """The policies against definitions: pandas' one-hot columns, and NumPy's median."""
    if not any(v is not None for v in values) or not any(colours[: len(values)]):
        return
    folder = tmp_path_factory.mktemp("any")
    rows = [(value, colour) for value, colour in zip(values, colours, strict=False)]
    cells = [("" if value is None else value, colour or "NA", at % 2) for at, (value, colour) in enumerate(rows)]
    cells += [(0, "r", 0), (0, "r", 1)]
    (folder / "t.csv").write_text("a,b,label\n" + "".join(f"{a},{b},{label}\n" for a, b, label in cells))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_CHUNK_ROWS", chunk)
        imputed = imported("imputed", folder / "t.csv", folder, missing="impute").x
        dropped = imported("dropped", folder / "t.csv", folder, missing="drop").x
    rows += [(0, "r"), (0, "r")]
    median = np.median([value for value, _ in rows if value is not None])
    columns = [[median if value is None else value for value, _ in rows]]
    columns += [[value is None for value, _ in rows]] * any(value is None for value, _ in rows)
    columns += [[colour == one for _, colour in rows] for one in sorted({colour for _, colour in rows if colour})]
    columns += [[colour is None for _, colour in rows]] * any(colour is None for _, colour in rows)
    np.testing.assert_array_equal(imputed, np.array(columns, np.float32).T)
    whole = [(value, colour) for value, colour in rows if value is not None and colour]
    kept = [[value for value, _ in whole], *([c == one for _, c in whole] for one in sorted({c for _, c in whole}))]
    np.testing.assert_array_equal(dropped, np.array(kept, np.float32).T)


def test_the_training_split_shrinks_with_its_dropped_rows(folder, tmp_path):
    splits = {
        name: datasets.Dataset.from_dict({"a": a, "label": [0, 1, 0]})
        for name, a in (("test", [1.0, None, 3.0]), ("train", [None, 5.0, 6.0]))
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    found = imported("mine", tmp_path / "saved", folder, missing="drop")
    assert (found.x.tolist(), found.n_train) == ([[5], [6], [1], [3]], 2)
    assert imported("other", tmp_path / "saved", folder, missing="impute").n_train == 3


@pytest.mark.parametrize(("empty", "n_train"), [("test", 2), ("train", None), ("validation", 2)])
def test_empty_splits_are_skipped(folder, tmp_path, empty, n_train):
    whole = datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": [0, 1]})
    splits = {"train": whole, "test": whole} | {empty: datasets.Dataset.from_dict({"a": [], "label": []})}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    found = imported("mine", tmp_path / "saved", folder)
    assert (found.x[:2].tolist(), found.n_train) == ([[1], [2]], n_train or 0)
    datasets.DatasetDict({name: whole.select([]) for name in splits}).save_to_disk(tmp_path / "none")
    with pytest.raises(FedobpError, match="none has no rows: there is nothing to import"):
        import_dataset("other", tmp_path / "none", folder)


# Columns that are left out, and flags.


def test_columns_are_left_out(summaries):
    text = 'label,a,id,"b,c",day\n0,1,p1,3,2020-01-02\n1,2,p2,4,2020-01-03\n'
    found, summary = summaries(text, drop=["id, day", "b,c"])
    assert (found.x.tolist(), summary.dropped_columns) == ([[1], [2]], ("id", "day", "b,c"))
    assert str(summary).splitlines()[-1] == "Left out: id, day, b,c."


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"drop": ["b"]}, r"unknown column for --drop in .*table.csv 'b': .*choose from label, a, c"),
        ({"categories": ["b"]}, "unknown column for --categories"),
        ({"drop": ["label"]}, "--drop names 'label', which --label, --client or --drop names too"),
        ({"categories": ["a"], "drop": ["a"]}, "--categories names 'a', which --label, --client or --drop names too"),
        ({"drop": "a,c"}, "no columns besides label and a and c: there are no inputs"),
        ({"missing": "ignore"}, "unknown value of --missing 'ignore': .*choose from refuse, drop, impute"),
    ],
)
def test_wrong_rules_are_refused(folder, source, rules, sentence):
    refused(sentence, source("label,a,c\n0,1,2\n1,2,3\n"), folder, **rules)


@pytest.mark.parametrize(
    ("suffix", "rules", "sentence"),
    [
        (
            "npz",
            {"missing": "drop", "drop": "a"},
            "mine.npz is an npz file and no table: leave out --missing and --drop",
        ),
        ("npz", {"encoding": "utf-8"}, "leave out --encoding"),
        ("parquet", {"separator": ";", "decimal": ","}, "is no CSV file: leave out --separator and --decimal"),
        ("", {"categories": "a"}, "mine is a folder of images and no table: leave out --categories"),
    ],
)
def test_flags_of_other_sources_are_refused(folder, tmp_path, suffix, rules, sentence):
    path = tmp_path / f"mine{suffix and '.'}{suffix}"
    path.touch() if suffix else path.mkdir()
    refused(sentence, path, folder, **rules)


def test_a_saved_dataset_is_no_csv_file(folder, tmp_path):
    datasets.Dataset.from_dict({"a": [1, 2], "label": [0, 1]}).save_to_disk(tmp_path / "saved")
    refused("saved is no CSV file: leave out --encoding", tmp_path / "saved", folder, encoding="utf-8")
