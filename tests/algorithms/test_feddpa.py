"""FedDPA: the merge by hand, and runs against a plain loop over real modules with one gradient a sample."""

from collections import OrderedDict
from functools import cache
from operator import mul

import pytest
import torch
from torch import nn
from torch.nn import functional
from walk import moment, vector

from fedobp import Config, Federation
from fedobp.algorithms import METHODS, Client, Sweep, Train
from fedobp.algorithms.feddpa import personal_loss, shared_loss
from fedobp.course import cohorts
from fedobp.models import NETS, Model, register

METHOD = METHODS["feddpa"]
SMALL = {
    "method": "feddpa", "clients": 12, "participation": 0.25, "rounds": 3, "epochs": 3, "batch_size": 160, "lr": 0.5,
    "precision": "fp64", "model": "narrow", "partition": "iid", "eval_every": 3, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def networks():
    """Small ones, because one gradient a sample takes its time, and one of two entries a tensor."""

    def narrow(shape, classes):
        layers = OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(64, 6), tanh=nn.Tanh())
        return nn.Sequential(layers | OrderedDict(classifier=nn.Linear(6, classes)))

    register("narrow")(narrow)
    register("tiny-dpa")(lambda *_: nn.Sequential(OrderedDict(classifier=nn.Linear(1, 2))))
    yield
    del NETS["narrow"], NETS["tiny-dpa"]


# By hand.


