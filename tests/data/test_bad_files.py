"""Bad files: any content, any size and anything that is not a regular file gives a one-sentence user error."""

import io
import json
import os
import socket
import struct
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from importer_cases import arrow, picture, refused
from PIL import Image

from fedobp import Config, Federation, Model
from fedobp.data import describe, fetch, import_dataset, list_datasets, load, load_partition, partition, save_partition
from fedobp.data.dataset import parse
from fedobp.data.images import ImageArray
from fedobp.errors import FedobpError

TABLE, LABELS = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8) % 4
GREY = np.arange(64).reshape(8, 8)


@pytest.fixture
def set_free_memory(monkeypatch):
    """A function that sets the number of free bytes."""

    def set_free(size):
        monkeypatch.setattr("fedobp.data.free_memory.free_bytes", lambda: float(size))

    return set_free


def header(text, values=b"", version=1):
    """An array in npy format with any header."""
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes((version, 0)) + length + text.encode("latin1") + values


def shape(shape, kind="<f4"):
    return "{'descr': '" + kind + "', 'fortran_order': False, 'shape': " + shape + ", }"


def archive(path, compression=zipfile.ZIP_STORED, **members):
    """An npz file of a valid x and y, except for the given members."""
    whole = {"x": TABLE, "y": LABELS, **members}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, value in whole.items():
            if isinstance(value, np.ndarray):
                buffer = io.BytesIO()
                np.save(buffer, value)
                value = buffer.getvalue()
            file.writestr(f"{name}.npy", value)
    return path


HEADERS = {
    "an open bracket": "{'descr': '<f4', 'shape': (8, 3, ",
    "an open text": "{'descr': '<f4",
    "brackets without end": "(" * 9000,
    "4 TB": shape("(1048576, 1048576)"),
    "more than can be counted": shape("(4294967296, 4294967296, 4294967296)"),
    "a number of 5,000 digits": shape(f"({'9' * 5000}, 3)"),
    "a negative length": shape("(-8, -3)"),
    "a fraction": shape("(8.0, 3)"),
    "texts without characters": shape("(1000000000000000,)", "<U0"),
    "no such type": shape("(8, 3)", "<q9"),
    "no header": "",
    "a list": "[1, 2, 3]",
    "NUL": "\0" * 64,
}


