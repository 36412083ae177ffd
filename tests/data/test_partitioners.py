"""Partitioners: their guarantees for any labels and seed, and their user errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedobp.data import PARTITIONERS, Dataset, data_dir, load, partition, with_client_changes
from fedobp.data.client_changes import UNCHANGED, ClientChange
from fedobp.data.partition_file import partition_hash
from fedobp.errors import FedobpError

NATURAL = np.arange(1797) * 7 % 20  # of the digits: 20 clients, with 89 or 90 samples each
LABELS = np.repeat(np.arange(10), 6000)
COMPLETE = sorted(set(PARTITIONERS) - {"dirichlet"})  # partitioners that succeed on all labels below


@pytest.fixture(scope="module")
def digits():
    return load("digits", data_dir())


def counts(y, shards):
    return np.stack([np.bincount(y[shard.samples], minlength=int(y.max()) + 1) for shard in shards])


def sizes(shards):
    return [len(shard.samples) for shard in shards]


# Guarantees of all partitioners.


@settings(deadline=None, max_examples=150)
@given(
    labels=st.lists(st.integers(0, 5), min_size=60, max_size=200),
    clients=st.integers(1, 6),
    kind=st.sampled_from(COMPLETE),
    alpha=st.floats(1e-3, 50.0),
    seed=st.integers(0, 2**32 - 1),
    val_ratio=st.floats(0.0, 0.9),
    holdout=st.integers(0, 5),
)
def test_every_sample_is_on_exactly_one_client(labels, clients, kind, alpha, seed, val_ratio, holdout):
    y = np.array([*labels, *range(6), *range(6)])
    natural, k = np.arange(len(y)) % clients, -(-6 // clients)
    options = {"k": max(2, k)} if kind == "classes" else {}
    try:
        shards = partition(
            y, clients, kind=kind, options=options, alpha=alpha, seed=seed, val_ratio=val_ratio, natural=natural,
            holdout=min(holdout, clients - 1),
        )  # fmt: skip
    except FedobpError as error:
        assert kind == "classes"
        assert "would be on" in str(error)  # noqa: PT017 (a rare label cannot be on many clients)
        return
    assert len(shards) == clients
    assert sorted(np.concatenate([shard.samples for shard in shards])) == list(range(len(y)))
    assert [shard.held_out for shard in shards] == [False] * (clients - min(holdout, clients - 1)) + [True] * min(
        holdout, clients - 1
    )
    for shard in shards:
        tested = len(shard.samples) // 4
        assert (len(shard.test), len(shard.val)) == (tested, int(val_ratio * (len(shard.samples) - tested)))


@pytest.mark.parametrize("kind", PARTITIONERS)
def test_the_seed_decides_and_the_global_generator_does_not(digits, kind):
    np.random.seed(11)
    before = np.random.get_state()
    first, again, other = (partition(digits.y, 20, kind=kind, seed=seed, natural=NATURAL) for seed in (3, 3, 4))
    np.testing.assert_array_equal(before[1], np.random.get_state()[1])
    assert partition_hash(digits, first) == partition_hash(digits, again) != partition_hash(digits, other)


HASHES = {
    "dirichlet": "554ec45aa032a9bd5ae61c253c8ce7dbc989d7b22e40b2af0cf30799619a3053",
    "dirichlet-equal": "92a9d11f586c7a3f55bed9326398e0402981f66ea9e5e551d210598a0b6bd517",
    "iid": "1a98f38f4b79f41c429312fbdfbec3a3b27f0936d3c8ed5341d7e52c8cf2debb",
    "shards": "049e3956d475fff2b103a28c9180b6dfc97863a259cc5b009550d726b52ce1cc",
    "classes": "debdc19faa54de9aab10ac3b39259beb56d53a04f9042fc198d8462d4c15df24",
    "quantity": "5a709b67f6bef1601573610123179c2a0a9c207b906fddc4dfd9f30c6a5d03f8",
    "feature": "f4fac2bd1c806c1142d2333c19085d6ffe496e61a654b88fc8e39009cb5d3638",
    "concept": "919efb94b6391fd74163d45e3d4561f1629bcdd24219f231f1396043b5d884f7",
    "natural": "706a020e9ca47a4f5f69b4fc80bb924aa89f61b7ac475a553bf5894d1628e4d9",
}


@pytest.mark.parametrize("kind", PARTITIONERS)
def test_equal_arguments_give_the_same_hash_everywhere(kind):
    """NumPy 1.26, 2.0 and 2.4 give these hashes; a changed hash means that users' partitions change."""
    y = np.arange(3000) ** 2 % 11 % 10
    mine = Dataset("mine", np.zeros((3000, 4, 4), np.uint8), y, tuple(range(10)), 0)
    shards = partition(y, 20, kind=kind, alpha=0.5, seed=7, val_ratio=0.1, holdout=3, natural=np.arange(3000) % 30)
    assert partition_hash(mine, shards) == HASHES[kind]


