"""Import of images from folders and Hugging Face datasets, and its user errors."""

import io
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from importer_cases import arrow, imported, picture, refused
from PIL import Image

datasets.disable_progress_bars()

# Images.

GREY = np.arange(6).reshape(2, 3) * 40  # 3 pixels wide, 2 high
COLOUR = np.arange(18).reshape(2, 3, 3) * 10


def test_images_are_labelled_by_their_folders_and_come_in_the_order_of_names(folder, tmp_path):
    for name, shift in (("dog/b.png", 0), ("dog/a.bmp", 1), ("cat/z.png", 2), (".cache/x.png", 3)):
        picture(tmp_path / "pets" / name, GREY + shift)
    (tmp_path / "pets/cat/.hidden").write_text("no image")
    (tmp_path / "pets/README.txt").write_text("no class")
    found = imported("mine", tmp_path / "pets", folder)
    assert found.x.dtype == np.uint8
    np.testing.assert_array_equal(found.x, np.stack([GREY + 2, GREY + 1, GREY]))
    assert (found.y.tolist(), found.labels, found.clients) == ([0, 1, 1], ("cat", "dog"), None)


@pytest.mark.parametrize("stray", ["stray.png", "stray.JPG", "train/stray.png", "test/stray.bmp"])
def test_an_image_beside_the_folders_of_classes_is_refused(folder, tmp_path, stray):
    inner = ("train/a", "train/b", "test/a") if "/" in stray else ("a", "b")
    for name in inner:
        picture(tmp_path / "pets" / name / "x.png", GREY)
    (tmp_path / "pets" / stray).write_bytes(b"")
    refused(f"{stray} is beside the folders of classes: move it into one of them, or remove it", tmp_path / "pets",
            folder)  # fmt: skip


def test_an_image_beside_the_folders_of_splits_is_refused(folder, tmp_path):
    for name in ("train/a/x.png", "train/b/x.png", "test/a/x.png", "stray.png"):
        picture(tmp_path / "pets" / name, GREY)
    refused("stray.png is beside the folders of splits: move it into one of their classes, or remove it",
            tmp_path / "pets", folder)  # fmt: skip


def test_colour_images_have_three_channels(folder, tmp_path):
    for name, shift in (("0", 0), ("1", 5)):
        picture(tmp_path / "pets" / name / "x.png", COLOUR + shift)
    found = imported("mine", tmp_path / "pets", folder)
    np.testing.assert_array_equal(found.x, np.stack([COLOUR, COLOUR + 5]))
    assert found.labels == (0, 1)


def test_numbered_folders_are_in_the_order_of_numbers(folder, tmp_path):
    for name in ("10", "9"):
        picture(tmp_path / "pets" / name / "x.png", GREY + int(name))
    found = imported("mine", tmp_path / "pets", folder)
    assert found.labels == (9, 10)
    assert (found.x[:, 0, 0] - 9 == found.y).all()


@pytest.mark.parametrize(
    ("mode", "shape"),
    [("1", (2, 3)), ("L", (2, 3)), ("LA", (2, 3)), ("P", (2, 3, 3)), ("RGBA", (2, 3, 3)), ("CMYK", (2, 3, 3))],
)
def test_every_8_bit_mode_is_grey_or_colour(folder, tmp_path, mode, shape):
    for name in ("a", "b"):
        path = tmp_path / "pets" / name / ("x.tiff" if mode == "CMYK" else "x.png")
        path.parent.mkdir(parents=True)
        Image.fromarray(COLOUR.astype(np.uint8)).convert(mode).save(path)
    assert imported("mine", tmp_path / "pets", folder).x.shape == (2, *shape)


def test_images_of_several_sizes_or_modes_are_refused(folder, tmp_path):
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


# Folders with splits.


def split_pets(folder, *names):
    """Images whose first pixel is their number, in the order of `names`."""
    for number, name in enumerate(names):
        picture(folder / name / f"{number}.png", GREY + number)
    return folder


def test_training_images_come_before_test_images(folder, tmp_path):
    pets = split_pets(tmp_path / "pets", "test/dog", "train/dog", "test/cat", "train/cat", "train/cow")
    (pets / "README.txt").write_text("no split")
    found = imported("mine", pets, folder)
    assert found.x[:, 0, 0].tolist() == [3, 4, 1, 2, 0]
    assert (found.y.tolist(), found.labels, found.n_train) == ([0, 1, 2, 0, 2], ("cat", "cow", "dog"), 3)


def test_validation_images_count_as_training_images(folder, tmp_path):
    pets = split_pets(tmp_path / "pets", "val/0", "Training/1", "testing/0", "validation/1", "train/0")
    found = imported("mine", pets, folder)
    assert (found.x[:, 0, 0].tolist(), found.y.tolist(), found.n_train) == ([4, 1, 0, 3, 2], [0, 1, 0, 1, 0], 4)


def test_a_folder_of_training_images_only(folder, tmp_path):
    found = imported("mine", split_pets(tmp_path / "pets", "train/a", "train/b"), folder)
    assert (found.x[:, 0, 0].tolist(), found.n_train) == ([0, 1], 2)


def test_classes_may_be_called_train_and_test(folder, tmp_path):
    found = imported("mine", split_pets(tmp_path / "pets", "train", "test"), folder)
    assert (found.labels, found.n_train) == (("test", "train"), 0)


