"""DataFrames in memory: the same arrays as an import of the same table."""

import datetime
import decimal

import numpy as np
import pandas
import pytest

from fedobp.data import import_dataset
from fedobp.data.tables import frame_arrays
from fedobp.errors import FedobpError

FRAME = pandas.DataFrame(
    {
        "age": [30.0, None, 50.0, 10.0, 20.0],
        "sex": ["m", "f", None, "m", "f"],
        "smokes": [True, False, True, True, False],
        "visits": [1, 2, 3, 4, 5],
        "outcome": ["ill", "well", "ill", "well", "well"],
        "ward": [9, 10, 9, 10, 9],
    }
)


@pytest.mark.parametrize("missing", ["impute", "drop"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_frame_is_what_an_import_of_its_file_is(tmp_path, missing, suffix):
    path = tmp_path / f"t.{suffix}"
    FRAME.to_csv(path, index=False) if suffix == "csv" else FRAME.to_parquet(path)
    rules = {"label": "outcome", "client": "ward", "missing": missing, "drop": "visits"}
    found = frame_arrays(FRAME, **rules)
    import_dataset("mine", path, tmp_path / "data", **rules)
    with np.load(tmp_path / "data" / "mine.npz", allow_pickle=False) as stored:
        assert sorted(found) == ["client", "x", "y"]
        for key, array in found.items():
            assert array.dtype == stored[key].dtype
            np.testing.assert_array_equal(array, stored[key])


NULLABLE = {
    "Int64": pandas.array([3, None, 1], dtype="Int64"),
    "Float64": pandas.array([3.0, None, 1.0], dtype="Float64"),
    "float": [3.0, np.nan, 1.0],
    "objects": np.array([3, None, "1"], object),
    "NA": np.array([3, pandas.NA, np.float32(1)], object),
    "Decimal": [decimal.Decimal(3), None, decimal.Decimal(1)],
    "arrow": pandas.array([3, None, 1], dtype="int64[pyarrow]"),
}


@pytest.mark.parametrize("column", NULLABLE.values(), ids=NULLABLE)
def test_every_type_of_number_with_a_gap(column):
    frame = pandas.DataFrame({"a": column, "label": [0, 1, 0]})
    assert frame_arrays(frame, "label", missing="impute")["x"].tolist() == [[3, 0], [2, 1], [1, 0]]
    assert frame_arrays(frame, "label", missing="drop")["y"].tolist() == [0, 0]
    with pytest.raises(FedobpError, match="the DataFrame has a missing value in row 2 of column 'a': fill it in"):
        frame_arrays(frame, "label")


CATEGORIES = {
    "str": ["r", None, "b"],
    "objects": np.array(["r", np.nan, "b"], object),
    "category": pandas.Categorical(["r", None, "b"], categories=["r", "unused", "b"]),
    "numbers as category": pandas.Categorical([20, None, 3]),
    "string": pandas.array(["r", None, "b"], dtype="string"),
    "arrow": pandas.array(["r", None, "b"], dtype="string[pyarrow]"),
}


@pytest.mark.parametrize("column", CATEGORIES.values(), ids=CATEGORIES)
def test_every_type_of_text_with_a_gap(column):
    frame = pandas.DataFrame({"a": column, "label": [0, 1, 0]})
    assert frame_arrays(frame, "label", missing="impute")["x"].tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize("dtype", ["boolean", "object"])
def test_truth_with_a_gap(dtype):
    frame = pandas.DataFrame({"a": pandas.array([True, None, True, False], dtype=dtype), "label": [0, 1, 0, 1]})
    assert frame_arrays(frame, "label", missing="impute")["x"].tolist() == [[1, 0], [1, 1], [1, 0], [0, 0]]


def test_intervals_are_categories_as_in_a_csv_file(tmp_path):
    frame = pandas.DataFrame({"a": pandas.cut([1, 9, 2, np.nan], [0, 5, 10]), "label": [0, 1, 0, 1]})
    found = frame_arrays(frame, "label", missing="impute")["x"].tolist()
    assert found == [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert import_dataset("mine", tmp_path / "t.csv", tmp_path / "data", missing="impute").x.tolist() == found


DAY = datetime.datetime(2020, 1, 2)
DATES = {
    "datetime64": pandas.to_datetime([None, "2020-01-02"]),
    "time zone": pandas.to_datetime([None, "2020-01-02"]).tz_localize("Europe/Berlin"),
    "objects": np.array([None, DAY.date()], object),
    "durations": pandas.to_timedelta([None, 5], unit="s"),
    "texts": [None, "2.1.2020"],
}


@pytest.mark.parametrize("column", DATES.values(), ids=DATES)
def test_dates_are_refused(column):
    frame = pandas.DataFrame({"when": column, "label": [0, 1]})
    with pytest.raises(
        FedobpError, match=r"the DataFrame has '.*' in row 2 of column 'when', which is no number but a"
    ):
        frame_arrays(frame, "label")


LABELS = {
    "whole floats": ([7.0, 7.0, 3.0], [7, 7, 3]),
    "Int64": (pandas.array([7, 7, 3], dtype="Int64"), [7, 7, 3]),
    "category": (pandas.Categorical(["b", "b", "a"]), ["b", "b", "a"]),
    "truth": ([True, True, False], ["True", "True", "False"]),
    "dates": (pandas.to_datetime(["2020-01-02"] * 2 + ["2020-01-01"]), [str(DAY), str(DAY), "2020-01-01 00:00:00"]),
}


@pytest.mark.parametrize(("column", "expected"), LABELS.values(), ids=LABELS)
def test_labels_and_clients_of_every_type(column, expected):
    frame = pandas.DataFrame({"a": [1, 2, 3], "label": column, "client": column})
    found = frame_arrays(frame, "label", "client")
    assert found["y"].tolist() == found["client"].tolist() == expected


@pytest.mark.parametrize("gap", [None, np.nan, pandas.NA, pandas.NaT, ""])
def test_missing_labels_are_refused_or_dropped(gap):
    frame = pandas.DataFrame({"a": [1, 2, 3], "label": np.array(["x", gap, "y"], object)})
    for missing in ("refuse", "impute"):
        with pytest.raises(FedobpError, match="the DataFrame has no label in row 2 of column 'label'"):
            frame_arrays(frame, "label", missing=missing)
    assert frame_arrays(frame, "label", missing="drop")["x"].tolist() == [[1], [3]]


def test_a_missing_date_is_no_label():
    frame = pandas.DataFrame({"a": [1, 2], "label": pandas.to_datetime(["2020-01-02", None])})
    with pytest.raises(FedobpError, match="no label in row 2"):
        frame_arrays(frame, "label")


def test_column_names_that_are_numbers(tmp_path):
    frame = pandas.DataFrame({0: [1, 2], 1: ["r", "b"], 2: [7, 8], "3": [5, 6]}, index=[10, 20])
    found = frame_arrays(frame, 2, drop=[0], categories=["3"])
    assert (found["x"].tolist(), found["y"].tolist()) == ([[0, 1, 1, 0], [1, 0, 0, 1]], [7, 8])


@pytest.mark.parametrize("rule", ["drop", "categories"])
def test_a_single_column_that_is_no_text_is_refused(rule):
    with pytest.raises(FedobpError, match=f"^{rule} is 0: give the names of columns as a text or a list"):
        frame_arrays(pandas.DataFrame({0: [1, 2], 1: [3, 4], "label": [0, 1]}), "label", **{rule: 0})


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        ({"a": [1, 2]}, "unknown column for --label in the DataFrame 'label': .*choose from a"),
        ({"label": []}, "the DataFrame has no columns besides label"),
        ({"a": [], "label": []}, "the DataFrame has no rows"),
        ({"a": [[1], [2]], "label": [0, 1]}, r"has '\[1\]' in row 1 of column 'a', which is no number: turn"),
        ({"a": [1, {2}], "label": [0, 1]}, r"has '\{2\}' in row 2 of column 'a', which is no number: turn"),
        ({"a": [1j, 2j], "label": [0, 1]}, "in row 1 of column 'a', which is no number: turn"),
        ({"a": [1, 10**400], "label": [0, 1]}, "has '10.*0' in row 2 of column 'a', which is infinite or too large"),
        ({"a": [1, "2", -(10**5000)], "label": [0, 1, 0]}, "in row 3 of column 'a', which is infinite or too large"),
        ({"a": [1, np.inf], "label": [0, 1]}, "has 'inf' in row 2 of column 'a', which is infinite"),
        ({"a": [1, 2], "label": [0.5, 1]}, "fractions in the label column 'label', such as 0.5: .*, unlike in row 1"),
        ({1: [1, 2], "1": [1, 2], "label": [0, 1]}, "the DataFrame has two columns called '1'"),
    ],
)
def test_bad_frames_are_refused(frame, sentence):
    with pytest.raises(FedobpError, match=sentence):
        frame_arrays(pandas.DataFrame(frame), "label")
