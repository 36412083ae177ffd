"""The codec: its payload is what is counted, records come back, and inconsistent messages are refused."""

import json
import math
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedobp.algorithms import METHODS
from fedobp.errors import FedobpError
from fedobp.method import RoundContext, Sparse
from fedobp.models import Model
from fedobp.records import stack
from fedobp.wire import decode, encode, header_bytes, payload_bytes

checked = settings(deadline=None, max_examples=100)

NAN, INF = math.nan, math.inf


def message(header: object, payload: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"FOBP\x01" + struct.pack("<I", len(raw)) + raw + payload


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


def payload_of(record) -> int:
    """Return the counted payload of one client's record, as that of a cohort of one."""
    return payload_bytes(stack([record]))


def shapes_of(record) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the receiver of a record expects."""
    return {name: tuple((value.values if isinstance(value, Sparse) else value).shape) for name, value in record.items()}


def assert_comes_back(record) -> None:
    """Check that sent values come back bit for bit, and that all others are NaN."""
    found = decode(encode(record), shapes_of(record))
    assert list(found) == list(record)
    for name, value in record.items():
        if isinstance(value, Sparse):
            back = found[name]
            assert isinstance(back, Sparse)
            assert back.keep.equal(value.keep)
            assert back.values.dtype == value.values.dtype
            assert back.values[back.keep].equal(value.values[value.keep])
            assert back.values[~back.keep].isnan().all()
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
    "no field": ({}, 0),
    "no entry": ({"theta": torch.zeros(0)}, 0),
    "kept list": ({"theta": keeping(1000, 3, 500, 999)}, 3 * 4 + 3 * 4),
    "dropped list": ({"theta": keeping(1000, *range(5, 1000))}, 995 * 4 + 5 * 4),
    "bitmap": ({"theta": keeping(1000, *range(0, 1000, 2))}, 500 * 4 + 125),
    "bitmap of a broken byte": ({"theta": keeping(11, *range(0, 11, 2))}, 6 * 4 + 2),
    "longest list": ({"theta": keeping(1000, *range(31))}, 31 * 4 + 31 * 4),
    "shortest bitmap": ({"theta": keeping(1000, *range(32))}, 32 * 4 + 125),
    "longest dropped list": ({"theta": keeping(1000, *range(969))}, 969 * 4 + 31 * 4),
    "list as long as a bitmap": ({"theta": keeping(1024, *range(32))}, 32 * 4 + 128),
    "keeps everything": ({"theta": keeping(1000, *range(1000))}, 1000 * 4),
    "keeps nothing": ({"theta": keeping(1000)}, 0),
    "sparse float64": ({"theta": keeping(1000, 7, dtype=torch.float64)}, 8 + 4),
    "sparse without entries": ({"theta": keeping(0)}, 0),
    "several": ({"theta": keeping(100, 1), "base": torch.ones(2), "n": torch.tensor(7)}, 8 + 8 + 8),
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
        torch.bool: st.booleans(),
    }
    return st.tuples(shapes, st.sampled_from(list(entries))).flatmap(
        lambda chosen: st.lists(entries[chosen[1]], min_size=math.prod(chosen[0]), max_size=math.prod(chosen[0])).map(
            lambda values: torch.tensor(values, dtype=chosen[1]).reshape(chosen[0])
        )
    )


def sparse_records():
    pairs = st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.booleans())
    dtypes = st.sampled_from([torch.float32, torch.float64])
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
@given(masks=st.lists(st.lists(st.booleans(), min_size=40, max_size=40), min_size=1, max_size=4))
def test_the_payload_of_a_cohort_is_the_sum_of_its_messages(masks):
    keep = torch.tensor(masks)
    values = torch.arange(40.0).expand(len(masks), -1)
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
            {"theta": keeping(100, 2, 40)},
            [field(shape=[100], mask="kept", listed=2)],
            positions(2, 40) + floats(3, 41),
        ),
        (
            {"theta": keeping(50, *range(49))},
            [field(shape=[50], mask="dropped", listed=1)],
            positions(49) + floats(*range(1, 50)),
        ),
        (
            {"theta": keeping(10, 0, 3, 9, 8, 4)},
            [field(shape=[10], mask="bitmap", listed=0)],
            bytes([0b10011000, 0b11000000]) + floats(1, 4, 5, 9, 10),
        ),
    ],
    ids=["dense", "dtypes", "kept", "dropped", "bitmap"],
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
    "kept": {"theta": keeping(40, 1, 2)},
    "dropped": {"theta": keeping(33, *range(1, 33))},
    "bitmap": {"theta": keeping(9, 0, 2, 4)},
    "no field": {},
}


@pytest.mark.parametrize("record", SMALL.values(), ids=SMALL.keys())
def test_a_message_cut_anywhere_is_refused(record):
    whole = encode(record)
    for length in range(len(whole)):
        with pytest.raises(FedobpError):
            decode(whole[:length], shapes_of(record))


@pytest.mark.parametrize("record", SMALL.values(), ids=SMALL.keys())
def test_trailing_bytes_are_refused(record):
    for tail in (b"\0", b"\0" * 4, encode(record)):
        with pytest.raises(FedobpError, match=f"{len(tail):,} bytes longer"):
            decode(encode(record) + tail, shapes_of(record))


@pytest.mark.parametrize("start", [b"", b"FOBP", b"FOBP\x01", b"FOBP\x02\0\0\0\0", b"\x80\x04" + b"\0" * 20])
def test_bytes_without_the_magic_number_are_refused(start):
    with pytest.raises(FedobpError, match="same version"):
        decode(start, {})
    with pytest.raises(FedobpError, match="same version"):
        header_bytes(start)


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
    "unknown mask form": ([field(mask="rle", listed=1)], positions(0) + floats(1)),
    "null mask form": ([field(mask=None, listed=0)], b""),
    "no listed": ([field(mask="kept")], b""),
    "null listed": ([field(mask="kept", listed=None)], b""),
    "negative listed": ([field(mask="kept", listed=-1)], b""),
    "listed beyond the message": ([field(mask="kept", listed=10**30)], b""),
    "position out of range": ([field(mask="kept", listed=1)], positions(3) + floats(1)),
    "dropped position out of range": ([field(mask="dropped", listed=1)], positions(3) + floats(1, 2)),
    "largest position": ([field(mask="kept", listed=1)], positions(2**32 - 1) + floats(1)),
    "positions out of order": ([field(mask="kept", listed=2)], positions(1, 0) + floats(1, 2)),
    "position twice": ([field(mask="kept", listed=2)], positions(1, 1) + floats(1)),
    "dropped position twice": ([field(mask="dropped", listed=2)], positions(1, 1) + floats(1, 2)),
    "sparse without a shape": ([field(shape=[], mask="kept", listed=0)], b""),
    "sparse bitmap without a shape": ([field(shape=[], mask="bitmap", listed=0)], b""),
    "sparse with no shape at all": ([field(shape=None, mask="bitmap", listed=0)], b""),
    "bitmap of negative size": ([field(shape=[-8], mask="bitmap", listed=0)], b""),
    "an empty table of fields": ({}, b""),
    "an empty text of fields": ("", b""),
    "a header nested deeply": (b"[" * 200_000, b""),
    "two negative sides": ([field(shape=[-1, -3])], THREE),
    "a negative and an empty side": ([field(shape=[-1, 0])], b""),
    "an infinite side": (b'[{"name": "theta", "dtype": "float32", "shape": [1e999]}]', THREE),
    "an infinite list": (
        b'[{"name": "theta", "dtype": "float32", "shape": [3], "mask": "kept", "listed": 1e999}]',
        THREE,
    ),
    "kept of negative size": ([field(shape=[-1], mask="kept", listed=0)], b""),
    "sparse beyond memory": ([field(shape=[10**18], mask="kept", listed=0)], b""),
    "square sparse table": ([field(shape=[3, 3], mask="kept", listed=0)], b""),
    "sparse whole numbers": ([field(dtype="int64", mask="kept", listed=1)], positions(0) + struct.pack("<q", 7)),
    "sparse truths": ([field(dtype="bool", mask="kept", listed=1)], positions(0) + b"\1"),
    "a broken side": ([field(shape=[3.7])], THREE),
    "a text for a shape": ([field(shape="3")], THREE),
    "a number for a name": ([field(name=5)], THREE),
    "a name twice": ([field(), field()], THREE + THREE),
}


@pytest.mark.parametrize(("header", "payload"), REFUSED.values(), ids=REFUSED.keys())
def test_an_inconsistent_message_is_refused(header, payload):
    with pytest.raises(FedobpError):
        decode(message(header, payload), {"theta": (3,)})


@pytest.mark.parametrize("name", ["dense", "kept", "bitmap"])
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
