"""FedDPA: the merge by hand, and runs against a plain loop with one gradient a sample."""

from collections import OrderedDict

import pytest
import torch
from contexts import with_model
from plain import RATES, SIZES, batches, both_engines, each_round, fit, mean, samples, sgd, small, theta_0
from torch import nn
from walk import moment, vector

from fedobp.algorithms import METHODS
from fedobp.algorithms.feddpa import personal_loss, shared_loss
from fedobp.method import Client, Sweep, Train
from fedobp.models import NETS, Model, register

METHOD = METHODS["feddpa"]
SMALL = {"clients": 12, "participation": 0.17, "lr": 0.5, "partition": "iid"}


@pytest.fixture(scope="module", autouse=True)
def networks():
    """One of two entries a tensor."""
    register("tiny-dpa")(lambda *_: nn.Sequential(OrderedDict(classifier=nn.Linear(1, 2))))
    yield
    del NETS["tiny-dpa"]


# By hand.


def merged(method, fisher, own, received, seen=True):
    model = Model("tiny-dpa", (1,), 2)
    client = Client(
        state={"theta": own, "seen": torch.tensor(seen)},
        download={},
        scratch={"fisher": fisher, "last": own, "received": received},
        upload={},
        hparams={"threshold": torch.tensor(method.threshold)},
    )
    return method._merge(model, client)


OWN, RECEIVED = vector(1, 2, 3, 4), vector(10, 20, 30, 40)


@pytest.mark.essential
@pytest.mark.parametrize(
    ("options", "fisher", "expected"),
    [
        ({}, vector(0, 9, 8, 6), [10, 2, 3, 40]),  # scaled within each tensor: 0 1 | 1 0
        ({}, vector(5, 5, 0, 0), [10, 20, 30, 40]),  # constant tensors count as 0
        ({"threshold": 1.0}, vector(0, 9, 8, 6), [10, 20, 30, 40]),  # strictly above
        ({"mode": "as-published"}, vector(1, 9, 6, 8), [10, 2, 30, 4]),  # above the quantile of two
        ({"mode": "as-published"}, vector(5, 5, 0, 0), [10, 20, 30, 40]),
        ({"mode": "as-published", "threshold": 1.0}, vector(1, 9, 6, 8), [10, 20, 30, 40]),
    ],
)
def test_the_merge_by_hand(options, fisher, expected):
    after = merged(METHOD(**options), fisher, OWN, RECEIVED)
    assert after.theta.tolist() == expected
    mine = [value < 10 for value in expected]
    assert after.scratch["mine"].tolist() == after.scratch["personal"].tolist() == mine
    assert after.scratch["shared"].tolist() == [not one for one in mine]


def test_without_a_model_of_its_own_a_client_has_nothing_personal_but_still_two_kinds_of_entries():
    after = merged(METHOD(), vector(0, 9, 8, 6), RECEIVED, RECEIVED, seen=False)
    assert after.theta.equal(RECEIVED)
    assert not after.scratch["mine"].any()
    assert after.scratch["personal"].tolist() == [False, True, True, False]


def test_the_regularisers_by_hand():
    model, labels = Model("tiny-dpa", (1,), 2), torch.tensor([0, 0])
    hparams = {name: torch.tensor(value) for name, value in (("near", 0.1), ("level", 0.05), ("bound", 0.5))}
    # The tensors are 5 and 13 apart, which makes 18; both logits are 0, so that the cross-entropy is log 2.
    client = Client({}, {}, {"theta": vector(0, 0, 0, 0), "received": vector(3, 4, 5, 12)}, {}, hparams)

    class Samples:
        x, y = torch.ones(2, 1), labels
        mean = staticmethod(torch.mean)

    half = torch.tensor(2.0).log().item()
    assert personal_loss(model, client, Samples).item() == pytest.approx(half + 0.05 * 18)
    assert shared_loss(model, client, Samples).item() == pytest.approx(half + 0.025 * 17.5)


