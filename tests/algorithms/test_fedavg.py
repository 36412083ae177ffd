"""FedAvg, FedAvg-FT and FedAvg-Last with two clients, worked out by hand."""

import pytest
import torch
from contexts import with_model
from torch import Tensor

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate, RoundContext, Train
from fedobp.models import Model

CTX = RoundContext(model=None, round=1, rounds=9, clients=2, epochs=3, cohort=torch.tensor([1, 0]))
MODEL = Model("mlp", (4,), 2)  # none of these methods looks at the model


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def run(program, own: dict[str, Tensor], theta: Tensor, step: Tensor) -> Client:
    """One client's program, with `step` added for each epoch of training."""
    state = Client(state=own, download={"theta": theta}, scratch={}, upload={}, hparams={})
    for item in program:
        state = state.set(theta=state.theta + item.epochs * step) if isinstance(item, Train) else item(MODEL, state)
    return state


@pytest.mark.essential
@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft", "fedavg-last"])
def test_a_round_by_hand(name):
    method = METHODS[name]()
    server, row, own = method.init(MODEL, vector(1, 2), 0)
    download, records = method.download(with_model(MODEL, CTX), server, {})
    assert (row, records) == ({}, {})
    assert {key: value.tolist() for key, value in download.items()} == {"theta": [[1, 2], [1, 2]]}
    program = method.client_update(with_model(MODEL, CTX))
    assert [item.epochs for item in program if isinstance(item, Train)] == [3]
    done = [run(program, own, download["theta"][i], step) for i, step in enumerate((vector(4, 0), vector(0, -4)))]
    assert [list(client.upload) for client in done] == [["theta"], ["theta"]]
    assert [client.upload["theta"].tolist() for client in done] == [[13, 2], [1, -10]]
    up = {"theta": torch.stack([client.upload["theta"] for client in done])}
    server, records = method.aggregate(with_model(MODEL, CTX), server, records, CohortUpdate(up, torch.tensor([3, 1])))
    assert {key: value.tolist() for key, value in server.items()} == {"theta": [10, -1]}
    assert records == {}


@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft"])
def test_clients_of_fedavg_remember_nothing(name):
    method = METHODS[name]()
    own = method.init(MODEL, vector(1, 2), 0).state
    assert own == run(method.client_update(with_model(MODEL, CTX)), own, vector(1, 2), vector(1, 1)).state == {}


def test_fedavg_serves_the_global_model_as_it_is():
    served = run(METHODS["fedavg"]().personalize(with_model(MODEL, CTX)), {}, vector(5, 6), vector(100, 100))
    assert served.theta.tolist() == [5, 6]
    assert "mine" not in served.scratch or not served.scratch["mine"].any()
    assert served.upload == {}


@pytest.mark.parametrize("epochs", [5, 2])
def test_fedavg_ft_serves_the_global_model_after_finetuning(epochs):
    method = METHODS["fedavg-ft"]() if epochs == 5 else METHODS["fedavg-ft"](finetune=epochs)
    served = run(method.personalize(with_model(MODEL, CTX)), {}, vector(5, 6), vector(1, -1))
    assert served.theta.tolist() == [5 + epochs, 6 - epochs]
    assert served.scratch["mine"].tolist() == [True, True]
    assert served.scratch["mine"].dtype == torch.bool
    assert (served.state, served.upload) == ({}, {})


def test_fedavg_last_serves_the_global_model_until_the_client_has_trained():
    method = METHODS["fedavg-last"]()
    server, _, own = method.init(MODEL, vector(1, 2), 0)
    assert (own["theta"].tolist(), own["seen"].tolist()) == ([1, 2], False)
    served = run(method.personalize(with_model(MODEL, CTX)), own, vector(5, 6), vector(100, 100))
    assert served.theta.tolist() == [5, 6]
    assert served.scratch["mine"].tolist() == [False, False]
    assert server["theta"].tolist() == [1, 2]


def test_fedavg_last_serves_the_model_that_the_client_last_trained():
    method = METHODS["fedavg-last"]()
    own = method.init(MODEL, vector(1, 2), 0).state
    for start, trained in ((vector(1, 2), [4, 5]), (vector(10, 20), [13, 23])):
        done = run(method.client_update(with_model(MODEL, CTX)), own, start, vector(1, 1))
        assert done.upload["theta"].tolist() == done.state["theta"].tolist() == trained
        own = done.state
        served = run(method.personalize(with_model(MODEL, CTX)), own, vector(7, 8), vector(100, 100))
        assert served.theta.tolist() == trained
        assert served.scratch["mine"].tolist() == [True, True]
        assert served.state["theta"].tolist() == trained
    assert own["seen"].dtype == torch.bool
