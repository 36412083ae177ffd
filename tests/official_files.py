"""Small files in the official formats of the registered datasets, written byte by byte, and their content."""

import gzip
import io
import tarfile
import zipfile
from functools import cache
from typing import NamedTuple

import numpy as np

TRAIN, VALIDATED, TEST = 7, 2, 3  # samples


class Official(NamedTuple):
    files: dict[str, bytes]
    x: np.ndarray
    y: np.ndarray
    n_train: int


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _samples(shape, classes, count=TRAIN + TEST):
    random = np.random.default_rng(5)
    return random.integers(0, 256, (count, *shape), dtype=np.uint8), random.integers(0, classes, count)


def _mnist():
    x, y = _samples((28, 28), 10)
    parts = {"train": slice(TRAIN), "t10k": slice(TRAIN, None)}
    files = {}
    for part, rows in parts.items():
        files[f"{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(x[rows]))
        files[f"{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx(y[rows].astype(np.uint8)))
    return Official(files, x, y, TRAIN)


def _emnist():
    x, y = _samples((28, 28), 62)
    members = {"gzip/": b"", "gzip/emnist-letters-mapping.txt": b"1 65 97\n"}
    for part, rows in {"test": slice(TRAIN, None), "train": slice(TRAIN)}.items():
        transposed = np.ascontiguousarray(x[rows].swapaxes(1, 2))
        members[f"gzip/emnist-byclass-{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(transposed))
        members[f"gzip/emnist-byclass-{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx(y[rows].astype(np.uint8)))
    return Official({"gzip.zip": zipped(members)}, x, y, TRAIN)


def cifar_record(labels, image):
    """A sample of CIFAR's binary version: labels, then the red, the green and the blue plane, row by row."""
    return bytes(labels) + b"".join(image[:, :, channel].tobytes() for channel in range(3))


def _cifar10():
    x, y = _samples((32, 32, 3), 10)
    records = [cifar_record([label], image) for label, image in zip(y, x, strict=True)]
    folder, members = "cifar-10-batches-bin", {}
    members[f"{folder}/batches.meta.txt"] = b"airplane\n"
    for batch, rows in ((3, [3]), (1, [0, 1]), (2, [2]), (5, [6]), (4, [4, 5])):  # out of order
        members[f"{folder}/data_batch_{batch}.bin"] = b"".join(records[row] for row in rows)
    members[f"{folder}/test_batch.bin"] = b"".join(records[TRAIN:])
    return Official({"cifar-10-binary.tar.gz": tarred(members)}, x, y, TRAIN)


def _cifar100():
    x, y = _samples((32, 32, 3), 100)
    records = [cifar_record([label // 5, label], image) for label, image in zip(y, x, strict=True)]
    parts = {"train.bin": records[:TRAIN], "test.bin": records[TRAIN:], "fine_label_names.txt": [b"apple\n"]}
    members = {f"cifar-100-binary/{name}": b"".join(content) for name, content in parts.items()}
    return Official({"cifar-100-binary.tar.gz": tarred(members)}, x, y, TRAIN)


def _svhn():
    from scipy.io import savemat

    x, y = _samples((32, 32, 3), 10)
    y[:3] = 0, 9, 0  # the digit 0 is label 10 there
    files = {}
    for part, rows in {"train": slice(TRAIN), "test": slice(TRAIN, None)}.items():
        buffer = io.BytesIO()
        labels = np.where(y[rows] == 0, 10, y[rows]).astype(np.uint8)[:, None]
        savemat(buffer, {"X": x[rows].transpose(1, 2, 3, 0), "y": labels}, do_compression=True)
        files[f"{part}_32x32.mat"] = buffer.getvalue()
    return Official(files, x, y, TRAIN)


def _medmnist(name):
    x, y = _samples((28, 28), 11, TRAIN + VALIDATED + TEST)
    buffer, start, arrays = io.BytesIO(), 0, {}
    for split, count in (("train", TRAIN), ("val", VALIDATED), ("test", TEST)):
        arrays[f"{split}_images"] = x[start : start + count]
        arrays[f"{split}_labels"] = y[start : start + count, None].astype(np.uint8)
        start += count
    np.savez_compressed(buffer, **arrays)
    return Official({f"{name}.npz": buffer.getvalue()}, x, y, TRAIN)


@cache
def official(name):
    """Return a dataset's files and their content, cached because compressed files hold the time of compression."""
    makers = {
        "mnist": _mnist, "fmnist": _mnist, "emnist": _emnist, "cifar10": _cifar10, "cifar100": _cifar100, "svhn": _svhn,
    }  # fmt: skip
    return makers[name]() if name in makers else _medmnist(name)
