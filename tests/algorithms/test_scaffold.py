"""SCAFFOLD with two clients, by hand and against a plain loop."""

from dataclasses import replace

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from plain_loops import RATES, batches, both_engines, each_round, flat, small_federation, theta_0
from torch.nn import functional

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate, Train
from fedobp.records import take

METHOD = METHODS["scaffold"]()
CTX = context(0, 1, clients=4)


def train(state, download, step, steps, momentum=0.0):
    """Run one client's program: training moves the model by `step`, in so many steps with learning rate 0.5."""
    hparams = {"lr": torch.tensor(0.5), "momentum": torch.tensor(momentum)}
    client = Client(state, download, {}, {}, hparams, {"steps": torch.tensor(steps)})
    for item in METHOD.client_update(CTX):
        if isinstance(item, Train):
            assert item == Train(5, drift="drift")
            client = client.set(theta=client.theta + step)
        else:
            client = item(None, client)
    return client


@pytest.mark.essential
def test_two_rounds_by_hand():
    server, records, state = METHOD.init(None, vector(1, 2), 0)
    download, records = METHOD.download(CTX, server, records)
    assert sorted(download) == ["control", "theta"]
    first = train(state, take(download, 0), vector(-2, 0), 2)
    second = train(state, take(download, 1), vector(0, 4), 4)
    assert first.scratch["drift"].tolist() == [0, 0]
    assert first.state["control"].tolist() == [2, 0]  # (w - y) / (K lr) = 2 / (2 * 0.5)
    assert second.state["control"].tolist() == [0, -2]
    server, records = METHOD.aggregate(CTX, server, records, update_of([first, second], 1, 3))
    assert server["theta"].tolist() == [0, 4]  # the mean of (-1, 2) and (1, 6): sizes do not count
    assert server["control"].tolist() == [0.5, -0.5]  # of four clients
    download, _ = METHOD.download(CTX, server, records)
    again = train(first.state, take(download, 0), vector(-1, -1), 2)
    assert again.scratch["drift"].tolist() == [-1.5, -0.5]  # c - c_i
    assert again.state["control"].tolist() == [2.5, 1.5]  # c_i - c + (w - y) / (K lr) = 1.5 + 1, 0.5 + 1
    assert again.upload["change"].tolist() == [0.5, 1.5]


def test_held_out_clients_do_not_count():
    server, records, _ = METHOD.init(None, vector(1, 2), 0)
    upload = {"theta": torch.ones(1, 2), "change": torch.tensor([[3.0, 6.0]])}
    server, _ = METHOD.aggregate(replace(CTX, held_out=1), server, records, CohortUpdate(upload, torch.tensor([1])))
    assert server["control"].tolist() == [1, 2]  # of three clients


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("steps", [1, 2, 7, 365])
def test_the_control_of_a_constant_gradient_is_that_gradient_with_any_momentum(momentum, steps):
    gradient, velocity, moved = vector(3, -1), torch.zeros(2), torch.zeros(2)
    for _ in range(steps):
        velocity = momentum * velocity + gradient
        moved = moved - 0.5 * velocity
    zero = vector(0, 0)
    client = train({"control": zero}, {"theta": zero, "control": zero}, moved, steps, momentum)
    torch.testing.assert_close(client.state["control"], gradient, rtol=1e-4, atol=0)


def test_without_a_step_the_control_stays():
    _, _, state = METHOD.init(None, vector(1, 2), 0)
    assert state["control"].tolist() == [0, 0]
    download = {"theta": vector(1, 2), "control": vector(3, 4)}
    client = train({"control": vector(5, 6)}, download, vector(0, 0), 0)
    assert client.state["control"].tolist() == [5, 6]
    assert client.upload["change"].tolist() == [0, 0]


def test_the_global_model_is_served():
    download = {"theta": vector(7, 8), "control": vector(0, 0)}
    served, phases = run_program(None, METHOD.personalize(CTX), {}, download)
    assert (served.theta.tolist(), phases) == ([7, 8], [])


@pytest.mark.parametrize("rates", RATES)
def test_runs_equal_a_plain_loop(rates):
    federation = small_federation("scaffold", rates)
    model, momentum, decay = federation.model, federation.config.momentum, federation.config.weight_decay
    theta = flat(theta_0(federation))
    control, controls = torch.zeros_like(theta), dict.fromkeys(range(4), torch.zeros_like(theta))
    for round, cohort in each_round(federation):
        models, changes = [], []
        for client in cohort:
            w, velocity, length = theta.clone(), torch.zeros_like(theta), 0.0
            factor = 0.0  # that a constant gradient has in the velocity: 1 + m + ... + m^(k-1)
            for x, y in batches(federation, client, round, phase=1, epochs=2):
                w.requires_grad_()
                [gradient] = torch.autograd.grad(functional.cross_entropy(model.logits(w, x), y), w)
                gradient = gradient + control - controls[client] + decay * w.detach()
                velocity = momentum * velocity + gradient
                w = (w - 0.1 * velocity).detach()
                factor = momentum * factor + 1
                length += 0.1 * factor
            new = controls[client] - control + (theta - w) / length
            changes.append(new - controls[client])
            controls[client] = new
            models.append(w)
        theta, control = sum(models) / 2, control + sum(changes) / 4
    for result in both_engines(federation, [theta], {client: [theta] for client in range(4)}):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 2 * 8 * model.layout.size
