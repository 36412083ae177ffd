"""Local-Only with two clients, worked out by hand: nothing is sent, nobody meets."""

import pytest
import torch
from torch import Tensor

from fedobp.algorithms import METHODS, Client, Moment, Train
from fedobp.models import Model
from fedobp.wire import payload_bytes

NOW = Moment(round=1, rounds=9, clients=2, epochs=2, cohort=torch.tensor([0, 1]))
MODEL = Model("mlp", (4,), 2)  # the method does not look at it
METHOD = METHODS["local"]()


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def run(program, own: dict[str, Tensor], step: Tensor) -> Client:
    state = Client(own=own, down={}, work={}, up={}, hp={})
    for item in program:
        state = state.set(theta=state.theta + item.epochs * step) if isinstance(item, Train) else item(MODEL, state)
    return state


@pytest.mark.essential
def test_two_rounds_by_hand():
    server, row, own = METHOD.begin(MODEL, vector(1, 2), 0)
    assert row == {}
    assert own["theta"].tolist() == [1, 2]
    owns = [own, own]
    for _ in range(2):
        down, rows = METHOD.send(MODEL, NOW, server, {})
        assert payload_bytes(down) == 0
        done = [
            run(METHOD.local(MODEL, NOW), one, step)
            for one, step in zip(owns, (vector(1, 0), vector(0, 3)), strict=True)
        ]
        owns = [client.own for client in done]
        assert all(client.up == {} for client in done)
        server, rows = METHOD.receive(MODEL, NOW, server, rows, {}, torch.tensor([1, 3]))
        assert server["theta"].tolist() == [1, 2]
        assert rows == {}
    assert [one["theta"].tolist() for one in owns] == [[5, 2], [1, 14]]
    served = [run(METHOD.serve(MODEL, NOW), one, vector(100, 100)) for one in owns]
    assert [client.theta.tolist() for client in served] == [[5, 2], [1, 14]]
    assert all(client.work["mine"].tolist() == [True, True] for client in served)


def test_a_client_never_selected_serves_theta_0():
    own = METHOD.begin(MODEL, vector(1, 2), 0).own
    assert run(METHOD.serve(MODEL, NOW), own, vector(100, 100)).theta.tolist() == [1, 2]
