"""Memory mapping: opening a dataset does not read images that are stored uncompressed as bytes."""

import tracemalloc

import numpy as np
import pytest
import torch

from fedobp.data import FederatedData, load, partition
from fedobp.errors import FedobpError

IMAGES = np.random.default_rng(1).integers(0, 256, (500, 28, 28), dtype=np.uint8)
LABELS = np.arange(500) % 10


def saved(folder, save=np.savez, **arrays):
    save(folder / "mnist.npz", **{"x": IMAGES, "y": LABELS, **arrays})
    return folder


def bases(array):
    while array is not None:
        yield array
        array = getattr(array, "base", None)


def is_mapped(array):
    return any(isinstance(one, np.memmap) for one in bases(array))


@pytest.mark.parametrize("first", ["x", "y"])
def test_stored_bytes_are_mapped(tmp_path, first):
    arrays = {"x": IMAGES, "y": LABELS}
    np.savez(tmp_path / "mnist.npz", **{first: arrays.pop(first)}, **arrays)
    dataset = load("mnist", tmp_path)
    assert is_mapped(dataset.x)
    np.testing.assert_array_equal(dataset.x, IMAGES)


@pytest.mark.parametrize(
    ("save", "x"),
    [
        (np.savez_compressed, IMAGES),
        (np.savez, np.asfortranarray(IMAGES)),
        (np.savez, IMAGES.astype(np.float32)),
    ],
    ids=["compressed", "Fortran's order", "floats"],
)
def test_other_arrays_are_read(tmp_path, save, x):
    dataset = load("mnist", saved(tmp_path, save, x=x))
    assert not is_mapped(dataset.x)
    np.testing.assert_array_equal(dataset.x, IMAGES)


def test_loading_allocates_no_memory_for_the_images(tmp_path):
    saved(tmp_path, x=np.tile(IMAGES, (20, 1, 1)), y=np.tile(LABELS, 20))
    load("mnist", tmp_path)
    tracemalloc.start()
    try:
        dataset = load("mnist", tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < dataset.x.nbytes / 10


def test_writing_to_a_loaded_dataset_does_not_change_its_file(tmp_path):
    before = (saved(tmp_path) / "mnist.npz").read_bytes()
    load("mnist", tmp_path).x[:] = 7
    assert (tmp_path / "mnist.npz").read_bytes() == before
    np.testing.assert_array_equal(load("mnist", tmp_path).x, IMAGES)


def test_clients_share_the_mapped_images(tmp_path):
    dataset = load("mnist", saved(tmp_path))
    data = FederatedData(dataset, partition(dataset.y, 2, kind="iid"), torch.device("cpu"), torch.float32)
    assert data.x.data_ptr() == dataset.x.ctypes.data


def test_a_header_with_a_larger_shape_is_refused(tmp_path):
    path = saved(tmp_path) / "mnist.npz"
    content = path.read_bytes()
    assert content.count(b"(500, 28, 28)") == 1
    path.write_bytes(content.replace(b"(500, 28, 28)", b"(999, 28, 28)"))
    with pytest.raises(FedobpError, match=r"mnist.npz cannot be read .*x.npy is not as long as it says"):
        load("mnist", tmp_path)
