"""SCAFFOLD with two clients, worked out by hand, and against a plain loop."""

from dataclasses import replace

import pytest
import torch
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS, Client, Train

METHOD = METHODS["scaffold"]()
NOW = replace(moment(0, 1), clients=4)


def visit(own, down, step, steps):
    """Train by hand: `step` is what the model moves by, in so many steps of 0.5."""
    client = Client(own, down, {}, {}, {"lr": vector(0.5)[0]}, {"steps": torch.tensor(steps)})
    for item in METHOD.local(None, NOW):
        if isinstance(item, Train):
            assert item == Train(5, drift="drift")
            client = client.set(theta=client.theta + step)
        else:
            client = item(None, client)
    return client


@pytest.mark.essential
def test_two_rounds_by_hand():
    server, rows, own = METHOD.begin(None, vector(1, 2), 0)
    down, rows = METHOD.send(None, NOW, server, rows)
    assert sorted(down) == ["control", "theta"]
    first, second = visit(own, row(down, 0), vector(-2, 0), 2), visit(own, row(down, 1), vector(0, 4), 4)
    assert first.work["drift"].tolist() == [0, 0]
    assert first.own["control"].tolist() == [2, 0]  # (w - y) / (K lr) = 2 / (2 * 0.5)
    assert second.own["control"].tolist() == [0, -2]
    up = {name: torch.stack([first.up[name], second.up[name]]) for name in first.up}
    server, rows = METHOD.receive(None, NOW, server, rows, up, torch.tensor([1, 3]))
    assert server["theta"].tolist() == [0, 4]  # the mean of (-1, 2) and (1, 6): sizes do not count
    assert server["control"].tolist() == [0.5, -0.5]  # of four clients
    down, _ = METHOD.send(None, NOW, server, rows)
    again = visit(first.own, row(down, 0), vector(-1, -1), 2)
    assert again.work["drift"].tolist() == [-1.5, -0.5]  # c - c_i
    assert again.own["control"].tolist() == [2.5, 1.5]  # c_i - c + (w - y) / (K lr) = 1.5 + 1, 0.5 + 1
    assert again.up["change"].tolist() == [0.5, 1.5]


def test_clients_that_never_train_do_not_count():
    server, rows, _ = METHOD.begin(None, vector(1, 2), 0)
    up = {"theta": torch.ones(1, 2), "change": torch.tensor([[3.0, 6.0]])}
    now = replace(NOW, held_out=1)
    server, _ = METHOD.receive(None, now, server, rows, up, torch.tensor([1]))
    assert server["control"].tolist() == [1, 2]  # of three clients


def test_without_a_step_the_control_stays():
    _, _, own = METHOD.begin(None, vector(1, 2), 0)
    down = {"theta": vector(1, 2), "control": vector(3, 4)}
    done = visit({"control": vector(5, 6)}, down, vector(0, 0), 0)
    assert done.own["control"].tolist() == [5, 6]
    assert done.up["change"].tolist() == [0, 0]
    assert own["control"].tolist() == [0, 0]


def test_it_serves_the_global_model():
    served, phases = walk(None, METHOD.serve(None, NOW), {}, {"theta": vector(7, 8), "control": vector(0, 0)}, [])
    assert (served.theta.tolist(), phases) == ([7, 8], [])


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_runs_are_those_of_a_plain_loop(engine):
    """Two rounds of full-batch clients on the digits, coded again without the library's engines."""
    from fedobp import Config, Federation

    config = Config(method="scaffold", clients=4, participation=1.0, rounds=2, epochs=2, batch_size=2000, lr=0.1,
                    precision="fp64", model="mlp", partition="iid", engine=engine, device="cpu")  # fmt: skip
    federation = Federation(config)
    data, model = federation.data, federation.model
    theta = model.initial(config.seed).double()
    control, controls = torch.zeros_like(theta), [torch.zeros_like(theta) for _ in range(4)]
    for _ in range(2):
        models, changes = [], []
        for client in range(4):
            x, y, w = data.inputs(client, "train"), data.targets(client, "train"), theta.clone()
            for _ in range(2):
                w.requires_grad_()
                loss = torch.nn.functional.cross_entropy(model.logits(w, x), y)
                [gradient] = torch.autograd.grad(loss, w)
                w = (w - 0.1 * (gradient + control - controls[client])).detach()
            new = controls[client] - control + (theta - w) / (2 * 0.1)
            changes.append(new - controls[client])
            controls[client] = new
            models.append(w)
        theta, control = torch.stack(models).mean(dim=0), control + torch.stack(changes).sum(dim=0) / 4
    result = federation.run()
    found = torch.cat([tensor.flatten() for tensor in result.state_dict().values()])
    torch.testing.assert_close(found, theta, rtol=0, atol=1e-10)
    assert result.bytes.down_per_round == result.bytes.up_per_round == 4 * 2 * 8 * model.layout.size
