"""FedProx with two clients, by hand: FedAvg with a proximal term towards the received model."""

import pytest
from by_hand import context, run_program, update_of, vector

from fedobp.algorithms import METHODS
from fedobp.method import Train
from fedobp.records import take

METHOD = METHODS["fedprox"]()
CTX = context(0, 1)


@pytest.mark.essential
def test_a_round_by_hand():
    server, records, state = METHOD.init(None, vector(1, 2), 0)
    download, records = METHOD.download(CTX, server, records)
    clients = []
    for at, step in enumerate((vector(4, 0), vector(0, 8))):
        client, phases = run_program(None, METHOD.client_update(CTX), state, take(download, at), [step])
        assert phases == [Train(5, pull=("received", "mu"))]
        assert client.scratch["received"].tolist() == [1, 2]  # the anchor does not move
        assert list(client.upload) == ["theta"]
        clients.append(client)
    server, _ = METHOD.aggregate(CTX, server, records, update_of(clients, 1, 3))
    assert server["theta"].tolist() == [2, 8]
    served, phases = run_program(None, METHOD.personalize(CTX), state, {"theta": server["theta"]})
    assert (served.theta.tolist(), phases) == ([2, 8], [])


def test_the_weight_of_the_proximal_term_reaches_clients():
    assert METHOD.hparams() == {"mu": 0.01}
