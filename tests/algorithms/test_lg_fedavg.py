"""LG-FedAvg with two clients, worked out by hand: what is below the head stays at home."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS, Train
from fedobp.models import NETS, Model, register

NOW = moment(0, 1)


@pytest.fixture(scope="module")
def model():
    """Entries: first layer 0 and 1, second 2 and 3, head 4 and 5."""
    layers = OrderedDict(a=nn.Linear(1, 2, bias=False), b=nn.Linear(2, 1, bias=False))
    layers["classifier"] = nn.Linear(1, 2, bias=False)
    register("tiny-lg")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-lg", (1,), 2)
    del NETS["tiny-lg"]


@pytest.mark.essential
@pytest.mark.parametrize(
    ("mode", "shared", "private"),
    [("faithful", [4, 5], [0, 1, 2, 3]), ("as-published", [0, 1], [2, 3, 4, 5])],
)
def test_a_round_by_hand(model, mode, shared, private):
    method, theta = METHODS["lg-fedavg"](mode=mode), vector(0, 1, 2, 3, 4, 5)
    server, rows, own = method.begin(model, theta, 0)
    assert own["private"].tolist() == private  # each entry is its own position
    down, rows = method.send(model, NOW, server, rows)
    assert down["shared"].tolist() == [shared, shared]
    owns, ups = [], []
    for client in (0, 1):
        step = torch.full((6,), 4.0 * (client + 1))
        state, phases = walk(model, method.local(model, NOW), own, row(down, client), [step])
        assert phases == [Train(5)]
        assert list(state.up) == ["shared"]
        owns.append(state.own)
        ups.append(state.up["shared"])
    server, rows = method.receive(model, NOW, server, rows, {"shared": torch.stack(ups)}, torch.tensor([3, 1]))
    expected = theta.clone()
    expected[shared] += 5  # (3 * 4 + 1 * 8) / 4; what nobody shares stays at theta^0
    assert server["theta"].tolist() == expected.tolist()
    down, _ = method.send(model, NOW, server, rows)
    served, _ = walk(model, method.serve(model, NOW), owns[1], row(down, 1), [])
    expected[private] += 8
    assert served.theta.tolist() == expected.tolist()
    assert served.work["mine"].nonzero().flatten().tolist() == private
