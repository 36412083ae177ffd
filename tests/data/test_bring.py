"""Your own data: what comes in from tables, images and Hugging Face datasets, and what is refused."""

import csv
import datetime
import decimal
import io
import sys
import tomllib
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from fedobp.data import bring, load, tables
from fedobp.errors import FedobpError

datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def source(tmp_path):
    """A function that writes a text to a CSV file and returns its path."""

    def save(text, encoding="utf-8"):
        path = tmp_path / "table.csv"
        path.write_bytes(text.encode(encoding))
        return path

    return save


def arrow(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


def picture(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path, **options)
    return path


def brought(name, source, folder, **columns):
    """Import, and return what is then loaded, which is what the import returned."""
    returned, loaded = bring(name, source, folder, **columns), load(name, folder)
    np.testing.assert_array_equal(returned.x, loaded.x)
    np.testing.assert_array_equal(returned.y, loaded.y)
    assert (returned.labels, returned.client_names, returned.n_train) == (
        loaded.labels, loaded.client_names, loaded.n_train,
    )  # fmt: skip
    assert returned.info == loaded.info
    if returned.clients is not None:
        np.testing.assert_array_equal(returned.clients, loaded.clients)
    return loaded


def refused(sentence, source, folder, **columns):
    with pytest.raises(FedobpError, match=sentence):
        bring("mine", source, folder, **columns)
    assert not folder.exists()


# CSV.

WARDS = "age, sugar ,outcome,ward\n40,1.5,ill,B\n50,-2e1,well,A\n\n60,0,ill,B\n"


def test_a_csv_table_becomes_float32_features_with_names_for_labels_and_clients(folder, source):
    found = brought("mine", source(WARDS), folder, label="outcome", client="ward")
    assert found.x.dtype == np.float32
    assert found.x.tolist() == [[40, 1.5], [50, -20], [60, 0]]
    assert (found.y.tolist(), found.labels) == ([0, 1, 0], ("ill", "well"))
    assert (found.clients.tolist(), found.client_names) == ([1, 0, 1], ("A", "B"))
    assert found.n_train == 0
    assert found.info.clients == 2


def test_the_label_column_is_called_label_unless_said_otherwise(folder, source):
    found = brought("mine", source("label,a\n0,1\n1,2\n"), folder)
    assert (found.x.tolist(), found.y.tolist(), found.clients) == ([[1], [2]], [0, 1], None)


def test_a_byte_order_mark_and_quotes_are_understood(folder, source):
    found = brought("mine", source('label,a\n"yes, or so",1\n"no ""really""",2\n', "utf-8-sig"), folder)
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
    found = brought("mine", source("label,a\n" + "".join(f"{text},0\n" for text in texts)), folder)
    assert found.labels == labels
    assert [str(found.labels[at]) for at in found.y] == [text.removesuffix(".0") for text in texts]


def test_clients_that_are_numbers_are_in_the_order_of_numbers(folder, source):
    found = brought("mine", source("label,a,who\n0,1,10\n1,2,9\n0,3,10\n"), folder, client="who")
    assert (found.clients.tolist(), found.client_names) == ([1, 0, 1], ("9", "10"))


def test_rows_beyond_the_first_part_are_read_and_counted(folder, source, monkeypatch):
    monkeypatch.setattr(tables, "_ROWS", 3)
    rows = [f"{row % 2},{row}\n" for row in range(10)]
    assert brought("mine", source("label,a\n" + "".join(rows)), folder).x[:, 0].tolist() == list(range(10))
    rows[7] = "1,many\n"
    with pytest.raises(FedobpError, match="has 'many' in row 8 of column 'a'"):
        bring("other", source("label,a\n" + "".join(rows)), folder)
    rows[7] = "1\n"
    with pytest.raises(FedobpError, match="has 1 cells in row 8 and 2 columns"):
        bring("other", source("label,a\n" + "".join(rows)), folder)


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=8)
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(NAMES, NUMBERS, NUMBERS), min_size=2, max_size=8))
def test_any_names_and_numbers_come_back(tmp_path, rows):
    names = ["x" + name for name, *_ in rows]  # so that none of them is a number
    assume(len(set(names)) > 1)
    with (tmp_path / "any.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("label", "a", "b"), *((f"x{name}", *numbers) for name, *numbers in rows)])
    (tmp_path / "data/mine.npz").unlink(missing_ok=True)
    found = brought("mine", tmp_path / "any.csv", tmp_path / "data")
    assert [found.labels[at] for at in found.y] == names
    np.testing.assert_array_equal(found.x, np.array([row[1:] for row in rows], np.float32))


BAD_TABLES = {
    "no such label": ("Outcome,a\n1,2\n", r"unknown column for --label in .*table.csv 'label': known are Outcome, a"),
    "a near miss": ("Lable,a\n1,2\n", "did you mean 'Lable'"),
    "no rows": ("label,a\n", "table.csv has no rows"),
    "an empty file": ("", "table.csv is empty: there is nothing to import"),
    "empty lines": ("\n\n", "table.csv is empty"),
    "no features": ("label\n1\n0\n", "no columns besides label: there are no inputs"),
    "a column twice": ("label,a,a\n0,1,2\n", "two columns called 'a'"),
    "pandas' index": (",label,a\n0,1,2\n", r"no name for column 1: .*index=False"),
    "semicolons": ("label;a\n1;2\n", "separate them with commas"),
    "a text among numbers": ("label,a\n0,1\n1,red\n", "has 'red' in row 2 of column 'a', which is no number"),
    "an empty cell": ("label,a\n0,1\n1,\n", "has nothing in row 2 of column 'a', which is no number"),
    "an underscore": ("label,a\n0,1_2\n1,1\n", "has '1_2' in row 1 of column 'a', which is no number"),
    "NaN": ("label,a\n0,1\n1,NaN\n", "missing, NaN or infinite value in row 2 of column 'a'"),
    "infinite": ("label,a\n0,-inf\n1,1\n", "missing, NaN or infinite value in row 1 of column 'a'"),
    "too large for float32": ("label,a\n0,1e39\n1,1\n", "missing, NaN or infinite value in row 1"),
    "no label in a row": ("label,a\n0,1\n ,1\n", "has no label in row 2 of column 'label': fill it in, or remove"),
    "a NaN for a label": ("label,a\n0,1\nnan,1\n", "has no label in row 2"),
    "a regression": ("label,a\n0.5,1\n2,1\n", "fractions in the label column 'label', such as 0.5: labels must be"),
    "one class": ("label,a\nyes,1\nyes,2\n", "'mine' has only the label yes: there is nothing to learn"),
    "too many cells": ("label,a\n0,1,2\n", "has 3 cells in row 1 and 2 columns: put texts with commas into quotes"),
    "an open quote": ('label,a\n0,"1\n', "cannot be read as a CSV file"),
}


@pytest.mark.parametrize(("text", "sentence"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_bad_table_is_refused_with_its_row_and_column(folder, source, text, sentence):
    refused(sentence, source(text), folder)


def test_empty_lines_are_skipped_before_the_names_too(folder, source):
    assert brought("mine", source("\n\nlabel,a\n0,1\n\n1,2\n"), folder).x.tolist() == [[1], [2]]


def test_text_that_is_not_utf8_is_refused(folder, source):
    refused("cannot be read as a CSV file .* in UTF-8", source("label,a\nä,1\nö,2\n", "latin-1"), folder)


def test_a_missing_client_is_refused(folder, source):
    refused("has no client in row 2 of column 'who'", source("label,a,who\n0,1,A\n1,2,\n"), folder, client="who")
    refused("unknown column for --client", source("label,a\n0,1\n"), folder, client="who")
    refused("are both 'label'", source("label,a\n0,1\n"), folder, client="label")


def test_a_client_may_be_called_by_a_fraction(folder, source):
    assert brought("mine", source("label,a,who\n0,1,0.5\n1,2,7\n"), folder, client="who").client_names == ("0.5", "7")


# Parquet.


def test_a_parquet_table_is_the_same_as_the_csv(folder, tmp_path, source):
    columns = {"age": [40, 50, 60], "sugar": [1.5, -20.0, 0.0], "outcome": ["ill", "well", "ill"], "ward": [9, 10, 9]}
    found = brought("mine", arrow(tmp_path / "t.parquet", **columns), folder, label="outcome", client="ward")
    text = "\n".join([",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))])
    other = brought("other", source(text), folder, label="outcome", client="ward")
    assert found.x.dtype == other.x.dtype
    assert found.x.tolist() == other.x.tolist() == [[40, 1.5], [50, -20], [60, 0]]
    assert found.labels == other.labels == ("ill", "well")
    assert found.y.tolist() == other.y.tolist() == [0, 1, 0]
    assert found.clients.tolist() == other.clients.tolist() == [0, 1, 0]
    assert found.client_names == other.client_names == ("9", "10")


def test_every_kind_of_number_is_one(folder, tmp_path):
    columns = {
        "bytes": pyarrow.array([1, 2], pyarrow.uint8()),
        "truth": [True, False],
        "decimal": [decimal.Decimal("0.25"), decimal.Decimal(3)],
        "text": ["1.5", "2"],
        "__index_level_0__": [17, 4],  # pandas' index
        "label": pyarrow.array(["b", "a"]).dictionary_encode(),
    }
    found = brought("mine", arrow(tmp_path / "t.parquet", **columns), folder)
    assert found.x.tolist() == [[1, 1, 0.25, 1.5], [2, 0, 3, 2]]
    assert [found.labels[at] for at in found.y] == ["b", "a"]


DATE = datetime.datetime(2020, 1, 2)
BAD_COLUMNS = {
    "a missing number": ([1, None], "missing, NaN or infinite value in row 2 of column 'a'"),
    "a missing truth": ([True, None], "missing, NaN or infinite value in row 2 of column 'a'"),
    "text": (["1", "red"], "has 'red' in row 2 of column 'a', which is no number"),
    "an underscore": (["1", "1_2"], "has '1_2' in row 2 of column 'a', which is no number"),
    "dates": ([DATE, DATE], "has '2020-01-02.* in row 1 of column 'a', which is no number"),
    "days": ([DATE.date(), DATE.date()], "has '2020-01-02' in row 1 of column 'a', which is no number"),
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
    assert brought("mine", arrow(tmp_path / "t.parquet", a=[1, 2], label=[3.0, 1.0]), folder).labels == (1, 3)


@pytest.mark.parametrize("content", [b"", b"PAR1 and then something else PAR1"])
def test_a_damaged_parquet_file_is_refused(folder, tmp_path, content):
    (tmp_path / "t.parquet").write_bytes(content)
    refused(r"t.parquet cannot be read as a Parquet file \(.*\): save it anew", tmp_path / "t.parquet", folder)


# Images.

GREY = np.arange(6).reshape(2, 3) * 40  # 3 pixels wide, 2 high
COLOUR = np.arange(18).reshape(2, 3, 3) * 10


def test_images_are_labelled_by_their_folders_and_come_in_the_order_of_names(folder, tmp_path):
    for name, shift in (("dog/b.png", 0), ("dog/a.bmp", 1), ("cat/z.png", 2), (".cache/x.png", 3)):
        picture(tmp_path / "pets" / name, GREY + shift)
    (tmp_path / "pets/cat/.hidden").write_text("no image")
    (tmp_path / "pets/README.txt").write_text("no class")
    found = brought("mine", tmp_path / "pets", folder)
    assert found.x.dtype == np.uint8
    np.testing.assert_array_equal(found.x, np.stack([GREY + 2, GREY + 1, GREY]))
    assert (found.y.tolist(), found.labels, found.clients) == ([0, 1, 1], ("cat", "dog"), None)


def test_colour_images_have_three_channels(folder, tmp_path):
    for name, shift in (("0", 0), ("1", 5)):
        picture(tmp_path / "pets" / name / "x.png", COLOUR + shift)
    found = brought("mine", tmp_path / "pets", folder)
    np.testing.assert_array_equal(found.x, np.stack([COLOUR, COLOUR + 5]))
    assert found.labels == (0, 1)


def test_numbered_folders_are_in_the_order_of_numbers(folder, tmp_path):
    for name in ("10", "9"):
        picture(tmp_path / "pets" / name / "x.png", GREY + int(name))
    found = brought("mine", tmp_path / "pets", folder)
    assert found.labels == (9, 10)
    assert (found.x[:, 0, 0] - 9 == found.y).all()


@pytest.mark.parametrize(
    ("mode", "shape"),
    [("1", (2, 3)), ("L", (2, 3)), ("LA", (2, 3)), ("P", (2, 3, 3)), ("RGBA", (2, 3, 3)), ("CMYK", (2, 3, 3))],
)
def test_every_kind_of_8_bit_image_is_grey_or_colour(folder, tmp_path, mode, shape):
    for name in ("a", "b"):
        path = tmp_path / "pets" / name / ("x.tiff" if mode == "CMYK" else "x.png")
        path.parent.mkdir(parents=True)
        Image.fromarray(COLOUR.astype(np.uint8)).convert(mode).save(path)
    assert brought("mine", tmp_path / "pets", folder).x.shape == (2, *shape)


def test_images_of_several_sizes_or_kinds_are_refused(folder, tmp_path):
    picture(tmp_path / "pets/a/x.png", GREY)
    other = picture(tmp_path / "pets/b/y.png", GREY.T)
    refused(
        r"pets/b/y.png is 2 x 3 pixels, grey and .*pets/a/x.png is 3 x 2 pixels, grey: images must have one size",
        tmp_path / "pets",
        folder,
    )
    picture(other, COLOUR)
    refused("y.png is 3 x 2 pixels, colour and .*x.png is 3 x 2 pixels, grey", tmp_path / "pets", folder)


def test_a_damaged_image_is_named(folder, tmp_path):
    picture(tmp_path / "pets/a/x.png", GREY)
    bad = picture(tmp_path / "pets/b/y.png", np.random.RandomState(0).randint(0, 255, (2, 3)))
    whole = bad.read_bytes()
    for content in (b"", b"text", whole[:-30], whole[:40]):
        bad.write_bytes(content)
        refused(r"pets/b/y.png cannot be read as an image \(.+\): repair it, or remove it", tmp_path / "pets", folder)


def test_deep_pixels_are_refused(folder, tmp_path):
    for name in ("a", "b"):
        path = tmp_path / "pets" / name / "x.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(GREY.astype(np.uint16)).save(path)
    refused("a/x.png has more than 8 bits for a pixel", tmp_path / "pets", folder)


def test_folders_that_are_not_images_by_class_are_refused(folder, tmp_path):
    pets = tmp_path / "pets"
    pets.mkdir()
    refused("pets holds no folders: put the images of each class", pets, folder)
    (pets / "a").mkdir()
    refused("pets/a is empty: put the images of class 'a' into it", pets, folder)
    picture(pets / "a/x.png", GREY)
    refused("'mine' has only the label a:", pets, folder)
    picture(pets / "a/deeper/x.png", GREY)
    refused("a/deeper is a folder: the images of class 'a' must lie in", pets, folder)
    refused("folder of images, which has no columns: leave out --label", pets, folder, client="who")


def test_a_folder_that_may_not_be_read_is_refused(folder, tmp_path, monkeypatch):
    picture(tmp_path / "pets/a/x.png", GREY)

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    refused("pets cannot be imported .*Permission denied.*: make all of it readable", tmp_path / "pets", folder)


# Hugging Face datasets.


def letters(rows, start=0):
    kinds = datasets.Features(
        {
            "image": datasets.Image(),
            "character": datasets.ClassLabel(names=["zebra", "ant"]),
            "writer": datasets.Value("string"),
            "page": datasets.Value("int64"),
        }
    )
    numbers = range(start, start + rows)
    columns = {
        "image": [Image.fromarray((GREY + number).astype(np.uint8)) for number in numbers],
        "character": [number % 2 for number in numbers],
        "writer": [f"w{number % 3}" for number in numbers],
        "page": list(numbers),
    }
    return datasets.Dataset.from_dict(columns, features=kinds)


def test_a_saved_dataset_of_images(folder, tmp_path):
    letters(5).save_to_disk(tmp_path / "saved")
    found = brought("mine", tmp_path / "saved", folder, label="character", client="writer")
    np.testing.assert_array_equal(found.x, np.stack([GREY + number for number in range(5)]))
    assert (found.y.tolist(), found.labels) == ([1, 0, 1, 0, 1], ("ant", "zebra"))
    assert (found.clients.tolist(), found.client_names) == ([0, 1, 2, 0, 1], ("w0", "w1", "w2"))
    assert found.n_train == 0


def test_of_several_splits_the_training_samples_come_first(folder, tmp_path):
    datasets.DatasetDict({"test": letters(2, start=3), "train": letters(3)}).save_to_disk(tmp_path / "saved")
    found = brought("mine", tmp_path / "saved", folder, label="character")
    np.testing.assert_array_equal(found.x, np.stack([GREY + number for number in range(5)]))
    assert found.n_train == 3


def test_a_known_set_keeps_the_numbers_of_its_labels(folder, tmp_path):
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["T-shirt", "Ankle boot"])}
    )
    images = [Image.fromarray(np.full((28, 28), value, np.uint8)) for value in (1, 2)]
    saved = datasets.Dataset.from_dict({"image": images, "label": [1, 0]}, features=kinds)
    saved.save_to_disk(tmp_path / "saved")
    found = brought("fmnist", tmp_path / "saved", folder)
    assert (found.y.tolist(), found.labels) == ([1, 0], tuple(range(10)))


def test_a_saved_table_of_chosen_rows(folder, tmp_path):
    saved = datasets.Dataset.from_dict({"a": [1.0, 2.0, 3.0], "b": [4, 5, 6], "label": ["x", "y", "z"]})
    saved.select([2, 0]).save_to_disk(tmp_path / "saved")
    found = brought("mine", tmp_path / "saved", folder)
    assert (found.x.tolist(), found.labels, found.y.tolist()) == ([[3, 6], [1, 4]], ("x", "z"), [1, 0])


def test_images_in_parquet_are_images_too(folder, tmp_path):
    letters(4).to_parquet(tmp_path / "t.parquet")
    found = brought("mine", tmp_path / "t.parquet", folder, label="character")
    np.testing.assert_array_equal(found.x, np.stack([GREY + number for number in range(4)]))
    assert found.labels == (0, 1)


def test_bad_saved_datasets_are_refused(folder, tmp_path):
    saved = tmp_path / "saved"
    letters(4).save_to_disk(saved)
    refused("did you mean 'character'", saved, folder, label="charactr")
    refused("unknown column for --client .* 'who'", saved, folder, label="character", client="who")
    refused("images in column 'image': labels and clients are whole numbers or names", saved, folder, label="image")
    kinds = datasets.Features({"a": datasets.Array2D((2, 2), "uint8"), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"a": [[[1, 2], [3, 4]]] * 2, "label": [0, 1]}, kinds).save_to_disk(tmp_path / "arrays")
    refused("lists in column 'a': give each number a column, or import an npz", tmp_path / "arrays", folder)
    cells = [{"bytes": b"no image", "path": None}, {"bytes": None, "path": None}, None]
    for cell, sentence in zip(cells, ["cannot be read as an image", "is missing", "is missing"], strict=True):
        good = io.BytesIO()
        Image.fromarray(GREY.astype(np.uint8)).save(good, "png")
        column = pyarrow.array([{"bytes": good.getvalue(), "path": None}, cell])
        path = arrow(tmp_path / "t.parquet", image=column, label=[0, 1])
        refused(f"the image in row 2 of .*t.parquet {sentence}", path, folder)
    letters(2).add_column("label", [0, 1]).add_column("other", [None, None]).cast_column(
        "other", datasets.Image()
    ).save_to_disk(tmp_path / "two")
    refused("has images in image and other: remove all but one", tmp_path / "two", folder)
    (saved / "state.json").write_text("{")
    refused("saved cannot be read as a Hugging Face dataset", saved, folder, label="character")


def test_a_label_that_the_dataset_does_not_know_is_missing(folder, tmp_path):
    kinds = datasets.Features({"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=["x", "y"])})
    saved = datasets.Dataset.from_dict({"a": [1, 2, 3], "label": [0, 1, -1]}, features=kinds)
    saved.save_to_disk(tmp_path / "saved")
    refused("no label in row 3 of column 'label'", tmp_path / "saved", folder)


@pytest.mark.parametrize(("library", "extra"), [("pyarrow", "tables"), ("datasets", "hf")])
def test_what_is_not_installed_is_named_with_its_extra(folder, tmp_path, monkeypatch, library, extra):
    letters(2).save_to_disk(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, library, None)
    path = tmp_path / "saved" if library == "datasets" else tmp_path / "t.parquet"
    (tmp_path / "t.parquet").touch()
    refused(rf"pip install 'fedobp\[{extra}\]'", path, folder)


# npz.


def test_arrays_of_an_npz_can_be_named(folder, tmp_path):
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    names = {"kind": np.array(["b", "a", "b", "a"]), "user": np.array([[10], [9], [9], [10]])}
    np.savez(tmp_path / "mine.npz", x=x, **names)
    found = brought("mine", tmp_path / "mine.npz", folder, label="kind", client="user")
    assert (found.y.tolist(), found.labels) == ([1, 0, 1, 0], ("a", "b"))
    assert (found.clients.tolist(), found.client_names) == ([1, 0, 0, 1], ("9", "10"))
    with np.load(folder / "mine.npz") as arrays:
        assert sorted(arrays) == ["client", "n_train", "x", "y"]
        assert arrays["y"].tolist() == ["b", "a", "b", "a"]
    with pytest.raises(FedobpError, match=r"unknown array in .*mine.npz 'users': did you mean 'user'"):
        bring("other", tmp_path / "mine.npz", folder, client="users")


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


def test_known_sets_take_no_names_for_labels(folder, tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((2, 28, 28), np.uint8), y=np.array(["boot", "shirt"]))
    with pytest.raises(FedobpError, match="has labels from boot to shirt, and fmnist has 0 to 9: import it under"):
        bring("fmnist", tmp_path / "mine.npz", folder)


# What it is, and how far it is.


@pytest.mark.parametrize("name", ["table.xlsx", "table"])
def test_other_sources_are_refused(folder, tmp_path, name):
    (tmp_path / name).touch()
    refused(rf"{name} cannot be imported: give a file that ends in .npz, .csv or .parquet", tmp_path / name, folder)


@pytest.mark.parametrize("name", ["absent.csv", "absent.parquet", "absent.npz", "absent"])
def test_a_source_that_is_not_there_is_refused(folder, tmp_path, name):
    refused(f"there is no file or folder .*{name}: give the path", tmp_path / name, folder)


def test_a_name_that_is_taken_is_refused_before_anything_is_read(folder, tmp_path, source):
    bring("mine", source("label,a\n0,1\n1,2\n"), folder)
    before = (folder / "mine.npz").read_bytes()
    with pytest.raises(FedobpError, match="'mine' exists already"):
        bring("mine", tmp_path / "absent.csv", folder)
    assert (folder / "mine.npz").read_bytes() == before


def test_progress_grows_to_one(folder, source, monkeypatch):
    monkeypatch.setattr(tables, "_ROWS", 100)
    told = []
    text = "label,a\n" + "".join(f"{row % 2},{row}\n" for row in range(3000))
    bring("mine", source(text), folder, progress=lambda what, share: told.append((what, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (told[0][0], told[-1]) == ("reading table.csv", ("checking and writing", 1.0))
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
        "error: unknown column for --label in wards.csv 'outcom': did you mean 'outcome'? known are a, outcome\n"
    )
