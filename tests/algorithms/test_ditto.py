"""Ditto by hand and against a plain loop: one model is shared, the other is held near it and used."""

import pytest
import torch
from contexts import with_model
from plain import RATES, batches, both_engines, each_round, fit, flat, mean, sgd, small, theta_0
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate, Train

METHOD = METHODS["ditto"]()
CTX = moment(0, 1)


@pytest.mark.essential
def test_two_rounds_by_hand():
    server, records, own = METHOD.init(None, vector(1, 2), 0)
    owns = [own, own]
    for shared in ([2, 5], [3, 8]):
        download, records = METHOD.download(with_model(None, CTX), server, records)
        done = []
        for client, step in ((0, vector(4, 0)), (1, vector(0, 4))):
            steps = [step, vector(10, 20) * (client + 1)]
            state, phases = walk(
                None, METHOD.client_update(with_model(None, CTX)), owns[client], row(download, client), steps
            )
            assert phases == [Train(5), Train(1, learn=("personal",), pull=("received", "lam"))]
            assert state.scratch["received"].equal(download["theta"][client])  # the anchor is the model as received
            assert list(state.upload) == ["theta"]
            owns[client] = state.state
            done.append(state.upload["theta"])
        server, records = METHOD.aggregate(
            with_model(None, CTX), server, records, CohortUpdate({"theta": torch.stack(done)}, torch.tensor([1, 3]))
        )
        assert server["theta"].tolist() == shared
    assert [one["personal"].tolist() for one in owns] == [[21, 42], [41, 82]]
    served, _ = walk(None, METHOD.personalize(with_model(None, CTX)), owns[1], {"theta": server["theta"]}, [])
    assert served.theta.tolist() == [41, 82]
    assert served.scratch["mine"].all()


def test_a_client_never_selected_uses_theta_0():
    own = METHOD.init(None, vector(1, 2), 0).state
    served, _ = walk(None, METHOD.personalize(with_model(None, CTX)), own, {"theta": vector(7, 8)}, [])
    assert served.theta.tolist() == [1, 2]


def test_its_numbers():
    assert METHOD.hparams() == {"lam": 1.0}
    program = METHODS["ditto"](personal_epochs=3).client_update(with_model(None, CTX))
    assert [item.epochs for item in program if isinstance(item, Train)] == [5, 3]


@pytest.mark.parametrize("rates", RATES)
def test_runs_are_those_of_a_plain_loop(rates):
    federation = small("ditto", rates, {"lam": 0.5})
    theta = theta_0(federation)
    personal = dict.fromkeys(range(4), theta)
    for round, cohort in each_round(federation):
        models = []

        def near(values, x, y, theta=theta):
            return fit(values, x, y) + 0.25 * ((flat(values) - flat(theta)) ** 2).sum()

        for client in cohort:
            models.append(sgd(federation, theta, fit, batches(federation, client, round, phase=1, epochs=2)))
            own = batches(federation, client, round, phase=2, epochs=1)
            personal[client] = sgd(federation, personal[client], near, own)
        theta = mean(federation, cohort, models)
    both_engines(federation, theta, personal)
