"""Batches: every sample once, keyed, and no batch of a single sample."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedobp.engine.schedule import batches
from fedobp.keys import fold


@settings(deadline=None, max_examples=100)
@given(key=st.integers(-(2**63), 2**63 - 1), n=st.integers(0, 150), size=st.integers(2, 40))
def test_every_sample_comes_once_in_full_batches_and_a_last_partial_one(key, n, size):
    found = batches(torch.tensor(key), n, size)
    seen = [sample for batch in found for sample in batch.tolist()]
    alone = n % size == 1
    assert len(seen) == len(set(seen)) == n - alone
    assert set(seen) <= set(range(n))
    expected = [size] * (n // size) + ([n % size] if n % size > 1 else [])
    assert [len(batch) for batch in found] == expected


@pytest.mark.parametrize(("n", "lengths"), [(0, []), (1, []), (2, [2]), (32, [32]), (33, [32]), (34, [32, 2])])
def test_a_batch_of_one_sample_is_left_out(n, lengths):
    assert [len(batch) for batch in batches(fold(42), n, 32)] == lengths


def test_the_sample_that_is_left_out_differs_from_epoch_to_epoch():
    out = set()
    for epoch in range(20):
        (batch,) = batches(fold(42, epoch), 5, 4)
        out |= set(range(5)) - set(batch.tolist())
    assert out == set(range(5))


def test_one_key_gives_one_order():
    first, again = batches(fold(1, 2, 3), 50, 8), batches(fold(1, 2, 3), 50, 8)
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in again]


def test_epochs_clients_and_rounds_have_orders_of_their_own():
    orders = {
        tuple(torch.cat(batches(fold(42, round, client, epoch), 40, 8)).tolist())
        for round in range(3)
        for client in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 27


def test_orders_are_shuffled_evenly():
    # Over 2,000 epochs each of 6 samples comes first about 333 times; 4 standard deviations are 67.
    first = torch.tensor([int(batches(fold(7, epoch), 6, 3)[0][0]) for epoch in range(2000)])
    assert (first.bincount(minlength=6) - 2000 / 6).abs().max() < 67
