"""Changes of clients' samples: each by hand on small arrays, and what holds for all inputs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedobp.data import ClientChange, Dataset, Shard, with_client_changes
from fedobp.data.client_changes import InputRange, blurred, changed_inputs
from fedobp.errors import FedobpError

NONE = np.array([], dtype=np.int64)


def changed(x, **change):
    """Return inputs with a change of all of them."""
    return changed_inputs(x, ClientChange(**change), InputRange.of(x))


def shard(change, *samples):
    return Shard(np.array(samples), NONE, NONE, change)


def test_blur_by_hand():
    """A dot spreads as exp(-d^2 / 2 sigma^2) along both axes, with the sum of weights within 3 sigma."""
    x = np.zeros((1, 8, 8), np.float32)
    x[0, 4, 3] = 1.0
    weights = {d: math.exp(-(d**2) / 2) for d in range(-3, 4)}  # sigma = 1 * sqrt(8 / 8)
    total = sum(weights.values())
    found = changed(x, blur=1.0)
    for row in range(8):
        for column in range(8):
            expected = weights.get(row - 4, 0) * weights.get(column - 3, 0) / total**2
            assert found[0, row, column] == pytest.approx(expected, abs=1e-12)
    half = {d: math.exp(-(d**2) / (2 * 0.25)) for d in range(-2, 3)}
    assert changed(x, blur=0.5)[0, 4, 3] == pytest.approx(1 / sum(half.values()) ** 2)


def test_blur_goes_on_at_the_edge_and_keeps_channels_apart():
    x = np.zeros((2, 4, 6, 3))
    x[..., 0], x[..., 2] = 0.25, 1.0
    np.testing.assert_allclose(blurred(x, 1.3), x)
    x[1, 0, 0, 1] = 1.0
    found = blurred(x, 0.2)  # a neighbour has the weight exp(-12.5) / (1 + 2 exp(-12.5))
    beside = math.exp(-12.5)
    # The corner goes on in the padding: above, left and itself.
    assert found[1, 0, 0, 1] == pytest.approx(((1 + beside) / (1 + 2 * beside)) ** 2)
    assert found[1, 0, 1, 1] == pytest.approx(beside * (1 + beside) / (1 + 2 * beside) ** 2)
    np.testing.assert_allclose(found[0], x[0])


def test_contrast_by_hand():
    x = np.array([[[0, 100], [200, 100]], [[50, 50], [50, 60]]], np.uint8)
    # Means 100 and 52.5; a quarter of each difference is left, and is rounded.
    np.testing.assert_array_equal(changed(x, contrast=0.75), [[[75, 100], [125, 100]], [[52, 52], [52, 54]]])
    np.testing.assert_array_equal(changed(x, contrast=1.0), [[[100, 100], [100, 100]], [[52, 52], [52, 52]]])
    colours = np.array([[[[0, 90, 60]]]], np.uint8)  # the mean is over all channels: 50
    np.testing.assert_array_equal(changed(colours, contrast=0.5), [[[[25, 70, 55]]]])


def test_colour_by_hand():
    x = np.array([[[[100, 20, 60]]]], np.uint8)
    np.testing.assert_array_equal(changed(x, colour=1.0), [[[[60, 100, 20]]]])
    # Three quarters of each channel, and a quarter of the one before it.
    np.testing.assert_array_equal(changed(x, colour=0.25), [[[[90, 40, 50]]]])


def test_changes_are_made_one_after_the_other():
    x = np.zeros((1, 4, 4, 3), np.float32)
    x[0, 0, 1] = [1.0, 0.5, 0.0]
    together = changed(x, turns=1, blur=0.7, contrast=0.5, colour=0.3)
    steps = np.rot90(x, axes=(1, 2))
    for step in ({"blur": 0.7}, {"contrast": 0.5}, {"colour": 0.3}):
        steps = changed_inputs(steps.astype(np.float64), ClientChange(**step), InputRange.of(x))
    np.testing.assert_allclose(together, steps, atol=1e-12)


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    white=st.sampled_from([16, 255]),
    shape=st.sampled_from([(5, 5), (1, 1), (8, 8, 3), (4, 4, 2)]),
    name=st.sampled_from(["noise", "blur", "contrast", "colour"]),
    strength=st.floats(0, 1),
)
def test_bytes_stay_bytes_between_black_and_the_largest(seed, white, shape, name, strength):
    x = np.random.default_rng(seed).integers(white + 1, size=(6, *shape)).astype(np.uint8)
    y = np.arange(6) % 2
    change = ClientChange(**{name: strength}, seed=seed)
    if change.problem(shape):
        assert (name, len(shape)) == ("colour", 2)
        return
    found = with_client_changes(Dataset("mine", x, y, (0, 1), 0), [shard(change, 1, 3), shard(ClientChange(), 0, 2)]).x
    assert found.dtype == np.uint8
    assert found.max() <= x.max()
    np.testing.assert_array_equal(found[[0, 2, 4, 5]], x[[0, 2, 4, 5]])
    # No wrapping around: averages of an image stay between its extremes.
    if name != "noise":
        assert (found.min(axis=tuple(range(1, x.ndim))) >= x.min(axis=tuple(range(1, x.ndim)))).all()


def test_labels_change_on_all_parts_and_elsewhere_not():
    y = np.array([0, 1, 2, 0, 1, 2, 1])
    mine = Dataset("mine", np.zeros((7, 2), np.float32), y, ("a", "b", "c"), 0)
    parts = Shard(np.array([0, 4]), np.array([2]), np.array([1]), ClientChange(labels=(2, 0, 1)))
    found = with_client_changes(mine, [parts, Shard(np.array([3, 5, 6]), NONE, NONE)])
    assert found.y.tolist() == [2, 0, 1, 0, 0, 2, 1]
    assert y.tolist() == [0, 1, 2, 0, 1, 2, 1]
    assert found.x is mine.x
    assert found.labels == ("a", "b", "c")


def test_groups_alone_change_nothing():
    mine = Dataset("mine", np.zeros((4, 2), np.float32), np.arange(4) % 2, (0, 1), 0)
    assert with_client_changes(mine, [shard(ClientChange(group=1), 0, 1), shard(ClientChange(group=0), 2)]) is mine


@pytest.mark.parametrize(
    ("shape", "change", "sentence"),
    [
        ((3,), {"turns": 1}, "cannot be rotated: use --partition-set change=noise"),
        ((2, 3), {"turns": 2}, "cannot be rotated: use --partition-set change=noise"),
        ((3,), {"blur": 0.5}, "are no images, so they have no sharpness: use --partition-set change=noise"),
        ((3,), {"contrast": 0.5}, "are no images, so they have no contrast: use --partition-set change=noise"),
        ((3,), {"colour": 0.5}, "have no colour channels: use --partition-set change=noise"),
        ((4, 4), {"colour": 0.5}, "have no colour channels: use --partition-set change=contrast"),
        ((4, 4, 1), {"colour": 0.5}, "have no colour channels: use --partition-set change=contrast"),
    ],
)
def test_inputs_that_cannot_be_changed_are_refused(shape, change, sentence):
    mine = Dataset("mine", np.zeros((4, *shape), np.float32), np.arange(4) % 2, (0, 1), 0)
    with pytest.raises(FedobpError, match=rf"^'mine' has inputs of shape \({shape[0]},.*\), which {sentence}$"):
        with_client_changes(mine, [shard(ClientChange(**change), 0, 1)])


def test_tokens_are_not_changed_but_their_labels_may_be():
    mine = Dataset("mine", np.zeros((4, 3), np.uint8), np.arange(4) % 2, (0, 1), 0, vocabulary=5)
    with pytest.raises(FedobpError, match="'mine' has tokens, which cannot be changed: choose another --partition"):
        with_client_changes(mine, [shard(ClientChange(noise=0.1), 0, 1)])
    assert with_client_changes(mine, [shard(ClientChange(labels=(1, 0)), 0, 1)]).y.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True),
        ({"turns": 4}, False),
        ({"noise": 20.0}, True),
        ({"noise": math.inf}, False),
        ({"noise": -0.1}, False),
        ({"seed": -1}, False),
        ({"blur": 1.0, "contrast": 1.0, "colour": 1.0}, True),
        ({"blur": 1.1}, False),
        ({"contrast": math.nan}, False),
        ({"colour": -0.1}, False),
        ({"labels": (2, 2, 0)}, True),
        ({"labels": (1, 0)}, False),
        ({"labels": (0, 1, 3)}, False),
        ({"labels": (0, 1, -1)}, False),
        ({"labels": (0, 1.5, 1)}, False),
        ({"group": 4}, True),
        ({"group": 5}, False),
        ({"group": -1}, False),
        ({"group": 1.5}, False),
    ],
)
def test_ranges_of_five_clients_with_three_labels(change, valid):
    assert ClientChange(**change).is_valid(5, 3) == valid
