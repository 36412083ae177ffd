"""FedPer, FedRep (with the tuning of all heads at the end) and LG-FedAvg in both modes against a plain loop."""

import pytest
from plain_loops import (
    RATES,
    SIZES,
    batches,
    both_engines,
    each_round,
    mean,
    network_loss,
    sgd,
    small_federation,
    theta_0,
)

METHODS = {  # which of the network's four tensors are shared, faithfully and as-published, and what each phase trains
    "fedper": ([0, 1], [0, 1], [[0, 1, 2, 3]]),
    "fedrep": ([0, 1], [0, 1], [[2, 3], [0, 1]]),
    "lg-fedavg": ([2, 3], [0, 1], [[0, 1, 2, 3]]),
}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("mode", ["faithful", "as-published"])
@pytest.mark.parametrize("method", METHODS)
def test_runs_equal_a_plain_loop(method, mode, rates):
    final = 1 if method == "fedrep" else 0
    federation = small_federation(method, rates, {"mode": mode, **({"final_epochs": final} if final else {})})
    faithful, published, phases = METHODS[method]
    shared = faithful if mode == "faithful" else published
    first, last = theta_0(federation), {}
    theta = first

    def merged(client):
        private = last.get(client, first if mode == "faithful" else theta)
        return [(theta if at in shared else private)[at] for at in range(4)]

    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            model = merged(client)
            for phase, part in enumerate(phases, start=1):
                data = batches(federation, client, round, phase, epochs=2 // len(phases))
                model = sgd(federation, model, network_loss, data, moving=[at in part for at in range(4)])
            models.append(model)
        last |= dict(zip(cohort, models, strict=True))
        theta = mean(federation, cohort, models)
        if mode == "faithful":
            theta = [(theta if at in shared else first)[at] for at in range(4)]
    for client in range(4) if final else ():  # after the last round's cohort
        data = batches(federation, client, round, phase=1, epochs=final)
        last[client] = sgd(federation, merged(client), network_loss, data, moving=[False, False, True, True])
    size = sum(SIZES if mode == "as-published" else (SIZES[at] for at in shared))
    for result in both_engines(federation, theta, {client: merged(client) for client in range(4)}):
        assert result.bytes.up_total == 6 * 8 * size
        assert result.bytes.down_total == (6 + 4 * final) * 8 * size