def merged(method, fisher, own, received, seen=True):
    model = Model("tiny-dpa", (1,), 2)
    client = Client(
        own={"theta": own, "seen": torch.tensor(seen)},
        down={},
        work={"fisher": fisher, "last": own, "received": received},
        up={},
        hp={"threshold": torch.tensor(method.threshold)},
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
    assert after.work["mine"].tolist() == after.work["personal"].tolist() == mine
    assert after.work["shared"].tolist() == [not one for one in mine]


def test_without_a_model_of_its_own_a_client_has_nothing_personal_but_still_two_kinds_of_entries():
    after = merged(METHOD(), vector(0, 9, 8, 6), RECEIVED, RECEIVED, seen=False)
    assert after.theta.equal(RECEIVED)
    assert not after.work["mine"].any()
    assert after.work["personal"].tolist() == [False, True, True, False]


def test_the_regularisers_by_hand():
    model, labels = Model("tiny-dpa", (1,), 2), torch.tensor([0, 0])
    hp = {name: torch.tensor(value) for name, value in (("near", 0.1), ("level", 0.05), ("bound", 0.5))}
    # The tensors are 5 and 13 apart, which makes 18; both logits are 0, so that the cross-entropy is log 2.
    client = Client({}, {}, {"theta": vector(0, 0, 0, 0), "received": vector(3, 4, 5, 12)}, {}, hp)

    class Samples:
        x, y = torch.ones(2, 1), labels
        mean = staticmethod(torch.mean)

    half = torch.tensor(2.0).log().item()
    assert personal_loss(model, client, Samples).item() == pytest.approx(half + 0.05 * 18)
    assert shared_loss(model, client, Samples).item() == pytest.approx(half + 0.025 * 17.5)


def test_how_epochs_are_spent():
    def phases(method, epochs=5):
        return [item for item in method.local(None, moment(0, epochs=epochs)) if isinstance(item, Train)]

    assert phases(METHOD()) == [
        Train(3, mask="personal", loss=personal_loss), Train(2, mask="shared", loss=shared_loss),
    ]  # fmt: skip
    assert [phase.epochs for phase in phases(METHOD(), 1)] == [0, 1]
    assert [phase.epochs for phase in phases(METHOD(shared_epochs=4))] == [1, 4]
    assert phases(METHOD(mode="as-published")) == [Train(5)]
    for mode in ("faithful", "as-published"):
        assert [item for item in METHOD(mode=mode).serve(None, moment(0)) if isinstance(item, Sweep)]


# Against a plain loop.


def information(module, x, y):
    """The sum of squared gradients of single samples, tensor by tensor."""
    total = [torch.zeros_like(p) for p in module.parameters()]
    for sample, label in zip(x, y, strict=True):
        likelihood = module(sample[None]).log_softmax(dim=1)[0, label]
        for one, gradient in zip(total, torch.autograd.grad(likelihood, module.parameters()), strict=True):
            one += gradient**2
    return total


def chosen(fisher, method):
    if method.mode == "as-published":
        return [one > torch.quantile(one, method.threshold) for one in fisher]
    return [(one - one.min()) / (one.max() - one.min()) > method.threshold for one in fisher]


def descend(module, x, y, epochs, masks, penalty):
    for _ in range(epochs):
        module.zero_grad()
        (functional.cross_entropy(module(x), y) + penalty(module)).backward()
        with torch.no_grad():
            for p, mask in zip(module.parameters(), masks, strict=True):
                p -= 0.5 * p.grad * mask


@cache
def plain(method):
    """Return the global model, and what two clients are served: one of the last round, and one never selected."""
    federation = Federation(Config(**SMALL))
    model, data, config = federation.model, federation.data, federation.config
    assert max(data.size(client, "train") for client in range(data.clients)) <= config.batch_size
    globe = [p.detach() for p in model.module(model.initial(config.seed).double()).parameters()]
    first = worker = globe
    own = {}

    def load(values):
        module = model.module().double()
        for p, value in zip(module.parameters(), values, strict=True):
            p.data.copy_(value)
        return module

    def merge(client, globe):
        last = own.get(client, first if method.mode == "as-published" else globe)
        x, y = data.inputs(client, "train"), data.targets(client, "train")
        measured = load(worker if method.mode == "as-published" else last)
        masks = chosen(information(measured, x, y), method)
        return [torch.where(m, a, b) for m, a, b in zip(masks, last, globe, strict=True)], masks

    def apart(module):
        return sum((p - q).norm() for p, q in zip(module.parameters(), globe, strict=True) if not p.equal(q))

    for cohort in cohorts(config):
        uploads, sizes = [], []
        for client in cohort.tolist():
            values, masks = merge(client, globe)
            module, (x, y) = load(values), (data.inputs(client, "train"), data.targets(client, "train"))
            if method.mode == "as-published":
                descend(module, x, y, 3, [1] * len(masks), lambda _: 0)
            else:
                descend(module, x, y, 1, masks, lambda module: method.near / 2 * apart(module))
                others = [~mask for mask in masks]
                descend(module, x, y, 2, others, lambda module: method.level / 2 * abs(apart(module) - method.bound))
            own[client] = worker = [p.detach().clone() for p in module.parameters()]
            uploads.append(own[client])
            sizes.append(len(y))
        shares = [n / sum(sizes) for n in sizes]
        globe = [sum(map(mul, shares, tensors)) for tensors in zip(*uploads, strict=True)]
    assert any(len([1 for cohort in cohorts(config) if client in cohort]) > 1 for client in own)  # somebody came back
    never = next(client for client in range(data.clients) if client not in own)
    served = {client: merge(client, globe)[0] for client in (cohort[0].item(), never)}
    return globe, served, never


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize(
    "options",
    [{}, {"threshold": 0.1, "near": 2.0, "level": 1.0, "bound": 0.2}, {"mode": "as-published"},
     {"mode": "as-published", "threshold": 0.7}],
)  # fmt: skip
def test_runs_are_those_of_a_plain_loop(engine, options):
    federation = Federation(Config(**SMALL, engine=engine, options=options))
    expected, served, never = plain(METHOD(**options))
    result = federation.run()
    for values, model in ((expected, None), *((values, client) for client, values in served.items())):
        for value, found in zip(values, result.state_dict(model).values(), strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=1e-9)
    size = 8 * federation.model.layout.size
    if "mode" not in options:
        assert all(value.equal(result.state_dict(never)[name]) for name, value in result.state_dict().items())
        assert result.bytes.down_per_round == result.bytes.up_per_round == 3 * size
        assert 0 < result.personal.max < federation.model.layout.size
    else:
        assert result.bytes.down_per_round == 3 * 3 * size  # the model, that of the round's start, and the worker's


@pytest.fixture(scope="module")
def usual(networks):
    federation = Federation(Config(**SMALL))
    return federation, federation.run()


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 0.1},
        {"near": 2.0},
        {"level": 1.0},
        {"bound": 0.01},
        {"shared_epochs": 1},
        {"mode": "as-published"},
    ],
)
def test_every_option_changes_the_model(change, usual):
    federation, result = usual
    other = federation.run(**change)
    theirs, ours = (federation.model.layout.flatten(one.state_dict()) for one in (other, result))
    assert not torch.allclose(theirs, ours, atol=1e-7)


def test_modes_that_leak_are_sequential():
    assert METHOD().together
    assert not METHOD(mode="as-published").together
