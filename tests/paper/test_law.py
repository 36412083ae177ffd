"""The law, where its numbers are known in closed form."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from fedobp.config import Config
from fedobp.csv_rows import write_rows
from fedobp.data import store
from fedobp.errors import FedobpError
from fedobp.paper.experiment import Work
from fedobp.paper.law import accuracy, label_counts, predict, rows_of, separation, tables
from paper.cases import row, setting


@pytest.mark.parametrize("g", [0.51, 0.6, 0.9, 0.999])
def test_the_separation_of_two_classes_is_a_normal_quantile(g):
    # x_1 - x_2 has mean m and variance 2: g = Phi(m / sqrt 2)
    assert separation(g, 2) == pytest.approx(math.sqrt(2) * norm.ppf(g), rel=1e-6)


def test_two_classes_with_a_prior():
    # right about class 1 if m (x_1 - x_2) > log(p_2 / p_1): Phi((m + log(p_1 / p_2) / m) / sqrt 2)
    m, p = 1.3, np.array([0.8, 0.2])
    expected = [norm.cdf((m + math.log(a / b) / m) / math.sqrt(2)) for a, b in ((0.8, 0.2), (0.2, 0.8))]
    assert accuracy(m, np.log(p), np.arange(2)) == pytest.approx(expected, rel=1e-10)
    assert accuracy(m, np.log(p), np.array([1])) == pytest.approx(expected[1:], rel=1e-10)


def test_several_classes_with_a_prior_as_drawn():
    m, p, draws = 1.5, np.array([0.6, 0.25, 0.1, 0.05]), 200_000
    random = np.random.default_rng(0)
    for y, expected in enumerate(accuracy(m, np.log(p), np.arange(4))):
        x = random.normal(size=(draws, 4)) + m * np.eye(4)[y]
        right = float(((m * x + np.log(p)).argmax(axis=1) == y).mean())
        assert right == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / draws))


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_clients_with_equal_shares_have_the_global_models_accuracy(classes):
    train = np.full((3, classes), 50)
    test = np.random.default_rng(0).integers(1, 9, (3, classes))
    assert predict(0.7, train, test) == pytest.approx(0.7, abs=1e-7)


def test_a_client_with_one_label_is_almost_always_right():
    train, test = np.array([[1000, 0, 0]]), np.array([[10, 0, 0]])
    assert predict(0.5, train, test) > 0.99
    assert predict(0.5, train, np.array([[0, 10, 0]])) < 0.01  # of a label that it has never seen


def test_the_ends():
    train, test = np.array([[6, 3, 1], [1, 2, 7]]), np.array([[5, 4, 1], [2, 2, 6]])
    assert predict(1 / 3, train, test) == pytest.approx(11 / 20)  # at chance a client says its most frequent label
    assert predict(0.0, train, test) == pytest.approx(11 / 20)
    assert predict(1.0, train, test) == pytest.approx(1)
    between = [predict(g, train, test) for g in (0.4, 0.6, 0.8, 0.95)]
    assert between == sorted(between)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Return a folder of result files whose runs are on a small dataset, and the label counts of its clients."""
    monkeypatch.setenv("FEDOBP_DATA", str(tmp_path / "data"))
    x, y = np.zeros((400, 3), np.float32), np.arange(400) % 4
    store("own", {"x": x, "y": y}, tmp_path / "data")
    labels = label_counts(Config(dataset="own", alpha=1.0, clients=5, partition_seed=42))
    common = {"dataset": "own", "alpha": 1.0, "partition": "dirichlet", "clients": 5}
    common |= {"partition_hash": labels.partition}
    rows = [
        row("fedavg", model=model, pooled=pooled, **common)
        for model, pooled in (("served", 70.0), ("last", 80.0), ("finetuned", 81.0))
    ]
    rows += [row("fedobp", pooled=90.0, **common)]  # serves no single model
    rows += [row("fedavg", 43, **{**common, "partition_hash": "another"})]
    rows += [row("scaffold", **{**common, "dataset": "mnist", "clients": 100})]
    (tmp_path / "results").mkdir()
    write_rows(tmp_path / "results" / "results.csv", rows)
    return tmp_path / "results", labels


def test_runs_of_result_files(found, tmp_path):
    folder, labels = found
    assert labels.train.sum() + labels.test.sum() == 400
    work = Work(tmp_path / "out")
    [one] = rows_of([folder], work)
    assert one == {
        "dataset": "own", "alpha": 1.0, "method": "fedavg", "seed": 42, "source": "results", "global": 70.0,
        "predicted": pytest.approx(100 * predict(0.7, labels.train, labels.test)),
        "last": 80.0, "finetuned": 81.0, "prior": None, "prior_unbiased": None,
    }  # fmt: skip
    assert work.notes == [
        "own, Dirichlet(1) is left out: its partition is not that of seed 42",
        "MNIST, Dirichlet(1) is left out, because its labels are needed: fedobp data fetch mnist",
    ]


def test_a_run_of_a_result_file_without_an_alpha_is_a_user_error(tmp_path):
    write_rows(tmp_path / "results.csv", [row("fedavg", dataset="own", partition="dirichlet", alpha=None)])
    with pytest.raises(FedobpError, match=r"results\.csv is damaged \(a row has no number in column 'alpha'\)"):
        rows_of([tmp_path], Work(tmp_path))


def test_a_run_of_a_result_file_that_does_not_name_its_clients_or_partition_is_left_out(found, tmp_path):
    folder, _ = found
    write_rows(folder / "results.csv", [row("fedavg", dataset="own", alpha=1.0, partition="dirichlet")])
    work = Work(tmp_path / "out")
    assert rows_of([folder], work) == []
    assert work.notes == ["own, Dirichlet(1) is left out: its partition is not that of seed 42"]


def test_tables():
    common = {
        "dataset": "cifar10",
        "alpha": 0.1,
        "method": "fedavg",
        "source": "results",
        "prior": None,
        "prior_unbiased": None,
    }
    rows = [
        {**common, "seed": 42, "global": 57.0, "predicted": 85.0, "last": 87.0, "finetuned": 86.0},
        {**common, "seed": 43, "global": 59.0, "predicted": 86.0, "last": 87.0, "finetuned": 86.0},
    ]
    digits = {"dataset": "digits", "prior": 85.5, "unbiased": 60.0, "confidence": 55.0, "predicted_unbiased": 87.5}
    table, unbiased = tables(setting(), {"results": [*rows, {**rows[0], **digits}]})
    assert [line[0].text for line in table.rows] == ["CIFAR10", "Digits"]
    assert [cell.text for cell in table.rows[0]] == [
        "CIFAR10", "0.1", "fedavg", "results", "2", "58.00 ± 1.41", "85.50 ± 0.71", "87.00 ± 0.00", "1.50 ± 0.71",
        "86.00 ± 0.00", "0.50 ± 0.71", "", "", "", "",
    ]  # fmt: skip
    assert [[cell.text for cell in line] for line in unbiased.rows] == [
        ["Digits", "0.1", "fedavg", "results", "1", "60.00", "55.00", "87.50", "87.00", "-0.50", "86.00", "-1.50",
         "85.50", "-2.00", "", ""],
    ]  # fmt: skip


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FedobpError, match="there is no folder"):
        rows_of([tmp_path / "absent"], Work(tmp_path))
