"""LG-FedAvg with two clients, worked out by hand: what is below the head stays at home."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS, Train
from fedobp.models import NETS, Model, register

NOW = moment(0, 1)
THETA = vector(*range(14))  # each entry is its own position


@pytest.fixture(scope="module")
def model():
    """Entries: first layer 0 to 3 (its bias 2 and 3), the second 4 to 6, the third 7 to 10, the head 11 to 13."""
    sizes = {"a": (1, 2), "b": (2, 1), "c": (1, 2), "classifier": (2, 1)}
    layers = OrderedDict((name, nn.Linear(*size)) for name, size in sizes.items())
    register("tiny-lg")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-lg", (1,), 1)
    del NETS["tiny-lg"]


def visit(model, method, own, down, step):
    state, phases = walk(model, method.local(model, NOW), own, down, [torch.full((14,), step)])
    assert phases == [Train(5)]
    return state


@pytest.mark.essential
def test_a_round_by_hand(model):
    method, shared, private = METHODS["lg-fedavg"](), [11, 12, 13], list(range(11))
    server, rows, own = method.begin(model, THETA, 0)
    assert own["private"].tolist() == private
    down, rows = method.send(model, NOW, server, rows)
    assert down["shared"].tolist() == [shared, shared]
    states = [visit(model, method, own, row(down, client), 4.0 * (client + 1)) for client in (0, 1)]
    assert [list(state.up) for state in states] == [["shared"], ["shared"]]
    up = {"shared": torch.stack([state.up["shared"] for state in states])}
    server, rows = method.receive(model, NOW, server, rows, up, torch.tensor([3, 1]))
    expected = THETA.clone()
    expected[shared] += 5  # (3 * 4 + 1 * 8) / 4; what nobody shares stays at theta^0
    assert server["theta"].tolist() == expected.tolist()
    down, _ = method.send(model, NOW, server, rows)
    served, _ = walk(model, method.serve(model, NOW), states[1].own, row(down, 1), [])
    expected[private] += 8
    assert served.theta.tolist() == expected.tolist()
    assert served.work["mine"].nonzero().flatten().tolist() == private


def test_as_published_the_first_layer_is_shared_and_new_clients_start_from_the_average(model):
    method, private = METHODS["lg-fedavg"](mode="as-published"), list(range(4, 14))
    server, rows, own = method.begin(model, THETA, 0)
    down, rows = method.send(model, NOW, server, rows)
    states = [visit(model, method, own, row(down, client), 4.0 * (client + 1)) for client in (0, 1)]
    assert [list(state.up) for state in states] == [["theta"], ["theta"]]
    up = {"theta": torch.stack([state.up["theta"] for state in states])}
    server, rows = method.receive(model, NOW, server, rows, up, torch.tensor([3, 1]))
    assert server["theta"].tolist() == (THETA + 5).tolist()  # private layers are averaged, too
    down, _ = method.send(model, NOW, server, rows)
    for state, move, mine in ((states[0].own, 4, private), (states[1].own, 8, private), (own, 5, [])):
        expected = THETA + 5
        expected[private] = THETA[private] + move  # one's own, or the average if there is none yet
        served, _ = walk(model, method.serve(model, NOW), state, row(down, 0), [])
        assert served.theta.tolist() == expected.tolist()
        assert served.work["mine"].nonzero().flatten().tolist() == mine
        trained = visit(model, method, state, row(down, 0), 1.0)  # and training starts from the same
        assert trained.up["theta"].tolist() == (expected + 1).tolist()
        assert trained.own["private"].tolist() == (expected[private] + 1).tolist()
        assert bool(trained.own["seen"])
