"""Local-Only with two clients, worked out by hand: nothing is sent, nobody meets."""

import pytest
import torch
from contexts import with_model
from torch import Tensor

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate, RoundContext, Train
from fedobp.models import Model
from fedobp.wire import payload_bytes

CTX = RoundContext(model=None, round=1, rounds=9, clients=2, epochs=2, cohort=torch.tensor([0, 1]))
MODEL = Model("mlp", (4,), 2)  # the method does not look at it
METHOD = METHODS["local"]()


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def run(program, own: dict[str, Tensor], step: Tensor) -> Client:
    state = Client(state=own, download={}, scratch={}, upload={}, hparams={})
    for item in program:
        state = state.set(theta=state.theta + item.epochs * step) if isinstance(item, Train) else item(MODEL, state)
    return state


@pytest.mark.essential
def test_two_rounds_by_hand():
    server, row, own = METHOD.init(MODEL, vector(1, 2), 0)
    assert row == {}
    assert own["theta"].tolist() == [1, 2]
    owns = [own, own]
    for _ in range(2):
        download, records = METHOD.download(with_model(MODEL, CTX), server, {})
        assert payload_bytes(download) == 0
        done = [
            run(METHOD.client_update(with_model(MODEL, CTX)), one, step)
            for one, step in zip(owns, (vector(1, 0), vector(0, 3)), strict=True)
        ]
        owns = [client.state for client in done]
        assert all(client.upload == {} for client in done)
        server, records = METHOD.aggregate(
            with_model(MODEL, CTX), server, records, CohortUpdate({}, torch.tensor([1, 3]))
        )
        assert server["theta"].tolist() == [1, 2]
        assert records == {}
    assert [one["theta"].tolist() for one in owns] == [[5, 2], [1, 14]]
    served = [run(METHOD.personalize(with_model(MODEL, CTX)), one, vector(100, 100)) for one in owns]
    assert [client.theta.tolist() for client in served] == [[5, 2], [1, 14]]
    assert all(client.scratch["mine"].tolist() == [True, True] for client in served)


def test_a_client_never_selected_serves_theta_0():
    own = METHOD.init(MODEL, vector(1, 2), 0).state
    assert run(METHOD.personalize(with_model(MODEL, CTX)), own, vector(100, 100)).theta.tolist() == [1, 2]
