"""The wire: messages that are refused, each with one short sentence."""

import struct
from contextlib import suppress

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import (
    INF,
    NAN,
    assert_comes_back,
    checked,
    codes,
    dense_records,
    field,
    floats,
    keeping,
    message,
    positions,
    shapes_of,
    sparse_records,
)

from fedobp.errors import FedobpError
from fedobp.method import Sparse
from fedobp.wire import (
    decode,
    decode_expected,
    encode,
    header_bytes,
    max_message_bytes,
)

SMALL = {
    "dense": {"theta": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
    "kept": {"theta": keeping(2**15, 2**14)},
    "dropped": {"theta": keeping(900, *range(899))},
    "bitmap": {"theta": keeping(9, 0, 2, 4)},
    "runs": {"theta": keeping(40, 1, 2, 3)},
    "codes": {"theta": codes(*[0] * 20, 5, -1, 3), "theta.scale": torch.tensor([0.5])},
    "zstd": {"theta": codes(*[1, 2, 3, 4] * 50), "theta.scale": torch.tensor([0.5])},
    "no field": {},
}


@pytest.mark.parametrize("record", SMALL.values(), ids=SMALL.keys())
def test_a_message_cut_anywhere_is_refused(record):
    whole = encode(record)
    for length in {*range(min(len(whole), 300)), *range(0, len(whole), 97), len(whole) - 1}:
        with pytest.raises(FedobpError):
            decode(whole[:length], shapes_of(record))


@pytest.mark.parametrize("record", SMALL.values(), ids=SMALL.keys())
def test_trailing_bytes_are_refused(record):
    for tail in (b"\0", b"\0" * 4, encode(record)):
        with pytest.raises(FedobpError, match=r"bytes longer|at most .* are expected|zstd"):
            decode(encode(record) + tail, shapes_of(record))


@pytest.mark.parametrize("start", [b"", b"FOBP", b"FOBP\x02\0\0\0", b"FOBP\x01\0\0\0\0", b"\x80\x04" + b"\0" * 20])
def test_bytes_without_the_magic_number_and_version_are_refused(start):
    with pytest.raises(FedobpError, match="same version"):
        decode(start, {})
    with pytest.raises(FedobpError, match="same version"):
        header_bytes(start)


def test_another_version_is_named():
    with pytest.raises(FedobpError, match="is of format version 3, and this side reads 2"):
        decode(b"FOBP\x03\0\0\0\0", {})


@checked
@given(record=st.dictionaries(st.text(max_size=5), st.one_of(dense_records(), sparse_records()), max_size=4))
def test_no_message_is_longer_than_the_receiver_allows(record):
    assert len(encode(record)) <= max_message_bytes(shapes_of(record))


def test_a_message_that_is_too_long_is_refused_before_it_is_read():
    limit = max_message_bytes({"theta": (3,)})
    with pytest.raises(FedobpError, match=f"a message has {limit + 1:,} bytes, and at most {limit:,} are expected"):
        decode(b"x" * (limit + 1), {"theta": (3,)})


def test_types_must_be_those_that_the_receiver_expects():
    sent, keep = encode({"theta": torch.ones(3)}), torch.tensor([True, False, True])
    assert decode_expected(sent, {"theta": torch.zeros(3)})["theta"].tolist() == [1, 1, 1]
    for other in (codes(1, 2, 3), torch.ones(3).double(), Sparse(torch.ones(3), keep)):
        with pytest.raises(FedobpError, match="is expected: both sides must use one model"):
            decode_expected(sent, {"theta": other})


@pytest.mark.parametrize("scale", [-0.5, 1e31])
def test_scales_that_no_sender_makes_are_refused(scale):
    record = {"theta": codes(1, 2), "theta.scale": torch.tensor([scale])}
    with pytest.raises(FedobpError, match=r"scales below 0 or above 1e\+30 in 'theta.scale'"):
        decode(encode(record), shapes_of(record))
    other = {"theta": torch.ones(2), "theta.scale": torch.tensor([scale])}  # of no codes
    assert_comes_back(other)


def packed(content: bytes, size: int | None = None, **changes: object) -> bytes:
    """Return a message with one zstd frame; `size` is what its header says."""
    body = zstandard.ZstdCompressor(**changes).compress(content)
    return message([field(dtype="int8")], body, zstd=len(content) if size is None else size)


def test_a_zstd_frame_is_read_only_in_the_size_that_header_and_shapes_allow():
    assert decode(packed(b"\1\2\3"), {"theta": (3,)})["theta"].tolist() == [1, 2, 3]
    bomb = b"\0" * 2**24
    for bad in (
        packed(bomb),  # a few hundred bytes that would take 16 MB
        packed(bomb, size=3),
        packed(b"\1\2\3", size=4),
        packed(b"\1\2\3", size=-1),
        packed(b"\1\2\3", size="3"),
        packed(b"\1\2\3", write_content_size=False),
        packed(b"\1\2\3")[:-1],
        packed(b"\1\2\3") + b"\0",
        packed(b"\1\2"),
        packed(b"\1\2\3\4"),
        message([field(dtype="int8")], b"\1\2\3", zstd=3),
    ):
        with pytest.raises(FedobpError):
            decode(bad, {"theta": (3,)})


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_values_that_are_not_finite_are_refused(bad):
    for name, value in {
        "theta": torch.tensor([0.0, bad]),
        "masked": Sparse(torch.tensor([0.0, bad]), torch.tensor([False, True])),
        "wide": torch.tensor([bad], dtype=torch.float64),
    }.items():
        record = {"n": torch.tensor(1), name: value}
        with pytest.raises(FedobpError, match=f"NaN or infinite values in '{name}'"):
            decode(encode(record), shapes_of(record))


@pytest.mark.parametrize(
    "expected", [{}, {"theta": (4,)}, {"other": (3,)}, {"theta": (3,), "other": (3,)}, {"theta": (3, 1)}]
)
def test_a_message_with_other_values_than_expected_is_refused(expected):
    with pytest.raises(FedobpError, match="is expected: both sides must use one model"):
        decode(encode({"theta": torch.ones(3)}), expected)


THREE = floats(1, 2, 3)


REFUSED = {
    "not JSON": (b"{", b""),
    "not text": (b"\xff\xff\xff", b""),
    "null": (None, b""),
    "a number": (5, b""),
    "a table of fields": ({"theta": 1}, b""),
    "numbers for fields": ([1], b""),
    "texts for fields": (["theta"], b""),
    "lists for fields": ([["name", "dtype", "shape"]], b""),
    "no name": ([{"dtype": "float32", "shape": [3]}], THREE),
    "no dtype": ([{"name": "theta", "shape": [3]}], THREE),
    "no shape": ([{"name": "theta", "dtype": "float32"}], THREE),
    "unknown dtype": ([field(dtype="float16")], THREE),
    "a list for a dtype": ([field(dtype=["float32"])], THREE),
    "a list for a name": ([field(name=["theta"])], THREE),
    "a number for a shape": ([field(shape=3)], THREE),
    "null in a shape": ([field(shape=[None])], THREE),
    "a word in a shape": ([field(shape=["three"])], THREE),
    "negative size": ([field(shape=[-3])], THREE),
    "one negative side": ([field(shape=[-1, 3])], THREE),
    "size beyond the message": ([field(shape=[10**30])], THREE),
    "unknown mask form": ([field(mask=["rle", 4])], positions(0) + floats(1)),
    "null mask": ([field(mask=None)], b""),
    "null mask form": ([field(mask=[None, 0])], b""),
    "no length": ([field(mask=["kept"])], b""),
    "null length": ([field(mask=["kept", None])], b""),
    "negative length": ([field(mask=["kept", -4])], b""),
    "broken length": ([field(mask=["kept", 4.0])], positions(0) + floats(1)),
    "half a position": ([field(mask=["kept", 2])], b"\0\0"),
    "length beyond the message": ([field(mask=["kept", 10**30])], b""),
    "position out of range": ([field(mask=["kept", 4])], positions(3) + floats(1)),
    "dropped position out of range": ([field(mask=["dropped", 4])], positions(3) + floats(1, 2)),
    "largest position": ([field(mask=["kept", 4])], positions(2**32 - 1) + floats(1)),
    "positions out of order": ([field(mask=["kept", 8])], positions(1, 0) + floats(1, 2)),
    "position twice": ([field(mask=["kept", 8])], positions(1, 1) + floats(1)),
    "dropped position twice": ([field(mask=["dropped", 8])], positions(1, 1) + floats(1, 2)),
    "long bitmap": ([field(mask=["bitmap", 2])], b"\xe0\0" + THREE),
    "short bitmap": ([field(mask=["bitmap", 0])], THREE),
    "no runs": ([field(mask=["runs", 0])], THREE),
    "runs of another size": ([field(mask=["runs", 2])], bytes([0, 4]) + THREE),
    "runs that do not end": ([field(mask=["runs", 2])], bytes([0, 128 | 3]) + THREE),
    "an empty run": ([field(mask=["runs", 4])], bytes([0, 1, 0, 2]) + THREE),
    "a run of six bytes": ([field(mask=["runs", 7])], bytes([0, *[128] * 5, 3]) + THREE),
    "a run beyond memory": ([field(mask=["runs", 6])], bytes([0, *[255] * 4, 127]) + THREE),
    "zeros left out of floats": ([field(nonzero=["kept", 4])], positions(0) + floats(1)),
    "codes below -127": ([field(dtype="int8")], bytes([1, 128, 3])),
    "a truth that is 2": ([field(dtype="bool")], bytes([0, 1, 2])),
    "sparse without a shape": ([field(shape=[], mask=["kept", 0])], b""),
    "sparse bitmap without a shape": ([field(shape=[], mask=["bitmap", 0])], b""),
    "sparse with no shape at all": ([field(shape=None, mask=["bitmap", 0])], b""),
    "bitmap of negative size": ([field(shape=[-8], mask=["bitmap", 0])], b""),
    "fields twice in a table": ({"fields": {"theta": 1}}, b""),
    "no fields": ({"zstd": 3}, b""),
    "an empty table of fields": ({}, b""),
    "an empty text of fields": ("", b""),
    "a header nested deeply": (b"[" * 300, b""),
    "a header that is too long": (b" " * 1000 + b"{}", b""),
    "two negative sides": ([field(shape=[-1, -3])], THREE),
    "a negative and an empty side": ([field(shape=[-1, 0])], b""),
    "an infinite side": (b'{"fields":[{"name": "theta", "dtype": "float32", "shape": [1e999]}]}', THREE),
    "an infinite list": (
        b'{"fields":[{"name": "theta", "dtype": "float32", "shape": [3], "mask": ["kept", 1e999]}]}',
        THREE,
    ),
    "kept of negative size": ([field(shape=[-1], mask=["kept", 0])], b""),
    "sparse beyond memory": ([field(shape=[10**18], mask=["kept", 0])], b""),
    "square sparse table": ([field(shape=[3, 3], mask=["kept", 0])], b""),
    "sparse whole numbers": ([field(dtype="int64", mask=["kept", 4])], positions(0) + struct.pack("<q", 7)),
    "sparse truths": ([field(dtype="bool", mask=["kept", 4])], positions(0) + b"\1"),
    "a broken side": ([field(shape=[3.7])], THREE),
    "a text for a shape": ([field(shape="3")], THREE),
    "a number for a name": ([field(name=5)], THREE),
    "a name twice": ([field(), field()], THREE + THREE),
}


@pytest.mark.parametrize(("header", "payload"), REFUSED.values(), ids=REFUSED.keys())
def test_an_inconsistent_message_is_refused(header, payload):
    with pytest.raises(FedobpError):
        decode(message(header, payload), {"theta": (3,)})


@pytest.mark.parametrize("name", ["dense", "bitmap", "runs", "codes", "zstd"])
def test_one_wrong_byte_gives_a_record_or_a_refusal(name):
    whole = bytearray(encode(SMALL[name]))
    for place, right in enumerate(whole):
        for wrong in {0, 1, 0x2D, 0x30, 0x39, 0x5B, 0x7F, 0x80, 0xFF, right ^ 1, right ^ 0x80}:
            whole[place] = wrong
            with suppress(FedobpError):
                assert isinstance(decode(bytes(whole), shapes_of(SMALL[name])), dict)
        whole[place] = right


@pytest.mark.parametrize(
    "header",
    [
        [field(name="a" * 5000)],
        [field(shape=[3] * 5000)],
        [field(dtype="line\nline" * 500)],
        [field(mask="b" * 5000, listed=0)],
        [field(mask="\ud800", listed=0)],
    ],
)
def test_a_refusal_is_one_short_line(header):
    with pytest.raises(FedobpError) as caught:
        decode(message(header, THREE), {"theta": (3,)})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
