"""FLUTE: its regulariser by hand, rounds against a plain loop, and the server's step."""

import math
from dataclasses import replace

import pytest
import torch
from by_hand import context, run_program
from plain_loops import (
    RATES,
    SIZES,
    batches,
    both_engines,
    each_round,
    hidden,
    mean,
    network_loss,
    samples,
    sgd,
    small_federation,
    theta_0,
)

from fedobp.algorithms import METHODS
from fedobp.algorithms.flute import collapse, head_loss, joint_loss
from fedobp.method import Client, CohortUpdate, Train
from fedobp.models import Model
from fedobp.records import take

METHOD = METHODS["flute"]


def mask_of(*labels, classes=2):
    return torch.tensor([label in labels for label in range(classes)])


def test_the_regulariser_by_hand():
    root = 1 / math.sqrt(2)  # the entries of the identity over its norm
    frame = torch.tensor([[1.0], [-1.0]])
    assert collapse(frame, mask_of(0, 1)).item() == pytest.approx(0, abs=1e-7)  # two opposite rows are the simplex
    assert collapse(3 * frame, mask_of(0, 1)).item() == pytest.approx(0, abs=1e-7)
    both = math.sqrt(2 * (root - 0.5) ** 2 + 2 * 0.5**2)
    assert collapse(torch.eye(2), mask_of(0, 1)).item() == pytest.approx(both)
    one = math.sqrt((root - 0.5) ** 2 + root**2)
    assert collapse(torch.eye(2), mask_of(0)).item() == pytest.approx(one)
    assert collapse(torch.eye(2), mask_of()).item() == pytest.approx(1)
    several = collapse(torch.eye(2).expand(3, 2, 2), torch.stack([mask_of(0, 1), mask_of(0), mask_of()]))
    assert several.tolist() == pytest.approx([both, one, 1])


def distance(weight, labels):
    """Return the regulariser, with its target computed entry by entry."""
    classes, gram = len(weight), weight @ weight.T
    target = [
        [((i == j) - 1 / classes) / math.sqrt(classes - 1) if {i, j} <= labels else 0.0 for j in range(classes)]
        for i in range(classes)
    ]
    return (gram / (gram**2).sum() ** 0.5 - torch.tensor(target, dtype=gram.dtype)).square().sum().sqrt()


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize(
    "options",
    [{"simplex": 2.0, "weights": 0.1, "features": 0.001, "server_lr": 3.0, "joint_epochs": 2},
     {"mode": "as-published"}],
)  # fmt: skip
def test_runs_equal_a_plain_loop(options, rates):
    federation, method = small_federation("flute", rates, options, alpha=0.3, epochs=3), METHOD(**options)
    first = base = theta_0(federation)
    heads, labels = dict.fromkeys(range(4), first[2:]), {}

    def loss_of(client, spread):
        def loss(values, x, y):
            penalties = method.weights * (values[2] ** 2).sum() + spread * (hidden(values, x) ** 2).sum()
            return network_loss(values, x, y) + method.simplex * distance(values[2], labels[client]) + penalties

        return loss

    joint = method.joint_epochs if method.mode == "faithful" else 0
    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            labels[client] = set(samples(federation, client)[1].tolist())
            head, everything = (batches(federation, client, round, phase, epochs) for phase, epochs in
                                ((1, 3 - joint), (2, joint)))  # fmt: skip
            model = [*base[:2], *heads[client]]
            model = sgd(federation, model, loss_of(client, 0), head, moving=[False, False, True, True])
            models.append(sgd(federation, model, loss_of(client, method.features), everything))
        base = mean(federation, cohort, models)
        for client, model in zip(cohort, models, strict=True):
            weight = model[2].clone().requires_grad_()
            [slope] = torch.autograd.grad(distance(weight, labels[client]) / len(cohort), weight)
            heads[client] = [model[2] - method.server_lr * slope, model[3]]
    served = {client: [*base[:2], *head] for client, head in heads.items()}
    assert base[0].equal(first[0]) == (method.mode == "as-published")
    for result in both_engines(federation, [*base[:2], *first[2:]], served, atol=1e-9):
        assert result.bytes.down_per_round == 2 * 8 * sum(SIZES)
        assert result.bytes.up_per_round == 2 * (8 * sum(SIZES) + 10)  # a byte for each of the ten labels
        assert result.personal.max == sum(SIZES[2:])