@pytest.mark.parametrize("kind", sorted({*PARTITIONERS} - {"dirichlet"}))
def test_sixty_thousand_samples_are_all_assigned_to_a_thousand_clients(kind):
    shards = partition(LABELS, 1000, kind=kind, natural=np.arange(60_000) % 1000)
    assert sum(sizes(shards)) == 60_000


@pytest.mark.parametrize("kind", PARTITIONERS)
def test_too_few_samples_are_refused(kind):
    with pytest.raises(FedobpError, match=r"use (fewer|more) --clients"):
        partition(np.arange(9) % 9, 5, kind=kind, natural=np.zeros(9, dtype=np.int64))


# Single partitioners.


@settings(deadline=None, max_examples=100)
@given(
    labels=st.lists(st.integers(0, 8), min_size=20, max_size=300),
    clients=st.integers(1, 10),
    alpha=st.one_of(st.floats(1e-300, 1e-3), st.floats(1e-3, 1e6)),
    seed=st.integers(0, 2**32 - 1),
)
def test_dirichlet_equal_always_terminates_with_sizes_that_differ_by_at_most_one(labels, clients, alpha, seed):
    found = sizes(partition(np.array(labels), clients, kind="dirichlet-equal", alpha=alpha, seed=seed))
    assert max(found) - min(found) <= 1
    assert sum(found) == len(labels)


def test_dirichlet_equal_follows_alpha():
    few, many = (counts(LABELS, partition(LABELS, 100, kind="dirichlet-equal", alpha=alpha)) for alpha in (0.1, 100.0))
    # At alpha 100 each of ten labels has about a tenth of 600 samples; at 0.1 one label has most of them.
    assert np.abs(many - 60).max() < 40
    assert np.median(few.max(axis=1)) > 300
    assert (few.sum(axis=0) == 6000).all()


def test_dirichlet_equal_draws_dirichlet_label_distributions():
    """If labels are not used up, counts have the mean and variance of samples from a Dirichlet(alpha) draw."""
    y = np.repeat(np.arange(4), 50_000)
    shares = counts(y, partition(y, 2000, kind="dirichlet-equal", alpha=1.0, seed=1)) / 100
    assert np.abs(shares.mean(axis=0) - 0.25).max() < 1e-9  # every sample is assigned
    # Dirichlet(1, 1, 1, 1) has variance 3/80 = 0.0375; 100 samples of it add (1/4 - 1/4^2 - 0.0375) / 100.
    assert shares.var(axis=0) == pytest.approx(np.full(4, 0.0375 + 0.0015), rel=0.1)


def test_iid_mixes_labels_on_all_clients():
    found = counts(LABELS, partition(LABELS, 10, kind="iid"))
    assert np.abs(found - 600).max() < 150


@pytest.mark.parametrize("per_client", [1, 2, 5])
def test_shards_have_few_labels_and_equal_sizes(per_client):
    shards = partition(LABELS, 100, kind="shards", options={"per_client": per_client})
    assert set(sizes(shards)) == {600}
    # 60,000 samples in 100, 200 or 500 shards: 600, 300 or 120 samples, all of one label because they divide 6,000.
    held = (counts(LABELS, shards) > 0).sum(axis=1)
    assert held.max() <= per_client
    assert held.mean() > min(per_client, 4) - 0.5


def test_more_shards_than_samples_are_refused():
    with pytest.raises(FedobpError, match=r"60,000 samples are fewer than 70000 for each of 1 clients: .* per_client"):
        partition(LABELS, 1, kind="shards", options={"per_client": 70_000})


def test_shards_across_the_border_of_two_labels_have_both():
    y = np.repeat([0, 1], 15)
    found = counts(y, partition(y, 3, kind="shards", options={"per_client": 1}))
    assert sorted(found.tolist()) == [[0, 10], [5, 5], [10, 0]]


