"""FedBN with two clients, worked out by hand: BatchNorm never crosses the wire."""

from collections import OrderedDict

import pytest
import torch
from contexts import with_model
from torch import nn
from walk import moment, row, vector, walk

from fedobp import Config, Federation
from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate, Train
from fedobp.models import NETS, Model, register

METHOD = METHODS["fedbn"]()
CTX = moment(0, 1)


@pytest.fixture
def model():
    """Entries: norm's weight and bias 0 and 1, classifier 2 and 3, running mean and variance 4 and 5."""
    layers = OrderedDict(norm=nn.BatchNorm1d(1), classifier=nn.Linear(1, 1))
    register("tiny-fedbn")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-fedbn", (1,), 1)
    del NETS["tiny-fedbn"]


@pytest.mark.essential
def test_a_round_by_hand(model):
    server, records, own = METHOD.init(model, vector(1, 2, 3, 4, 5, 6), 0)
    assert own["private"].tolist() == [1, 2, 5, 6]
    download, records = METHOD.download(with_model(model, CTX), server, records)
    assert {name: value.tolist() for name, value in download.items()} == {"shared": [[3, 4], [3, 4]]}
    states = []
    for client, step in ((0, vector(1, 1, 4, 0, 1, 1)), (1, vector(9, 9, 0, 4, 9, 9))):
        state, phases = walk(model, METHOD.client_update(with_model(model, CTX)), own, row(download, client), [step])
        assert phases == [Train(5)]
        assert list(state.upload) == ["shared"]
        states.append(state)
    assert states[0].state["private"].tolist() == [2, 3, 6, 7]
    up = {"shared": torch.stack([state.upload["shared"] for state in states])}
    server, records = METHOD.aggregate(with_model(model, CTX), server, records, CohortUpdate(up, torch.tensor([1, 3])))
    assert server["theta"].tolist() == [1, 2, 4, 7, 5, 6]
    download, _ = METHOD.download(with_model(model, CTX), server, records)
    served, phases = walk(model, METHOD.personalize(with_model(model, CTX)), states[1].state, row(download, 1), [])
    assert (served.theta.tolist(), phases) == ([10, 11, 4, 7, 14, 15], [])
    assert served.scratch["mine"].tolist() == [True, True, False, False, True, True]


def test_without_batch_norm_it_is_fedavg_and_says_so():
    config = Config(clients=4, rounds=2, model="mlp", precision="fp64", epochs=1, batch_size=100)
    with pytest.warns(UserWarning, match="'mlp' has no BatchNorm, so fedbn is fedavg"):
        found = Federation(config).run("fedbn")
    right = Federation(config).run("fedavg")
    assert found.accuracy == right.accuracy
    assert found.bytes == right.bytes
    assert found.personal.max == 0
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, right.state_dict()[name])


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