def test_how_epochs_are_spent():
    def phases(method, epochs=5):
        return [
            item for item in method.client_update(with_model(None, moment(0, epochs=epochs))) if isinstance(item, Train)
        ]

    assert phases(METHOD()) == [
        Train(5, mask="personal", loss=personal_loss), Train(5, mask="shared", loss=shared_loss),
    ]  # fmt: skip
    assert [phase.epochs for phase in phases(METHOD(), 1)] == [1, 1]
    assert phases(METHOD(mode="as-published")) == [Train(5)]
    for mode in ("faithful", "as-published"):
        assert [item for item in METHOD(mode=mode).personalize(with_model(None, moment(0))) if isinstance(item, Sweep)]


# Against a plain loop.


def information(values, x, y):
    """The sum of squared gradients of single samples, tensor by tensor."""
    values = [value.clone().requires_grad_() for value in values]
    each = [torch.autograd.grad(fit(values, x[i : i + 1], y[i : i + 1]), values) for i in range(len(y))]
    return [sum(gradient**2 for gradient in many) for many in zip(*each, strict=True)]


def chosen(fisher, method):
    if method.mode == "as-published":
        return [one > torch.quantile(one, method.threshold) for one in fisher]
    return [(one - one.min()) / (one.max() - one.min()) > method.threshold for one in fisher]


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize(
    "options",
    [{"threshold": 0.1, "near": 2.0, "level": 1.0, "bound": 0.05}, {"mode": "as-published", "threshold": 0.7}],
)
def test_runs_are_those_of_a_plain_loop(options, rates):
    federation, method = small("feddpa", rates, options, **SMALL), METHOD(**options)
    published = method.mode == "as-published"
    first = worker = theta = theta_0(federation)
    own, visits = {}, 0

    def merge(client, theta):
        last = own.get(client, first if published else theta)
        masks = chosen(information(worker if published else last, *samples(federation, client)), method)
        return [torch.where(m, a, b) for m, a, b in zip(masks, last, theta, strict=True)], masks

    def apart(values):
        return sum((one - other).norm() for one, other in zip(values, theta, strict=True) if not one.equal(other))

    def personal_loss(values, x, y):
        return fit(values, x, y) + method.near / 2 * apart(values)

    def shared_loss(values, x, y):
        return fit(values, x, y) + method.level / 2 * abs(apart(values) - method.bound)

    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            values, masks = merge(client, theta)
            phases = [(personal_loss, masks), (shared_loss, [~mask for mask in masks])]
            for phase, (loss, moving) in enumerate([(fit, None)] if published else phases, start=4):
                values = sgd(federation, values, loss, batches(federation, client, round, phase, 2), moving=moving)
            own[client] = worker = values
            models.append(values)
        theta, visits = mean(federation, cohort, models), visits + len(cohort)
    assert len(own) < visits  # somebody came back
    never = next(client for client in range(12) if client not in own)
    results = both_engines(federation, theta, {client: merge(client, theta)[0] for client in (*cohort, never)})
    for result in results:
        if published:  # the model, that of the round's start, and the worker's
            assert result.bytes.down_per_round == 2 * 3 * 8 * sum(SIZES)
            continue
        assert all(value.equal(result.state_dict(never)[name]) for name, value in result.state_dict().items())
        assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * sum(SIZES)
        assert 0 < result.personal.max < sum(SIZES)


@pytest.fixture(scope="module")
def usual():
    federation = small("feddpa", "one batch", **SMALL)
    return federation, federation.run()


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 0.1},
        {"near": 2.0},
        {"level": 1.0},
        {"bound": 0.01},
        {"mode": "as-published"},
    ],
)
def test_every_option_changes_the_model(change, usual):
    federation, result = usual
    other = federation.run(**change)
    theirs, ours = (federation.model.layout.flatten(one.state_dict()) for one in (other, result))
    assert not torch.allclose(theirs, ours, atol=1e-7)


def test_modes_that_leak_are_sequential():
    assert METHOD().sequential
    assert not METHOD(mode="as-published").sequential
