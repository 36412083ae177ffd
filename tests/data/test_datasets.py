"""Datasets: the data folder, storing and loading, and user errors."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedobp.data import Info, data_dir, dataset_names, describe, import_dataset, load
from fedobp.data.dataset import parse
from fedobp.errors import FedobpError

TABLE = np.arange(24, dtype=np.float32).reshape(8, 3)
LABELS = np.arange(8) % 4
IMAGES = np.zeros((8, 28, 28), np.uint8)


@pytest.fixture
def source(tmp_path):
    """A function that writes arrays to an npz file and returns its path."""

    def save(**arrays):
        path = tmp_path / "source.npz"
        np.savez(path, **arrays)
        return path

    return save


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


# The data folder.


def test_the_given_folder_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("FEDOBP_DATA", "/elsewhere")
    assert data_dir("/here") == Path("/here")


def test_the_environment_comes_before_the_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv("FEDOBP_DATA", "/elsewhere")
    assert data_dir() == Path("/elsewhere")


def test_the_cache_folder_comes_last(monkeypatch):
    monkeypatch.delenv("FEDOBP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_dir() == Path("/cache/fedobp/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert data_dir() == Path("/home/someone/.cache/fedobp/data")


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert data_dir("~/data") == Path("/home/someone/data")
    monkeypatch.setenv("FEDOBP_DATA", "~/other")
    assert data_dir() == Path("/home/someone/other")


def test_names_are_the_registered_ones_and_then_the_imported_ones_sorted(folder, source):
    registered = dataset_names(folder)
    assert {"digits", "mnist", "fmnist", "emnist", "cifar10", "cifar100", "svhn"} < set(registered)
    for name in ("zebras", "ants.v2"):
        import_dataset(name, source(x=TABLE, y=LABELS), folder)
    import_dataset("mnist", source(x=IMAGES, y=LABELS), folder)
    assert dataset_names(folder) == [*registered, "ants.v2", "zebras"]


# Storing and loading.


def test_digits_need_no_file(folder):
    digits = load("digits", folder)
    assert digits.x.shape == (1797, 8, 8)
    assert digits.x.dtype == np.uint8
    assert (digits.x.min(), digits.x.max()) == (0, 16)
    assert (digits.y.shape, digits.y.dtype) == ((1797,), np.int64)
    assert np.unique(digits.y).tolist() == list(digits.labels) == list(range(10))
    assert digits.classes == 10
    assert not folder.exists()


@pytest.mark.parametrize(
    "x",
    [
        np.arange(8 * 4 * 4, dtype=np.uint8).reshape(8, 4, 4),
        np.arange(8 * 2 * 2 * 3, dtype=np.uint8).reshape(8, 2, 2, 3),
        TABLE,
    ],
    ids=["grey", "colour", "table"],
)
def test_inputs_are_stored_unchanged(folder, source, x):
    returned = import_dataset("mine", source(x=x, y=LABELS), folder)
    for dataset in (returned, load("mine", folder)):
        np.testing.assert_array_equal(dataset.x, x)
        assert dataset.x.dtype == x.dtype
        np.testing.assert_array_equal(dataset.y, LABELS)
        assert (dataset.name, dataset.n_train) == ("mine", 0)
    assert list(files(folder)) == ["mine.npz"]


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_floats_become_float32(folder, source, dtype):
    import_dataset("mine", source(x=TABLE.astype(dtype) / 7, y=LABELS), folder)
    loaded = load("mine", folder)
    assert loaded.x.dtype == np.float32
    np.testing.assert_array_equal(loaded.x, (TABLE.astype(dtype) / 7).astype(np.float32))


def test_labels_may_be_a_column(folder, source):
    import_dataset("mine", source(x=TABLE, y=LABELS[:, None].astype(np.uint8)), folder)
    assert load("mine", folder).y.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_labels_are_numbered_in_ascending_order_and_keep_their_names(folder, source):
    import_dataset("mine", source(x=TABLE, y=np.array([7, -3, 7, 100, 100, -3, 7, 7])), folder)
    loaded = load("mine", folder)
    assert loaded.y.tolist() == [1, 0, 1, 2, 2, 0, 1, 1]
    assert loaded.labels == (-3, 7, 100)
    assert loaded.classes == 3
    with np.load(folder / "mine.npz", allow_pickle=False) as arrays:
        assert arrays["y"].tolist() == [7, -3, 7, 100, 100, -3, 7, 7]


@pytest.mark.parametrize("n_train", [0, 5, 8])
@pytest.mark.parametrize("wrap", [np.int64, lambda n: np.array([n])], ids=["number", "array of one"])
def test_the_official_split_is_kept(folder, source, n_train, wrap):
    import_dataset("mine", source(x=TABLE, y=LABELS, n_train=wrap(n_train)), folder)
    assert load("mine", folder).n_train == n_train


def test_a_registered_dataset_has_all_its_classes_even_those_that_do_not_occur(folder, source):
    import_dataset("organamnist", source(x=IMAGES, y=np.full(8, 4)), folder)
    loaded = load("organamnist", folder)
    assert loaded.classes == 11
    assert loaded.y.tolist() == [4] * 8


def test_a_registered_grey_dataset_may_have_a_channel_axis(folder, source):
    import_dataset("mnist", source(x=IMAGES[..., None], y=LABELS), folder)
    assert load("mnist", folder).x.shape == (8, 28, 28, 1)


def test_a_compressed_file_is_read_too(folder, tmp_path):
    np.savez_compressed(tmp_path / "small.npz", x=TABLE, y=LABELS)
    import_dataset("mine", tmp_path / "small.npz", folder)
    np.testing.assert_array_equal(load("mine", folder).x, TABLE)


# User errors leave no file behind.

REFUSED = {
    "no x": ("mine", {"y": LABELS}, r"'mine' has no array 'x' \(it has y\): save x and y with np.savez"),
    "no y": ("mine", {"x": TABLE}, r"'mine' has no array 'y' \(it has x\): save x and y"),
    "nothing": ("mine", {}, r"has no array 'x' \(it has nothing\)"),
    "x of one axis": ("mine", {"x": TABLE[:, 0], "y": LABELS}, r"x of shape \(8,\) .* x must be \[N, features\]"),
    "x of five axes": ("mine", {"x": TABLE.reshape(8, 3, 1, 1, 1), "y": LABELS}, r"x of shape \(8, 3, 1, 1, 1\)"),
    "y of two columns": ("mine", {"x": TABLE, "y": LABELS.repeat(2).reshape(8, 2)}, r"y of shape \(8, 2\): .* y \[N\]"),
    "lengths differ": ("mine", {"x": TABLE, "y": LABELS[:7]}, r"x of shape \(8, 3\) and y of shape \(7,\)"),
    "empty": ("mine", {"x": TABLE[:0], "y": LABELS[:0]}, r"x of shape \(0, 3\)"),
    "no features": ("mine", {"x": TABLE[:, :0], "y": LABELS}, r"x of shape \(8, 0\)"),
    "integer x": ("mine", {"x": TABLE.astype(np.int64), "y": LABELS}, "x of type int64: convert it to uint8 or float"),
    "NaN": ("mine", {"x": np.where(TABLE == 5, np.nan, TABLE), "y": LABELS}, "NaN or infinite values in x: remove"),
    "infinite": ("mine", {"x": np.where(TABLE == 5, -np.inf, TABLE), "y": LABELS}, "NaN or infinite values in x"),
    "too large for float32": (
        "mine",
        {"x": np.where(TABLE == 5, 1e300, TABLE.astype(float)), "y": LABELS},
        "NaN or infinite values in x",
    ),
    "float labels": (
        "mine",
        {"x": TABLE, "y": LABELS.astype(float)},
        "labels of type float64: y must hold integers or texts",
    ),
    "one class": ("mine", {"x": TABLE, "y": np.full(8, 6)}, "has only the label 6: there is nothing to learn"),
    "negative label": (
        "mnist",
        {"x": IMAGES, "y": LABELS - 1},
        "labels from -1 to 2, and mnist has 0 to 9: import it under another name",
    ),
    "label too large": ("mnist", {"x": IMAGES, "y": LABELS + 7}, "labels from 7 to 10, and mnist has 0 to 9"),
    "another image shape": (
        "cifar10",
        {"x": IMAGES, "y": LABELS},
        r"samples of shape \(28, 28\), and cifar10 has \(32, 32, 3\): import it under another name",
    ),
    "n_train too large": ("mine", {"x": TABLE, "y": LABELS, "n_train": np.int64(9)}, "n_train 9 of 8 samples: give 0"),
    "n_train negative": ("mine", {"x": TABLE, "y": LABELS, "n_train": np.int64(-1)}, "n_train -1 of 8 samples"),
    "n_train that is text": ("mine", {"x": TABLE, "y": LABELS, "n_train": np.array("many")}, "n_train"),
    "n_train that is no number": ("mine", {"x": TABLE, "y": LABELS, "n_train": np.float64(np.nan)}, "n_train"),
    "pickled x": ("mine", {"x": np.array([{1}, None], dtype=object), "y": LABELS}, "pickled objects, which are never"),
    "pickled y": ("mine", {"x": TABLE, "y": np.array([1, None], dtype=object)}, "pickled objects, which are never"),
}


@pytest.mark.parametrize(("name", "arrays", "sentence"), REFUSED.values(), ids=REFUSED)
def test_bad_arrays_are_refused_with_a_reason(folder, source, name, arrays, sentence):
    with pytest.raises(FedobpError, match=sentence):
        import_dataset(name, source(**arrays), folder)
    assert files(folder) == {}


@pytest.mark.parametrize(("name", "arrays", "sentence"), REFUSED.values(), ids=REFUSED)
def test_bad_arrays_in_the_data_folder_are_refused_too(folder, name, arrays, sentence):
    folder.mkdir()
    np.savez(folder / f"{name}.npz", **arrays)
    with pytest.raises(FedobpError, match=sentence):
        load(name, folder)


def npz_bytes(save=np.savez):
    buffer = io.BytesIO()
    save(buffer, x=TABLE, y=LABELS)
    return buffer.getvalue()


def npy_bytes():
    buffer = io.BytesIO()
    np.save(buffer, TABLE)
    return buffer.getvalue()


def changed_bytes():
    content = bytearray(npz_bytes())
    content[content.find(TABLE.tobytes()) + 5] ^= 1
    return bytes(content)


def garbled_bytes():
    """A compressed file in which x's stream starts with a block type that does not exist."""
    content = bytearray(npz_bytes(np.savez_compressed))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        start = archive.getinfo("x.npy").header_offset
    name, extra = (int.from_bytes(content[start + at : start + at + 2], "little") for at in (26, 28))
    content[start + 30 + name + extra] = 0xFF
    return bytes(content)


