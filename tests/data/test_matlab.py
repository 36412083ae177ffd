"""Arrays in MATLAB files, as SciPy writes them and as no one should."""

import io
import struct
import zlib

import numpy as np
import pytest
from scipy.io import savemat

from fedobp.data import matlab
from fedobp.data.matlab import read_matlab

X = np.arange(48, dtype=np.uint8).reshape(2, 2, 3, 4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.mat"


def written(path, compress=False, **arrays):
    buffer = io.BytesIO()
    savemat(buffer, arrays, do_compression=compress)
    path.write_bytes(buffer.getvalue())
    return bytearray(buffer.getvalue())


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("kind", ["u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_arrays_of_all_numbers_are_read(path, kind, compress):
    written(path, compress, X=X.astype(kind), other="text", y=np.array([[1], [10]], kind), long_name_of_a_variable=X)
    found = read_matlab(path, ("X", "y", "missing"))
    assert list(found) == ["X", "y"]
    np.testing.assert_array_equal(found["X"], X)
    np.testing.assert_array_equal(found["y"], [[1], [10]])
    assert found["X"].dtype == kind


def test_the_other_byte_order_is_read(path):
    """An array as a machine with the other order writes it, by hand."""
    parts = [(6, struct.pack(">II", 9, 0)), (5, struct.pack(">ii", 2, 1)), (1, b"y"), (4, struct.pack(">HH", 258, 3))]
    body = b"".join(struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8) for kind, data in parts)
    path.write_bytes(bytes(124) + b"\x01\x00MI" + struct.pack(">II", 14, len(body)) + body)
    np.testing.assert_array_equal(read_matlab(path, "y")["y"], [[258], [3]])


OTHERS = {
    "cells": np.array([["a", 1]], object), "a structure": {"a": 1}, "a text": "abc", "complex": np.array([1j, 2]),
}  # fmt: skip


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
def test_what_is_no_array_of_numbers_is_refused(path, value):
    written(path, X=value)
    with pytest.raises(ValueError, match="X is no array of numbers"):
        read_matlab(path, "X")


@pytest.mark.parametrize("kind", [1, 9])  # cells, of which SciPy would reserve as many as the header says; numbers
@pytest.mark.parametrize("side", [2**26, -1, 2**31 - 1])
def test_a_header_that_says_more_than_there_is_is_refused(path, kind, side):
    content = written(path, X=X)
    content[144] = kind
    struct.pack_into("<i", content, 160, side)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"X is (no array of numbers|not as long as it says)"):
        read_matlab(path, "X")


def test_a_compressed_array_is_unpacked_no_further_than_it_says_and_fits(path, monkeypatch):
    zeros = zlib.compress(struct.pack("<II", 14, 2**31) + bytes(2**24))
    path.write_bytes(written(path, X=X)[:128] + struct.pack("<II", 15, len(zeros)) + zeros)
    asked = []
    monkeypatch.setattr(matlab, "require_free_memory", lambda what, size: asked.append(size))
    with pytest.raises(ValueError, match="it ends before its last value"):
        read_matlab(path, "X")
    assert asked == [2**31]


@pytest.mark.parametrize("compress", [True, False])
def test_a_file_cut_anywhere_is_refused_or_has_fewer_arrays(path, compress):
    content = written(path, compress, X=X, y=X)
    for cut in range(1, len(content)):
        path.write_bytes(content[:cut])
        try:
            assert len(read_matlab(path, ("X", "y"))) < 2
        except (ValueError, zlib.error):
            continue
