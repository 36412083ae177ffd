"""Feature shift and concept shift: groups, assignments, strengths and labels, for any labels and seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedobp.data import Dataset, partition, with_client_changes
from fedobp.errors import FedobpError

Y = np.arange(200) % 5
CHANGES = ["rotation", "noise", "blur", "contrast", "colour"]


def sizes_of(groups):
    return np.unique(groups, return_counts=True)[1]


@settings(deadline=None, max_examples=80)
@given(
    kind=st.sampled_from([*[("feature", change) for change in CHANGES], ("concept", "permute"), ("concept", "merge")]),
    clients=st.integers(4, 13),
    groups=st.integers(2, 4),
    holdout=st.integers(0, 3),
    labels=st.sampled_from(["iid", "dirichlet"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_assigned_as_without_the_change_and_groups_are_equally_large(
    kind, clients, groups, holdout, labels, seed
):
    name, change = kind
    given = {"alpha": 50.0, "seed": seed, "holdout": holdout}
    shards = partition(Y, clients, kind=name, options={"change": change, "groups": groups, "labels": labels}, **given)
    plain = partition(Y, clients, kind=labels, **given)
    for shard, other in zip(shards, plain, strict=True):
        for part in ("train", "val", "test", "held_out"):
            np.testing.assert_array_equal(getattr(shard, part), getattr(other, part))
    found = sizes_of([shard.group for shard in shards])
    assert len(found) == groups
    assert found.max() - found.min() <= 1
    if change != "noise":  # whose seeds differ
        assert len({(shard.group, shard.change) for shard in shards}) == groups


def test_other_partitions_have_no_groups():
    assert {shard.group for shard in partition(Y, 6, kind="iid")} == {0}
    assert {shard.group for shard in partition(Y, 6, kind="feature", options={"change": "blur"})} == {0}


# Feature shift.


@pytest.mark.parametrize("change", CHANGES[1:])
def test_strengths_are_spaced_evenly_over_clients_or_groups(change):
    largest = {"noise": 0.3} if change == "noise" else {"strength": 0.3}

    def strengths(**more):
        shards = partition(Y, 7, kind="feature", options={"change": change, **largest, **more}, seed=2)
        assert {name for shard in shards for name, value in vars(shard.change).items() if value} <= {
            change, "seed", "group",
        }  # fmt: skip
        return [getattr(shard.change, change) for shard in shards], [shard.group for shard in shards]

    alone, groups = strengths()
    assert sorted(alone) == pytest.approx([0.3 * at / 6 for at in range(7)])
    assert alone != sorted(alone)
    assert set(groups) == {0}
    found, groups = strengths(groups=3)
    assert found == pytest.approx([0.15 * group for group in groups])
    assert sorted(sizes_of(groups)) == [2, 2, 3]


def test_clients_of_a_group_have_noise_of_their_own():
    shards = partition(Y, 6, kind="feature", options={"change": "noise", "groups": 2})
    assert len({shard.change.seed for shard in shards}) == 6


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_groups_of_rotations_are_their_turns(groups):
    shards = partition(Y, 9, kind="feature", options={"groups": groups})
    assert [shard.group for shard in shards] == [shard.change.turns for shard in shards]
    assert len(sizes_of([shard.group for shard in shards])) == groups


def test_four_groups_of_rotations_are_the_default():
    given = {"kind": "feature", "seed": 3}
    plain, asked = (partition(Y, 9, options=options, **given) for options in ({}, {"groups": 4}))
    assert [shard.change for shard in plain] == [shard.change for shard in asked]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"groups": 5}, "groups=5 of feature must be at most 4, because there are four rotations; or leave it out"),
        ({"groups": 1, "change": "blur"}, "groups=1 of feature must be at least 2; or leave it out"),
        ({"groups": -2}, "option 'groups' of feature must be at least 0, not -2"),
    ],
)
def test_impossible_groups_are_refused(options, sentence):
    with pytest.raises(FedobpError, match=sentence):
        partition(Y, 8, kind="feature", options=options)


# Concept shift.


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.integers(0, 9), min_size=30, max_size=60),
    groups=st.integers(2, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_permuted_labels_are_bijections_that_differ_everywhere(labels, groups, seed):
    y = np.array([*labels, 0, 1, 2, 5, 7, 9])
    present = np.unique(y)
    shards = partition(y, 8, kind="concept", options={"groups": groups}, seed=seed)
    maps = {shard.group: np.array(shard.change.labels or range(10)) for shard in shards}
    for new in maps.values():
        assert sorted(new[present]) == present.tolist()
    for label in present:  # no two groups give a label the same new one
        assert len({int(new[label]) for new in maps.values()}) == groups
    assert next(shard for shard in shards if shard.group == 0).change.labels == ()


@settings(deadline=None, max_examples=60)
@given(labels=st.integers(3, 11), groups=st.integers(2, 6), seed=st.integers(0, 2**32 - 1))
def test_merged_labels_are_pairs(labels, groups, seed):
    y = np.arange(60) % labels
    shards = partition(y, 8, kind="concept", options={"groups": groups, "change": "merge"}, seed=seed)
    for shard in shards:
        if shard.group == 0:
            assert shard.change.labels == ()
            continue
        new = np.array(shard.change.labels)
        merged = np.bincount(new, minlength=labels)
        assert sorted(merged) == [0] * (labels // 2) + [1] * (labels % 2) + [2] * (labels // 2)
        assert (new[new] == new).all()  # a pair becomes one of its own labels


def test_labels_of_all_parts_change_and_the_number_of_classes_does_not():
    mine = Dataset("mine", np.zeros((200, 3), np.float32), Y, tuple("abcde"), 0)
    shards = partition(Y, 8, kind="concept", val_ratio=0.2)
    found = with_client_changes(mine, shards)
    for shard in shards:
        new = np.array(shard.change.labels or range(5))
        for part in (shard.train, shard.val, shard.test):
            assert found.y[part].tolist() == new[Y[part]].tolist()
    assert found.classes == 5
    assert (found.y != Y).mean() == pytest.approx(0.75)  # all but group 0's


@pytest.mark.parametrize(
    ("y", "options", "sentence"),
    [
        (Y % 3, {}, "4 groups cannot each give 3 labels other meanings: use --partition-set groups=3, or change=merge"),
        (Y % 2, {"change": "merge"}, "2 labels merged in pairs are one: use --partition-set change=permute"),
        (Y, {"groups": 1}, "option 'groups' of concept must be at least 2, not 1"),
    ],
)
def test_impossible_concepts_are_refused(y, options, sentence):
    with pytest.raises(FedobpError, match=sentence):
        partition(y, 8, kind="concept", options=options)


# Changed inputs.


def small(x, name="mine"):
    return Dataset(name, x, np.arange(len(x)) % 2, (0, 1), 0)


def test_rotation_changes_each_clients_images_and_not_the_dataset():
    x = np.arange(64 * 9, dtype=np.uint8).reshape(64, 3, 3)
    mine, before = small(x), x.copy()
    shards = partition(mine.y, 8, kind="feature", seed=5)
    assert sorted(shard.change.turns for shard in shards) == [0, 0, 1, 1, 2, 2, 3, 3]
    rotated = with_client_changes(mine, shards)
    for shard in shards:
        for sample in shard.samples:
            by_hand = x[sample]
            for _ in range(shard.change.turns):
                by_hand = np.array([[row[column] for row in by_hand] for column in (2, 1, 0)])
            np.testing.assert_array_equal(rotated.x[sample], by_hand)
    np.testing.assert_array_equal(x, before)
    assert rotated.x.dtype == np.uint8
    assert (rotated.y == mine.y).all()


def test_colour_images_rotate_with_their_channels():
    x = np.arange(8 * 2 * 2 * 3, dtype=np.uint8).reshape(8, 2, 2, 3)
    shards = partition(np.arange(8) % 2, 4, kind="feature", seed=5)
    rotated = with_client_changes(small(x), shards).x
    shard = next(shard for shard in shards if shard.change.turns == 1)
    # [[a, b], [c, d]] turned counter-clockwise is [[b, d], [a, c]].
    (a, b), (c, d) = x[shard.train[0]]
    np.testing.assert_array_equal(rotated[shard.train[0]], [[b, d], [a, c]])


def test_noise_is_spread_from_none_to_the_largest_and_is_the_same_every_time():
    x = np.full((2000, 4, 4), 128, np.uint8)
    x[0, 0, 0] = 255
    shards = partition(np.arange(2000) % 2, 5, kind="feature", options={"change": "noise", "noise": 0.2}, seed=3)
    assert sorted(shard.change.noise for shard in shards) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    noisy = with_client_changes(small(x), shards).x
    assert noisy.dtype == np.uint8
    for shard in shards:
        found = noisy[shard.samples].astype(float)
        assert found.mean() == pytest.approx(128, abs=3)
        assert found.std() == pytest.approx(255 * shard.change.noise, rel=0.05)
    np.testing.assert_array_equal(with_client_changes(small(x), shards).x, noisy)
    dark = with_client_changes(small(np.where(x == 255, x, 0)), shards).x
    assert dark[1:].max() < 255  # bytes below 0 stay at 0, and do not wrap around


def test_noise_on_bytes_is_a_share_of_the_largest():
    x = np.full((2000, 4, 4), 8, np.uint8)
    x[0, 0, 0] = 16  # white, as in the digits
    shards = partition(np.arange(2000) % 2, 2, kind="feature", options={"change": "noise", "noise": 0.1})
    noisy = with_client_changes(small(x), shards).x
    [noisiest] = [shard for shard in shards if shard.change.noise]
    assert noisy[noisiest.samples].std() == pytest.approx(1.6, rel=0.05)
    assert noisy.max() <= 16


def test_noise_on_a_table_is_in_each_features_own_deviation():
    x = np.stack([np.tile([0, 2], 1000), np.tile([0, 200], 1000)], axis=1).astype(np.float32)
    shards = partition(np.arange(2000) % 2, 2, kind="feature", options={"change": "noise", "noise": 0.5})
    noisy = with_client_changes(small(x), shards).x
    [noisiest] = [shard for shard in shards if shard.change.noise]
    [noiseless] = [shard for shard in shards if not shard.change.noise]
    added = noisy[noisiest.samples] - x[noisiest.samples]
    assert added.std(axis=0) == pytest.approx([0.5, 50], rel=0.1)  # features have deviations 1 and 100
    np.testing.assert_array_equal(noisy[noiseless.samples], x[noiseless.samples])
    assert noisy.dtype == np.float32
    assert noisy.min() < 0


def test_float_images_stay_between_their_darkest_and_their_brightest():
    x = np.random.default_rng(0).random((100, 4, 4)).astype(np.float32)
    shards = partition(np.arange(100) % 2, 4, kind="feature", options={"change": "noise", "noise": 5})
    noisy = with_client_changes(small(x), shards).x
    assert (noisy.min(), noisy.max()) == (x.min(), x.max())
