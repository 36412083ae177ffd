"""Readers of the official formats: order and orientation of samples, and damaged files."""

import gzip
import io
import re
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from official_files import TRAIN, cifar_record, idx, official, tarred, zipped

from fedobp.data import REGISTRY, formats
from fedobp.data.sources import SOURCES, read
from fedobp.errors import FedobpError

NAMES = [name for name in REGISTRY if name != "digits"]


@pytest.fixture
def put(tmp_path):
    """A function that writes files and returns their paths in the order a source lists them."""

    def write(name, files):
        for file, content in files.items():
            (tmp_path / file).write_bytes(content)
        return [tmp_path / file.name for file in SOURCES[name].files]

    return write


@pytest.mark.parametrize("chunk", [1, 3, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_official_files_are_read_whole_in_order(put, monkeypatch, name, chunk):
    monkeypatch.setattr(formats, "CHUNK", chunk)
    files, x, y, n_train = official(name)
    shares = []
    arrays = read(name, put(name, files), shares.append)
    np.testing.assert_array_equal(arrays["x"], x)
    np.testing.assert_array_equal(arrays["y"], y)
    assert arrays["x"].dtype == np.uint8
    assert arrays["n_train"] == n_train == TRAIN
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def mnist_files(images, labels):
    parts = {"train": slice(1), "t10k": slice(1, None)}
    contents = (
        {f"{part}-images-idx3-ubyte.gz": images[at], f"{part}-labels-idx1-ubyte.gz": labels[at]}
        for part, at in parts.items()
    )
    return {name: gzip.compress(idx(array)) for content in contents for name, array in content.items()}


def test_emnist_images_are_transposed(put):
    transposed = np.zeros((2, 28, 28), np.uint8)
    transposed[0, 3, :10] = 1  # in the file, a stroke along row 3 ...
    members = {}
    for part, at in (("train", slice(1)), ("test", slice(1, None))):
        members[f"gzip/emnist-byclass-{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(transposed[at]))
        members[f"gzip/emnist-byclass-{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx(np.array([61], np.uint8)))
    x = read("emnist", put("emnist", {"gzip.zip": zipped(members)}))["x"]
    assert x[0, :10, 3].tolist() == [1] * 10  # ... is one down column 3
    assert x.sum() == 10


def test_mnist_images_are_unchanged(put):
    images = np.zeros((2, 28, 28), np.uint8)
    images[0, 3, :10] = 1
    x = read("mnist", put("mnist", mnist_files(images, np.array([5, 6], np.uint8))))["x"]
    assert x[0, 3, :10].tolist() == [1] * 10


def test_a_cifar_sample_is_a_label_and_three_planes(put):
    record = bytes([9]) + bytes([1]) * 1024 + bytes([2]) * 1023 + bytes([77]) + bytes([3]) * 1024
    members = {f"cifar-10-batches-bin/data_batch_{k}.bin": b"" for k in range(2, 6)}
    members |= {f"cifar-10-batches-bin/{name}.bin": record for name in ("data_batch_1", "test_batch")}
    arrays = read("cifar10", put("cifar10", {"cifar-10-binary.tar.gz": tarred(members)}))
    assert arrays["y"].tolist() == [9, 9]
    assert arrays["x"][0, 0, 0].tolist() == [1, 2, 3]
    assert arrays["x"][1, 31, 31].tolist() == [1, 77, 3]
    assert cifar_record([9], arrays["x"][0]) == record
    assert arrays["n_train"] == 1


def test_cifar100_uses_the_fine_label(put):
    members = {f"cifar-100-binary/{part}.bin": bytes([19, 99]) + bytes(3072) for part in ("train", "test")}
    assert read("cifar100", put("cifar100", {"cifar-100-binary.tar.gz": tarred(members)}))["y"].tolist() == [99, 99]


def test_svhns_label_10_is_the_digit_0(put):
    files, _, y, _ = official("svhn")
    assert y[:3].tolist() == [0, 9, 0]
    assert read("svhn", put("svhn", files))["y"][:3].tolist() == [0, 9, 0]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_idx_files_of_any_size_are_read(tmp_path_factory, trained, tested, height, width, chunk):
    folder = tmp_path_factory.mktemp("idx")
    x = np.arange((trained + tested) * height * width, dtype=np.uint8).reshape(-1, height, width)
    y = np.arange(trained + tested, dtype=np.uint8)
    paths = []
    for rows in (slice(trained), slice(trained, None)):
        for array in (x[rows], y[rows]):
            paths.append(folder / str(len(paths)))
            paths[-1].write_bytes(gzip.compress(idx(array)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK", chunk)
        arrays = formats.idx(paths, lambda share: None)
    np.testing.assert_array_equal(arrays["x"], x)
    assert arrays["y"].tolist() == y.tolist()
    assert arrays["n_train"] == trained


def damaged(name, **changes):
    files = official(name).files
    return {file: changes.get(file.split("-")[0], lambda content: content)(content) for file, content in files.items()}


def flipped(content):
    """The content with one bit of its checksum changed."""
    return content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]


DAMAGE = {
    "no gzip": lambda content: b"<html>Not here</html>",
    "cut gzip": lambda content: content[:-20],
    "wrong gzip checksum": flipped,
    "nothing": lambda content: b"",
    "fewer samples than it says": lambda content: gzip.compress(gzip.decompress(content)[:-1]),
    "more samples than it says": lambda content: gzip.compress(gzip.decompress(content) + b"\0"),
    "floats": lambda content: gzip.compress(b"\0\0\x0d" + gzip.decompress(content)[3:]),
    "other counts": lambda content: gzip.compress(idx(np.zeros((1, 28, 28), np.uint8))),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_idx_file_is_refused(put, tmp_path, change):
    paths = put("mnist", damaged("mnist", t10k=change))
    with pytest.raises(
        FedobpError, match=rf"files of dataset 'mnist' in {tmp_path} cannot be read \(.+\): get them anew"
    ):
        read("mnist", paths)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"cifar-100-binary/train.bin": bytes(3074)}, "cifar-100-binary/test.bin"),
        ({"cifar-100-binary/train.bin": bytes(3074), "cifar-100-binary/test.bin": bytes(3073)}, "3074 bytes"),
    ],
)
def test_a_cifar_archive_without_its_parts_is_refused(put, members, reason):
    paths = put("cifar100", {"cifar-100-binary.tar.gz": tarred(members)})
    with pytest.raises(FedobpError, match=rf"cannot be read \(.*{reason}.*\)"):
        read("cifar100", paths)


HOSTILE = {
    "a link outside": {"type": tarfile.SYMTYPE, "linkname": "../outside"},
    "a link to itself": {"type": tarfile.SYMTYPE, "linkname": "train.bin"},
    "an absolute link": {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "a hard link": {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
    "a device": {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5},
    "a pipe": {"type": tarfile.FIFOTYPE},
    "a folder": {"type": tarfile.DIRTYPE},
    "a sparse file of a terabyte": {
        "pax_headers": {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,0",
                        "GNU.sparse.size": str(3074 * 2**28)},
    },
}  # fmt: skip


@pytest.mark.parametrize("about", HOSTILE.values(), ids=HOSTILE)
def test_a_member_of_an_archive_that_is_no_plain_file_is_refused(put, tmp_path, about):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content, more in (("train", b"", about), ("test", bytes(3074), {}), ("../../up", bytes(9), {})):
            member = tarfile.TarInfo(f"cifar-100-binary/{name}.bin")
            member.size = len(content)
            for key, value in more.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(content))
    paths = put("cifar100", {"cifar-100-binary.tar.gz": buffer.getvalue()})
    with pytest.raises(FedobpError, match=r"train\.bin is no file"):
        read("cifar100", paths)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-100-binary.tar.gz"]


@pytest.mark.parametrize("name", ["/absolute.bin", "../up.bin", "a/../../up.bin"])
def test_nothing_of_an_archive_is_unpacked_to_disk(put, tmp_path, name):
    """Members are read by name, into memory: others do not matter, whatever they are called."""
    cifar, emnist = official("cifar100"), official("emnist")
    with tarfile.open(fileobj=io.BytesIO(cifar.files["cifar-100-binary.tar.gz"])) as archive:
        members = {one.name: archive.extractfile(one).read() for one in archive.getmembers()}
    arrays = read("cifar100", put("cifar100", {"cifar-100-binary.tar.gz": tarred({**members, name: b"outside"})}))
    np.testing.assert_array_equal(arrays["x"], cifar.x)
    with zipfile.ZipFile(io.BytesIO(emnist.files["gzip.zip"])) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    arrays = read("emnist", put("emnist", {"gzip.zip": zipped({**members, name: b"outside"})}))
    np.testing.assert_array_equal(arrays["x"], emnist.x)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cifar-100-binary.tar.gz", "gzip.zip"]


def test_archives_are_never_unpacked_to_disk_at_all():
    for path in Path(formats.__file__).parents[1].rglob("*.py"):
        assert not re.search(r"extractall|\.extract\(|unpack_archive", path.read_text(encoding="utf-8")), path


def test_emnist_without_the_byclass_split_is_refused(put):
    with pytest.raises(FedobpError, match="emnist-byclass-train-images"):
        read("emnist", put("emnist", {"gzip.zip": zipped({"gzip/emnist-letters-mapping.txt": b""})}))


def test_reading_emnist_takes_little_more_than_its_array(put):
    count = 40_000
    members = {}
    for part in ("train", "test"):
        for kind, shape in (("images-idx3", (count // 2, 28, 28)), ("labels-idx1", (count // 2,))):
            members[f"gzip/emnist-byclass-{part}-{kind}-ubyte.gz"] = gzip.compress(idx(np.zeros(shape, np.uint8)), 1)
    paths = put("emnist", {"gzip.zip": zipped(members)})
    tracemalloc.start()
    try:
        read("emnist", paths)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1.0 < peak / (count * 28 * 28) < 1.5


# Sources.


def test_every_registered_dataset_except_the_embedded_one_has_a_source():
    assert list(SOURCES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_file_has_an_address_and_a_checksum(name):
    for file in SOURCES[name].files:
        algorithm, digest = file.checksum.split(":")
        assert len(bytes.fromhex(digest)) == {"md5": 16, "sha256": 32}[algorithm]
        assert file.url.startswith("http")
        assert file.name in file.url
        assert file.size is None or file.size > 0


def test_all_files_of_a_dataset_differ():
    checksums = [file.checksum for source in SOURCES.values() for file in source.files]
    assert len(set(checksums)) == len(checksums)