@pytest.fixture(scope="module")
def usual():
    federation = small_federation("flute", "one batch", rounds=1, epochs=3, participation=1.0)
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


def test_the_epochs_of_both_phases():
    def phases(method, **when):
        return [item for item in method.client_update(context(0, 1, **when)) if isinstance(item, Train)]

    head = Train(4, part="head", loss=head_loss)
    assert phases(METHOD()) == [head, Train(1, loss=joint_loss)]
    assert [item.epochs for item in phases(METHOD(), epochs=1)] == [0, 1]
    assert [item.epochs for item in phases(METHOD(joint_epochs=9))] == [0, 5]
    assert [item.epochs for item in phases(METHOD(mode="as-published"))] == [5, 0]


def test_all_clients_train_their_heads_in_the_authors_last_round():
    method, model = METHOD(final_epochs=7), Model("mlp", (4,), 3)
    assert [method.cohorts(round, 9) for round in (1, 8, 9)] == [("sampled",), ("sampled",), ("all",)]
    assert METHOD().cohorts(9, 9) == ("sampled",)
    ctx = replace(context(0, 1, model=model, round=9), full_participation=True)
    server, record, _ = method.init(model, model.initial(0), 0)
    program = method.client_update(ctx)
    assert [item for item in program if isinstance(item, Train)] == [Train(7, part="head", loss=head_loss)]
    heads = torch.ones(2, len(record["head"]))
    sent = program[-1](model, Client({}, {}, {"theta": model.initial(1)}, {}, {})).upload
    assert list(sent) == ["head"]
    assert sent["head"].equal(model.layout.split(model.initial(1))[1])
    update = CohortUpdate({"head": heads}, torch.tensor([1, 1]))
    after, records = method.aggregate(ctx, server, {"head": 0 * heads}, update)
    assert after["theta"].equal(server["theta"])
    assert records["head"].equal(heads)  # the server takes no step


@pytest.mark.essential
def test_the_servers_step_does_not_change_biases_and_heads_without_labels():
    model, method = Model("mlp", (4,), 3), METHOD(server_lr=5.0)
    theta = model.initial(0).double()
    base, head = model.layout.split(theta)
    present = torch.stack([mask_of(0, 2, classes=3), mask_of(classes=3)])
    update = CohortUpdate(
        {"base": base.repeat(2, 1), "head": head.repeat(2, 1), "present": present}, torch.tensor([1, 0])
    )
    server, records = method.aggregate(context(0, 1, model=model), {"theta": theta}, {}, update)
    assert server["theta"].equal(theta)
    weight, bias = model.head(model.layout.join(base.repeat(2, 1), records["head"]))
    before, old_bias = model.head(theta)
    assert (weight[0] - before).abs().max() > 1e-3
    torch.testing.assert_close(weight[1], before)
    assert bias.equal(old_bias.repeat(2, 1))
    assert collapse(weight[0], present[0]) < collapse(before, present[0])


def test_a_client_receives_its_own_head():
    model, method = Model("mlp", (4,), 3), METHOD()
    ctx = context(0, 1, model=model)
    server, record, state = method.init(model, model.initial(0), 0)
    assert state == {}
    heads = torch.stack([record["head"], record["head"] + 1])
    download, _ = method.download(ctx, server, {"head": heads})
    assert sorted(download) == ["base", "head"]
    served, _ = run_program(model, method.personalize(ctx), state, take(download, 1))
    assert model.layout.split(served.theta)[1].equal(heads[1])
    assert served.scratch["mine"].equal(model.layout.is_head())
