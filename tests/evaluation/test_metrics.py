"""Accuracies of clients' predictions, against numbers computed by hand."""

import math

import pytest
import torch

from fedobp.evaluation import accuracy, count, merge


def labels(*values):
    return torch.tensor(values, dtype=torch.int64)


# Four clients, of which the third has no test samples; label 3 occurs in training alone.
TARGETS = [labels(0, 0, 1, 2), labels(1), labels(), labels(2, 2, 1, 0, 0)]


PREDICTED = [labels(0, 0, 1, 1), labels(0), labels(), labels(2, 2, 1, 0, 1)]


COUNTS = [labels(5, 5, 1, 0), labels(0, 1, 3, 0), labels(9, 0, 0, 0), labels(0, 4, 0, 4)]


@pytest.mark.essential
def test_accuracies_of_a_small_federation():
    found = accuracy(PREDICTED, TARGETS, COUNTS)
    assert found.pooled == pytest.approx(100 * 7 / 10)  # 3 of 4, 0 of 1, 4 of 5
    assert found.client_mean == pytest.approx((75 + 0 + 80) / 3)
    # Deviations from 155/3 are 70/3, -155/3 and 85/3; the population's variance is their mean square.
    assert found.client_std == pytest.approx(math.sqrt((70**2 + 155**2 + 85**2) / 27))
    assert found.worst_decile == 0.0
    # Label 0: 3 of 4; label 1: 2 of 3; label 2: 2 of 3.
    assert found.balanced == pytest.approx(100 * (3 / 4 + 2 / 3 + 2 / 3) / 3)
    # Guesses 0 (ties go to the lowest), 2 and 1: right 2 of 4, 0 of 1, 1 of 5.
    assert found.majority_class == pytest.approx(100 * 3 / 10)


def test_all_right_is_100_and_all_wrong_is_0():
    right = accuracy(TARGETS, TARGETS, COUNTS)
    assert (right.pooled, right.client_mean, right.client_std, right.balanced) == (100, 100, 0, 100)
    wrong = accuracy([(t + 1) % 3 for t in TARGETS], TARGETS, COUNTS)
    assert (wrong.pooled, wrong.client_mean, wrong.client_std, wrong.balanced) == (0, 0, 0, 0)


def test_one_client_has_no_spread():
    found = accuracy([labels(0, 1, 1)], [labels(0, 1, 0)], [labels(2, 1)])
    assert (found.client_std, found.worst_decile) == (0, found.pooled)


def ladder(clients):
    """Clients with 25 test samples each, of which 1, 2, 3, ... are right, not in this order."""
    order = [(7 * i) % clients for i in range(clients)]
    assert sorted(order) == list(range(clients))
    targets = [torch.zeros(25, dtype=torch.int64) for _ in order]
    predicted = [(torch.arange(25) > i).long() for i in order]
    return accuracy(predicted, targets, [labels(1, 1)] * clients)


@pytest.mark.parametrize(("clients", "expected"), [(5, 4), (10, 4), (19, 4), (20, 6), (25, 6)])
def test_worst_decile_is_the_mean_of_the_lowest_tenth(clients, expected):
    assert ladder(clients).worst_decile == pytest.approx(expected)


def test_clients_without_test_samples_do_not_count_in_the_decile():
    empty = [labels()] * 100
    targets, predicted = [labels(0), labels(0, 0), *empty], [labels(0), labels(0, 1), *empty]
    found = accuracy(predicted, targets, [labels(1, 0)] * 102)
    assert (found.worst_decile, found.client_mean) == (50, 75)


def test_counts_of_clients_are_whole_numbers_that_are_merged_in_any_groups():
    counts = [count(*one) for one in zip(PREDICTED, TARGETS, COUNTS, strict=True)]
    assert [one.correct.tolist() for one in counts] == [[2, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 2, 0]]
    assert [one.tested.tolist() for one in counts] == [[2, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [2, 1, 2, 0]]
    assert [one.majority for one in counts] == [2, 0, 0, 1]
    assert merge(counts) == merge([*counts[:1], *counts[1:]]) == accuracy(PREDICTED, TARGETS, COUNTS)
