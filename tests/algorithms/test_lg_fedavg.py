"""LG-FedAvg with two clients, worked out by hand: what is below the head stays at home."""

from collections import OrderedDict

import pytest
import torch
from contexts import with_model
from torch import nn
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate, Train
from fedobp.models import NETS, Model, register

CTX = moment(0, 1)
THETA = vector(*range(14))  # each entry is its own position


@pytest.fixture(scope="module")
def model():
    """Entries: first layer 0 to 3 (its bias 2 and 3), the second 4 to 6, the third 7 to 10, the head 11 to 13."""
    sizes = {"a": (1, 2), "b": (2, 1), "c": (1, 2), "classifier": (2, 1)}
    layers = OrderedDict((name, nn.Linear(*size)) for name, size in sizes.items())
    register("tiny-lg")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-lg", (1,), 1)
    del NETS["tiny-lg"]


def visit(model, method, own, download, step):
    state, phases = walk(model, method.client_update(with_model(model, CTX)), own, download, [torch.full((14,), step)])
    assert phases == [Train(5)]
    return state


@pytest.mark.essential
def test_a_round_by_hand(model):
    method, shared, private = METHODS["lg-fedavg"](), [11, 12, 13], list(range(11))
    server, records, own = method.init(model, THETA, 0)
    assert own["private"].tolist() == private
    download, records = method.download(with_model(model, CTX), server, records)
    assert download["shared"].tolist() == [shared, shared]
    states = [visit(model, method, own, row(download, client), 4.0 * (client + 1)) for client in (0, 1)]
    assert [list(state.upload) for state in states] == [["shared"], ["shared"]]
    up = {"shared": torch.stack([state.upload["shared"] for state in states])}
    server, records = method.aggregate(with_model(model, CTX), server, records, CohortUpdate(up, torch.tensor([3, 1])))
    expected = THETA.clone()
    expected[shared] += 5  # (3 * 4 + 1 * 8) / 4; what nobody shares stays at theta^0
    assert server["theta"].tolist() == expected.tolist()
    download, _ = method.download(with_model(model, CTX), server, records)
    served, _ = walk(model, method.personalize(with_model(model, CTX)), states[1].state, row(download, 1), [])
    expected[private] += 8
    assert served.theta.tolist() == expected.tolist()
    assert served.scratch["mine"].nonzero().flatten().tolist() == private


def test_as_published_the_first_layer_is_shared_and_new_clients_start_from_the_average(model):
    method, private = METHODS["lg-fedavg"](mode="as-published"), list(range(4, 14))
    server, records, own = method.init(model, THETA, 0)
    download, records = method.download(with_model(model, CTX), server, records)
    states = [visit(model, method, own, row(download, client), 4.0 * (client + 1)) for client in (0, 1)]
    assert [list(state.upload) for state in states] == [["theta"], ["theta"]]
    up = {"theta": torch.stack([state.upload["theta"] for state in states])}
    server, records = method.aggregate(with_model(model, CTX), server, records, CohortUpdate(up, torch.tensor([3, 1])))
    assert server["theta"].tolist() == (THETA + 5).tolist()  # private layers are averaged, too
    download, _ = method.download(with_model(model, CTX), server, records)
    for state, move, mine in ((states[0].state, 4, private), (states[1].state, 8, private), (own, 5, [])):
        expected = THETA + 5
        expected[private] = THETA[private] + move  # one's own, or the average if there is none yet
        served, _ = walk(model, method.personalize(with_model(model, CTX)), state, row(download, 0), [])
        assert served.theta.tolist() == expected.tolist()
        assert served.scratch["mine"].nonzero().flatten().tolist() == mine
        trained = visit(model, method, state, row(download, 0), 1.0)  # and training starts from the same
        assert trained.upload["theta"].tolist() == (expected + 1).tolist()
        assert trained.state["private"].tolist() == (expected[private] + 1).tolist()
        assert bool(trained.state["seen"])
