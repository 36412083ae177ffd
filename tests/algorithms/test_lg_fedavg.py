"""LG-FedAvg with two clients, by hand: the layers below the head stay on the client."""

from collections import OrderedDict

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from torch import nn

from fedobp.algorithms import METHODS
from fedobp.method import Train
from fedobp.models import NETS, Model, register
from fedobp.records import take

THETA = vector(*range(14))  # each entry is its own position


@pytest.fixture(scope="module")
def model():
    """Entries: first layer 0 to 3 (its bias 2 and 3), the second 4 to 6, the third 7 to 10, the head 11 to 13."""
    sizes = {"a": (1, 2), "b": (2, 1), "c": (1, 2), "classifier": (2, 1)}
    layers = OrderedDict((name, nn.Linear(*size)) for name, size in sizes.items())
    register("tiny-lg")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-lg", (1,), 1)
    del NETS["tiny-lg"]


def train(method, ctx, state, download, step):
    client, phases = run_program(ctx.model, method.client_update(ctx), state, download, [torch.full((14,), step)])
    assert phases == [Train(5)]
    return client


@pytest.mark.essential
def test_a_round_by_hand(model):
    method, ctx, shared, private = METHODS["lg-fedavg"](), context(0, 1, model=model), [11, 12, 13], list(range(11))
    server, records, state = method.init(model, THETA, 0)
    assert state["private"].tolist() == private
    download, records = method.download(ctx, server, records)
    assert download["shared"].tolist() == [shared, shared]
    clients = [train(method, ctx, state, take(download, at), 4.0 * (at + 1)) for at in (0, 1)]
    assert [list(client.upload) for client in clients] == [["shared"], ["shared"]]
    server, records = method.aggregate(ctx, server, records, update_of(clients, 3, 1))
    expected = THETA.clone()
    expected[shared] += 5  # (3 * 4 + 1 * 8) / 4; private entries stay at theta^0
    assert server["theta"].tolist() == expected.tolist()
    download, _ = method.download(ctx, server, records)
    served, _ = run_program(model, method.personalize(ctx), clients[1].state, take(download, 1))
    expected[private] += 8
    assert served.theta.tolist() == expected.tolist()
    assert served.scratch["mine"].nonzero().flatten().tolist() == private


def test_as_published_the_first_layer_is_shared_and_new_clients_start_from_the_average(model):
    method, ctx, private = METHODS["lg-fedavg"](mode="as-published"), context(0, 1, model=model), list(range(4, 14))
    server, records, state = method.init(model, THETA, 0)
    download, records = method.download(ctx, server, records)
    clients = [train(method, ctx, state, take(download, at), 4.0 * (at + 1)) for at in (0, 1)]
    assert [list(client.upload) for client in clients] == [["theta"], ["theta"]]
    server, records = method.aggregate(ctx, server, records, update_of(clients, 3, 1))
    assert server["theta"].tolist() == (THETA + 5).tolist()  # private layers are averaged, too
    download, _ = method.download(ctx, server, records)
    for one, step, mine in ((clients[0].state, 4, private), (clients[1].state, 8, private), (state, 5, [])):
        expected = THETA + 5
        expected[private] = THETA[private] + step  # the client's, or the average until it has trained
        served, _ = run_program(model, method.personalize(ctx), one, take(download, 0))
        assert served.theta.tolist() == expected.tolist()
        assert served.scratch["mine"].nonzero().flatten().tolist() == mine
        trained = train(method, ctx, one, take(download, 0), 1.0)  # training starts from the same
        assert trained.upload["theta"].tolist() == (expected + 1).tolist()
        assert trained.state["private"].tolist() == (expected[private] + 1).tolist()
        assert bool(trained.state["seen"])
