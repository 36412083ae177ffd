"""What personal entries do, on a network small enough to compute by hand."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from fedobp.importance import squared
from fedobp.models import Layout, Model
from fedobp.paper.experiment import Work
from fedobp.paper.explained import (
    ACCURACIES,
    above_rms,
    between_clients,
    centred,
    common_bias,
    correlation,
    explain,
    explain_client,
    log_prior,
    tables,
    train_run,
)
from paper.cases import setting


def linear(shape, classes):
    """Return a network whose features are its inputs."""
    return nn.Sequential(OrderedDict(base=nn.Identity(), classifier=nn.Linear(shape[0], classes)))


def vector(weight, bias):
    return torch.cat([torch.tensor(weight, dtype=torch.float64).flatten(), torch.tensor(bias, dtype=torch.float64)])


def test_a_clients_bias_and_accuracies_by_hand():
    model = Model(linear, (2,), 3)
    theta = torch.zeros(9, dtype=torch.float64)
    mine = vector([[0, 2], [0, 0], [-1, 0]], [0, 3, 0]).bool()
    last = vector([[0, 2], [0, 0], [-1, 0]], [0, 3, 10])  # the 10 is not personal
    train = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)  # on average z = (2, 3)
    test = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64), torch.tensor([1, 0])
    given = {"prior": torch.tensor([0.0, -1.0, -1.0]), "unbiased": torch.tensor([0.0, 0.0, 1.0])}
    biases, right, change = explain_client(model, theta, last, mine, given, train, test)
    assert biases["classifier"].tolist() == pytest.approx([2 * 3, 3, -1 * 2])
    assert biases["all"].tolist() == pytest.approx([6, 3, -2])
    # served: (0, 3, -1) and (4, 3, 0); the global model, the bias and the prior say 0 twice, the others 2 twice
    assert right == {
        "global": 1, "served": 2, "head": 2, "bias_all": 1, "bias_classifier": 1, "prior": 1, "unbiased": 0, "last": 0,
    }  # fmt: skip
    # samples' changes (4, 3, -1) and (8, 3, -3): centred, their squares sum to 14 + 546 / 9, those of the mean to 294/9
    assert change == pytest.approx((14 + 546 / 9, 2 * 294 / 9))


def test_entries_below_the_classifier_have_a_bias_that_is_measured():
    model, generator = Model("mlp", (2,), 3), torch.Generator().manual_seed(0)
    theta, last = (torch.randn(model.layout.size, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    test, head = (x, torch.tensor([0, 1, 2, 0, 1])), model.layout.is_head()
    biases, right, _ = explain_client(model, theta, last, ~head, {}, x, test)
    served = torch.where(head, theta, last)
    with torch.no_grad():
        expected = (model.module(served)(x) - model.module(theta)(x)).mean(dim=0)
    torch.testing.assert_close(biases["all"], expected)
    assert biases["classifier"].tolist() == [0, 0, 0]
    assert right["head"] == right["global"]
    biases, right, _ = explain_client(model, theta, last, head, {}, x, test)
    torch.testing.assert_close(biases["all"], biases["classifier"])  # the classifier is linear
    assert right["head"] == right["served"]


def test_the_rms_rule():
    # one entry of 1 among N: 20 rms = 20 / sqrt(N), which is below 1 from N = 401 on
    for size, chosen in ((399, 0), (401, 1)):
        d = torch.zeros(2, size)
        d[0, 7] = -1.0
        mask = above_rms(Layout(("classifier.weight",), ((size,),)), d)
        assert mask.sum(dim=1).tolist() == [chosen, 0]  # a client that has not trained has none
        assert bool(mask[0, 7]) == bool(chosen)


def test_log_prior_has_half_a_sample_more_of_each_class():
    assert log_prior(torch.tensor([3, 0])).exp().tolist() == pytest.approx([3.5 / 4, 0.5 / 4])


def test_correlation():
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert correlation(a, 3 * a + 1) == pytest.approx(1)
    assert correlation(a, -a) == pytest.approx(-1)
    b = torch.tensor([[1.0, -1.0], [1.0, 3.0]])  # products of differences from 2.5 and 1: 4.5 - 0 + ... = 4
    assert correlation(a, b) == pytest.approx(float(np.corrcoef(a.flatten(), b.flatten())[0, 1]))
    assert correlation(a, torch.ones(2, 2)) is None


def test_what_all_clients_have_in_common_is_taken_off():
    rows = [
        {"seed": seed, "class": c, "log_prior": prior, "all": 2 * prior + 10 * c + seed}
        for seed in (42, 43)
        for c, priors in enumerate(([0.0, -1.0], [-3.0, 1.0]))
        for prior in priors
    ]
    x, y = between_clients(rows)
    assert x.tolist() == [0.5, -0.5, -2.0, 2.0] * 2
    assert y.tolist() == (2 * x).tolist()


def test_the_common_bias_predicts_each_class_as_often_as_it_occurs():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    y = logits.argmax(dim=1)
    skewed = logits + torch.tensor([5.0, 0.0, -2.0])
    shares = log_prior(torch.bincount(y))
    bias = common_bias(skewed, shares)
    torch.testing.assert_close((skewed + bias).softmax(dim=1).mean(dim=0), shares.exp())
    moved = centred(bias - common_bias(logits, shares))  # what was added is taken off again
    torch.testing.assert_close(moved, centred(torch.tensor([-5.0, 0.0, 2.0], dtype=torch.float64)), atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = setting(scale="smoke", rounds=3).config("digits", 0.1, 42, "fedobp", eval_every=3)
    return train_run(config, Work(tmp_path_factory.mktemp("out")), "digits")


def test_a_run_is_explained_with_the_models_that_it_serves(trained):
    mine = trained.method.personal(trained.model, squared(trained.last, trained.theta))
    row, classes = explain(trained, mine)
    report = trained.report
    assert (row["served"], row["last"]) == (pytest.approx(report.served.pooled), pytest.approx(report.last.pooled))
    assert row["personal_mean"] == report.personal.mean > 0
    of_head = sum(count for name, count in report.personal_by_tensor.items() if Layout.in_head(name))
    assert row["in_classifier"] == pytest.approx(of_head / report.personal.mean)
    clients = mine.any(dim=1).nonzero().flatten().tolist()
    assert len(clients) < trained.config.clients  # some have not trained, and have no bias to compare
    assert [(one["client"], one["class"]) for one in classes] == [(i, c) for i in clients for c in range(10)]
    counts = trained.data.counts(clients[0])
    assert [one["log_prior"] for one in classes[:10]] == pytest.approx(centred(log_prior(counts)).tolist())


def test_the_global_model_without_its_own_class_bias(trained):
    row, _ = explain(trained, torch.zeros_like(trained.last, dtype=torch.bool))
    data, module = trained.data, trained.model.module(trained.theta)
    shares = log_prior(data.label_counts.sum(dim=0))
    with torch.no_grad():
        train, test = (module(data.samples(data.pooled_ids(split))).double() for split in ("train", "test"))
    logits, y = test + common_bias(train, shares), data.y[data.pooled_ids("test")]
    assert row["unbiased"] == pytest.approx(100 * float((logits.argmax(dim=1) == y).double().mean()))
    assert row["confidence"] == pytest.approx(100 * float(logits.softmax(dim=1).amax(dim=1).mean()))
    owner = torch.cat([torch.full((data.size(i, "test"),), i) for i in range(data.clients)])
    logits += log_prior(data.label_counts)[owner] - shares
    assert row["prior_unbiased"] == pytest.approx(100 * float((logits.argmax(dim=1) == y).double().mean()))


def test_without_personal_entries_all_that_is_left_is_the_global_model(trained):
    row, classes = explain(trained, torch.zeros_like(trained.last, dtype=torch.bool))
    assert classes == []
    assert row["served"] == row["head"] == row["bias_all"] == row["bias_classifier"] == row["global"]
    assert [row[name] for name in ("in_classifier", "correlation_all", "between_all", "slope")] == [None] * 4


def test_tables():
    numbers = {
        "personal_mean": 18.0, "in_classifier": 0.9, "correlation_classifier": 0.8, "correlation_all": 0.81,
        "between_classifier": 0.9, "between_all": 0.91, "slope": 1.0, "same_for_all_samples": 0.98,
    }  # fmt: skip
    rows = [
        {"dataset": "cifar10", "alpha": 0.1, "seed": seed, "rule": "rms", **numbers,
         **{name: 80.0 + at for at, name in enumerate(ACCURACIES)}}
        for seed in (42, 43)
    ]  # fmt: skip
    bias, accuracy = tables(setting(), {"results": rows, "classes": []})
    assert [cell.text for cell in bias.rows[0]] == ["CIFAR10", "0.1", "FedOBP's quantile", *[""] * 8]
    assert [cell.text for cell in bias.rows[1]][2:6] == ["20 rms", "18.0", "0.90 ± 0.00", "0.80 ± 0.00"]
    assert [cell.rank for cell in accuracy.rows[1]] == [0] * 10 + [2, 1]
    assert accuracy.rows[1][3].text == "80.00 ± 0.00"
