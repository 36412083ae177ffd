"""The published numbers are complete, and agree with what the package knows."""

from fedobp.algorithms import METHODS
from fedobp.data import REGISTRY
from fedobp.importance import count_above
from fedobp.models import Model
from fedobp.paper.published import GRID, NAMES, SHORT_GRID, TABLE1, TABLE2, accuracy, momentum_0, published


def test_every_part_has_a_source():
    assert set(published()) - {"about", "sources"} == set(published()["sources"])


def test_thirteen_methods_on_eight_datasets_at_two_alphas():
    assert len(NAMES) == 13
    assert set(NAMES) <= set(METHODS)
    for dataset in (*TABLE1, *TABLE2):
        for method in NAMES:
            for alpha in (0.1, 0.5):
                mean, std = accuracy(dataset, method, alpha)
                assert 0 < mean < 100
                assert 0 <= std < 2
    assert accuracy("cifar10", "fedobp", 0.1) == (87.02, 0.17)
    assert accuracy("organcmnist", "fedala", 0.1) == (9.03, 0.0)
    assert accuracy("digits", "fedobp", 0.1) is None
    assert accuracy("cifar10", "ditto", 0.1) is None


def test_runs_at_momentum_0_are_of_alpha_01():
    assert momentum_0("cifar10", "fedavg", 0.1) == 58.04
    assert momentum_0("cifar10", "fedavg", 0.5) is None
    assert momentum_0("cifar10", "fedobp", 0.1) is None


def test_parameters_are_those_of_the_network():
    for dataset, layers in published()["parameters"].items():
        facts = REGISTRY[dataset]
        shape = (1, *facts.shape) if len(facts.shape) == 2 else (3, *facts.shape[:2])
        layout = Model("cnn", shape, facts.classes).layout
        counted = dict.fromkeys((name.rpartition(".")[0] for name in layout.names), 0)
        for name, size in zip(layout.names, layout.sizes, strict=True):
            counted[name.rpartition(".")[0]] += size
        assert {**counted, "total": layout.size} == layers


def test_counts_follow_from_the_quantiles_but_for_one():
    wrong = []
    for dataset, by_alpha in published()["quantiles"].items():
        for alpha, cell in by_alpha.items():
            assert REGISTRY[dataset].q[float(alpha)] == cell["q"]
            if count_above(published()["parameters"][dataset]["total"], cell["q"]) != cell["count"]:
                wrong.append((dataset, alpha))
    assert wrong == [("organamnist", "0.1")]


def test_the_grids():
    assert len(GRID) == 32
    assert len(SHORT_GRID) == 12
    assert list(GRID) == sorted(set(GRID))
    assert set(SHORT_GRID) < set(GRID)
