"""Local-Only with two clients, by hand: nothing is sent in either direction."""

import pytest
import torch
from by_hand import context, vector
from torch import Tensor

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate, Train
from fedobp.models import Model
from fedobp.wire import payload_bytes

MODEL = Model("mlp", (4,), 2)  # the method does not look at it
CTX = context(0, 1, model=MODEL, epochs=2)
METHOD = METHODS["local"]()


def run(program, state: dict[str, Tensor], step: Tensor) -> Client:
    """Run one client's program, with `step` added for each epoch of training."""
    client = Client(state=state, download={}, scratch={}, upload={}, hparams={})
    for item in program:
        client = client.set(theta=client.theta + item.epochs * step) if isinstance(item, Train) else item(MODEL, client)
    return client


@pytest.mark.essential
def test_two_rounds_by_hand():
    server, record, state = METHOD.init(MODEL, vector(1, 2), 0)
    assert record == {}
    assert state["theta"].tolist() == [1, 2]
    states, steps = [state, state], (vector(1, 0), vector(0, 3))
    for _ in range(2):
        download, records = METHOD.download(CTX, server, {})
        assert payload_bytes(download) == 0
        clients = [run(METHOD.client_update(CTX), one, step) for one, step in zip(states, steps, strict=True)]
        states = [client.state for client in clients]
        assert all(client.upload == {} for client in clients)
        server, records = METHOD.aggregate(CTX, server, records, CohortUpdate({}, torch.tensor([1, 3])))
        assert server["theta"].tolist() == [1, 2]
        assert records == {}
    assert [one["theta"].tolist() for one in states] == [[5, 2], [1, 14]]
    served = [run(METHOD.personalize(CTX), one, vector(100, 100)) for one in states]
    assert [client.theta.tolist() for client in served] == [[5, 2], [1, 14]]
    assert all(client.scratch["mine"].tolist() == [True, True] for client in served)


def test_a_client_that_has_never_trained_is_served_theta_0():
    state = METHOD.init(MODEL, vector(1, 2), 0).state
    assert run(METHOD.personalize(CTX), state, vector(100, 100)).theta.tolist() == [1, 2]
