"""pFedMe against a plain loop with modules, and where its numbers leave nothing to do."""

import pytest
import torch
from sweeps import draw, numbers, visit
from torch.nn import functional
from walk import moment, row, vector

from fedobp import Config, Federation
from fedobp.algorithms import METHODS
from fedobp.models import Model

PFedMe = METHODS["pfedme"]
NOW = moment(0, 1, epochs=2)
MODEL = Model("mlp", (4,), 3)
THETA = MODEL.initial(0).double()
BATCHES = {0: draw(1, [5, 3, 2]), 1: draw(2, [4, 1])}  # a batch of one sample is skipped
MANY = {"inner": 3, "lam": 4.0, "eta_p": 0.07, "mu": 0.2, "beta": 1.5}


def plain_visit(received, batches, lr, method):
    """Train two modules, parameter by parameter."""
    personal, shared = MODEL.module(received), MODEL.module(received)
    for _ in range(2):
        for x, y in batches:
            if len(y) == 1:
                continue
            for _ in range(method.inner):
                personal.zero_grad()
                functional.cross_entropy(personal(x), y).backward()
                with torch.no_grad():
                    for theta, w in zip(personal.parameters(), shared.parameters(), strict=True):
                        theta -= method.eta_p * (theta.grad + method.lam * (theta - w) + method.mu * theta)
            with torch.no_grad():
                for theta, w in zip(personal.parameters(), shared.parameters(), strict=True):
                    w -= lr * method.lam * (w - theta)
    return MODEL.read(personal), MODEL.read(shared)


@pytest.mark.parametrize("options", [{}, MANY, *({name: value} for name, value in MANY.items())])
def test_two_rounds_are_those_of_a_plain_loop(options):
    method = PFedMe.configure(options)
    hp = numbers(lr=0.05, momentum=0.9, weight_decay=0.3, **method.floats())  # momentum and decay are not its own
    server, rows, own = method.begin(MODEL, THETA, 0)
    shared, owns = THETA, [own, own]
    for _ in range(2):
        down, rows = method.send(MODEL, NOW, server, rows)
        assert list(down) == ["theta"]
        up, models = [], []
        for client in (0, 1):
            program = method.local(MODEL, NOW)
            done, epochs = visit(MODEL, program, owns[client], row(down, client), hp, lambda _, c=client: BATCHES[c])
            theta, w = plain_visit(shared, BATCHES[client], 0.05, method)
            assert epochs == [2]
            assert list(done.up) == ["theta"]
            torch.testing.assert_close(done.own["theta"], theta, rtol=0, atol=1e-12)
            torch.testing.assert_close(done.up["theta"], w, rtol=0, atol=1e-12)
            assert done.theta.equal(done.own["theta"])
            owns[client] = done.own
            up.append(done.up["theta"])
            models.append(w)
        server, rows = method.receive(MODEL, NOW, server, rows, {"theta": torch.stack(up)}, torch.tensor([1, 3]))
        shared = (1 - method.beta) * shared + method.beta * (models[0] + 3 * models[1]) / 4
        torch.testing.assert_close(server["theta"], shared, rtol=0, atol=1e-12)
    served, _ = visit(MODEL, method.serve(MODEL, NOW), owns[1], {"theta": shared}, hp, lambda _: [])
    assert served.theta.equal(owns[1]["theta"])
    assert served.work["mine"].all()


@pytest.mark.essential
@pytest.mark.parametrize(("beta", "expected"), [(0, [1, 2]), (0.5, [2.5, 4]), (1, [4, 6]), (2, [7, 10])])
def test_how_far_the_server_moves(beta, expected):
    uploads = torch.stack([vector(1, 9), vector(5, 5)])
    method, server = PFedMe(beta=beta), {"theta": vector(1, 2)}
    after, _ = method.receive(None, NOW, server, {}, {"theta": uploads}, torch.tensor([1, 3]))
    assert after["theta"].tolist() == expected


def test_without_a_batch_the_received_model_is_kept_and_sent_back():
    method = PFedMe()
    for batches in ([], draw(0, [1])):
        own, down, hp = {"theta": THETA * 2}, {"theta": THETA}, numbers(**method.floats())
        done, _ = visit(MODEL, method.local(MODEL, NOW), own, down, hp, lambda _, b=batches: b)
        assert done.own["theta"].equal(THETA)
        assert done.up["theta"].equal(THETA)


def test_a_client_never_selected_uses_theta_0():
    own = PFedMe().begin(MODEL, THETA, 0).own
    served, _ = visit(MODEL, PFedMe().serve(MODEL, NOW), own, {"theta": THETA * 5}, numbers(), lambda _: [])
    assert served.theta.equal(THETA)


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_without_a_pull_clients_fine_tune_theta_0(engine):
    """With lam and mu at 0 the global model never moves, and a visit is training from it with eta_p."""
    config = Config(clients=4, participation=0.5, rounds=3, epochs=2, batch_size=2000, lr=0.1, alpha=0.5,
                    precision="fp64", model="mlp", engine=engine, device="cpu")  # fmt: skip
    federation = Federation(config)
    found = federation.run("pfedme", lam=0, mu=0, eta_p=0.1, inner=1)
    start = federation.model.initial(config.seed).double()
    for name, tensor in federation.model.layout.views(start).items():
        assert found.state_dict()[name].equal(tensor)
    trained = 0
    for client in range(4):
        theta = torch.cat([tensor.flatten() for tensor in found.state_dict(client).values()])
        if theta.equal(start):
            continue
        module, trained = federation.model.module(start), trained + 1
        optimiser = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(2):
            optimiser.zero_grad()
            data = (federation.data.inputs(client, "train"), federation.data.targets(client, "train"))
            functional.cross_entropy(module(data[0]), data[1]).backward()
            optimiser.step()
        torch.testing.assert_close(theta, federation.model.read(module), rtol=0, atol=1e-10)
    assert trained >= 2
    assert found.bytes.down_per_round == found.bytes.up_per_round == 2 * 8 * federation.model.layout.size
