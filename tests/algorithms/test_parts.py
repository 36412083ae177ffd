"""FedPer, FedRep (with its last turn, of all clients' heads) and LG-FedAvg in both modes against a plain loop."""

import pytest
from plain import RATES, SIZES, batches, both_engines, each_round, fit, mean, sgd, small, theta_0

METHODS = {  # which of the network's four tensors are shared, faithfully and as-published, and what each phase trains
    "fedper": ([0, 1], [0, 1], [[0, 1, 2, 3]]),
    "fedrep": ([0, 1], [0, 1], [[2, 3], [0, 1]]),
    "lg-fedavg": ([2, 3], [0, 1], [[0, 1, 2, 3]]),
}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("mode", ["faithful", "as-published"])
@pytest.mark.parametrize("method", METHODS)
def test_runs_are_those_of_a_plain_loop(method, mode, rates):
    final = 1 if method == "fedrep" else 0
    federation = small(method, rates, {"mode": mode, **({"final_epochs": final} if final else {})})
    faithful, published, phases = METHODS[method]
    shared = faithful if mode == "faithful" else published
    first, own = theta_0(federation), {}
    theta = first

    def taken(client):
        private = own.get(client, first if mode == "faithful" else theta)
        return [(theta if at in shared else private)[at] for at in range(4)]

    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            model = taken(client)
            for phase, part in enumerate(phases, start=1):
                data = batches(federation, client, round, phase, epochs=2 // len(phases))
                model = sgd(federation, model, fit, data, moving=[at in part for at in range(4)])
            models.append(model)
        own |= dict(zip(cohort, models, strict=True))
        theta = mean(federation, cohort, models)
        if mode == "faithful":
            theta = [(theta if at in shared else first)[at] for at in range(4)]
    for client in range(4) if final else ():  # the round has taken place: this turn is an extra one
        data = batches(federation, client, round, phase=1, epochs=final)
        own[client] = sgd(federation, taken(client), fit, data, moving=[False, False, True, True])
    size = sum(SIZES if mode == "as-published" else (SIZES[at] for at in shared))
    for result in both_engines(federation, theta, {client: taken(client) for client in range(4)}):
        assert result.bytes.up_total == 6 * 8 * size
        assert result.bytes.down_total == (6 + 4 * final) * 8 * size
