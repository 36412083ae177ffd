"""Records and messages for tests of the wire format."""

import json
import math
import struct

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from fedobp.method import Sparse
from fedobp.records import stack
from fedobp.wire import decode, encode, payload_bytes

checked = settings(deadline=None, max_examples=100)
NAN, INF = math.nan, math.inf


def message(header: object, payload: bytes = b"", **more: object) -> bytes:
    """Return a message; a list is its fields, bytes are the header as they are."""
    if isinstance(header, list):
        header = {"fields": header, **more}
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return b"FOBP\x02" + struct.pack("<I", len(raw)) + raw + payload


def field(**changes: object) -> dict[str, object]:
    return {"name": "theta", "dtype": "float32", "shape": [3], **changes}


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def positions(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def keeping(n: int, *kept: int, dtype: torch.dtype = torch.float32) -> Sparse:
    keep = torch.zeros(n, dtype=torch.bool)
    keep[list(kept)] = True
    return Sparse(torch.arange(1, n + 1, dtype=dtype), keep)


def codes(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


def payload_of(record) -> int:
    """Return the counted payload of one client's record, as that of a cohort of one."""
    return payload_bytes(stack([record]))


def shapes_of(record) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the receiver of a record expects."""
    return {name: tuple((value.values if isinstance(value, Sparse) else value).shape) for name, value in record.items()}


def assert_comes_back(record) -> None:
    """Check that sent values come back bit for bit, and that all others are NaN, or 0 in integers."""
    found = decode(encode(record), shapes_of(record))
    assert list(found) == list(record)
    for name, value in record.items():
        if isinstance(value, Sparse):
            back = found[name]
            assert isinstance(back, Sparse)
            assert back.keep.equal(value.keep)
            assert back.values.dtype == value.values.dtype
            assert back.values[back.keep].equal(value.values[value.keep])
            rest = back.values[~back.keep]
            assert (rest.isnan() if rest.is_floating_point() else rest == 0).all()
        else:
            assert isinstance(found[name], Tensor)
            assert found[name].dtype == value.dtype
            assert found[name].equal(value)


def dense_records():
    shapes = st.lists(st.integers(0, 4), max_size=3)
    entries = {
        torch.float32: st.floats(width=32, allow_nan=False, allow_infinity=False),
        torch.float64: st.floats(allow_nan=False, allow_infinity=False),
        torch.int64: st.integers(-(2**63), 2**63 - 1),
        torch.int8: st.one_of(st.just(0), st.integers(-127, 127)),
        torch.uint8: st.integers(0, 255),
        torch.bool: st.booleans(),
    }
    return st.tuples(shapes, st.sampled_from(list(entries))).flatmap(
        lambda chosen: st.lists(entries[chosen[1]], min_size=math.prod(chosen[0]), max_size=math.prod(chosen[0])).map(
            lambda values: torch.tensor(values, dtype=chosen[1]).reshape(chosen[0])
        )
    )


def sparse_records():
    pairs = st.tuples(st.one_of(st.just(0), st.integers(-127, 127)), st.booleans())
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.int8])
    sizes = st.tuples(st.lists(pairs, max_size=80), dtypes, st.sampled_from([None, True, False]))

    def build(drawn) -> Sparse:
        entries, dtype, all_or_nothing = drawn
        keep = [kept if all_or_nothing is None else all_or_nothing for _, kept in entries]
        return Sparse(torch.tensor([value for value, _ in entries], dtype=dtype), torch.tensor(keep, dtype=torch.bool))

    return sizes.map(build)