@pytest.mark.parametrize("key", ["x", "y"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("text", HEADERS.values(), ids=HEADERS)
def test_any_header_gives_a_sentence(folder, key, version, text):
    folder.mkdir()
    archive(folder / "mine.npz", **{key: header(text, TABLE.tobytes(), version)})
    np.savez(folder / "good.npz", x=TABLE, y=LABELS)
    for ask in (load, describe, lambda name, folder: import_dataset("other", folder / f"{name}.npz", folder)):
        with pytest.raises(FedobpError, match=r"mine.npz cannot be read as an npz file of plain arrays") as caught:
            ask("mine", folder)
        assert len(str(caught.value)) < 600
    found = {info.name: info.available for info in list_datasets(folder)}
    assert (found["mine"], found["good"]) == (False, True)


@pytest.mark.parametrize("key", ["x", "y", "other"])
def test_an_array_larger_than_free_memory_is_refused_unread(folder, tmp_path, set_free_memory, key):
    """A zip bomb: 64 MB of zeros in 64 kB, with a correct header."""
    zeros = header(shape("(8, 2097152)"), bytes(8 * 2097152 * 4))
    path = archive(tmp_path / "mine.npz", zipfile.ZIP_DEFLATED, **{key: zeros})
    assert path.stat().st_size < 100_000
    set_free_memory(2**24)
    refused(r"reading .*mine.npz needs more memory than there is \(asked for: 64 MiB; free: 16 MiB\)", path, folder)
    with pytest.raises(FedobpError, match="needs more memory than there is"):
        load("mine", tmp_path)


def test_an_array_longer_than_its_archive_says_is_refused(folder, tmp_path):
    path = archive(tmp_path / "mine.npz", x=header(shape("(8, 3)"), TABLE.tobytes() + b"more"))
    refused("x.npy is not as long as it says", path, folder)


@pytest.mark.parametrize("target", ["fedobp.data.npz.np.lib.format.read_array", "fedobp.data.datasets.np.isfinite"])
def test_a_memory_error_becomes_a_user_error(folder, tmp_path, monkeypatch, target):
    def out_of_memory(*_, **__):
        raise MemoryError("Unable to allocate 7.00 TiB for an array")

    folder.mkdir()
    np.savez(folder / "mine.npz", x=TABLE, y=LABELS)
    monkeypatch.setattr(target, out_of_memory)
    for ask in (load, lambda name, folder: import_dataset("other", folder / f"{name}.npz", folder)):
        with pytest.raises(
            FedobpError, match=r"more memory than there is .*: use fewer or smaller samples, or a machi"
        ):
            ask("mine", folder)


def test_floats_are_converted_only_if_memory_suffices(set_free_memory):
    set_free_memory(100)
    with pytest.raises(FedobpError, match=r"dataset 'mine' needs more memory .*asked for: 120 bytes; free: 100 bytes"):
        parse("mine", {"x": TABLE.astype(np.float64), "y": LABELS})


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"y": np.arange(8).astype("m8[s]")}, r"labels of type timedelta64\[s\]"),
        ({"client": np.arange(8).astype("m8[s]")}, "clients of type timedelta64"),
        ({"n_train": np.array(3, "m8[s]")}, "n_train that is no whole number"),
        ({"x": TABLE.astype("m8[s]")}, "x of type timedelta64"),
        ({"y": np.full(8, 0x00FFFFFF, "<u4").view("<U1")}, "names in y that are no text"),
        ({"y": np.array(["a" * 5000 + "\n"] * 8)}, "has only the label aaa.*…"),
        ({"y": LABELS.reshape(2, 4)}, r"y of shape \(2, 4\)"),
        ({"client": LABELS.reshape(2, 4)}, r"client of shape \(2, 4\)"),
    ],
)
def test_arrays_of_strange_types_are_refused(folder, arrays, sentence):
    folder.mkdir()
    np.savez(folder / "mine.npz", **{"x": TABLE, "y": LABELS, **arrays})
    with pytest.raises(FedobpError, match=sentence) as caught:
        load("mine", folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert [info.name for info in list_datasets(folder)][-1] == "mine"


# Images.


@pytest.mark.parametrize("free", [200, 2000])
def test_images_that_do_not_fit_are_refused(folder, tmp_path, set_free_memory, free):
    for at in range(40):
        picture(tmp_path / f"pets/{at % 2}/{at}.png", GREY)
    set_free_memory(free)  # too little for one image, or for all of them
    what = r"pets/0/0.png" if free < 512 else "40 images of 8 x 8 pixels, grey"
    refused(f"{what} needs more memory than there is .*asked for: (512|2,560) bytes", tmp_path / "pets", folder)


def test_an_image_of_far_too_many_pixels_is_refused_before_it_is_unpacked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)  # at 64 pixels Pillow warns
    picture(tmp_path / "pets/a/x.png", GREY)
    refused("x.png cannot be read as an image .*decompression bomb", tmp_path / "pets", folder)


def test_mapped_colour_images_are_copied_only_if_memory_suffices(folder, set_free_memory):
    folder.mkdir()
    np.savez(folder / "mine.npz", x=np.zeros((20, 8, 8, 3), np.uint8), y=np.arange(20) % 2)
    config = Config(dataset="mine", data_dir=str(folder))
    set_free_memory(3839)
    with pytest.raises(FedobpError, match=r"'mine' needs more memory than there is \(asked for: 3,840 bytes"):
        Federation(config)


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(FedobpError, match="model 'mlp' for inputs of shape 1099511627776 needs more memory"):
        Model("mlp", (2**40,), 2)


# Not a regular file.


def a_pipe(path):
    os.mkfifo(path)


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(path.parent)  # socket addresses have a short maximum length
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def a_link_to_nowhere(path):
    path.symlink_to(path.parent / "nowhere")


def a_link_to_itself(path):
    path.symlink_to(path)