def strange_bytes():
    """An archive in which y is no array."""
    buffer = io.BytesIO()
    np.savez(buffer, x=TABLE)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("y.npy", b"something else")
    return buffer.getvalue()


BROKEN = {
    "text": b"this is not a dataset",
    "nothing": b"",
    "a bare array": npy_bytes(),
    "a truncated file": npz_bytes()[:-30],
    "the first half": npz_bytes()[: len(npz_bytes()) // 2],
    "a changed bit": changed_bytes(),
    "a garbled compressed file": garbled_bytes(),
    "a member that is no array": strange_bytes(),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_npz_is_refused_with_its_path(folder, tmp_path, content):
    path = tmp_path / "source.npz"
    path.write_bytes(content)
    with pytest.raises(FedobpError, match=r"source.npz cannot be read as an npz file of plain arrays .*: save it"):
        import_dataset("mine", path, folder)
    assert files(folder) == {}


@settings(
    deadline=None, max_examples=200, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(compressed=st.booleans(), cut=st.integers(0, 700), at=st.integers(0, 699), value=st.integers(0, 255))
@example(compressed=False, cut=700, at=4, value=200)  # a zip version that does not exist
@example(compressed=True, cut=700, at=6, value=1)  # a member that is marked as encrypted
def test_damage_gives_a_dataset_or_a_sentence_and_nothing_else(tmp_path, compressed, cut, at, value):
    content = bytearray(npz_bytes(np.savez_compressed if compressed else np.savez)[:cut])
    if at < len(content):
        content[at] = value
    (tmp_path / "mine.npz").write_bytes(content)
    for ask in (load, describe):
        try:
            ask("mine", tmp_path)
        except FedobpError as error:
            assert "mine" in str(error)  # noqa: PT017 (any outcome but another exception is right)


@pytest.mark.parametrize("pickled", ["x", "y"])
def test_pickles_are_named_as_the_reason_and_never_run(folder, tmp_path, pickled):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    folder.mkdir()
    arrays = {"x": TABLE, "y": LABELS, pickled: np.array([Bomb(), Bomb()], dtype=object)}
    np.savez(folder / "mine.npz", **arrays)
    asked = [lambda: import_dataset("other", folder / "mine.npz", folder), lambda: load("mine", folder)]
    if pickled == "y":  # `describe` reads only the header of x
        asked.append(lambda: describe("mine", folder))
    for ask in asked:
        with pytest.raises(FedobpError, match="it holds pickled objects, which are never read"):
            ask()
    assert not (tmp_path / "exploded").exists()
    assert list(files(folder)) == ["mine.npz"]


def test_a_zip_of_other_things_has_no_x(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "source.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(FedobpError, match=r"source\.npz|no array 'x'"):
        import_dataset("mine", tmp_path / "source.npz", folder)


def test_a_registered_dataset_without_a_file_says_how_to_fetch_it(folder):
    sentence = r"'cifar10' is not in .*data: run `fedobp data fetch cifar10 --data-dir .*data`"
    with pytest.raises(FedobpError, match=sentence):
        load("cifar10", folder)


def test_a_damaged_file_of_a_registered_dataset_can_be_fetched_again(folder):
    folder.mkdir()
    (folder / "mnist.npz").write_bytes(b"half of it")
    with pytest.raises(
        FedobpError,
        match=r"mnist\.npz cannot be read .*, or remove it and run `fedobp data fetch mnist --data-dir .*data`$",
    ):
        load("mnist", folder)


def test_images_with_their_channels_first_are_refused():
    y = np.arange(6) % 2
    with pytest.raises(FedobpError, match=r"shape \(6, 3, 8, 8\), which has its channels first: .*transpose"):
        parse("mine", {"x": np.zeros((6, 3, 8, 8), np.uint8), "y": y})
    assert parse("mine", {"x": np.zeros((6, 3, 8, 3), np.uint8), "y": y}).x.shape == (6, 3, 8, 3)


@pytest.mark.parametrize("ask", [load, describe])
def test_an_unknown_name_suggests_the_nearest(folder, ask):
    with pytest.raises(FedobpError, match="unknown dataset 'minst': did you mean 'mnist'"):
        ask("minst", folder)


@pytest.mark.parametrize("name", ["", "Mine", "a/b", "../up", ".hidden", "-x", "a b", "ä", "mine\n"])
def test_a_name_that_is_no_plain_file_name_is_refused(folder, source, name):
    with pytest.raises(FedobpError, match="cannot name a dataset: use lower-case letters"):
        import_dataset(name, source(x=TABLE, y=LABELS), folder)
    assert files(folder) == {}


def test_an_existing_dataset_is_not_overwritten(folder, source):
    import_dataset("mine", source(x=TABLE, y=LABELS), folder)
    before = files(folder)
    with pytest.raises(FedobpError, match=r"'mine' exists already: import under another name, or remove .*mine.npz"):
        import_dataset("mine", source(x=TABLE + 1, y=LABELS), folder)
    assert files(folder) == before


def test_the_digits_name_is_reserved(folder, source):
    with pytest.raises(FedobpError, match="'digits' is built in: import under another name"):
        import_dataset("digits", source(x=np.zeros((8, 8, 8), np.uint8), y=LABELS), folder)
    assert files(folder) == {}


def test_a_folder_that_cannot_be_made_is_refused(source, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FedobpError, match="file"):
        import_dataset("mine", source(x=TABLE, y=LABELS), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_write_that_fails_leaves_no_file(folder, source, monkeypatch):
    def full(file, **arrays):
        file.write(b"half")
        raise OSError("No space left on device")

    path = source(x=TABLE, y=LABELS)
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises((OSError, FedobpError), match="No space"):
        import_dataset("mine", path, folder)
    assert files(folder) == {}


# Sizes.


def test_describe_an_absent_registered_dataset(folder):
    assert describe("cifar100", folder) == Info("cifar100", None, (32, 32, 3), 100, available=False)


def test_describe_the_digits(folder):
    assert describe("digits", folder) == Info("digits", 1797, (8, 8), 10, available=True)


def test_describe_a_present_dataset(folder, source):
    dataset = import_dataset("mine", source(x=TABLE, y=np.array([7, -3, 7, 100, 100, -3, 7, 7])), folder)
    assert describe("mine", folder) == dataset.info == Info("mine", 8, (3,), 3, available=True)


def test_describe_a_present_registered_dataset_counts_all_its_classes(folder, source):
    import_dataset("mnist", source(x=IMAGES, y=LABELS), folder)
    assert describe("mnist", folder) == Info("mnist", 8, (28, 28), 10, available=True)


@pytest.mark.parametrize("content", [BROKEN["text"], BROKEN["a bare array"], BROKEN["a truncated file"]])
def test_describe_a_damaged_dataset_names_its_file(folder, content):
    folder.mkdir()
    (folder / "mine.npz").write_bytes(content)
    with pytest.raises(FedobpError, match=r"mine.npz cannot be read as an npz file .*damaged"):
        describe("mine", folder)


def test_a_file_that_may_not_be_read_says_so(folder, monkeypatch):
    folder.mkdir()
    (folder / "mine.npz").write_bytes(npz_bytes())

    def forbidden(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(zipfile, "ZipFile", forbidden)
    monkeypatch.setattr(Path, "open", forbidden)
    for look in (describe, load):
        with pytest.raises(FedobpError, match=r"mine.npz may not be read \(Permission denied\): ask its owner"):
            look("mine", folder)


SEEN = {case: REFUSED[case] for case in ("no x", "no y", "float labels", "one class", "label too large", "pickled y")}
SEEN |= {"a scalar x": ("mine", {"x": np.float32(1), "y": LABELS}, ""), "empty": REFUSED["empty"]}


@pytest.mark.parametrize(("name", "arrays", "_"), SEEN.values(), ids=SEEN)
def test_describe_refuses_what_it_can_see(folder, name, arrays, _):
    folder.mkdir()
    np.savez(folder / f"{name}.npz", **arrays)
    with pytest.raises(FedobpError):
        describe(name, folder)
