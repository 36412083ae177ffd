"""What the theory says, on networks small enough to compute by hand."""

import pytest
import torch
from torch.nn import functional

from fedobp.models import Model
from fedobp.paper.theory import compare_scores, gradient_of, loss_changes, mean_loss, spearman

X = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 1.0]], dtype=torch.float64)
Y = torch.tensor([0, 1, 1])


def model():
    return Model("mlp", (2,), 2)


def thetas(size):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]


def test_the_loss_change_replaces_one_entry_by_the_global_value():
    network = model()
    theta_i, theta_g = thetas(network.layout.size)
    entries = torch.tensor([0, 7, network.layout.size - 1])
    found = loss_changes(network, theta_i, theta_g, entries, X, Y)

    def loss(theta):
        with torch.no_grad():
            return functional.cross_entropy(network.module(theta)(X), Y)

    for k, change in zip(entries.tolist(), found, strict=True):
        replaced = theta_i.clone()
        replaced[k] = theta_g[k]
        assert float(change) == pytest.approx(abs(float(loss(replaced) - loss(theta_i))), rel=1e-9)
    assert torch.equal(theta_i, thetas(network.layout.size)[0])  # it is left as it was


def test_loss_and_gradient_in_parts_are_those_of_all(monkeypatch):
    network = model()
    theta, _ = thetas(network.layout.size)
    whole = mean_loss(network, theta, X, Y), gradient_of(network, theta, X, Y)
    monkeypatch.setattr("fedobp.paper.theory._CHUNK", 2)
    torch.testing.assert_close(mean_loss(network, theta, X, Y), whole[0])
    torch.testing.assert_close(gradient_of(network, theta, X, Y), whole[1])
    step = 1e-6 * whole[1] / whole[1].norm()
    slope = (mean_loss(network, theta + step, X, Y) - mean_loss(network, theta - step, X, Y)) / 2e-6
    assert float(slope) == pytest.approx(float(whole[1].norm()), rel=1e-5)


def test_rank_correlation():
    rising = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert spearman(rising, rising.exp()) == pytest.approx(1)
    assert spearman(rising, -rising) == pytest.approx(-1)
    # ranks 1, 2, 3, 4 and 2, 1, 4, 3: 1 - 6 * 4 / (4 * 15) = 0.6
    assert spearman(rising, torch.tensor([20.0, 10.0, 40.0, 30.0])) == pytest.approx(0.6)
    assert spearman(rising, torch.zeros(4)) is None


def test_near_the_global_model_the_first_order_term_ranks_as_the_loss_does():
    network = model()
    theta_i, other = thetas(network.layout.size)
    theta_g = theta_i + 1e-6 * other
    rows, entries = compare_scores(network, theta_i, theta_g, X, Y, 12, torch.Generator().manual_seed(1))
    assert {(row["drawn"], row["score"]) for row in rows} == {
        (drawn, score) for drawn in ("random", "top") for score in ("squared", "product")
    }
    assert all(row["taylor_with_loss"] > 0.99 for row in rows if row["drawn"] == "top")
    top = [entry["squared"] for entry in entries if entry["drawn"] == "top"]
    assert top == (theta_i - theta_g).square().sort(descending=True).values[:12].tolist()
