"""Which clients take part in a round."""

import random

import pytest
from resolved import resolved

from fedobp import Config
from fedobp.sampling import Sampler, cohorts

PAPER = {"clients": 100, "holdout_clients": 0, "participation": 0.1, "rounds": 400}


def test_published_sampling_is_pythons_stream():
    config = Config(**PAPER, sampling="published", seed=42)
    random.seed(42)
    expected = [random.sample(list(range(100)), 10) for _ in range(400)]
    assert [cohort.tolist() for cohort in cohorts(config)] == expected


def test_keyed_sampling_draws_distinct_clients_and_depends_on_seed_and_round():
    drawn = [cohort.tolist() for cohort in cohorts(resolved(rounds=50))]
    assert all(len(set(cohort)) == 4 and set(cohort) <= set(range(20)) for cohort in drawn)
    assert len({tuple(cohort) for cohort in drawn}) > 45
    assert {client for cohort in drawn for client in cohort} == set(range(20))
    assert drawn != [cohort.tolist() for cohort in cohorts(resolved(rounds=50, seed=43))]
    assert drawn[:10] == [cohort.tolist() for cohort in cohorts(resolved(rounds=10))]


@pytest.mark.parametrize("sampling", ["keyed", "published"])
def test_a_cohort_depends_on_its_round_and_not_on_what_was_asked_before(sampling):
    config = Config(**PAPER, sampling=sampling)
    expected = [cohort.tolist() for cohort in cohorts(config)]
    sampler = Sampler(config)
    assert [sampler.cohort(round).tolist() for round in (7, 7, 1, 400, 8)] == [
        expected[round - 1] for round in (7, 7, 1, 400, 8)
    ]


@pytest.mark.parametrize("sampling", ["keyed", "published"])
def test_clients_that_are_held_out_are_never_sampled(sampling):
    config = Config(**{**PAPER, "holdout_clients": 90}, sampling=sampling)
    drawn = [cohort.tolist() for cohort in cohorts(config)]
    assert {client for cohort in drawn for client in cohort} == set(range(10))
    assert {len(cohort) for cohort in drawn} == {1}
