"""Keyed randomness, against splitmix64 in plain Python integers."""

import random
from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedobp.keys import Purpose, fold, normal, permutation, uniform

checked = settings(deadline=None, max_examples=100)
int64 = st.integers(-(2**63), 2**63 - 1)

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def finalise(value: int) -> int:
    value %= 2**64
    value = (value ^ (value >> 30)) * FIRST % 2**64
    value = (value ^ (value >> 27)) * SECOND % 2**64
    return value ^ (value >> 31)


def reference(key: int, *parts: int) -> int:
    """The same formula in unbounded integers, converted to a signed 64-bit one at the end."""
    for part in parts:
        key = finalise(key * FIRST + finalise(part + GOLDEN) + GOLDEN)
    return key if key < 2**63 else key - 2**64


def test_the_reference_is_splitmix64():
    stream = [finalise(1234567 + step * GOLDEN) for step in range(1, 6)]
    assert stream == [  # the sequence that other implementations publish for this seed
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


PINNED = {
    (0, 0): -6411193824288604561,
    (42, 1): -5683699397063474209,
    (42, 1, 7, 2): 1498779388532998425,
    (42, -1): -3511054781566559260,
    (2**63 - 1, -(2**63)): -2098424150201537490,
}


@pytest.mark.essential
@pytest.mark.parametrize(("parts", "value"), PINNED.items())
def test_fold_never_changes(parts, value):
    assert int(fold(*parts)) == reference(*parts) == value


def test_purposes_never_change():
    expected = {"COHORT": 1, "TRAIN": 2, "PERSONALIZE": 3, "INIT": 4, "SCORE": 5, "EVALUATE": 6, "SPLIT": 7}
    assert {purpose.name: purpose.value for purpose in Purpose} == expected


@checked
@given(key=int64, parts=st.lists(int64, min_size=1, max_size=4))
def test_fold_equals_the_formula_in_unbounded_integers(key, parts):
    assert int(fold(key, *parts)) == reference(key, *parts)


def test_fold_computes_in_int64_for_any_dtype():
    keys, parts = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([True, False])
    assert fold(keys, parts).tolist() == [reference(1, 1), reference(2, 0)]
    assert fold(torch.tensor([3], dtype=torch.int8), 9).dtype == torch.int64


def test_fold_without_parts_is_the_key():
    assert int(fold(5)) == 5


def test_fold_hashes_one_part_after_the_other():
    assert fold(fold(3, 4), 5).equal(fold(3, 4, 5))


def test_fold_broadcasts_keys_against_parts():
    keys, parts = torch.tensor([1, 2, -3]), torch.tensor([10, 20])
    table = fold(keys[:, None], parts)
    assert table.shape == (3, 2)
    assert table.tolist() == [[reference(key, part) for part in (10, 20)] for key in (1, 2, -3)]
    assert fold(9, keys).tolist() == [reference(9, key) for key in (1, 2, -3)]


def test_different_parts_give_different_keys():
    seeds, rounds, clients = range(3), range(20), range(30)
    keys = [fold(seed, r, torch.arange(30), purpose) for seed, r, purpose in product(seeds, rounds, Purpose)]
    assert len(torch.cat(keys).unique()) == len(seeds) * len(rounds) * len(clients) * len(Purpose)
    assert int(fold(0, 1, 2)) != int(fold(0, 2, 1))
    assert int(fold(1, 0)) != int(fold(0, 1))


def test_every_bit_is_set_half_of_the_time():
    values = fold(0, torch.arange(20_000))
    shares = torch.stack([((values >> bit) & 1).double().mean() for bit in range(64)])
    assert ((shares - 0.5).abs() < 0.02).all()  # more than five standard deviations


@checked
@given(key=int64, n=st.integers(0, 200))
def test_permutation_is_a_permutation(key, n):
    order = permutation(torch.tensor(key), n)
    assert sorted(order.tolist()) == list(range(n))


def test_permutation_sorts_by_hash():
    hashes = [reference(42, index) for index in range(20)]
    assert permutation(torch.tensor(42), 20).tolist() == sorted(range(20), key=hashes.__getitem__)


def test_permutations_of_different_keys_differ():
    assert len({tuple(permutation(torch.tensor(key), 30).tolist()) for key in range(50)}) == 50


def test_all_permutations_are_about_equally_frequent():
    keys = fold(7, torch.arange(2400))
    found = Counter(tuple(permutation(key, 4).tolist()) for key in keys)
    assert set(found) == set(permutations(range(4)))
    chi_square = sum((count - 100) ** 2 / 100 for count in found.values())
    assert chi_square < 60  # 23 degrees of freedom: exceeded by chance less than once in 10,000 times


def test_uniform_converts_a_hash_to_a_fraction():
    found = uniform(torch.tensor(42), 5)
    assert found.dtype == torch.float64
    assert found.tolist() == [((reference(42, at) % 2**64 >> 12) + 0.5) / 2**52 for at in range(5)]


def test_uniform_never_reaches_0_or_1(monkeypatch):
    ends = torch.tensor([0, -1])  # no bit set, and every bit set
    monkeypatch.setattr("fedobp.keys.fold", lambda key, *parts: ends)
    assert uniform(torch.tensor(0), 2).tolist() == [2**-53, 1 - 2**-53]


def test_uniform_numbers_fill_the_interval_evenly():
    counts = torch.histc(uniform(fold(3), 50_000), bins=50, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 100  # 49 degrees of freedom: 0.00002


def test_normal_numbers_are_distributed_normally():
    found, ends = normal(fold(3), 50_000), torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    shares = (found[:, None] <= ends).double().mean(dim=0)
    assert torch.allclose(shares, torch.special.ndtr(ends), atol=0.01)  # more than four standard deviations
    assert torch.allclose(found.pow(torch.tensor([[1], [2], [4]])).mean(dim=1), torch.tensor([0.0, 1.0, 3.0]).double(),
                          atol=0.2)  # fmt: skip


@pytest.mark.parametrize("draw", [uniform, normal])
def test_numbers_of_many_keys_come_from_one_vectorised_call(draw):
    keys = fold(5, torch.arange(6))
    found = torch.vmap(lambda key: draw(key, 7))(keys)
    assert torch.allclose(found, torch.stack([draw(key, 7) for key in keys]), rtol=0, atol=1e-12)
    assert len(found.unique()) == 42


def test_no_global_generator_is_used():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    permutation(fold(1, 2, 3), 100)
    normal(fold(1, 2, 3), 100)
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
