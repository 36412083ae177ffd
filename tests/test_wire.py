"""The codec: its payload is what is counted, records come back, and inconsistent messages are refused."""

import json
import math
import struct
from contextlib import suppress

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedobp.algorithms import METHODS
from fedobp.errors import FedobpError
from fedobp.method import RoundContext, Sparse
from fedobp.models import Model
from fedobp.records import stack
from fedobp.wire import (
    _decode_runs,
    _encode_runs,
    _scanned,
    decode,
    decode_expected,
    encode,
    header_bytes,
    max_message_bytes,
    payload_bytes,
    run_bytes,
)

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


EXAMPLES = {
    "dense": ({"theta": torch.arange(6.0)}, 24),
    "a table": ({"theta": torch.arange(6.0).reshape(2, 3)}, 24),
    "a number": ({"loss": torch.tensor(0.5)}, 4),
    "float64": ({"theta": torch.arange(3, dtype=torch.float64)}, 24),
    "int64": ({"counts": torch.tensor([-(2**62), 5])}, 16),
    "bool": ({"flags": torch.tensor([True, False, True])}, 3),
    "uint8": ({"bytes": torch.tensor([0, 255], dtype=torch.uint8)}, 2),
    "no field": ({}, 0),
    "no entry": ({"theta": torch.zeros(0)}, 0),
    "kept list": ({"theta": keeping(2**22, 2**21)}, 4 + 4),
    "dropped list": ({"theta": keeping(1000, *range(999))}, 999 * 4 + 4),
    "run lengths": ({"theta": keeping(1000, 3, 500, 999)}, 3 * 4 + (1 + 1 + 2 + 1 + 2 + 1)),
    "run lengths from a kept entry on": ({"theta": keeping(1000, *range(300))}, 300 * 4 + (1 + 2 + 2)),
    "long runs": ({"theta": keeping(2**15, *range(2, 2**15 - 2))}, (2**15 - 4) * 4 + (1 + 3 + 1)),
    "bitmap": ({"theta": keeping(1000, *range(0, 1000, 2))}, 500 * 4 + 125),
    "bitmap of a broken byte": ({"theta": keeping(11, *range(0, 11, 2))}, 6 * 4 + 2),
    "longest run lengths": ({"theta": keeping(1000, *range(0, 124, 2))}, 62 * 4 + 125),
    "shortest bitmap": ({"theta": keeping(1000, *range(0, 128, 2))}, 64 * 4 + 125),
    "keeps everything": ({"theta": keeping(1000, *range(1000))}, 1000 * 4),
    "keeps nothing": ({"theta": keeping(1000)}, 0),
    "sparse float64": ({"theta": keeping(1000, 7, dtype=torch.float64)}, 8 + 4),
    "sparse without entries": ({"theta": keeping(0)}, 0),
    "several": ({"theta": keeping(100, 1), "base": torch.ones(2), "n": torch.tensor(7)}, 4 + 3 + 8 + 8),
    "codes": ({"theta": codes(1, -127, 5)}, 3),
    "codes with zeros": ({"theta": codes(*[0] * 20, 5, -1)}, 2 + 2),
    "codes of nothing": ({"theta": codes(*[0] * 9)}, 0),
    "sparse codes": ({"theta": Sparse(codes(1, 2, 3, 0, 9), torch.tensor([True, True, False, True, True]))}, 1 + 4),
    "no codes": ({"theta": codes()}, 0),
}


@pytest.mark.parametrize(("record", "size"), EXAMPLES.values(), ids=EXAMPLES.keys())
def test_the_counted_payload_is_the_encoded_one(record, size):
    encoded = encode(record)
    assert payload_of(record) == len(encoded) - header_bytes(encoded) == size
    assert type(payload_of(record)) is int


@pytest.mark.parametrize("record", [record for record, _ in EXAMPLES.values()], ids=EXAMPLES.keys())
def test_a_record_comes_back(record):
    assert_comes_back(record)


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


@checked
@given(record=st.dictionaries(st.text(max_size=5), st.one_of(dense_records(), sparse_records()), max_size=4))
def test_any_record_comes_back_and_its_payload_is_counted_exactly(record):
    assert_comes_back(record)
    encoded = encode(record)
    assert payload_of(record) == len(encoded) - header_bytes(encoded)


@checked
@given(runs=st.lists(st.integers(0, 40_000), max_size=8), rest=st.lists(st.booleans(), max_size=8))
def test_run_lengths_of_any_mask_are_counted_exactly(runs, rest):
    """Where the other forms are shorter, too."""
    mask = np.append(np.repeat(np.arange(len(runs)) % 2 == 0, runs), rest).astype(bool)
    if len(mask):
        raw = _encode_runs(mask)
        assert int(run_bytes(torch.from_numpy(mask))) == len(raw)
        assert (_decode_runs(np.frombuffer(raw, np.uint8), len(mask)) == mask).all()


