"""Batches: every sample once, keyed, no batch of a single sample; for one client and for many at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedobp.engine.batch_order as batch_order_module
from fedobp.engine.batch_order import batches, batches_of, orders, share_of, step_key, subset
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
def test_a_batch_of_one_sample_is_dropped(n, lengths):
    assert [len(batch) for batch in batches(fold(42), n, 32)] == lengths


def test_the_dropped_sample_differs_from_epoch_to_epoch():
    out = set()
    for epoch in range(20):
        (batch,) = batches(fold(42, epoch), 5, 4)
        out |= set(range(5)) - set(batch.tolist())
    assert out == set(range(5))


def test_one_key_gives_one_order():
    first, again = batches(fold(1, 2, 3), 50, 8), batches(fold(1, 2, 3), 50, 8)
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in again]


def test_epochs_clients_and_rounds_have_different_orders():
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


# Many clients at once.


def one_by_one(key, n, epochs, size):
    """Return a client's batches as `batches` makes them."""
    return [batch.tolist() for epoch in range(epochs) for batch in batches(fold(key, epoch), n, size)]


def check(keys, n, epochs, size):
    found = orders(keys, n, epochs, size)
    expected = [one_by_one(key, *one, size) for key, *one in zip(keys, n, epochs, strict=True)]
    steps = max(map(len, expected))
    assert found.positions.shape == (len(n), steps, size)
    assert found.counts.shape == (len(n), steps)
    assert found.positions.dtype == found.counts.dtype == torch.int64
    for positions, counts, expected_batches in zip(found.positions, found.counts, expected, strict=True):
        assert counts.tolist() == [len(batch) for batch in expected_batches] + [0] * (steps - len(expected_batches))
        assert [row[:count].tolist() for row, count in zip(positions, counts, strict=True)][
            : len(expected_batches)
        ] == expected_batches


client = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 40), st.integers(0, 3))


@settings(deadline=None, max_examples=150)
@given(clients=st.lists(client, min_size=1, max_size=6), size=st.integers(2, 12))
def test_orders_are_the_batches_of_each_client_epoch_by_epoch(clients, size):
    keys, n, epochs = zip(*clients, strict=True)
    check(torch.tensor(keys), n, epochs, size)


@pytest.mark.parametrize(
    ("n", "epochs"),
    [((0, 1), (2, 2)), ((5, 9), (0, 0)), ((4, 0, 1, 5), (1, 3, 3, 2)), ((8, 4), (1, 2)), ((1, 33), (9, 1))],
    ids=["no batches", "no epochs", "some without batches", "equally many steps", "one sample too many"],
)
def test_orders_of_ragged_clients(n, epochs):
    check(fold(3, torch.arange(len(n))), n, epochs, 4)


@settings(deadline=None, max_examples=100)
@given(n=st.integers(0, 150), size=st.integers(2, 40))
def test_batches_of_counts_the_batches(n, size):
    assert batches_of(n, size) == len(batches(fold(1), n, size))


@pytest.mark.parametrize("spread", [1, 2, 3])
@pytest.mark.parametrize("top", [2**63 - 1, 0])
def test_samples_whose_hashes_tie_keep_their_order(monkeypatch, spread, top):
    """Hashes with few values, among them the largest int64, which also marks padding."""

    def few(key, *parts):
        key = torch.as_tensor(key)
        for part in parts:
            key = key * 5 + torch.as_tensor(part) * 3
        return top - key.remainder(spread)

    monkeypatch.setattr(batch_order_module, "fold", few)
    monkeypatch.setattr("fedobp.keys.fold", few)
    n, epochs, keys = (7, 0, 10, 1, 4), (2, 1, 1, 3, 2), torch.tensor([1, 2, 3, 4, 5])
    found = orders(keys, n, epochs, 3)
    for client, key in enumerate(keys):
        wanted = [b.tolist() for e in range(epochs[client]) for b in batches(few(key, e), n[client], 3)]
        records = zip(found.positions[client], found.counts[client].tolist(), strict=True)
        assert [row[:count].tolist() for row, count in records if count] == wanted


def test_a_clients_order_does_not_depend_on_the_other_clients():
    keys = fold(9, torch.arange(3))
    alone = orders(keys[1:2], [10], [2], 4)
    beside = orders(keys, [50, 10, 3], [1, 2, 4], 4)
    steps = alone.positions.shape[1]
    real = torch.arange(4) < alone.counts[0, :, None]
    assert torch.equal(beside.counts[1, :steps], alone.counts[0])
    assert torch.equal(beside.positions[1, :steps][real], alone.positions[0][real])


@pytest.mark.parametrize(("n", "size", "smallest", "count"), [(9, 4, 1, 3), (9, 4, 2, 2), (3, 4, 4, 0), (1, 1, 2, 0)])
def test_the_smallest_allowed_batch(n, size, smallest, count):
    assert len(batches(fold(3), n, size, smallest=smallest)) == batches_of(n, size, smallest) == count


def test_orders_can_start_at_a_later_epoch():
    keys, n = fold(7, torch.arange(3)), [9, 5, 2]
    later = orders(keys, n, [1, 1, 1], 4, 1, first=2)
    for row, (key, size) in enumerate(zip(keys, n, strict=True)):
        wanted = batches(fold(key, 2), size, 4, smallest=1)
        found = [p[:c].tolist() for p, c in zip(later.positions[row], later.counts[row].tolist(), strict=True) if c]
        assert found == [batch.tolist() for batch in wanted]


@pytest.mark.parametrize(("n", "fraction", "count"), [(10, 0.8, 8), (3, 0.5, 1), (1, 0.1, 1), (0, 0.5, 0), (4, 1.0, 4)])
def test_a_fraction_of_the_samples(n, fraction, count):
    chosen = subset(fold(5), n, fraction).tolist()
    assert len(chosen) == len(set(chosen)) == share_of(n, fraction) == count
    assert set(chosen) <= set(range(n))


def test_keys_of_steps_differ_from_keys_of_orders():
    key = fold(1, 2)
    steps = [int(step_key(key, epoch, at)) for epoch in range(5) for at in range(5)]
    hashes = [int(fold(key, epoch, sample)) for epoch in range(5) for sample in range(50)]
    assert len(set(steps + hashes)) == 25 + 250
