"""Records of clients and cohorts: `take` and `stack` are inverse, and only entries that are not sent become NaN."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedobp.records import Sparse, mask_unsent, stack, take

FLOATS = st.floats(width=32, allow_nan=True)
LENGTHS = {"whole": 3, "part": 4}


@st.composite
def records(draw):
    """One client's record: a vector, a vector of which a part is sent, and two scalars."""

    def floats(name):
        return torch.tensor(draw(st.lists(FLOATS, min_size=LENGTHS[name], max_size=LENGTHS[name])), dtype=torch.float32)

    keep = torch.tensor(draw(st.lists(st.booleans(), min_size=LENGTHS["part"], max_size=LENGTHS["part"])))
    return {
        "whole": floats("whole"),
        "part": Sparse(floats("part"), keep),
        "count": torch.tensor(draw(st.integers(-(2**63), 2**63 - 1))),
        "flag": torch.tensor(draw(st.booleans())),
    }


def bits(record):
    """Return all of a record as plain values: names in order, types, shapes and bytes."""

    def one(tensor):
        return tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()

    return [
        (name, list(map(one, value)) if isinstance(value, Sparse) else one(value)) for name, value in record.items()
    ]


@given(st.lists(records(), min_size=1, max_size=5))
def test_taking_each_client_of_a_stack_gives_its_record(clients):
    cohort = stack(clients)
    assert [bits(take(cohort, at)) for at in range(len(clients))] == list(map(bits, clients))


@given(st.lists(records(), min_size=1, max_size=5))
def test_stacking_all_clients_of_a_cohort_gives_the_cohort(clients):
    cohort = stack(clients)
    assert bits(stack([take(cohort, at) for at in range(len(clients))])) == bits(cohort)


@given(st.lists(records(), min_size=1, max_size=5), st.data())
def test_a_part_of_a_cohort_is_the_stack_of_its_clients(clients, data):
    start = data.draw(st.integers(0, len(clients) - 1))
    stop = data.draw(st.integers(start + 1, len(clients)))
    assert bits(take(stack(clients), slice(start, stop))) == bits(stack(clients[start:stop]))


@given(records())
def test_only_entries_that_are_not_sent_become_nan(record):
    before = bits(record)
    found = mask_unsent(record)
    part, sent = found["part"], record["part"].keep
    assert torch.equal(part.keep, sent)
    assert part.values[~sent].isnan().all()
    assert bits({"sent": part.values[sent]}) == bits({"sent": record["part"].values[sent]})
    others = [name for name in record if name != "part"]
    assert bits({name: found[name] for name in others}) == bits({name: record[name] for name in others})
    assert bits(record) == before, "the sender's record must not change"


@given(st.lists(records(), min_size=1, max_size=4))
def test_masking_a_cohort_is_masking_each_client(clients):
    assert bits(mask_unsent(stack(clients))) == bits(stack(list(map(mask_unsent, clients))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masked_values_keep_their_type(dtype):
    found = mask_unsent({"part": Sparse(torch.ones(2, dtype=dtype), torch.tensor([True, False]))})["part"]
    assert found.values.dtype == dtype
    assert found.values[0] == 1
    assert math.isnan(found.values[1])


def test_entries_that_are_not_sent_are_filled_from_another_vector():
    part = Sparse(torch.tensor([1.0, math.nan]), torch.tensor([True, False]))
    assert part.fill(torch.tensor([5.0, 6.0])).tolist() == [1, 6]
    cohort = Sparse(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, True]]))
    assert (cohort.at(1).values.tolist(), cohort.at(1).keep.tolist()) == ([3, 4], [False, True])
    assert cohort.at(slice(1)).values.tolist() == [[1, 2]]
