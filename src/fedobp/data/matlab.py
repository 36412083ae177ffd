"""Arrays of numbers in MATLAB files of level 5, as SVHN has them.

SciPy's reader is not used: some damaged files end the process, and others make it reserve what a header says.
The format is described in MathWorks' "MAT-File Format".
"""

import math
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.free_memory import require_free_memory
from fedobp.errors import short

_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMBER_CLASSES = range(6, 16)  # others are cells, structures, objects, texts and sparse arrays
_COMPLEX = 0x0800


def read_matlab(path: Path, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return arrays of numbers by name."""
    whole = np.memmap(path, np.uint8, "r").data
    order = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}.get(bytes(whole[124:128]))
    if order is None:
        raise ValueError("no MATLAB file of level 5")
    found, at = {}, 128
    while at < len(whole):
        kind, content, _ = _element(whole, at, order)
        at += 8 + len(content)
        if kind == _COMPRESSED:
            kind, content, _ = _element(_inflated(content, order), 0, order)
        if kind != _MATRIX:
            raise ValueError("no array where one should be")
        name, parts = _header(content, order)
        if name in names:
            found[name] = _array(name, parts, order)
    return found


def _inflated(content: memoryview, order: str) -> memoryview:
    """Return a compressed element, of which no more is unpacked than it says."""
    stream = zlib.decompressobj()
    head = stream.decompress(content, 8)
    if len(head) < 8:
        raise ValueError("it ends before its last value")
    size = struct.unpack(f"{order}II", head)[1]
    require_free_memory("a MATLAB file", size)
    return memoryview(head + stream.decompress(stream.unconsumed_tail, size) if size else head)


def _element(data: memoryview, at: int, order: str) -> tuple[int, memoryview, int]:
    """Return the type and the content of an element, and where the next one begins."""
    if at + 8 > len(data):
        raise ValueError("it ends before its last value")
    kind, size = struct.unpack_from(f"{order}II", data, at)
    start, end = at + 8, at + 8 + size + -size % 8
    if kind >> 16:  # a short one: its content is where others have their size
        kind, size, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
    if start + size > len(data):
        raise ValueError("it ends before its last value")
    return kind, data[start : start + size], end


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while at < len(data):
        kind, content, at = _element(data, at, order)
        yield kind, content


def _header(content: memoryview, order: str) -> tuple[str, list[tuple[int, memoryview]]]:
    """Return an array's name, and its parts: flags, dimensions, name, and the values of numbers."""
    parts = [part for part, _ in zip(_elements(content, order), range(4), strict=False)]
    if len(parts) < 3:
        raise ValueError("an array without a name")
    return bytes(parts[2][1]).decode("ascii"), parts


def _array(name: str, parts: list[tuple[int, memoryview]], order: str) -> NDArray[Any]:
    (_, flags), (_, dimensions), _, *values = parts
    flag = struct.unpack_from(f"{order}I", flags)[0]
    if flag & 0xFF not in _NUMBER_CLASSES or flag & _COMPLEX or not values or values[0][0] not in _NUMBERS:
        raise ValueError(f"{short(name)} is no array of numbers")
    shape = tuple(np.frombuffer(dimensions, f"{order}i4").tolist())
    numbers = np.frombuffer(values[0][1], order + _NUMBERS[values[0][0]])
    if min(shape, default=0) < 0 or math.prod(shape) != len(numbers):
        raise ValueError(f"{short(name)} is not as long as it says")
    return numbers.reshape(shape, order="F")