@checked
@given(runs=st.lists(st.integers(1, 20_000), min_size=3, max_size=12), clients=st.integers(1, 3))
def test_run_lengths_are_counted_without_a_list_as_with_one(runs, clients):
    """The first is what a GPU does, which has several clients' masks in one tensor."""
    mask = np.repeat(np.arange(len(runs)) % 2 == 0, runs)
    keep = torch.from_numpy(mask[: len(mask) // clients * clients].reshape(clients, -1))
    ends = torch.cat([keep[:, 1:] != keep[:, :-1], torch.ones(clients, 1, dtype=torch.bool)], dim=1)
    sizes = [len(_encode_runs(row.numpy())) for row in keep]
    assert run_bytes(keep).tolist() == sizes
    assert (_scanned(ends) + keep[:, 0]).tolist() == sizes


@checked
@given(masks=st.lists(st.lists(st.booleans(), min_size=40, max_size=40), min_size=1, max_size=4), coded=st.booleans())
def test_the_payload_of_a_cohort_is_the_sum_of_its_messages(masks, coded):
    keep = torch.tensor(masks)
    values = torch.arange(40, dtype=torch.int8 if coded else torch.float32).expand(len(masks), -1)
    messages = [encode({"theta": Sparse(values[i], keep[i])}) for i in range(len(masks))]
    assert payload_bytes({"theta": Sparse(values, keep)}) == sum(len(m) - header_bytes(m) for m in messages)


def test_fedavg_costs_four_bytes_an_entry_and_client():
    model = Model("mlp", (4,), 2)
    ctx = RoundContext(model, round=1, rounds=1, clients=3, epochs=1, cohort=torch.tensor([2, 0, 1]))
    download, _ = METHODS["fedavg"]().download(ctx, {"theta": model.initial(0)}, {})
    assert payload_bytes(download) == 3 * 4 * model.layout.size == 3 * 4 * 898
    keep = torch.ones(3, 898, dtype=torch.bool)
    assert payload_bytes({"theta": Sparse(torch.zeros(3, 898), keep)}) == 3 * 4 * 898


@pytest.mark.essential
@pytest.mark.parametrize(
    ("record", "header", "payload"),
    [
        ({"theta": torch.tensor([1.0, -2.0])}, [field(shape=[2])], floats(1, -2)),
        (
            {"a": torch.tensor(0.1, dtype=torch.float64), "b": torch.tensor([[-7]]), "c": torch.tensor([True, False])},
            [
                {"name": "a", "dtype": "float64", "shape": []},
                {"name": "b", "dtype": "int64", "shape": [1, 1]},
                {"name": "c", "dtype": "bool", "shape": [2]},
            ],
            struct.pack("<dqBB", 0.1, -7, 1, 0),
        ),
        (
            {"theta": keeping(2**22, 2**21)},
            [field(shape=[2**22], mask=["kept", 4])],
            positions(2**21) + floats(2**21 + 1),
        ),
        (
            {"theta": keeping(1000, *range(999))},
            [field(shape=[1000], mask=["dropped", 4])],
            positions(999) + floats(*range(1, 1000)),
        ),
        (
            {"theta": keeping(10, 0, 3, 9, 8, 4)},
            [field(shape=[10], mask=["bitmap", 2])],
            bytes([0b10011000, 0b11000000]) + floats(1, 4, 5, 9, 10),
        ),
        (
            {"theta": keeping(200, 1, 2)},
            [field(shape=[200], mask=["runs", 4])],
            bytes([1, 2, 128 | (197 & 127), 197 >> 7]) + floats(2, 3),
        ),
        (
            {"theta": codes(*[0] * 20, 5, -1), "theta.scale": torch.tensor([0.5])},
            [
                field(dtype="int8", shape=[22], nonzero=["runs", 2]),
                {"name": "theta.scale", "dtype": "float32", "shape": [1]},
            ],
            bytes([20, 2, 5, 255]) + floats(0.5),
        ),
    ],
    ids=["dense", "dtypes", "kept", "dropped", "bitmap", "runs", "codes"],
)
def test_the_bytes_on_the_wire(record, header, payload):
    assert encode(record) == message(header, payload)


def test_entries_that_are_not_kept_are_never_sent():
    values = torch.tensor([1.0, 1234.5, NAN, 2.0])
    encoded = encode({"theta": Sparse(values, torch.tensor([True, False, False, True]))})
    assert struct.pack("<f", 1234.5) not in encoded
    assert struct.pack("<f", NAN) not in encoded
    assert decode(encoded, {"theta": (4,)})["theta"].fill(torch.zeros(4)).tolist() == [1, 0, 0, 2]


def test_encode_follows_views_and_strides():
    table = torch.arange(12.0).reshape(3, 4)
    assert_comes_back({"column": table[:, 1], "transposed": table.T, "expanded": torch.ones(3).expand(2, 3)})


# Refusals


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
