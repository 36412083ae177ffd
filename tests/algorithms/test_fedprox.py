"""FedProx with two clients, worked out by hand: FedAvg, pulled to what was received."""

import pytest
import torch
from contexts import with_model
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate, Train

METHOD = METHODS["fedprox"]()
CTX = moment(0, 1)


@pytest.mark.essential
def test_a_round_by_hand():
    server, records, own = METHOD.init(None, vector(1, 2), 0)
    download, records = METHOD.download(with_model(None, CTX), server, records)
    done = []
    for client, step in ((0, vector(4, 0)), (1, vector(0, 8))):
        state, phases = walk(None, METHOD.client_update(with_model(None, CTX)), own, row(download, client), [step])
        assert phases == [Train(5, pull=("received", "mu"))]
        assert state.scratch["received"].tolist() == [1, 2]  # the anchor stays where it was
        assert list(state.upload) == ["theta"]
        done.append(state.upload["theta"])
    server, _ = METHOD.aggregate(
        with_model(None, CTX), server, records, CohortUpdate({"theta": torch.stack(done)}, torch.tensor([1, 3]))
    )
    assert server["theta"].tolist() == [2, 8]
    served, phases = walk(None, METHOD.personalize(with_model(None, CTX)), own, {"theta": server["theta"]}, [])
    assert (served.theta.tolist(), phases) == ([2, 8], [])


def test_the_pull_is_a_number_that_reaches_clients():
    assert METHOD.hparams() == {"mu": 0.01}
