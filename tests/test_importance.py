"""Scores, smoothing, normalisation and thresholds, against numbers computed by hand and an exact reference."""

import math
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedobp.importance import (
    SCORES,
    above,
    candidates,
    count_above,
    product,
    quantile_threshold,
    rms_threshold,
    scale_global,
    scale_layers,
    smooth,
    soft_mask,
    squared,
)
from fedobp.models import Model

checked = settings(deadline=None, max_examples=100)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def chosen(score: Tensor, q: float) -> list[int]:
    return above(score, q).nonzero()[:, 0].tolist()


def exact_above(row: list[int], q: float) -> list[bool]:
    """The definition, in fractions: strictly above the linearly interpolated quantile of the sorted row."""
    ordered = [Fraction(value) for value in sorted(row)]
    position = Fraction(Decimal(repr(q))) * (len(row) - 1)
    left = math.floor(position)
    right = min(left + 1, len(row) - 1)
    quantile = ordered[left] + (position - left) * (ordered[right] - ordered[left])
    return [value > quantile for value in row]


quantiles = st.one_of(
    st.sampled_from([0.0, 0.25, 0.29, 0.5, 0.57, 0.9, 0.99998, 1.0]),
    st.integers(0, 1000).map(lambda thousandths: thousandths / 1000),
    st.floats(0, 1),
)
tied_rows = st.lists(st.integers(0, 6), min_size=1, max_size=40)
matrices = st.tuples(st.integers(1, 4), st.integers(1, 12)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 8), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


# Scores


@pytest.mark.essential
def test_squared_is_the_squared_difference():
    assert squared(vector(3, -1, 0.5, 2), vector(1, 1, 0.5, -1)).tolist() == [4, 4, 0, 9]


def test_product_is_the_absolute_difference_times_the_clients_value():
    client, shared = vector(3, -1, 0.5, 2, -1, 0), vector(1, 1, 0.5, 3, -3, 7)
    assert product(client, shared).tolist() == [6, 2, 0, 2, 2, 0]


def test_scores_broadcast_one_global_model_over_clients():
    client, shared = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), vector(1, 1)
    assert squared(client, shared).tolist() == [[0, 1], [4, 16]]
    assert product(client, shared).tolist() == [[0, 2], [6, 20]]


def test_scores_are_found_by_their_names():
    assert dict(SCORES) == {"squared": squared, "product": product}


# Smoothing


