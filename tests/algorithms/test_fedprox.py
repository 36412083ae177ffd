"""FedProx with two clients, worked out by hand: FedAvg, pulled to what was received."""

import pytest
import torch
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS, Train

METHOD = METHODS["fedprox"]()
NOW = moment(0, 1)


@pytest.mark.essential
def test_a_round_by_hand():
    server, rows, own = METHOD.begin(None, vector(1, 2), 0)
    down, rows = METHOD.send(None, NOW, server, rows)
    done = []
    for client, step in ((0, vector(4, 0)), (1, vector(0, 8))):
        state, phases = walk(None, METHOD.local(None, NOW), own, row(down, client), [step])
        assert phases == [Train(5, pull=("received", "mu"))]
        assert state.work["received"].tolist() == [1, 2]  # the anchor stays where it was
        assert list(state.up) == ["theta"]
        done.append(state.up["theta"])
    server, _ = METHOD.receive(None, NOW, server, rows, {"theta": torch.stack(done)}, torch.tensor([1, 3]))
    assert server["theta"].tolist() == [2, 8]
    served, phases = walk(None, METHOD.serve(None, NOW), own, {"theta": server["theta"]}, [])
    assert (served.theta.tolist(), phases) == ([2, 8], [])


def test_the_pull_is_a_number_that_reaches_clients():
    assert METHOD.floats() == {"mu": 0.01}
