"""FLUTE: its regulariser by hand, two rounds against a plain loop over real modules, and the server's step."""

import math

import pytest
import torch
from torch.nn import functional
from walk import moment, walk

from fedobp import Config, Federation
from fedobp.algorithms import METHODS, Client, Train
from fedobp.algorithms.flute import collapse, head_loss, joint_loss
from fedobp.models import Model

METHOD = METHODS["flute"]
SMALL = {
    "method": "flute", "clients": 4, "participation": 1.0, "rounds": 2, "epochs": 3, "batch_size": 2000, "lr": 0.1,
    "precision": "fp64", "model": "mlp", "alpha": 0.3, "device": "cpu",
}  # fmt: skip


def known(*labels, classes=2):
    return torch.tensor([label in labels for label in range(classes)])


def test_the_regulariser_by_hand():
    root = 1 / math.sqrt(2)  # the entries of the identity over its norm
    frame = torch.tensor([[1.0], [-1.0]])
    assert collapse(frame, known(0, 1)).item() == pytest.approx(0, abs=1e-7)  # two opposite rows are the simplex
    assert collapse(3 * frame, known(0, 1)).item() == pytest.approx(0, abs=1e-7)
    both = math.sqrt(2 * (root - 0.5) ** 2 + 2 * 0.5**2)
    assert collapse(torch.eye(2), known(0, 1)).item() == pytest.approx(both)
    one = math.sqrt((root - 0.5) ** 2 + root**2)
    assert collapse(torch.eye(2), known(0)).item() == pytest.approx(one)
    assert collapse(torch.eye(2), known()).item() == pytest.approx(1)
    several = collapse(torch.eye(2).expand(3, 2, 2), torch.stack([known(0, 1), known(0), known()]))
    assert several.tolist() == pytest.approx([both, one, 1])


def distance(weight, labels):
    """The regulariser once more, entry by entry."""
    classes, total = len(weight), 0
    gram = [[row @ other for other in weight] for row in weight]
    size = sum(entry**2 for row in gram for entry in row) ** 0.5
    for i in range(classes):
        for j in range(classes):
            aim = ((i == j) - 1 / classes) / math.sqrt(classes - 1) if i in labels and j in labels else 0.0
            total = total + (gram[i][j] / size - aim) ** 2
    return total**0.5


def plain(federation, theta, rounds, epochs, l1, l2, l3, server_lr, joint, mode):
    """FLUTE on full-batch clients with ordinary modules; return the global vector and everybody's head."""
    model, data = federation.model, federation.data
    clients = range(data.clients)
    module = model.module(theta)
    heads = [{name: p.detach().clone() for name, p in module.classifier.named_parameters()} for _ in clients]
    first = [{name: p.clone() for name, p in one.items()} for one in heads]
    base = {name: p.detach().clone() for name, p in module.named_parameters() if "classifier" not in name}
    for _ in range(rounds):
        bases, labels = [], []
        for client in clients:
            x, y = data.inputs(client, "train"), data.targets(client, "train")
            labels.append(set(y.tolist()))
            module.load_state_dict({**base, **{f"classifier.{name}": p for name, p in heads[client].items()}})
            for epoch in range(epochs):
                features = module[:-1](x)
                if mode == "as-published" or epoch < epochs - joint:
                    features = features.detach()
                loss = (
                    functional.cross_entropy(module.classifier(features), y) + l2 * module.classifier.weight.norm() ** 2
                )
                loss = loss + l1 * distance(module.classifier.weight, labels[-1])
                loss = loss + (l3 * features.norm() ** 2 if epoch >= epochs - joint else 0)
                module.zero_grad()
                loss.backward()
                torch.optim.SGD(module.parameters(), 0.1).step()
            heads[client] = {name: p.detach().clone() for name, p in module.classifier.named_parameters()}
            bases.append({name: p.detach().clone() for name, p in module.named_parameters() if name in base})
        n = [data.size(client, "train") for client in clients]
        base = {name: sum(m * one[name] for m, one in zip(n, bases, strict=True)) / sum(n) for name in base}
        weights = [one["weight"].requires_grad_() for one in heads]
        (sum(map(distance, weights, labels)) / len(weights)).backward()
        for one in heads:
            one["weight"] = (one["weight"] - server_lr * one["weight"].grad).detach()
    whole = model.layout.flatten({**base, **{f"classifier.{name}": p for name, p in first[0].items()}})
    return whole, [torch.cat([one["weight"].flatten(), one["bias"]]) for one in heads]


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize(
    "options",
    [{}, {"simplex": 2.0, "weights": 0.1, "features": 0.001, "server_lr": 3.0, "joint_epochs": 2},
     {"mode": "as-published"}],
)  # fmt: skip
def test_runs_are_those_of_a_plain_loop(engine, options):
    federation = Federation(Config(**SMALL, engine=engine, options=options))
    theta = federation.model.initial(federation.config.seed).double()
    method = METHOD(**options)
    expected, heads = plain(
        federation, theta, 2, 3, method.simplex, method.weights, method.features, method.server_lr,
        method.joint_epochs, method.mode,
    )  # fmt: skip
    result = federation.run()
    layout, vector = federation.model.layout, federation.model.layout.flatten
    torch.testing.assert_close(vector(result.state_dict()), expected, rtol=0, atol=1e-9)
    for client in range(4):
        base, head = layout.split(vector(result.state_dict(client)))
        torch.testing.assert_close(head, heads[client], rtol=0, atol=1e-9)
        assert base.equal(layout.split(vector(result.state_dict()))[0])
    moved = not base.equal(layout.split(theta)[0])
    assert moved == (method.mode == "faithful")
    assert result.bytes.down_per_round == 4 * 8 * layout.size
    assert result.bytes.up_per_round == 4 * (8 * layout.size + 10)  # a byte for each of the ten labels
    assert result.personal.max == len(heads[0])