def test_smooth_weights_the_previous_value_by_ema_and_starts_with_the_score():
    score, previous = torch.tensor([[1.0, 2.0], [10.0, 20.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    smoothed = smooth(score, previous, torch.tensor([True, False]), 0.25)
    assert smoothed.tolist() == [[0.75 * 1 + 0.25 * 5, 0.75 * 2 + 0.25 * 6], [10, 20]] == [[2, 3], [10, 20]]


@pytest.mark.parametrize(("ema", "expected"), [(0.0, [1, 2]), (1.0, [5, 6])])
def test_smooth_at_its_limits_is_the_score_or_the_previous_value(ema, expected):
    assert smooth(vector(1, 2), vector(5, 6), torch.tensor(True), ema).tolist() == expected


def test_smooth_ignores_the_previous_value_of_a_new_client():
    assert smooth(vector(1, 2), vector(math.nan, math.inf), torch.tensor(False), 0.5).tolist() == [1, 2]


def test_smooth_takes_any_leading_axes():
    score, previous = torch.ones(2, 3, 4), torch.full((2, 3, 4), 5.0)
    has_previous = torch.tensor([[True, False, True], [False, True, False]])
    smoothed = smooth(score, previous, has_previous, 0.5)
    assert smoothed.tolist() == torch.where(has_previous[:, :, None].expand(2, 3, 4), 3.0, 1.0).tolist()


# Normalisation


def test_scale_global_is_min_max_over_the_row():
    assert scale_global(vector(2, 4, 3, 6)).tolist() == [0, 0.5, 0.25, 1]


def test_scale_global_scales_each_row_separately_and_equal_scores_become_zero():
    rows = torch.tensor([[0.0, 5.0, 10.0], [7.0, 7.0, 7.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    assert scale_global(rows).tolist() == [[0, 0.5, 1], [0, 0, 0], [0, 0, 0], [0, 0.5, 1]]
    assert scale_global(rows.reshape(2, 2, 3)).tolist() == scale_global(rows).reshape(2, 2, 3).tolist()


def test_scale_layers_is_min_max_within_each_tensor_and_a_constant_tensor_becomes_zero():
    score = vector(2, 4, 10, 30, 20, 9, 9, 5)
    assert scale_layers(score, (2, 3, 2, 1)).tolist() == [0, 1, 0, 1, 0.5, 0, 0, 0]
    rows = torch.stack([score, torch.zeros(8), score + 1])
    expected = [[0, 1, 0, 1, 0.5, 0, 0, 0], [0] * 8, [0, 1, 0, 1, 0.5, 0, 0, 0]]
    assert scale_layers(rows, (2, 3, 2, 1)).tolist() == expected


def test_a_tiny_spread_still_counts_as_one():
    assert scale_global(vector(0, 1e-30)).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_keeps_the_dtype(dtype):
    client, shared = torch.tensor([[1, 2, 4]], dtype=dtype), torch.zeros(3, dtype=dtype)
    scores = [squared(client, shared), product(client, shared)]
    results = [
        *scores,
        scale_global(client),
        scale_layers(client, (1, 2)),
        smooth(client, client, torch.tensor([True]), 0.3),
    ]
    assert {result.dtype for result in results} == {dtype}
    assert above(client, 0.5).dtype == torch.bool


# The threshold


@pytest.mark.parametrize(
    ("n", "q", "count"),
    [
        (101, 0.29, 71),  # position 29, although 0.29 * 100 is 28.999999999999996 in floating point
        (101, 0.57, 43),  # 0.57 * 100 is 56.99999999999999
        (11, 0.7, 3),
        (11, 0.75, 3),  # position 7.5: the scores at positions 8, 9 and 10
        (5, 0.5, 2),
        (4, 0.5, 2),
        (5, 0.0, 4),
        (5, 1.0, 0),
        (1, 0.0, 0),
        (1, 1.0, 0),
        (2, 0.999, 1),
        (1_000_001, 1e-05, 999_990),  # Python writes this q with an exponent
    ],
)
def test_count_above_by_hand(n, q, count):
    assert count_above(n, q) == count
    if n < 1000:
        assert int(above(torch.arange(float(n)), q).sum()) == count


CNNS = {
    "cifar10": ((3, 32, 32), 10, 878_538),
    "cifar100": ((3, 32, 32), 100, 924_708),
    "emnist": ((1, 28, 28), 62, 608_702),
    "svhn": ((3, 32, 32), 10, 878_538),
    "mnist": ((1, 28, 28), 10, 582_026),
    "fmnist": ((1, 28, 28), 10, 582_026),
    "medmnistA": ((1, 28, 28), 11, 582_539),
    "medmnistC": ((1, 28, 28), 11, 582_539),
}
PUBLISHED = [
    ("cifar10", 0.99998, 18),
    ("cifar10", 0.99979, 185),
    ("cifar100", 0.9998, 185),
    ("cifar100", 0.99992, 74),
    ("emnist", 0.995, 3_044),
    ("emnist", 0.9991, 548),
    ("svhn", 0.99997, 27),
    ("svhn", 0.9998, 176),
    ("mnist", 0.9998, 117),
    ("mnist", 0.99993, 41),
    ("fmnist", 0.99993, 41),
    ("fmnist", 0.9999, 59),
    ("medmnistA", 0.9999, 59),  # the paper prints 53
    ("medmnistA", 0.99995, 30),
    ("medmnistC", 0.9997, 175),
    ("medmnistC", 0.99995, 30),
]


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Entries of the paper's CNN for each dataset, counted on the models themselves."""
    found = {inputs: Model("cnn", *inputs).layout.size for inputs in {(shape, k) for shape, k, _ in CNNS.values()}}
    return {name: found[shape, classes] for name, (shape, classes, _) in CNNS.items()}


@pytest.mark.parametrize(("dataset", "q", "count"), PUBLISHED)
def test_the_published_number_of_personal_entries(sizes, dataset, q, count):
    n = sizes[dataset]
    assert n == CNNS[dataset][2]
    assert count_above(n, q) == count
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    personal = above(order.float(), q)  # below 2^24, so all scores are distinct
    assert personal.equal(order >= n - count)


@pytest.mark.parametrize(("pool", "q", "count"), [(5130, 0.983, 88), (51_300, 0.91078, 4577), (31_806, 0.9057, 3000)])
def test_the_published_number_of_personal_entries_in_the_classifier(pool, q, count):
    assert count_above(pool, q) == count


@checked
@given(seed=st.integers(0, 10**6), values=st.sampled_from([2, 50, 10**6]), count=st.integers(1, 30))
def test_few_out_of_many_by_blocks(seed, values, count):
    """Vectors that are long enough for the shortcut, full of ties and with a partial last block."""
    n = 130 * 512 + 77
    row = torch.randint(values, (2, n), generator=torch.Generator().manual_seed(seed)).float()
    assert 0 < candidates(row, count + 1).shape[-1] < n / 4 + 512
    lower = row.sort(dim=-1, descending=True).values[:, count, None]
    assert above(row, 1 - (count - 0.5) / (n - 1)).equal(row > lower)


@pytest.mark.parametrize(("q", "count"), [(0.9999, 1_700), (0.0001, 16_998_300)])
def test_a_row_longer_than_float32_can_count(q, count):
    n = 17_000_000
    ranks = (torch.arange(n) * 7_368_787) % n  # a permutation: the factor is coprime to n
    score = (ranks.int() + 0x3F800000).view(torch.float32)[None]  # n neighbouring floats from 1.0 upwards
    assert above(score, q).equal((ranks >= n - count)[None])


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (0.0, [0, 1, 3, 4]),  # quantile 1: everything but the minimum
        (0.1, [0, 1, 3, 4]),  # 1.4
        (0.25, [3]),  # 2, and three scores tie there: all of them are shared
        (0.5, [3]),
        (0.75, [3]),
        (0.8, [3]),  # 2.2
        (1.0, []),
    ],
)
def test_ties_at_the_threshold_are_shared(q, expected):
    assert chosen(vector(2, 2, 1, 3, 2), q) == expected


def test_ties_above_an_interpolated_threshold_are_personal():
    assert chosen(vector(1, 2, 2, 0, 2), 0.3) == [1, 2, 4]  # position 1.2: 1 + 0.2 * (2 - 1)
    assert chosen(vector(5, 0, 5, 0), 0.5) == [0, 2]  # position 1.5: 2.5


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_equal_scores_give_no_personal_entry(q, value):
    assert not above(torch.full((2, 7), value), q).any()


def test_a_single_entry_is_never_personal():
    for q in (0.0, 0.5, 1.0):
        assert not above(vector(4), q).any()


def test_every_row_has_its_threshold_whatever_the_leading_axes():
    rows = torch.tensor([[1.0, 2, 3, 4], [40, 30, 20, 10], [5, 5, 5, 6], [0, 0, 0, 0], [9, 8, 9, 8], [1, 1, 2, 3]])
    expected = [[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]
    expected = torch.tensor(expected, dtype=torch.bool)
    assert above(rows, 0.5).equal(expected)
    assert above(rows.reshape(2, 3, 4), 0.5).equal(expected.reshape(2, 3, 4))
    assert above(rows.reshape(3, 1, 2, 4), 0.5).equal(expected.reshape(3, 1, 2, 4))
    for row, mask in zip(rows, expected, strict=True):
        assert above(row, 0.5).equal(mask)


def test_inputs_are_not_changed():
    score = vector(3, 1, 2)
    above(score, 0.5), scale_global(score), scale_layers(score, (1, 2)), smooth(score, score, torch.tensor(True), 0.5)
    assert score.tolist() == [3, 1, 2]


def test_the_quantiles_threshold_is_the_largest_score_that_is_not_above_it():
    rows = torch.tensor([[1.0, 2, 3, 4, 9], [5, 5, 5, 5, 5]])
    assert quantile_threshold(rows, 0.6).tolist() == [[3], [5]]
    assert quantile_threshold(rows, 1.0).tolist() == [[9], [5]]
    assert quantile_threshold(rows, 0.0).tolist() == [[1], [5]]


def test_the_rms_threshold_is_a_multiple_of_the_mean_score():
    assert rms_threshold(torch.tensor([[1.0, 3, 0, 4], [0, 0, 0, 0]]), 3.0).tolist() == [[18], [0]]


@checked
@given(
    row=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40),
    c=st.sampled_from([0.5, 1.0, 1.5, 3.0]),
    factor=st.floats(0.01, 100),
)
def test_the_rms_rule_does_not_depend_on_the_scale(row, c, factor):
    d = torch.tensor(row, dtype=torch.float64)
    score, scaled = d.square(), (d * factor).square()
    # Precondition: no score is so near the threshold that rounding decides.
    assume(((score / rms_threshold(score, c) - 1).abs() > 1e-9)[score > 0].all())
    assert (score > rms_threshold(score, c)).equal(scaled > rms_threshold(scaled, c))
    # Chebyshev: at most one in c^2 entries is c times above the root mean square.
    assert (score > rms_threshold(score, c)).sum() * c**2 <= len(row) * (1 + 1e-9)


def test_soft_weights_by_hand():
    score, threshold = vector(0, 4, 9, 16, 36), vector(9)
    assert soft_mask(score, threshold, 1.0).tolist() == [0, 0, 0, 1 - 9 / 16, 0.75]  # the non-negative garrote
    assert soft_mask(score, threshold, 2.0).tolist() == [0, 0, 0, 0.25, 0.5]  # |d| = 4 and 6 become 1 and 3
    assert soft_mask(score, threshold, 0.5).tolist() == pytest.approx([0, 0, 0, 1 - 81 / 256, 1 - 1 / 16])
    assert soft_mask(vector(0, 0, 3), vector(0), 1.0).tolist() == [0, 0, 1]


@checked
@given(row=tied_rows, q=quantiles, temperature=st.floats(0.01, 100))
def test_soft_weights_lie_between_nothing_and_the_mask_and_rise_with_the_score(row, q, temperature):
    score = torch.tensor(row, dtype=torch.float64)
    threshold = quantile_threshold(score, q)
    weights = soft_mask(score, threshold, temperature)
    assert (weights > 0).equal(above(score, q))
    assert (weights <= 1).all()
    assert (weights[score.argsort()].diff() >= -1e-12).all()  # equal scores may be rounded in other ways
    assert (soft_mask(score, threshold, temperature / 2) >= weights).all()
    # The limit, ties and scores at the threshold included.
    torch.testing.assert_close(soft_mask(score, threshold, 1e-3), above(score, q).double(), rtol=0, atol=1e-9)


@checked
@given(row=tied_rows, q=quantiles)
def test_above_equals_the_definition_in_exact_fractions(row, q):
    assert above(torch.tensor(row, dtype=torch.float64), q).tolist() == exact_above(row, q)
    assert above(torch.tensor(row, dtype=torch.float32), q).tolist() == exact_above(row, q)


@checked
@given(n=st.integers(1, 10_000_000), q=quantiles)
def test_count_above_equals_its_formula_in_exact_decimals(n, q):
    position = Fraction(Decimal(repr(q))) * (n - 1)
    assert count_above(n, q) == n - 1 - position.numerator // position.denominator
    assert 0 <= count_above(n, q) <= n - 1


@checked
@given(row=tied_rows)
def test_q_one_makes_nothing_personal_and_q_zero_all_but_the_minimum(row):
    score = torch.tensor(row, dtype=torch.float32)
    assert not above(score, 1.0).any()
    assert above(score, 0.0).equal(score > min(row))


@checked
@given(row=tied_rows, low=quantiles, high=quantiles)
def test_a_larger_q_never_makes_more_personal(row, low, high):
    score = torch.tensor(row, dtype=torch.float32)
    wide, narrow = above(score, min(low, high)), above(score, max(low, high))
    assert not (narrow & ~wide).any()
    assert int(wide.sum()) <= count_above(len(row), min(low, high))  # ties can only lower the count


@checked
@given(rows=matrices, q=quantiles, random=st.randoms(use_true_random=False))
def test_permuting_clients_permutes_masks(rows, q, random):
    score = torch.tensor(rows, dtype=torch.float32)
    order = random.sample(range(len(rows)), len(rows))
    assert above(score[order], q).equal(above(score, q)[order])
    assert above(scale_global(score[order]), q).equal(above(scale_global(score), q)[order])


@checked
@given(rows=matrices, q=quantiles, random=st.randoms(use_true_random=False))
def test_permuting_entries_permutes_masks(rows, q, random):
    score = torch.tensor(rows, dtype=torch.float32)
    order = random.sample(range(score.shape[1]), score.shape[1])
    assert above(score[:, order], q).equal(above(score, q)[:, order])


@checked
@given(row=st.lists(st.floats(0, 1e6, width=32), min_size=2, max_size=40), q=quantiles)
def test_global_norm_gives_the_mask_of_no_norm(row, q):
    score = torch.tensor(row, dtype=torch.float32)
    scaled = scale_global(score)
    # Precondition: rounding in the normalisation has made no two different scores equal.
    assume(len(scaled.unique()) == len(score.unique()))
    assert above(scaled, q).equal(above(score, q))


def test_layer_norm_can_give_another_mask():
    score = vector(1, 2, 10, 40)
    assert chosen(score, 0.5) == chosen(scale_global(score), 0.5) == [2, 3]
    assert chosen(scale_layers(score, (2, 2)), 0.5) == [1, 3]


@checked
@given(row=st.lists(st.integers(-1000, 1000), min_size=1, max_size=40), q=quantiles)
def test_the_squared_score_chooses_by_distance_alone(row, q):
    client, shared = torch.tensor(row, dtype=torch.float64), torch.tensor(7.0, dtype=torch.float64)
    assert above(squared(client, shared), q).equal(above((client - shared).abs(), q))
