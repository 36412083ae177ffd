def test_published_sampling_is_pythons_stream():
    config = Config(dataset="cifar10", sampling="published", seed=42)
    random.seed(42)
    expected = [random.sample(list(range(100)), 10) for _ in range(400)]
    assert [cohort.tolist() for cohort in cohorts(config)] == expected


def test_keyed_sampling_draws_distinct_clients_and_depends_on_seed_and_round():
    drawn = [cohort.tolist() for cohort in cohorts(Config(rounds=50))]
    assert all(len(set(cohort)) == 4 and set(cohort) <= set(range(20)) for cohort in drawn)
    assert len({tuple(cohort) for cohort in drawn}) > 45
    assert {client for cohort in drawn for client in cohort} == set(range(20))
    assert drawn != [cohort.tolist() for cohort in cohorts(Config(rounds=50, seed=43))]
    assert drawn[:10] == [cohort.tolist() for cohort in cohorts(Config(rounds=10))]
