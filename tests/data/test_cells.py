"""Dates, times and durations in tables: as texts, and as types of Arrow and pandas."""

import datetime

import datasets
import pandas
import pyarrow
import pytest
from importer_cases import arrow, imported, refused

from fedobp.data import tables
from fedobp.data.cells import is_date, is_number
from fedobp.data.tables import frame_arrays
from fedobp.errors import FedobpError

datasets.disable_progress_bars()
DATE = r"in row 1 of column 'when', which is no number but a date or a time: turn .*--drop when, .*--categories when"


@pytest.mark.parametrize(
    "text",
    ["2020-01-02", "2020-1-2", "2020/01/02 10:30", "2020-01-02T10:30:00Z", "1899.12.31", "2020-01", "20200102T103000Z",
     "2.1.2020", "02/01/20", "1-2-2020 10:30", "12/31/2020", "31/12/2020", "10:30", "10:30:00.5", "7:05 pm",
     "2 Jan 2020", "Jan 2, 2020", "January 2020", "2-Jan-20", "Sept. 3 1999", "2nd March 2020", "JUL-20", "June 20",
     "01/2020", "12-2020", "2020-1", "2020Q1", "Q1 2020", "2020-W05", "2020-W53-7", "02Jan2020", "2020-Jan-02",
     "Thu, 02 Jan 2020 10:00:00 GMT", "Thursday, January 2, 2020", "Thu Jan  2 10:00:00 2020", "0001-01-01",
     "9999-12-31", "10:30:00Z", "10:30+01:00", "0 days 10:30:00", "-1 days +23:59:59.5", "1 days"],
)  # fmt: skip
def test_dates_are_recognised(folder, source, text):
    path = source(f'label,when\n0,"{text}"\n1,"{text}"\n')
    refused(DATE, path, folder)
    assert imported("mine", path, folder, categories="when").x.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    "text",
    ["20-29", "2020-13", "1.2.3", "v2020-01-02", "Jan", "May", "mar12", "10-20", "12:345", "1/2", "Junior 10",
     "Mark 21", "Decile 10", "Market 2020", "Mayor 20", "Sunday", "25:61", "24:61", "10:60", "0000-01-01", "32.13.2020",
     "13/13/2020", "2020-02-32", "2020Q5", "Q0 2020", "2020-W54", "5-1000", "March 20 people", "2 Janet 2020", "days"],
)  # fmt: skip
def test_other_texts_are_no_dates(folder, source, text):
    assert not is_date(text)
    assert imported("mine", source(f"label,a\n0,{text}\n1,{text}\n"), folder).x.tolist() == [[1], [1]]


TYPES = {
    "timestamp": pyarrow.timestamp("ns", "UTC"), "seconds": pyarrow.timestamp("s"), "date32": pyarrow.date32(),
    "date64": pyarrow.date64(), "time32": pyarrow.time32("s"), "time64": pyarrow.time64("ns"),
    "duration": pyarrow.duration("ns"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("number", [0, -62135596800, 253402300799])  # seconds of the years 1970, 1 and 9999
def test_types_for_dates_are_refused_whatever_the_date(folder, tmp_path, kind, number):
    number = number // 86400 if kind == pyarrow.date32() else number * 1000 if kind == pyarrow.date64() else number
    if pyarrow.types.is_time(kind):
        number = abs(number) % 86400
    cells = pyarrow.array([number, number], pyarrow.int32() if kind.bit_width == 32 else pyarrow.int64()).view(kind)
    path = arrow(tmp_path / "t.parquet", when=cells, label=[0, 1])
    refused(DATE, path, folder)
    assert imported("mine", path, folder, categories="when").x.tolist() == [[1], [1]]


@pytest.mark.parametrize("freq", ["Q", "M", "W", "h"])
def test_periods_are_refused(folder, tmp_path, freq):
    frame = pandas.DataFrame({"when": pandas.period_range("2020-01-01", periods=2, freq=freq), "label": [0, 1]})
    frame.to_parquet(tmp_path / "t.parquet")
    refused(DATE, tmp_path / "t.parquet", folder)
    assert len(imported("mine", tmp_path / "t.parquet", folder, categories="when").x[0]) == 2
    with pytest.raises(FedobpError, match=DATE):
        frame_arrays(frame, "label")
    assert frame_arrays(frame, "label", categories="when")["x"].tolist() == [[1, 0], [0, 1]]


def test_a_period_is_known_by_its_metadata_without_pandas():
    field = pyarrow.field("when", pyarrow.int64(), metadata={"ARROW:extension:name": "pandas.period"})
    assert tables._is_temporal(field)
    assert not tables._is_temporal(field.with_metadata({"ARROW:extension:name": "other"}))


def test_dates_in_a_saved_dataset_are_refused(folder, tmp_path):
    features = datasets.Features({"when": datasets.Value("timestamp[s]"), "label": datasets.Value("int64")})
    when = [datetime.datetime(1, 1, 1)] * 2
    datasets.Dataset.from_dict({"when": when, "label": [0, 1]}, features=features).save_to_disk(tmp_path / "saved")
    refused(DATE, tmp_path / "saved", folder)


def test_labels_and_clients_may_be_dates(folder, tmp_path):
    days = [datetime.date(2020, 1, 2), datetime.date(2020, 1, 1)]
    found = imported("mine", arrow(tmp_path / "t.parquet", a=[1, 2], label=[0, 1], day=days), folder, client="day")
    assert (found.clients.tolist(), found.client_names) == ([1, 0], ("2020-01-01", "2020-01-02"))


@pytest.mark.parametrize("text", ["1" * 130_000 + "x", "1" * 130_000 + ".x", "." + "1" * 130_000 + "e"])
def test_a_long_cell_is_told_from_a_number_in_one_pass(text):
    """With steps that grow with the square of its length, this would take minutes."""
    assert not is_number(text)
    assert is_number(text.strip("xe"))