@settings(deadline=None, max_examples=60)
@given(k=st.integers(1, 10), clients=st.integers(10, 60), seed=st.integers(0, 2**32 - 1))
def test_classes_gives_each_client_exactly_k_labels_and_each_label_equally_many_clients(k, clients, seed):
    y = np.repeat(np.arange(10), 80)
    found = counts(y, partition(y, clients, kind="classes", options={"k": k}, seed=seed))
    assert ((found > 0).sum(axis=1) == k).all()
    holders = (found > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for label in range(10):
        shares = found[:, label][found[:, label] > 0]
        assert shares.max() - shares.min() <= 1


def test_classes_do_not_always_go_together():
    found = counts(LABELS, partition(LABELS, 200, kind="classes"))
    pairs = {tuple(np.flatnonzero(row)) for row in found}
    assert len(pairs) > 30  # of 45


@pytest.mark.parametrize(
    ("clients", "options", "sentence"),
    [
        (20, {"k": 11}, "k=11 is more than the 10 labels there are"),
        (4, {"k": 2}, r"4 clients with 2 labels each do not take all 10 labels: .* --partition-set k=3"),
        (200, {"k": 10}, "a label has 50 samples and would be on 200 clients: use fewer --clients, or a smaller k"),
    ],
)
def test_impossible_classes_are_refused(clients, options, sentence):
    with pytest.raises(FedobpError, match=sentence):
        partition(np.repeat(np.arange(10), 50), clients, kind="classes", options=options)


def test_quantity_gives_every_client_ten_samples_and_splits_the_rest_unevenly():
    found = np.array(sizes(partition(LABELS, 100, kind="quantity")))
    assert found.min() >= 10
    assert found.max() > 3 * 600
    even = np.array(sizes(partition(LABELS, 100, kind="quantity", options={"beta": 1000})))
    assert np.abs(even - 600).max() < 100


@settings(deadline=None, max_examples=60)
@given(n=st.integers(50, 300), clients=st.integers(1, 5), beta=st.floats(0.01, 1000), seed=st.integers(0, 2**32 - 1))
def test_quantity_uses_every_sample_at_every_beta(n, clients, beta, seed):
    found = sizes(partition(np.arange(n) % 3, clients, kind="quantity", options={"beta": beta}, seed=seed))
    assert sum(found) == n
    assert min(found) >= 10


def test_natural_keeps_the_clients_of_the_data(digits):
    for client, shard in enumerate(partition(digits.y, 20, kind="natural", natural=NATURAL)):
        assert sorted(shard.samples) == np.flatnonzero(client == NATURAL).tolist()


def test_natural_with_fewer_clients_draws_clients_and_keeps_their_order(digits):
    def drawn_clients(seed):
        shards = partition(digits.y, 5, kind="natural", natural=NATURAL, seed=seed)
        for shard in shards:
            assert len(shard.samples) == (NATURAL[shard.train[0]] == NATURAL).sum()
        return [int(NATURAL[shard.train[0]]) for shard in shards]

    assert drawn_clients(1) == sorted(drawn_clients(1)) != drawn_clients(2)
    assert len(set(drawn_clients(1))) == 5


def test_natural_needs_the_clients_of_the_samples(digits):
    with pytest.raises(FedobpError, match="import the data with --client COLUMN, or choose another --partition"):
        partition(digits.y, 5, kind="natural")
    with pytest.raises(FedobpError, match="the data comes from 20 clients, not 21: use fewer --clients"):
        partition(digits.y, 21, kind="natural", natural=NATURAL)


# Changes and held-out clients.


def test_other_partitions_change_nothing(digits):
    assert with_client_changes(digits, partition(digits.y, 10)) is digits
    assert partition(digits.y, 3, kind="iid")[0].change == ClientChange() == UNCHANGED


@pytest.mark.parametrize("kind", PARTITIONERS)
def test_held_out_clients_come_last_and_the_others_stay_in_order(digits, kind):
    plain, held = (
        [shard.samples.tolist() for shard in partition(digits.y, 20, kind=kind, natural=NATURAL, holdout=holdout)]
        for holdout in (0, 6)
    )
    places = [plain.index(samples) for samples in held]
    assert places[:14] == sorted(places[:14])
    assert sorted(places) == list(range(20))
    fewer = partition(digits.y, 20, kind=kind, natural=NATURAL, holdout=2)
    assert [shard.samples.tolist() for shard in fewer[18:]] == held[14:16]
    assert [shard.held_out for shard in fewer] == [False] * 18 + [True] * 2


def test_the_held_out_clients_depend_on_the_seed(digits):
    def names(seed):
        shards = partition(digits.y, 20, kind="natural", natural=NATURAL, holdout=3, seed=seed)
        return {int(NATURAL[shard.train[0]]) for shard in shards[17:]}

    assert len({frozenset(names(seed)) for seed in range(5)}) > 1


def test_a_changed_client_that_is_held_out_keeps_its_change():
    plain = partition(np.arange(80) % 2, 8, kind="feature")
    change = {tuple(shard.samples): shard.change for shard in plain}
    for shard in partition(np.arange(80) % 2, 8, kind="feature", holdout=4):
        assert shard.change == change[tuple(shard.samples)]
