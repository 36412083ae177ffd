"""Ditto by hand and against a plain loop: one model is shared; the other is kept near it, and used."""

import pytest
from by_hand import context, run_program, update_of, vector
from plain_loops import (
    RATES,
    batches,
    both_engines,
    each_round,
    flat,
    mean,
    network_loss,
    sgd,
    small_federation,
    theta_0,
)

from fedobp.algorithms import METHODS
from fedobp.method import Train
from fedobp.records import take

METHOD = METHODS["ditto"]()
CTX = context(0, 1)


@pytest.mark.essential
def test_two_rounds_by_hand():
    server, records, state = METHOD.init(None, vector(1, 2), 0)
    states = [state, state]
    for shared in ([2, 5], [3, 8]):
        download, records = METHOD.download(CTX, server, records)
        trained = []
        for at, step in enumerate((vector(4, 0), vector(0, 4))):
            steps = [step, vector(10, 20) * (at + 1)]
            client, phases = run_program(None, METHOD.client_update(CTX), states[at], take(download, at), steps)
            assert phases == [Train(5), Train(1, learn=("personal",), pull=("received", "lam"))]
            assert client.scratch["received"].equal(download["theta"][at])  # the anchor is the model as received
            assert list(client.upload) == ["theta"]
            states[at] = client.state
            trained.append(client)
        server, records = METHOD.aggregate(CTX, server, records, update_of(trained, 1, 3))
        assert server["theta"].tolist() == shared
    assert [one["personal"].tolist() for one in states] == [[21, 42], [41, 82]]
    served, _ = run_program(None, METHOD.personalize(CTX), states[1], {"theta": server["theta"]})
    assert served.theta.tolist() == [41, 82]
    assert served.scratch["mine"].all()


def test_a_client_that_has_never_trained_uses_theta_0():
    state = METHOD.init(None, vector(1, 2), 0).state
    served, _ = run_program(None, METHOD.personalize(CTX), state, {"theta": vector(7, 8)})
    assert served.theta.tolist() == [1, 2]


def test_hyper_parameters_and_epochs():
    assert METHOD.hparams() == {"lam": 1.0}
    program = METHODS["ditto"](personal_epochs=3).client_update(CTX)
    assert [item.epochs for item in program if isinstance(item, Train)] == [5, 3]


@pytest.mark.parametrize("rates", RATES)
def test_runs_equal_a_plain_loop(rates):
    federation = small_federation("ditto", rates, {"lam": 0.5})
    theta = theta_0(federation)
    personal = dict.fromkeys(range(4), theta)
    for round, cohort in each_round(federation):
        models = []

        def near(values, x, y, theta=theta):
            return network_loss(values, x, y) + 0.25 * ((flat(values) - flat(theta)) ** 2).sum()

        for client in cohort:
            data = [batches(federation, client, round, phase, epochs) for phase, epochs in ((1, 2), (2, 1))]
            models.append(sgd(federation, theta, network_loss, data[0]))
            personal[client] = sgd(federation, personal[client], near, data[1])
        theta = mean(federation, cohort, models)
    both_engines(federation, theta, personal)
