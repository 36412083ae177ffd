"""FedACG with two clients, by hand: clients start from the model moved on by the server's momentum."""

from dataclasses import replace

import torch
from by_hand import context, run_program, update_of, vector

from fedobp.algorithms import METHODS
from fedobp.averaged import averaged
from fedobp.method import Train
from fedobp.records import take

METHOD = METHODS["fedacg"](beta=0.5)
CTX = context(0, 1)


def play(method, server, steps, round=1):
    """Play a round in which two clients of 1 and 3 samples move the model by these steps."""
    ctx = replace(CTX, round=round)
    download, records = method.download(ctx, server, {})
    clients = []
    for at, step in enumerate(steps):
        client, phases = run_program(None, method.client_update(ctx), {}, take(download, at), [step])
        assert phases == [Train(5)]
        assert list(client.upload) == ["theta"]
        clients.append(client)
    server, _ = method.aggregate(ctx, server, records, update_of(clients, 1, 3))
    return server


def test_three_rounds_by_hand():
    server, records, state = METHOD.init(None, vector(1, 2), 0)
    assert (records, state) == ({}, {})
    server = play(METHOD, server, (vector(4, 0), vector(0, 8)))
    assert server["theta"].tolist() == [2, 8]  # the mean of (5, 2) and (1, 10)
    assert server["move"].tolist() == [1, 6]
    download, _ = METHOD.download(CTX, server, records)
    assert download["theta"][0].tolist() == [2.5, 11]  # theta + m / 2
    server = play(METHOD, server, (vector(0, 0), vector(0, 0)))
    assert server["theta"].tolist() == [2.5, 11]  # clients did not move: half of the last move
    assert server["move"].tolist() == [0.5, 3]
    served, _ = METHOD.download(replace(CTX, serving=True), server, records)
    assert served["theta"][0].tolist() == [2.5, 11]  # the model itself
    server = play(METHOD, server, (vector(-4, 0), vector(0, -8)))
    assert server["theta"].tolist() == [1.75, 6.5]  # (2.75, 12.5) and the mean of (-4, 0) and (0, -8)


def test_it_is_the_form_of_the_paper():
    """m <- beta m + mean - s, theta <- theta + m, with the same s."""
    torch.manual_seed(0)
    server, *_ = METHOD.init(None, vector(1, 2), 0)
    theta, m = vector(1, 2).double(), torch.zeros(2, dtype=torch.float64)
    for _ in range(5):
        steps = torch.randn(2, 2)
        server = play(METHOD, server, steps)
        start = theta + 0.5 * m
        mean = start + (steps[0] + 3 * steps[1]) / 4
        m = 0.5 * m + mean - start
        theta = theta + m
        torch.testing.assert_close(server["theta"].double(), theta, rtol=1e-5, atol=1e-5)


def test_without_momentum_it_is_fedavg():
    method, fedavg = METHODS["fedacg"](beta=0.0), METHODS["fedavg"]()
    one, other = (of.init(None, vector(1, 2), 0).server for of in (method, fedavg))
    for steps in ((vector(4, 0), vector(0, 8)), (vector(-1, 1), vector(3, 0))):
        one, other = play(method, one, steps), play(fedavg, other, steps)
        assert torch.equal(one["theta"], other["theta"])


def test_an_average_for_use_leaves_the_momentum_alone():
    method = averaged(METHOD, 1.0)
    server = method.init(None, vector(1, 2), 0).server
    for round, steps in ((1, (vector(4, 0), vector(0, 8))), (2, (vector(0, 0), vector(0, 0)))):
        server = play(method, server, steps, round)
    assert server["newest"].tolist() == [2.5, 11]
    assert server["move"].tolist() == [0.5, 3]
    assert server["theta"].tolist() == [2.25, 9.5]  # the mean of both rounds