@pytest.fixture(scope="module")
def usual():
    federation = Federation(Config(**{**SMALL, "rounds": 1}))
    return federation, federation.run().state_dict(0)


@pytest.mark.parametrize(
    "change",
    [{"simplex": 1.0}, {"weights": 0.1}, {"features": 0.1}, {"joint_epochs": 2}, {"server_lr": 5.0},
     {"final_epochs": 1}, {"mode": "as-published"}],
)  # fmt: skip
def test_every_option_changes_the_models(change, usual):
    federation, model = usual
    other = federation.run(**change).state_dict(0)
    assert any(not torch.allclose(model[name], other[name], atol=1e-6) for name in model)


def test_how_epochs_are_spent():
    def phases(method, **when):
        return [item for item in method.local(None, moment(0, 1, **when)) if isinstance(item, Train)]

    head = Train(4, part="head", loss=head_loss)
    assert phases(METHOD()) == [head, Train(1, loss=joint_loss)]
    assert [item.epochs for item in phases(METHOD(), epochs=1)] == [0, 1]
    assert [item.epochs for item in phases(METHOD(joint_epochs=9))] == [0, 5]
    assert [item.epochs for item in phases(METHOD(mode="as-published"))] == [5, 0]


def test_the_authors_last_round_is_everybodys_and_for_heads():
    method = METHOD(final_epochs=7)
    assert [method.everyone(round, 9) for round in (1, 8, 9)] == [False, False, True]
    assert not METHOD().everyone(9, 9)
    model, now = Model("mlp", (4,), 3), moment(0, 1, round=9)
    server, rows, _ = method.begin(model, model.initial(0), 0)
    program = method.local(model, now)
    assert [item for item in program if isinstance(item, Train)] == [Train(7, part="head", loss=head_loss)]
    heads = torch.ones(2, len(rows["head"]))
    sent = program[-1](model, Client({}, {}, {"theta": model.initial(1)}, {}, {})).up
    assert list(sent) == ["head"]
    assert sent["head"].equal(model.layout.split(model.initial(1))[1])
    after, rows = method.receive(model, now, server, {"head": 0 * heads}, {"head": heads}, torch.tensor([1, 1]))
    assert after["theta"].equal(server["theta"])
    assert rows["head"].equal(heads)  # no step of the server's


@pytest.mark.essential
def test_the_servers_step_leaves_biases_and_heads_without_labels():
    model, method = Model("mlp", (4,), 3), METHOD(server_lr=5.0)
    theta = model.initial(0).double()
    base, head = model.layout.split(theta)
    up = {"base": base.repeat(2, 1), "head": head.repeat(2, 1), "present": torch.stack([known(0, 2, classes=3)] * 2)}
    up["present"][1] = False
    now = moment(0, 1)
    server, rows = method.receive(model, now, {"theta": theta}, {}, up, torch.tensor([1, 0]))
    assert server["theta"].equal(theta)
    weight, bias = model.head(model.layout.join(base.repeat(2, 1), rows["head"]))
    before, old_bias = model.head(theta)
    assert (weight[0] - before).abs().max() > 1e-3
    torch.testing.assert_close(weight[1], before)
    assert bias.equal(old_bias.repeat(2, 1))
    assert collapse(weight[0], up["present"][0]) < collapse(before, up["present"][0])


def test_a_client_gets_its_own_head():
    model, method, now = Model("mlp", (4,), 3), METHOD(), moment(0, 1)
    server, rows, own = method.begin(model, model.initial(0), 0)
    assert own == {}
    heads = torch.stack([rows["head"], rows["head"] + 1])
    down, _ = method.send(model, now, server, {"head": heads})
    assert sorted(down) == ["base", "head"]
    served, _ = walk(model, method.serve(model, now), own, {name: value[1] for name, value in down.items()}, [])
    assert model.layout.split(served.theta)[1].equal(heads[1])
    assert served.work["mine"].equal(model.layout.is_head())