def a_link_to_a_pipe(path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def a_link_to_a_device(path):
    path.symlink_to("/dev/zero")


NOT_FILES = [a_pipe, a_socket, Path.mkdir, a_link_to_nowhere, a_link_to_itself, a_link_to_a_pipe, a_link_to_a_device]
not_a_regular_file = pytest.mark.parametrize("make", NOT_FILES, ids=lambda make: make.__name__)


@not_a_regular_file
def test_in_the_data_folder_it_is_no_dataset(folder, make):
    folder.mkdir()
    make(folder / "mine.npz")
    np.savez(folder / "good.npz", x=TABLE, y=LABELS)
    for ask in (load, describe):
        with pytest.raises(FedobpError, match=r"mine.npz"):
            ask("mine", folder)
    with pytest.raises(FedobpError, match="'mine' exists already"):
        import_dataset("mine", folder / "good.npz", folder)
    assert [(info.name, info.available) for info in list_datasets(folder)][-2:] == [("good", True), ("mine", False)]


@not_a_regular_file
@pytest.mark.parametrize("name", ["mine.npz", "mine.csv", "mine.parquet", "mine"])
def test_as_a_source_it_is_refused(folder, tmp_path, name, make):
    make(tmp_path / name)
    refused(r"mine", tmp_path / name, folder)


@not_a_regular_file
def test_among_images_it_is_refused(folder, tmp_path, make):
    picture(tmp_path / "pets/a/1.png", GREY)
    make(tmp_path / "pets/a/2.png")
    refused("2.png", tmp_path / "pets", folder)


@not_a_regular_file
def test_in_a_saved_dataset_it_is_refused(folder, tmp_path, make):
    datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": ["x", "y"]}).save_to_disk(tmp_path / "saved")
    [data] = (tmp_path / "saved").glob("*.arrow")
    data.unlink()
    make(data)
    refused("arrow|saved", tmp_path / "saved", folder)


def test_a_pipe_that_a_table_names_as_an_image_is_refused(folder, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    column = pyarrow.array([{"bytes": None, "path": str(tmp_path / "pipe.png")}] * 2)
    refused("pipe.png is a named pipe, not a file", arrow(tmp_path / "t.parquet", image=column, label=[0, 1]), folder)
    numbers = pyarrow.array([{"bytes": 3}] * 2)
    refused("row 1 .* is neither bytes nor the path", arrow(tmp_path / "t.parquet", i=numbers, label=[0, 1]), folder)


@not_a_regular_file
def test_among_downloads_it_is_refused(folder, make):
    target = folder / "downloads" / "organcmnist"
    target.mkdir(parents=True)
    make(target / "organcmnist.npz")
    with pytest.raises(FedobpError, match=r"organcmnist\.npz"):
        fetch(["organcmnist"], folder)


# Partitions.


@pytest.fixture
def digits(folder):
    return load("digits", folder)


@pytest.fixture
def saved(tmp_path, digits):
    save_partition(tmp_path / "mine", digits, partition(digits.y, 4), {"clients": 4, "holdout_clients": 0})
    return tmp_path / "mine"


@not_a_regular_file
@pytest.mark.parametrize("kind", ["json", "npz"])
def test_as_a_partition_it_is_refused(saved, digits, make, kind):
    file = saved.with_suffix(f".{kind}")
    file.unlink()
    make(file)
    with pytest.raises(FedobpError, match=rf"mine\.{kind}"):
        load_partition(saved, digits)
    with pytest.raises(FedobpError, match=r"mine\.(npz|json) exists already"):
        save_partition(saved, digits, partition(digits.y, 4), {})


@pytest.mark.parametrize(
    ("key", "value"), [("turns", 7), ("turns", -1), ("noise", np.nan), ("noise", -1.0), ("seeds", -1)]
)
def test_a_partition_of_impossible_numbers_is_refused_even_with_the_right_hash(saved, digits, monkeypatch, key, value):
    arrays = dict(np.load(saved.with_suffix(".npz"), allow_pickle=False))
    arrays[key][0] = value
    np.savez(saved.with_suffix(".npz"), **arrays)
    monkeypatch.setattr(
        "fedobp.data.partition_file._content_hash", lambda *_: json.loads(Path(f"{saved}.json").read_text())["hash"]
    )
    with pytest.raises(FedobpError, match="does not have the content that its json file names"):
        load_partition(saved, digits)


def test_a_partition_without_training_samples_is_refused(tmp_path, digits):
    nothing = np.zeros(0, np.int64)
    shards = [replace(shard, train=nothing, val=shard.train) for shard in partition(digits.y, 2)]
    save_partition(tmp_path / "mine", digits, shards, {"clients": 2, "holdout_clients": 0})
    with pytest.raises(FedobpError, match="does not have the content"):
        load_partition(tmp_path / "mine", digits)


def test_a_partition_is_saved_whole_or_not_at_all(tmp_path, digits, monkeypatch):
    def full(*_):
        raise FedobpError("no space")

    monkeypatch.setattr("fedobp.data.partition_file.write_checked_json", full)
    with pytest.raises(FedobpError, match="no space"):
        save_partition(tmp_path / "mine", digits, partition(digits.y, 4), {})
    assert not list(tmp_path.glob("mine*"))


# Error messages stay short.

LONG = "x" * 5000
WORDY = {
    "a cell": f"label,a\n0,{LONG}\n1,2\n",
    "a column": f"label,{LONG}\n0,red\n1,2\n",
    "columns": f"label,{LONG},{LONG}\n0,1,2\n",
    "other columns": "".join(f"{LONG}{at}," for at in range(100)) + "end\n",
    "a label": f"label,a\n{LONG},1\n{LONG},2\n",
    "line ends": '"la\nbel","b\r\n"\n0,1\n',
    "fractions": f"label,a\n0.{'5' * 5000},1\n2,1\n",
    "digits that only Python knows": "label,a\n0,١٢\n1,x\n",
}


@pytest.mark.parametrize("text", WORDY.values(), ids=WORDY)
def test_a_long_text_is_shortened(folder, tmp_path, text):
    (tmp_path / "t.csv").write_bytes(text.encode())
    with pytest.raises(FedobpError) as caught:
        import_dataset("mine", tmp_path / "t.csv", folder)
    assert len(str(caught.value)) < 4000  # at most fifty column names, each shortened
    assert "\n" not in str(caught.value)


def test_very_long_labels_are_refused_if_memory_does_not_suffice(folder, tmp_path, set_free_memory):
    (tmp_path / "t.csv").write_text("label,a\n" + "a,1\nb,2\n" * 50 + f"{LONG},3\n")
    set_free_memory(100_000)
    refused(r"the labels of .*t.csv needs more memory than there is", tmp_path / "t.csv", folder)


def test_a_table_is_refused_when_its_rows_no_longer_fit(folder, tmp_path, set_free_memory):
    (tmp_path / "t.csv").write_text("label,a\n" + "1,1\n2,2\n" * 50)
    set_free_memory(399)
    refused(r"t.csv, .* needs more memory than there is \(asked for: 400 bytes; free: 399", tmp_path / "t.csv", folder)


# Damaged files.


def contents(tmp_path):
    table = arrow(tmp_path / "t.parquet", a=list(range(20)), label=["x", "y"] * 10).read_bytes()
    good = io.BytesIO()
    Image.fromarray(GREY.astype(np.uint8)).save(good, "png")
    images = arrow(tmp_path / "t.parquet", i=[{"bytes": good.getvalue(), "path": None}] * 4, label=[0, 1] * 2)
    return {"parquet": table, "images": images.read_bytes(), "csv": b"label,a\n0,1.5\n1,2e3\n", "png": good.getvalue()}


@settings(
    deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kind=st.sampled_from(["parquet", "images", "csv", "png"]),
    cut=st.floats(0, 2),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
)
def test_damage_gives_data_or_a_sentence(tmp_path, kind, cut, changes):
    content = bytearray(contents(tmp_path)[kind])
    for at, value in changes:
        content[int(at * (len(content) - 1))] = value
    content = content[: int(cut * len(content))]
    path = tmp_path / f"damaged.{'csv' if kind == 'csv' else 'parquet'}"
    path.write_bytes(content)
    (tmp_path / "data/mine.npz").unlink(missing_ok=True)
    try:
        ImageArray(1).add("it", bytes(content)) if kind == "png" else import_dataset("mine", path, tmp_path / "data")
    except FedobpError as error:
        assert "\n" not in str(error)  # noqa: PT017 (any outcome but another exception is right)


def test_an_arrow_file_with_impossible_offsets_is_refused(folder, tmp_path):
    """Invalid offsets would read arbitrary memory."""
    datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": ["first", "second"]}).save_to_disk(tmp_path / "saved")
    [file] = (tmp_path / "saved").glob("*.arrow")
    content = file.read_bytes()
    offsets = struct.pack("<3i", 0, 5, 11)
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, struct.pack("<3i", 0, 2**30, 2**31 - 1)))
    refused("cannot be read as a Hugging Face dataset", tmp_path / "saved", folder)


# What an image or a name may not be.


def test_a_script_is_no_image(folder, tmp_path, monkeypatch):
    """Pillow would give an EPS file to Ghostscript, which executes it."""
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "pets/a").mkdir(parents=True)
    (tmp_path / "pets/a/1.png").write_bytes(script)
    with Image.open(io.BytesIO(script)) as image:
        assert image.format == "EPS"
    refused("1.png cannot be read as an image .no image of a known format", tmp_path / "pets", folder)


def test_a_small_file_is_not_believed_to_be_a_large_image(folder, tmp_path):
    """80 million pixels in 70 bytes: they would take hundreds of megabytes."""
    path = picture(tmp_path / "pets/a/1.png", GREY)
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", 8000, 10_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(content)
    refused("1.png has .* bytes and says that it has 80,000,000 pixels: repair it", tmp_path / "pets", folder)


def test_names_that_no_file_can_hold_are_refused(folder):
    folder.mkdir()
    np.savez(folder / "mine.npz", x=TABLE, y=np.full(8, 0xD800, "<u4").view("<U1"))
    with pytest.raises(FedobpError, match="names in y that are no text"):
        load("mine", folder)