def test_bad_splits_are_refused(folder, tmp_path):
    pets = split_pets(tmp_path / "pets", "test/a", "test/b")
    refused("pets has test images only: put the others into a folder train", pets, folder)
    split_pets(pets, "train/a")
    refused("test/b holds test images of class 'b', which has no training images: add some", pets, folder)
    split_pets(pets, "train/b", "other/a")
    refused("pets/other is beside train: move it into a folder for training or testing", pets, folder)
    (pets / "other").rename(pets / "valid")
    (pets / "train/c").mkdir()
    refused("train/c is empty: put the images of class 'c' into it", pets, folder)
    picture(pets / "train/c/deep/x.png", GREY)
    refused("c/deep is a folder: the images of class 'c' must lie in", pets, folder)


def test_rows_without_an_image_are_dropped(folder, tmp_path):
    rows = letters(5)
    cells = [
        {"bytes": None, "path": None} if row in (0, 3) else cell
        for row, cell in enumerate(rows.data["image"].to_pylist())
    ]
    path = arrow(tmp_path / "t.parquet", image=pyarrow.array(cells), label=["x", "y", None, "y", "x"])
    refused(
        "the image in row 1 of column 'image' of .* is missing: remove the row, or choose --missing drop", path, folder
    )
    refused("row 1 of column 'image' of .* is missing", path, folder, missing="impute")
    found = imported("mine", path, folder, missing="drop")
    np.testing.assert_array_equal(found.x, np.stack([GREY + 1, GREY + 4]))
    assert [found.labels[at] for at in found.y] == ["y", "x"]


def test_a_folder_that_may_not_be_read_is_refused(folder, tmp_path, monkeypatch):
    picture(tmp_path / "pets/a/x.png", GREY)

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    refused("pets cannot be imported .*Permission denied.*: make all of it readable", tmp_path / "pets", folder)


# Hugging Face datasets.


def letters(rows, start=0):
    features = datasets.Features(
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
    return datasets.Dataset.from_dict(columns, features=features)


def test_a_saved_dataset_of_images(folder, tmp_path):
    letters(5).save_to_disk(tmp_path / "saved")
    found = imported("mine", tmp_path / "saved", folder, label="character", client="writer")
    np.testing.assert_array_equal(found.x, np.stack([GREY + number for number in range(5)]))
    assert (found.y.tolist(), found.labels) == ([1, 0, 1, 0, 1], ("ant", "zebra"))
    assert (found.clients.tolist(), found.client_names) == ([0, 1, 2, 0, 1], ("w0", "w1", "w2"))
    assert found.n_train == 0


def test_of_several_splits_the_training_samples_come_first(folder, tmp_path):
    datasets.DatasetDict({"test": letters(2, start=3), "train": letters(3)}).save_to_disk(tmp_path / "saved")
    found = imported("mine", tmp_path / "saved", folder, label="character")
    np.testing.assert_array_equal(found.x, np.stack([GREY + number for number in range(5)]))
    assert found.n_train == 3


def test_a_registered_dataset_keeps_its_label_numbers(folder, tmp_path):
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["T-shirt", "Ankle boot"])}
    )
    images = [Image.fromarray(np.full((28, 28), value, np.uint8)) for value in (1, 2)]
    saved = datasets.Dataset.from_dict({"image": images, "label": [1, 0]}, features=features)
    saved.save_to_disk(tmp_path / "saved")
    found = imported("fmnist", tmp_path / "saved", folder)
    assert (found.y.tolist(), found.labels) == ([1, 0], tuple(range(10)))


def test_a_saved_table_of_chosen_rows(folder, tmp_path):
    saved = datasets.Dataset.from_dict({"a": [1.0, 2.0, 3.0], "b": [4, 5, 6], "label": ["x", "y", "z"]})
    saved.select([2, 0]).save_to_disk(tmp_path / "saved")
    found = imported("mine", tmp_path / "saved", folder)
    assert (found.x.tolist(), found.labels, found.y.tolist()) == ([[3, 6], [1, 4]], ("x", "z"), [1, 0])


def test_images_in_parquet_are_images_too(folder, tmp_path):
    letters(4).to_parquet(tmp_path / "t.parquet")
    found = imported("mine", tmp_path / "t.parquet", folder, label="character")
    np.testing.assert_array_equal(found.x, np.stack([GREY + number for number in range(4)]))
    assert found.labels == (0, 1)


def test_bad_saved_datasets_are_refused(folder, tmp_path):
    saved = tmp_path / "saved"
    letters(4).save_to_disk(saved)
    refused("did you mean 'character'", saved, folder, label="charactr")
    refused("unknown column for --client .* 'who'", saved, folder, label="character", client="who")
    refused("images in column 'image': labels and clients are whole numbers or names", saved, folder, label="image")
    features = datasets.Features({"a": datasets.Array2D((2, 2), "uint8"), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"a": [[[1, 2], [3, 4]]] * 2, "label": [0, 1]}, features).save_to_disk(
        tmp_path / "arrays"
    )
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
    refused("has images in image and other: leave out all but one", tmp_path / "two", folder)
    (saved / "state.json").write_text("{")
    refused("saved cannot be read as a Hugging Face dataset", saved, folder, label="character")


def test_a_label_without_a_class_name_is_missing(folder, tmp_path):
    features = datasets.Features({"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=["x", "y"])})
    saved = datasets.Dataset.from_dict({"a": [1, 2, 3], "label": [0, 1, -1]}, features=features)
    saved.save_to_disk(tmp_path / "saved")
    refused("no label in row 3 of column 'label'", tmp_path / "saved", folder)


@pytest.mark.parametrize(("library", "extra"), [("pyarrow", "tables"), ("datasets", "hf")])
def test_what_is_not_installed_is_named_with_its_extra(folder, tmp_path, monkeypatch, library, extra):
    letters(2).save_to_disk(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, library, None)
    path = tmp_path / "saved" if library == "datasets" else tmp_path / "t.parquet"
    (tmp_path / "t.parquet").touch()
    refused(rf"pip install 'fedobp\[{extra}\]'", path, folder)
