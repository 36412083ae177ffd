"""Groups of results: what belongs together, and how it is labelled."""

from handmade import made

from fedobp.report.groups import by_settings, settings_of


def labels(*results):
    return {label: [run.config.seed for run in runs] for label, runs in by_settings(results).items()}


def test_runs_of_one_method_that_differ_in_their_seeds_are_one_group():
    runs = [made(method, seed=seed) for seed in (1, 2) for method in ("local", "fedavg")]
    assert labels(*runs) == {"local": [1, 2], "fedavg": [1, 2]}
    # The partition may be the same for all seeds, or not.
    assert labels(*(made(seed=seed, partition_seed=2) for seed in (1, 2, 3))) == {"fedavg": [1, 2, 3]}
    assert labels() == {}


def test_an_option_is_told_apart_within_its_method_and_a_setting_among_all():
    runs = [
        made("fedprox", options={"mu": 0.1}),
        made("fedprox", options={"mu": 1.0}),
        made("fedprox", options={"mu": 1.0}, seed=2),
        made("ditto", options={"lam": 0.5}),
    ]
    assert labels(*runs) == {"fedprox, mu=0.1": [1], "fedprox, mu=1.0": [1, 2], "ditto": [1]}
    assert labels(made(lr=0.1), made("local", lr=0.2)) == {"fedavg, lr=0.1": [1], "local, lr=0.2": [1]}
    parts = [{"partition": "classes", "partition_options": {"k": k}} for k in (1, 2)]
    assert labels(made(), *(made(**one) for one in parts)) == {
        "fedavg, partition=None": [1],
        "fedavg, partition=classes, k=1": [1],
        "fedavg, partition=classes, k=2": [1],
    }


def test_settings_are_flat_and_a_function_is_a_reference():
    config = made(options={"mu": 0.1}, model=labels).config
    found = settings_of(config)
    assert (found["model"], found["options.mu"], found["rounds"]) == (f"{__name__}:labels", 0.1, 4)
    assert "options" not in found


def test_two_functions_of_one_name_are_two_groups():
    one, other = (lambda shape, classes: None for _ in range(2))
    found = labels(made(model=one), made(model=other), made(model=one, seed=2))
    assert sorted(found.values()) == [[1], [1, 2]]
