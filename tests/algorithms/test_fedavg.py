"""FedAvg, FedAvg-FT and FedAvg-Last with two clients, by hand."""

import pytest
import torch
from by_hand import context, update_of, vector
from torch import Tensor

from fedobp.algorithms import METHODS
from fedobp.method import Client, Train
from fedobp.models import Model
from fedobp.records import take

MODEL = Model("mlp", (4,), 2)  # none of these methods looks at the model
CTX = context(1, 0, model=MODEL, epochs=3)


def run(program, state: dict[str, Tensor], download: dict[str, Tensor], step: Tensor) -> Client:
    """Run one client's program, with `step` added for each epoch of training."""
    client = Client(state=state, download=download, scratch={}, upload={}, hparams={})
    for item in program:
        client = client.set(theta=client.theta + item.epochs * step) if isinstance(item, Train) else item(MODEL, client)
    return client


@pytest.mark.essential
@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft", "fedavg-last"])
def test_a_round_by_hand(name):
    method = METHODS[name]()
    server, record, state = method.init(MODEL, vector(1, 2), 0)
    download, records = method.download(CTX, server, {})
    assert (record, records) == ({}, {})
    assert {key: value.tolist() for key, value in download.items()} == {"theta": [[1, 2], [1, 2]]}
    program = method.client_update(CTX)
    assert [item.epochs for item in program if isinstance(item, Train)] == [3]
    steps = vector(4, 0), vector(0, -4)
    clients = [run(program, state, take(download, at), step) for at, step in enumerate(steps)]
    assert [list(client.upload) for client in clients] == [["theta"], ["theta"]]
    assert [client.upload["theta"].tolist() for client in clients] == [[13, 2], [1, -10]]
    server, records = method.aggregate(CTX, server, records, update_of(clients, 3, 1))
    assert {key: value.tolist() for key, value in server.items()} == {"theta": [10, -1]}
    assert records == {}


@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft"])
def test_clients_of_fedavg_have_no_state(name):
    method = METHODS[name]()
    state = method.init(MODEL, vector(1, 2), 0).state
    client = run(method.client_update(CTX), state, {"theta": vector(1, 2)}, vector(1, 1))
    assert state == client.state == {}


def test_fedavg_serves_the_global_model_without_changes():
    served = run(METHODS["fedavg"]().personalize(CTX), {}, {"theta": vector(5, 6)}, vector(100, 100))
    assert served.theta.tolist() == [5, 6]
    assert "mine" not in served.scratch or not served.scratch["mine"].any()
    assert served.upload == {}


@pytest.mark.parametrize("epochs", [5, 2])
def test_fedavg_ft_serves_the_global_model_after_fine_tuning(epochs):
    method = METHODS["fedavg-ft"]() if epochs == 5 else METHODS["fedavg-ft"](finetune=epochs)
    served = run(method.personalize(CTX), {}, {"theta": vector(5, 6)}, vector(1, -1))
    assert served.theta.tolist() == [5 + epochs, 6 - epochs]
    assert served.scratch["mine"].tolist() == [True, True]
    assert served.scratch["mine"].dtype == torch.bool
    assert (served.state, served.upload) == ({}, {})


def test_fedavg_last_serves_the_global_model_until_the_client_has_trained():
    method = METHODS["fedavg-last"]()
    server, _, state = method.init(MODEL, vector(1, 2), 0)
    assert (state["theta"].tolist(), state["seen"].tolist()) == ([1, 2], False)
    served = run(method.personalize(CTX), state, {"theta": vector(5, 6)}, vector(100, 100))
    assert served.theta.tolist() == [5, 6]
    assert served.scratch["mine"].tolist() == [False, False]
    assert server["theta"].tolist() == [1, 2]


def test_fedavg_last_serves_the_model_that_the_client_trained_last():
    method = METHODS["fedavg-last"]()
    state = method.init(MODEL, vector(1, 2), 0).state
    for start, trained in ((vector(1, 2), [4, 5]), (vector(10, 20), [13, 23])):
        client = run(method.client_update(CTX), state, {"theta": start}, vector(1, 1))
        assert client.upload["theta"].tolist() == client.state["theta"].tolist() == trained
        state = client.state
        served = run(method.personalize(CTX), state, {"theta": vector(7, 8)}, vector(100, 100))
        assert served.theta.tolist() == trained
        assert served.scratch["mine"].tolist() == [True, True]
        assert served.state["theta"].tolist() == trained
    assert state["seen"].dtype == torch.bool
