"""Readers of the official file formats of the registered datasets, without pickle and in chunks.

A reader takes the paths of the files in the order of `sources`, and returns a dataset's arrays `x`, `y` and `n_train`,
with the training split first. Besides the result it holds one chunk at a time, except for SVHN and MedMNIST, whose
formats can only be read whole.
"""

import gzip
import math
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.free_memory import require_free_memory
from fedobp.data.matlab import read_matlab
from fedobp.data.npz import read_npz

Arrays = dict[str, NDArray[Any]]
OnProgress = Callable[[float], None]  # called with the share that is done
Reader = Callable[[Sequence[Path], OnProgress], Arrays]

CHUNK = 4096  # samples read at once


class _ArrayBuilder:
    """The arrays of a dataset, filled in order."""

    def __init__(self, samples: int, shape: tuple[int, ...], on_progress: OnProgress) -> None:
        require_free_memory(
            f"a dataset of {samples:,} images of {'x'.join(map(str, shape))}", samples * (math.prod(shape) + 8)
        )
        self.x, self.y = np.empty((samples, *shape), np.uint8), np.empty(samples, np.int64)
        self._on_progress, self._filled = on_progress, 0

    def add(self, images: NDArray[np.uint8], labels: NDArray[Any]) -> None:
        start, self._filled = self._filled, self._filled + len(images)
        self.x[start : self._filled], self.y[start : self._filled] = images, labels
        self._on_progress(self._filled / len(self.y))

    def arrays(self, n_train: int) -> Arrays:
        return {"x": self.x, "y": self.y, "n_train": np.asarray(n_train)}


def idx(paths: Sequence[Path], on_progress: OnProgress) -> Arrays:
    """Read MNIST and Fashion-MNIST: images and labels for training, images and labels for test, each gzipped."""
    with ExitStack() as opened:
        return _idx([opened.enter_context(gzip.open(path)) for path in paths], on_progress, transposed=False)


def emnist(paths: Sequence[Path], on_progress: OnProgress) -> Arrays:
    """Read EMNIST's byclass split out of its zip of gzipped files.

    The files hold each image transposed; the reader transposes it back, so that characters are upright as in MNIST.
    """
    names = [f"{split}-{kind}" for split in ("train", "test") for kind in ("images-idx3", "labels-idx1")]
    with ExitStack() as opened:
        archive = opened.enter_context(zipfile.ZipFile(paths[0]))
        packed = [opened.enter_context(archive.open(f"gzip/emnist-byclass-{name}-ubyte.gz")) for name in names]
        return _idx([opened.enter_context(gzip.open(member)) for member in packed], on_progress, transposed=True)


def _idx(streams: Sequence[gzip.GzipFile], on_progress: OnProgress, *, transposed: bool) -> Arrays:
    shapes = [_idx_shape(stream, axes) for stream, axes in zip(streams, (3, 1, 3, 1), strict=True)]
    if [shapes[1], shapes[3]] != [shapes[0][:1], shapes[2][:1]] or shapes[0][1:] != shapes[2][1:]:
        raise ValueError("images and labels do not belong together")
    size = shapes[0][1:]
    builder = _ArrayBuilder(shapes[0][0] + shapes[2][0], size, on_progress)
    for images, labels, (count,) in zip(streams[::2], streams[1::2], shapes[1::2], strict=True):
        for n in _chunk_sizes(count):
            x = _read_exactly(images, n * math.prod(size)).reshape(n, *size)
            builder.add(x.swapaxes(1, 2) if transposed else x, _read_exactly(labels, n))
        if images.read(1) or labels.read(1):  # reading to the end also verifies the gzip checksum
            raise ValueError("it goes on after its last sample")
    return builder.arrays(n_train=shapes[0][0])


def _idx_shape(stream: gzip.GzipFile, axes: int) -> tuple[int, ...]:
    if bytes(_read_exactly(stream, 4)) != bytes((0, 0, 8, axes)):  # 8: unsigned bytes
        raise ValueError(f"no idx file of bytes with {axes} axes")
    return tuple(_read_exactly(stream, 4 * axes).view(">u4").tolist())


def cifar10(paths: Sequence[Path], on_progress: OnProgress) -> Arrays:
    """Read CIFAR10's binary version: per sample a label and three planes of 32x32."""
    batches = [f"cifar-10-batches-bin/data_batch_{k}.bin" for k in range(1, 6)]
    return _cifar(paths[0], batches, "cifar-10-batches-bin/test_batch.bin", 1, on_progress)


def cifar100(paths: Sequence[Path], on_progress: OnProgress) -> Arrays:
    """Read CIFAR100's binary version: per sample a coarse label, the label, and three planes of 32x32."""
    return _cifar(paths[0], ["cifar-100-binary/train.bin"], "cifar-100-binary/test.bin", 2, on_progress)


def _cifar(path: Path, train: Sequence[str], test: str, labels: int, on_progress: OnProgress) -> Arrays:
    record = labels + 3 * 32 * 32
    with tarfile.open(path, "r:gz") as archive:
        members = [archive.getmember(name) for name in (*train, test)]
        for member in members:  # a sparse file holds as many zeros as its header says
            if not member.isreg() or member.issparse():
                raise ValueError(f"{member.name} is no file")
        if any(member.size % record for member in members):
            raise ValueError(f"a part is no whole number of records of {record} bytes")
        counts = [member.size // record for member in members]
        builder = _ArrayBuilder(sum(counts), (32, 32, 3), on_progress)
        for member, count in zip(members, counts, strict=True):
            stream = archive.extractfile(member)
            assert stream is not None, "it is a file"
            for n in _chunk_sizes(count):
                records = _read_exactly(stream, n * record).reshape(n, record)
                planes = records[:, labels:].reshape(n, 3, 32, 32)
                builder.add(planes.transpose(0, 2, 3, 1), records[:, labels - 1])
    return builder.arrays(sum(counts[:-1]))


def svhn(paths: Sequence[Path], on_progress: OnProgress) -> Arrays:
    """Read SVHN's cropped digits, training and test: MATLAB files in which label 10 is the digit 0."""
    parts = [read_matlab(path, ("X", "y")) for path in paths]
    builder = _ArrayBuilder(sum(len(part["y"]) for part in parts), parts[0]["X"].shape[:3], on_progress)
    for part in parts:
        builder.add(part["X"].transpose(3, 0, 1, 2), part["y"][:, 0] % 10)
    return builder.arrays(len(parts[0]["y"]))


def medmnist(paths: Sequence[Path], on_progress: OnProgress) -> Arrays:
    """Read a MedMNIST file: training, validation and test, in this order."""
    file = read_npz(paths[0])
    parts = [(file[f"{split}_images"], file[f"{split}_labels"]) for split in ("train", "val", "test")]
    builder = _ArrayBuilder(sum(len(labels) for _, labels in parts), parts[0][0].shape[1:], on_progress)
    for images, labels in parts:
        builder.add(images, labels[:, 0])
    return builder.arrays(len(parts[0][1]))


def _chunk_sizes(count: int) -> Iterator[int]:
    return (min(CHUNK, count - start) for start in range(0, count, CHUNK))


def _read_exactly(stream: gzip.GzipFile | IO[bytes], count: int) -> NDArray[np.uint8]:
    read = np.frombuffer(stream.read(count), np.uint8)
    if len(read) < count:
        raise ValueError("it ends before its last sample")
    return read
