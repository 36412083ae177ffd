"""Statistics of tables, computed by hand."""

import math

import pytest

from fedobp.paper.stats import Paired, Spread, paired, ranks, spread, within_noise


def test_mean_and_deviation_over_seeds():
    assert spread([1.0, 2.0, 3.0]) == Spread(2.0, 1.0, 3)
    assert spread([1.5]) == Spread(1.5, None, 1)
    assert spread([]) is None
    assert (str(Spread(86.774, 0.126, 2)), str(Spread(86.774, None, 1))) == ("86.77 ± 0.13", "86.77")


def test_within_noise_takes_the_published_number_as_one_more_run():
    # 2 sqrt(0.3^2 (1 + 1/2) + 0.4^2) = 2 sqrt(0.295) = 1.0863
    ours = Spread(80.0, 0.3, 2)
    assert within_noise(ours, 81.086, 0.4)
    assert not within_noise(ours, 81.087, 0.4)
    # of three seeds with deviation 0.15 and a published deviation of 0: 2 sqrt(0.0225 * 4/3) = 0.3464
    assert within_noise(Spread(80.0, 0.15, 3), 79.654)
    assert not within_noise(Spread(80.0, 0.15, 3), 79.653)


def test_one_seed_has_a_tolerance_of_half_a_point_whatever_the_published_deviation():
    assert within_noise(Spread(80.0, None, 1), 80.5, 9.0)
    assert not within_noise(Spread(80.0, None, 1), 80.51, 9.0)


@pytest.mark.essential
def test_paired_t_test_over_seeds():
    # differences 1, 2, 3: t = 2 / (1 / sqrt 3), and for two degrees of freedom p = 1 - t / sqrt(t^2 + 2)
    test = paired({42: 3.0, 43: 5.0, 44: 4.0}, {44: 1.0, 42: 2.0, 43: 3.0})
    t = 2 * math.sqrt(3)
    assert test == Paired(2.0, pytest.approx(1 - t / math.sqrt(t * t + 2)), 3)
    assert test.verdict == "no difference shown"
    # differences 0.9, 1.0, 1.1: t = 1 / (0.1 / sqrt 3)
    clear = {42: 0.9, 43: 1.0, 44: 1.1}
    t = 10 * math.sqrt(3)
    assert paired(clear, dict.fromkeys(clear, 0.0)).p == pytest.approx(1 - t / math.sqrt(t * t + 2))
    assert paired(clear, dict.fromkeys(clear, 0.0)).verdict == "better"
    assert paired(dict.fromkeys(clear, 0.0), clear).verdict == "worse"


def test_only_seeds_that_both_have_are_paired():
    assert paired({42: 3.0, 43: 5.0}, {43: 4.0, 44: 9.0}) == Paired(1.0, None, 1)
    assert paired({42: 3.0}, {43: 4.0}) is None


def test_no_test_is_claimed_of_one_pair_or_of_equal_differences():
    assert paired({42: 3.0}, {42: 1.0}).verdict == "no test"
    assert paired({42: 3.0, 43: 4.0}, {42: 1.0, 43: 2.0}) == Paired(2.0, None, 2)
    assert paired({42: 3.0, 43: 4.0}, {42: 3.0, 43: 4.0}).verdict == "no test"


def test_the_best_and_the_second_as_they_are_printed():
    assert ranks({"a": 3.0, "b": 5.0, "c": 4.0}) == {"b": 1, "c": 2}
    assert ranks({"a": 5.001, "b": 4.999, "c": 4.0, "d": 3.0}) == {"a": 1, "b": 1, "c": 2}
    assert ranks({"a": 1.0}) == {"a": 1}
    assert ranks({}) == {}
