"""FedDPA: the merge by hand, and runs against a plain loop with one gradient a sample."""

import math
from collections import OrderedDict

import pytest
import torch
from by_hand import context, vector
from plain_loops import (
    RATES,
    SIZES,
    batches,
    both_engines,
    each_round,
    mean,
    network_loss,
    samples,
    sgd,
    small_federation,
    theta_0,
)
from torch import nn

from fedobp.algorithms import METHODS
from fedobp.algorithms.feddpa import personal_loss, shared_loss
from fedobp.method import Batch, Client, Sweep, Train
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


def merged(method, fisher, last, received, seen=True):
    model = Model("tiny-dpa", (1,), 2)
    client = Client(
        state={"theta": last, "seen": torch.tensor(seen)},
        download={},
        scratch={"fisher": fisher, "last": last, "received": received},
        upload={},
        hparams={"threshold": torch.tensor(method.threshold)},
    )
    return method._merge(model, client)


LAST, RECEIVED = vector(1, 2, 3, 4), vector(10, 20, 30, 40)


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
    after = merged(METHOD(**options), fisher, LAST, RECEIVED)
    assert after.theta.tolist() == expected
    mine = [value < 10 for value in expected]
    assert after.scratch["mine"].tolist() == after.scratch["personal"].tolist() == mine
    assert after.scratch["shared"].tolist() == [not one for one in mine]


def test_a_client_without_a_last_model_has_no_personal_entries_but_still_trains_in_two_phases():
    after = merged(METHOD(), vector(0, 9, 8, 6), RECEIVED, RECEIVED, seen=False)
    assert after.theta.equal(RECEIVED)
    assert not after.scratch["mine"].any()
    assert after.scratch["personal"].tolist() == [False, True, True, False]


def test_the_regularisers_by_hand():
    model, zero = Model("tiny-dpa", (1,), 2), torch.tensor(0)
    hparams = {name: torch.tensor(value) for name, value in (("near", 0.1), ("level", 0.05), ("bound", 0.5))}
    # The tensors are 5 and 13 apart, which makes 18; both logits are 0, so that the cross-entropy is log 2.
    client = Client({}, {}, {"theta": vector(0, 0, 0, 0), "received": vector(3, 4, 5, 12)}, {}, hparams)

    batch = Batch(torch.ones(2, 1), torch.tensor([0, 0]), torch.ones(2), zero, zero, zero)
    assert personal_loss(model, client, batch).item() == pytest.approx(math.log(2) + 0.05 * 18)
    assert shared_loss(model, client, batch).item() == pytest.approx(math.log(2) + 0.025 * 17.5)


def test_the_epochs_of_both_phases():
    def phases(method, epochs=5):
        return [item for item in method.client_update(context(0, epochs=epochs)) if isinstance(item, Train)]

    assert phases(METHOD()) == [
        Train(5, mask="personal", loss=personal_loss), Train(5, mask="shared", loss=shared_loss),
    ]  # fmt: skip
    assert [phase.epochs for phase in phases(METHOD(), 1)] == [1, 1]
    assert phases(METHOD(mode="as-published")) == [Train(5)]
    for mode in ("faithful", "as-published"):
        assert [item for item in METHOD(mode=mode).personalize(context(0)) if isinstance(item, Sweep)]


# Against a plain loop.


def information(values, x, y):
    """Return the sum of squared gradients of single samples, tensor by tensor."""
    values = [value.clone().requires_grad_() for value in values]
    each = [torch.autograd.grad(network_loss(values, x[i : i + 1], y[i : i + 1]), values) for i in range(len(y))]
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
def test_runs_equal_a_plain_loop(options, rates):
    federation, method = small_federation("feddpa", rates, options, **SMALL), METHOD(**options)
    published = method.mode == "as-published"
    first = worker = theta = theta_0(federation)
    last, trained = {}, 0

    def merge(client, theta):
        local = last.get(client, first if published else theta)
        masks = chosen(information(worker if published else local, *samples(federation, client)), method)
        return [torch.where(m, a, b) for m, a, b in zip(masks, local, theta, strict=True)], masks

    def distance(values):
        return sum((one - other).norm() for one, other in zip(values, theta, strict=True) if not one.equal(other))

    def personal_loss(values, x, y):
        return network_loss(values, x, y) + method.near / 2 * distance(values)

    def shared_loss(values, x, y):
        return network_loss(values, x, y) + method.level / 2 * abs(distance(values) - method.bound)

    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            values, masks = merge(client, theta)
            phases = [(personal_loss, masks), (shared_loss, [~mask for mask in masks])]
            for phase, (loss, moving) in enumerate([(network_loss, None)] if published else phases, start=4):
                values = sgd(federation, values, loss, batches(federation, client, round, phase, 2), moving=moving)
            last[client] = worker = values
            models.append(values)
        theta, trained = mean(federation, cohort, models), trained + len(cohort)
    assert len(last) < trained  # a client trains a second time
    never = next(client for client in range(12) if client not in last)
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
    federation = small_federation("feddpa", "one batch", **SMALL)
    return federation, federation.run()


@pytest.mark.parametrize(
    "change",
    [{"threshold": 0.1}, {"near": 2.0}, {"level": 1.0}, {"bound": 0.01}, {"mode": "as-published"}],
)
def test_every_option_changes_the_model(change, usual):
    federation, result = usual
    other = federation.run(**change)
    theirs, ours = (federation.model.layout.flatten(one.state_dict()) for one in (other, result))
    assert not torch.allclose(theirs, ours, atol=1e-7)


def test_only_the_published_mode_is_sequential():
    assert not METHOD().sequential
    assert METHOD(mode="as-published").sequential
