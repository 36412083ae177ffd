"""FedBN with two clients, by hand: BatchNorm layers are never sent."""

from collections import OrderedDict

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from torch import nn

from fedobp import Config, Federation
from fedobp.algorithms import METHODS
from fedobp.method import Train
from fedobp.models import NETS, Model, register
from fedobp.records import take

METHOD = METHODS["fedbn"]()


@pytest.fixture
def model():
    """Entries: norm's weight and bias 0 and 1, classifier 2 and 3, running mean and variance 4 and 5."""
    layers = OrderedDict(norm=nn.BatchNorm1d(1), classifier=nn.Linear(1, 1))
    register("tiny-fedbn")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-fedbn", (1,), 1)
    del NETS["tiny-fedbn"]


@pytest.mark.essential
def test_a_round_by_hand(model):
    ctx = context(0, 1, model=model)
    server, records, state = METHOD.init(model, vector(1, 2, 3, 4, 5, 6), 0)
    assert state["private"].tolist() == [1, 2, 5, 6]
    download, records = METHOD.download(ctx, server, records)
    assert {name: value.tolist() for name, value in download.items()} == {"shared": [[3, 4], [3, 4]]}
    clients = []
    for at, step in enumerate((vector(1, 1, 4, 0, 1, 1), vector(9, 9, 0, 4, 9, 9))):
        client, phases = run_program(model, METHOD.client_update(ctx), state, take(download, at), [step])
        assert phases == [Train(5)]
        assert list(client.upload) == ["shared"]
        clients.append(client)
    assert clients[0].state["private"].tolist() == [2, 3, 6, 7]
    server, records = METHOD.aggregate(ctx, server, records, update_of(clients, 1, 3))
    assert server["theta"].tolist() == [1, 2, 4, 7, 5, 6]
    download, _ = METHOD.download(ctx, server, records)
    served, phases = run_program(model, METHOD.personalize(ctx), clients[1].state, take(download, 1))
    assert (served.theta.tolist(), phases) == ([10, 11, 4, 7, 14, 15], [])
    assert served.scratch["mine"].tolist() == [True, True, False, False, True, True]


def test_without_batch_norm_it_is_fedavg_and_warns():
    config = Config(clients=4, rounds=2, model="mlp", precision="fp64", epochs=1, batch_size=100)
    with pytest.warns(UserWarning, match="'mlp' has no BatchNorm, so fedbn is fedavg"):
        found = Federation(config).run("fedbn")
    expected = Federation(config).run("fedavg")
    assert found.accuracy == expected.accuracy
    assert found.bytes == expected.bytes
    assert found.personal.max == 0
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_a_run_with_batch_norm(engine, monkeypatch):
    monkeypatch.setitem(NETS, "small-bn", small_bn)
    config = Config(clients=4, rounds=2, model="small-bn", precision="fp64", epochs=1, engine=engine)
    result = Federation(config).run("fedbn")
    assert result.personal.min == result.personal.max == 4 * 8
    first, second = result.state_dict(0), result.state_dict(1)
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    assert torch.equal(first["fc.weight"], second["fc.weight"])


def small_bn(shape, classes):
    layers = OrderedDict(
        flatten=nn.Flatten(),
        fc=nn.Linear(64, 8),
        norm=nn.BatchNorm1d(8),
        relu=nn.ReLU(),
        classifier=nn.Linear(8, classes),
    )
    return nn.Sequential(layers)
