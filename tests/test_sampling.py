"""Which clients take part in a round."""

import random
from dataclasses import replace

import pytest
from resolved import resolved

from fedobp import Config
from fedobp.sampling import Sampler, cohorts, evaluated_clients

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


def test_evaluated_clients_are_a_sample_that_the_seed_fixes():
    assert evaluated_clients(Config(**PAPER)) is None
    config = Config(**{**PAPER, "holdout_clients": 10}, eval_clients=20)
    found = evaluated_clients(config).tolist()
    assert len(set(found)) == 20
    assert found == sorted(found)
    assert set(found) <= set(range(90))
    assert found == evaluated_clients(replace(config, rounds=7, method="local")).tolist()
    assert set(found) < set(evaluated_clients(replace(config, eval_clients=40)).tolist())  # a larger sample keeps them
    assert found != evaluated_clients(replace(config, seed=1)).tolist()
    assert found != sorted(Sampler(replace(config, participation=20 / 90)).cohort(1).tolist())


def test_the_published_stream_keeps_no_cohorts():
    """A run of a million rounds must not hold a million of them; going back draws the stream again."""
    sampler = Sampler(Config(**PAPER, sampling="published"))
    first = sampler.cohort(1)
    sampler.cohort(300)
    assert not any(isinstance(value, list | dict | set) and len(value) > 1 for value in vars(sampler).values())
    assert sampler.cohort(1).tolist() == first.tolist()
