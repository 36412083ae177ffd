"""The codec: its payload is what is counted, and records come back."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import (
    NAN,
    assert_comes_back,
    checked,
    codes,
    dense_records,
    field,
    floats,
    keeping,
    message,
    payload_of,
    positions,
    sparse_records,
)

from fedobp.algorithms import METHODS
from fedobp.method import RoundContext, Sparse
from fedobp.models import Model
from fedobp.wire import (
    _decode_runs,
    _encode_runs,
    decode,
    encode,
    header_bytes,
    payload_bytes,
    run_bytes,
)

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
def test_run_lengths_of_several_masks_are_counted_one_by_one(runs, clients):
    """A run ends with its mask, also where the next client's mask begins in the same way."""
    mask = np.repeat(np.arange(len(runs)) % 2 == 0, runs)
    keep = torch.from_numpy(mask[: len(mask) // clients * clients].reshape(clients, -1))
    assert run_bytes(keep).tolist() == [len(_encode_runs(row.numpy())) for row in keep]


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
