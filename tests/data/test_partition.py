"""The published Dirichlet recipe against an independent implementation on NumPy's global generator, and its limits."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedobp.data import data_dir, load, partition, partitioners
from fedobp.errors import FedobpError


def published(y, clients, alpha, seed):
    """The recipe as published, on the global generator (restored afterwards): each (train, test), and the tries."""
    before = np.random.get_state()
    try:
        np.random.seed(seed)
        by_label = [np.array([i for i in range(len(y)) if y[i] == label]) for label in sorted(set(y.tolist()))]
        tries = 0
        while True:
            tries += 1
            clients_samples = [[] for _ in range(clients)]
            for samples in by_label:
                np.random.shuffle(samples)
                shares = np.random.dirichlet(np.repeat(alpha, clients))
                bounds = [0, *[int(edge * len(samples)) for edge in np.cumsum(shares)][:-1], len(samples)]
                for client in range(clients):
                    clients_samples[client].extend(samples[bounds[client] : bounds[client + 1]].tolist())
            if min(len(samples) for samples in clients_samples) >= 10:
                break
        shards = []
        for samples in clients_samples:
            samples = np.array(samples)
            np.random.shuffle(samples)
            cut = int(0.25 * len(samples))
            shards.append((samples[cut:], samples[:cut]))
        return shards, tries
    finally:
        np.random.set_state(before)


@pytest.fixture
def draws(monkeypatch):
    """A list that grows by one with every Dirichlet draw from a legacy generator."""
    drawn = []

    class Counting(np.random.RandomState):
        def dirichlet(self, alpha):
            drawn.append(len(alpha))
            return super().dirichlet(alpha)

    monkeypatch.setattr(partitioners, "RandomState", Counting)
    return drawn


def assert_same(shards, expected):
    assert len(shards) == len(expected)
    for shard, (train, test) in zip(shards, expected, strict=True):
        np.testing.assert_array_equal(shard.train, train)
        np.testing.assert_array_equal(shard.test, test)
        assert len(shard.val) == 0


def sizes(shards):
    return [len(s.train) + len(s.val) + len(s.test) for s in shards]


@pytest.fixture(scope="module")
def digits():
    return load("digits", data_dir()).y


@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1])
@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_digits_are_assigned_as_published(digits, alpha, seed):
    assert_same(partition(digits, 10, alpha=alpha, seed=seed), published(digits, 10, alpha, seed)[0])


@pytest.mark.essential
@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_uneven_labels_are_assigned_as_published(alpha, seed):
    y = np.random.RandomState(3).choice(np.array([0, 2, 3, 7]), size=900, p=[0.6, 0.25, 0.1, 0.05])
    assert_same(partition(y, 5, alpha=alpha, seed=seed), published(y, 5, alpha, seed)[0])


def test_retries_continue_with_shuffled_arrays_and_the_same_stream():
    y = np.repeat(np.arange(4), 50)
    expected, tries = published(y, 8, 0.5, 42)
    assert tries > 1, "this case must need a second try, or it shows nothing"
    assert_same(partition(y, 8, alpha=0.5, seed=42), expected)


@pytest.mark.parametrize(("alpha", "tries", "low", "high"), [(0.1, 8, 14, 3091), (0.5, 1, 177, 1211)])
def test_cifar10s_published_sizes_and_tries(draws, alpha, tries, low, high):
    # Sizes depend only on label counts, so 6,000 samples of each of ten labels give CIFAR10's sizes in any order.
    y = np.repeat(np.arange(10), 6000)
    shards = partition(y, 100, alpha=alpha, seed=42)
    assert (min(sizes(shards)), max(sizes(shards)), sum(sizes(shards))) == (low, high, 60_000)
    assert draws == [100] * (10 * tries)


@pytest.mark.parametrize(("alpha", "tries", "low", "high"), [(0.1, 8, 14, 3091), (0.5, 1, 177, 1211)])
def test_real_cifar10_is_assigned_as_published(alpha, tries, low, high):
    file = Path(os.environ.get("FEDOBP_DATA", "")) / "cifar10.npz"
    if not os.environ.get("FEDOBP_DATA") or not file.is_file():
        pytest.skip("needs CIFAR10: set FEDOBP_DATA to a folder with cifar10.npz (`fedobp data import cifar10 FILE`)")
    with np.load(file, allow_pickle=False) as arrays:
        y = arrays["y"].reshape(-1).astype(np.int64)
    expected, needed = published(y, 100, alpha, 42)
    shards = partition(y, 100, alpha=alpha, seed=42)
    assert_same(shards, expected)
    assert (needed, min(sizes(shards)), max(sizes(shards))) == (tries, low, high)


@pytest.mark.parametrize("kind", ["dirichlet", "iid"])
def test_a_quarter_rounded_down_is_test_and_the_rest_train(digits, kind):
    for shard in partition(digits, 10, kind=kind, seed=5):
        n = len(shard.train) + len(shard.test)
        assert len(shard.test) == int(0.25 * n) == n // 4
        assert len(shard.val) == 0


@pytest.mark.parametrize("kind", ["dirichlet", "iid"])
def test_validation_is_cut_from_training_and_leaves_test_as_it_was(digits, kind):
    without = partition(digits, 10, kind=kind, seed=5)
    for plain, cut in zip(without, partition(digits, 10, kind=kind, seed=5, val_ratio=0.3), strict=True):
        np.testing.assert_array_equal(cut.test, plain.test)
        assert len(cut.val) == int(0.3 * len(plain.train))
        assert sorted([*cut.val, *cut.train]) == sorted(plain.train)


@pytest.mark.parametrize("clients", [1, 7, 100])
def test_iid_sizes_differ_by_at_most_one(digits, clients):
    found = sizes(partition(digits, clients, kind="iid"))
    assert max(found) - min(found) <= 1
    assert sum(found) == 1797


def test_iid_mixes_labels_and_depends_on_the_seed(digits):
    first = partition(digits, 5, kind="iid", seed=1)
    assert all(len(np.unique(digits[shard.train])) == 10 for shard in first)
    assert not np.array_equal(first[0].train, partition(digits, 5, kind="iid", seed=2)[0].train)


@settings(deadline=None, max_examples=50)
@given(
    labels=st.lists(st.integers(0, 6), min_size=40, max_size=200),
    clients=st.integers(1, 4),
    kind=st.sampled_from(["dirichlet", "iid"]),
    alpha=st.floats(1.0, 20.0),
    seed=st.integers(0, 2**32 - 1),
    val_ratio=st.floats(0.0, 0.9),
)
def test_every_sample_is_on_exactly_one_client(labels, clients, kind, alpha, seed, val_ratio):
    y = np.array(labels)
    try:
        shards = partition(y, clients, kind=kind, alpha=alpha, seed=seed, val_ratio=val_ratio)
    except FedobpError as error:
        assert kind == "dirichlet"
        assert "tries" in str(error)  # noqa: PT017 (small draws may fail, and must then say so)
        return
    everything = np.concatenate([np.concatenate([s.train, s.val, s.test]) for s in shards])
    assert sorted(everything) == list(range(len(y)))
    assert kind == "iid" or min(sizes(shards)) >= 10


def test_equal_seeds_give_equal_partitions_and_others_do_not(digits):
    first, again, other = (partition(digits, 10, seed=seed) for seed in (3, 3, 4))
    assert_same(again, [(s.train, s.test) for s in first])
    assert any(not np.array_equal(a.train, b.train) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("kind", ["dirichlet", "iid"])
def test_the_global_generator_is_neither_used_nor_changed(digits, kind):
    np.random.seed(11)
    before = np.random.get_state()
    first = partition(digits, 10, kind=kind, seed=42)
    after = np.random.get_state()
    assert before[0] == after[0]
    assert before[2:] == after[2:]
    np.testing.assert_array_equal(before[1], after[1])
    np.random.seed(12)
    assert_same(partition(digits, 10, kind=kind, seed=42), [(s.train, s.test) for s in first])


def test_the_callers_labels_are_not_changed(digits):
    before = digits.copy()
    partition(digits, 10)
    np.testing.assert_array_equal(digits, before)


def test_a_draw_that_might_succeed_gives_up_after_a_thousand_tries(draws):
    y = np.repeat(np.arange(4), 50)
    with pytest.raises(
        FedobpError, match=r"200 samples .* 13 clients .* alpha 0\.5 \(1,000 tries\): use fewer --clients"
    ):
        partition(y, 13, alpha=0.5)
    assert len(draws) == 4 * 1000


def test_a_small_chance_of_success_is_tried(draws):
    y = np.repeat(np.arange(4), 50)
    expected, tries = published(y, 12, 0.5, 42)
    assert tries == 250, "this case must need many tries, or it shows nothing"
    assert_same(partition(y, 12, alpha=0.5, seed=42), expected)
    assert len(draws) == 4 * 250


def test_a_hopeless_partition_is_refused_after_ten_tries(digits, draws):
    with pytest.raises(
        FedobpError, match=r"about 10\^\d\d draws until each of 100 clients has 10 of 1,797 samples"
    ) as no:
        partition(digits, 100)
    assert "--partition dirichlet-equal" in str(no.value)
    assert len(draws) == 10 * 10


def test_sixty_thousand_samples_on_a_thousand_clients_are_refused_after_ten_tries(draws):
    with pytest.raises(
        FedobpError, match=r"would need about 10\^\d\d draws until each of 1000 clients has 10 of 60,000"
    ):
        partition(np.repeat(np.arange(10), 6000), 1000)
    assert len(draws) == 10 * 10


def test_an_infinite_number_of_draws_is_said_in_words():
    # 10,000 samples of one label: at alpha 0.01 few of 1,000 clients get any.
    with pytest.raises(FedobpError, match="would need more draws than can be counted until each of 1000 clients"):
        partition(np.zeros(10_000, dtype=np.int64), 1000, alpha=0.01)


def test_too_few_samples_for_ten_each_fail_before_anything_is_drawn(draws):
    with pytest.raises(FedobpError, match=r"199 samples are fewer than 10 for each of 20 clients: use fewer --clients"):
        partition(np.arange(199) % 5, 20, alpha=0.5)
    assert draws == []


def test_too_few_samples_for_iid_are_refused():
    with pytest.raises(FedobpError, match="9 samples are fewer than 2 for each of 5 clients: use fewer --clients"):
        partition(np.arange(9), 5, kind="iid")


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_a_concentration_that_is_not_positive_is_refused(digits, alpha):
    with pytest.raises(FedobpError, match="not above 0"):
        partition(digits, 5, alpha=alpha)


@pytest.mark.parametrize("alpha", [1e-3, 1e-300])
def test_a_concentration_so_small_that_draws_vanish_gives_a_partition_or_a_sentence(digits, alpha):
    try:
        shards = partition(digits, 2, alpha=alpha)
    except FedobpError as error:
        assert "alpha" in str(error)  # noqa: PT017 (a refusal is as right as a partition; a warning is not)
    else:
        assert sum(sizes(shards)) == len(digits)


def test_an_unknown_partitioner_suggests_the_nearest(digits):
    with pytest.raises(FedobpError, match="unknown partition 'dirichle': did you mean 'dirichlet'"):
        partition(digits, 5, kind="dirichle")
