"""FedALA: the mixing weights against a plain loop with a module, when they are learned, and what leaks in its table."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from contexts import with_model
from plain import RATES, SIZES, batches, both_engines, each_round, fit, flat, key, mean, samples, sgd, small, theta_0
from sweeps import draw, numbers, visit
from torch.nn import functional
from walk import moment, row

from fedobp.algorithms import METHODS
from fedobp.engine.batch_order import batches as positions
from fedobp.engine.batch_order import subset
from fedobp.keys import Purpose, fold
from fedobp.method import Client, CohortUpdate, Sweep, Train
from fedobp.models import Model

FedALA = METHODS["fedala"]
PUBLISHED = FedALA(mode="as-published")
CTX = moment(0, 1)
MODEL = Model("mlp", (4,), 3)
THETA = MODEL.initial(0).double()
LOCAL, GLOBAL = (MODEL.initial(seed).double() * 2 for seed in (1, 2))
BATCHES = draw(1, [5, 3, 1])  # one of a single sample is no exception here
HARD = (BATCHES[1][0] * 30, BATCHES[1][1])


def still(epoch):
    return BATCHES


def changing(until):
    """Batches whose last one, and with it its loss, changes from epoch to epoch until some epoch."""
    return lambda epoch: [BATCHES[0], HARD] if epoch < until and epoch % 2 else BATCHES


def top_of(method, theta):
    return theta[sum(MODEL.layout.sizes[: -method.tensors]) :]


def held(method, local=LOCAL, weight=1.0, started=False):
    top = top_of(method, local)
    return {"top": top, "mixing": torch.full_like(top, weight), "started": torch.tensor(started)}


def plain_weights(model, method, own, other, weights, batches, started):
    """Learn the weights on a module, tensor by tensor; return the mixed model, the weights and the epochs."""
    p, module = method.tensors, model.module(other)
    local, shared = (list(model.module(theta).parameters())[-p:] for theta in (own, other))
    mixed = list(module.parameters())[-p:]
    weights = [
        part.view_as(tensor) for part, tensor in zip(weights.split([t.numel() for t in local]), local, strict=True)
    ]

    @torch.no_grad()
    def mix():
        for tensor, own, other, share in zip(mixed, local, shared, weights, strict=True):
            tensor.copy_(own + (other - own) * share)

    mix()
    losses = []
    while any(not one.equal(two) for one, two in zip(local, shared, strict=True)):
        for x, y in batches(len(losses)):
            module.zero_grad()
            loss = functional.cross_entropy(module(x), y)
            loss.backward()
            for at, (tensor, own, other) in enumerate(zip(mixed, local, shared, strict=True)):
                weights[at] = (weights[at] - method.eta * tensor.grad * (other - own)).clamp(0, 1).detach()
            mix()
        losses.append(float(loss.detach()))
        settled = len(losses) > 10 and np.std(losses[-10:]) < 0.1
        if started or settled or len(losses) == 100:
            break
    return model.read(module), torch.cat([share.flatten() for share in weights]), len(losses)


@pytest.mark.parametrize(
    ("options", "weight", "batches", "started", "epochs"),
    [
        ({}, 1.0, still, False, 12),
        ({}, 1.0, still, True, 1),
        ({}, 0.3, still, True, 1),
        ({"eta": 0.1}, 0.3, changing(15), False, 26),
        ({"eta": 5.0}, 0.3, changing(200), False, 100),
        ({"tensors": 1}, 0.5, still, True, 1),
        ({"tensors": 3}, 0.5, still, False, 11),
        ({"tensors": 99}, 0.5, still, True, 1),
    ],
)
def test_a_visit_is_that_of_a_plain_loop(options, weight, batches, started, epochs):
    method = FedALA.configure(options)
    own, hparams = held(method, weight=weight, started=started), numbers(**method.hparams())
    mixed, weights, taken = plain_weights(MODEL, method, LOCAL, GLOBAL, own["mixing"], batches, started)
    assert taken == epochs
    assert not torch.allclose(mixed, GLOBAL)
    done, sweeps = visit(
        MODEL, method.client_update(with_model(MODEL, CTX)), own, {"theta": GLOBAL}, hparams, batches, step=0.5
    )
    assert sweeps == [epochs]
    torch.testing.assert_close(done.theta, mixed + 0.5, rtol=0, atol=1e-12)
    torch.testing.assert_close(done.state["mixing"], weights, rtol=0, atol=1e-12)
    assert done.state["top"].equal(top_of(method, done.theta))
    assert bool(done.state["started"])
    assert list(done.upload) == ["theta"]
    assert done.upload["theta"].equal(done.theta)
    served, sweeps = visit(MODEL, method.personalize(with_model(MODEL, CTX)), own, {"theta": GLOBAL}, hparams, batches)
    assert sweeps == [epochs]
    torch.testing.assert_close(served.theta, mixed, rtol=0, atol=1e-12)
    assert served.state == own
    assert int(served.scratch["mine"].sum()) == len(own["top"]) == int(served.scratch["mine"][-len(own["top"]) :].sum())


def test_its_program():
    _, _, learning, training, _ = FedALA().client_update(with_model(MODEL, CTX))
    assert isinstance(learning, Sweep)
    assert (learning.epochs, learning.fraction, learning.smallest) == (100, 0.8, 1)
    assert training == Train(5)


@pytest.mark.parametrize(("epochs", "spread", "more"), [(11, 0.099, False), (11, 0.101, True), (10, 0.0, True)])
def test_a_first_time_ends_when_ten_losses_agree(epochs, spread, more):
    """That is, after more than 10 epochs, if the standard deviation of the last 10, of a population, is below 0.1."""
    losses = torch.tensor([1 + spread, 1 - spread] * 5).double()
    scratch = {"epochs": torch.tensor(epochs), "losses": losses, "started": torch.tensor(False)}
    client = Client({}, {}, {**scratch, "top": LOCAL, "shared": GLOBAL}, {}, {})
    assert bool(FedALA().client_update(with_model(MODEL, CTX))[2].more(MODEL, client)) == more


def test_equal_models_teach_nothing_and_are_no_first_time():
    method = FedALA()
    server, records, own = method.init(MODEL, THETA, 0)
    download, _ = method.download(with_model(MODEL, CTX), server, records)
    assert list(download) == ["theta"]
    done, sweeps = visit(
        MODEL, method.client_update(with_model(MODEL, CTX)), own, row(download, 0), numbers(eta=1.0), still, step=0.5
    )
    assert sweeps == [0]
    assert done.theta.equal(THETA + 0.5)
    assert done.state["mixing"].eq(1).all()
    assert not bool(done.state["started"])


def test_a_client_without_samples_mixes_with_the_weights_that_it_has():
    method, top = FedALA(), top_of(FedALA(), GLOBAL)
    own = held(method, weight=0.25)
    done, _ = visit(
        MODEL, method.client_update(with_model(MODEL, CTX)), own, {"theta": GLOBAL}, numbers(eta=1.0), lambda _: []
    )
    torch.testing.assert_close(done.state["top"], top_of(method, LOCAL) * 0.75 + top * 0.25)
    assert done.state["mixing"].eq(0.25).all()
    assert not bool(done.state["started"])


def test_one_class_is_enough():
    x, y = BATCHES[0]
    done, _ = visit(MODEL, FedALA().personalize(with_model(MODEL, CTX)), held(FedALA()), {"theta": GLOBAL}, numbers(eta=1.0),
                    lambda _: [(x, torch.zeros_like(y))])  # fmt: skip
    assert done.theta.isfinite().all()
    assert not done.theta.equal(GLOBAL)


def test_the_server_averages_by_samples():
    uploads, n = torch.stack([LOCAL, GLOBAL]), torch.tensor([1, 3])
    server, _ = FedALA().aggregate(with_model(MODEL, CTX), {"theta": THETA}, {}, CohortUpdate({"theta": uploads}, n))
    assert list(server) == ["theta"]
    torch.testing.assert_close(server["theta"], (LOCAL + 3 * GLOBAL) / 4, rtol=0, atol=1e-12)


def turn(server, client, round, n, step):
    """Let one client train in the published mode; return (server, its upload, what it began with)."""
    ctx = replace(moment(client), round=round)
    download, records = PUBLISHED.download(with_model(MODEL, ctx), server, {})
    program, got = PUBLISHED.client_update(with_model(MODEL, ctx)), row(download, 0)
    done, epochs = visit(MODEL, program, {}, got, numbers(eta=1.0), still if n else lambda _: [], step=step)
    up = {name: value[None] for name, value in done.upload.items()}
    after, _ = PUBLISHED.aggregate(with_model(MODEL, ctx), server, records, CohortUpdate(up, torch.tensor([n])))
    assert done.state == {}
    return after, done.theta, got, epochs


@pytest.mark.essential
def test_as_published_each_client_goes_on_from_the_one_before():
    assert (FedALA().sequential, PUBLISHED.sequential) == (True, False)
    server, _, own = PUBLISHED.init(MODEL, THETA, 0)
    assert own == {}
    server, first, got, epochs = turn(server, 0, 1, 1, step=0.5)
    assert (sorted(got), epochs) == (["mixing", "start", "theta", "top"], [0])
    assert first.equal(THETA + 0.5)
    server, second, got, epochs = turn(server, 1, 1, 3, step=-0.25)
    assert epochs == [1]  # the first client's models were equal, and that was the first time for everyone
    assert got["start"].equal(THETA)  # this round's model, not yet the mean
    assert got["top"].equal(top_of(PUBLISHED, first))
    below = len(THETA) - len(got["top"])
    assert second[:below].equal(THETA[:below] - 0.25)
    assert not torch.allclose(second, THETA - 0.25)
    mean = (first + 3 * second) / 4
    torch.testing.assert_close(server["theta"], mean, rtol=0, atol=1e-12)
    assert not server["mixing"].eq(1).all()
    weights = server["mixing"]
    server, third, got, _ = turn(server, 0, 2, 0, step=0.0)  # nobody's samples: only what leaks goes on
    torch.testing.assert_close(got["start"], mean, rtol=0, atol=1e-12)
    assert got["top"].equal(top_of(PUBLISHED, second))
    assert server["mixing"].equal(weights)
    torch.testing.assert_close(server["theta"], mean, rtol=0, atol=1e-12)
    server, fourth, got, _ = turn(server, 1, 2, 7, step=1.0)
    torch.testing.assert_close(got["start"], mean, rtol=0, atol=1e-12)
    assert got["top"].equal(top_of(PUBLISHED, third))
    assert server["theta"].equal(fourth)


def test_as_published_everyone_is_served_from_what_the_last_one_left():
    server, _, _ = PUBLISHED.init(MODEL, THETA, 0)
    server, _, _, _ = turn(server, 0, 1, 2, step=0.5)
    server, last, _, _ = turn(server, 1, 1, 2, step=-0.5)
    download, _ = PUBLISHED.download(with_model(MODEL, CTX), server, {})
    for client in (0, 1):
        got = row(download, client)
        assert got["theta"].equal(server["theta"])
        served, epochs = visit(MODEL, PUBLISHED.personalize(with_model(MODEL, CTX)), {}, got, numbers(eta=1.0), still)
        assert epochs == [1]
        assert served.scratch["top"].equal(top_of(PUBLISHED, last))
        below = len(THETA) - len(served.scratch["top"])
        assert served.theta[:below].equal(server["theta"][:below])


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("mode", ["faithful", "as-published"])
def test_runs_are_those_of_a_plain_loop(mode, rates):
    federation = small("fedala", rates, {"mode": mode})
    method, model = FedALA(mode=mode), federation.model
    theta = flat(theta_0(federation))
    weights = torch.ones(sum(SIZES[-2:])).double()
    never = theta, weights, mode == "as-published"  # the last model, the weights, whether there was a first time
    held, worker = {}, never

    def mixed(client, theta, round, purpose):
        """Draw most of the samples, and mix."""
        (x, y), drawn = samples(federation, client), key(federation, client, round, 2, purpose)
        x, y = (part[subset(drawn, len(y), 0.8)] for part in (x, y))

        def epoch(at):
            return [(x[b], y[b]) for b in positions(fold(drawn, at), len(y), federation.config.batch_size, None, 1)]

        local, weights, started = worker if mode == "as-published" else held.get(client, never)
        found, weights, epochs = plain_weights(model, method, local, theta, weights, epoch, started)
        return found, weights, started or epochs > 0

    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            begun, weights, started = mixed(client, theta, round, Purpose.TRAIN)
            data = batches(federation, client, round, phase=3, epochs=2)
            trained = sgd(federation, model.layout.views(begun).values(), fit, data)
            held[client] = worker = flat(trained), weights, started
            models.append([flat(trained)])
        [theta] = mean(federation, cohort, models)
    served = {client: [mixed(client, theta, 3, Purpose.SERVE)[0]] for client in range(4)}
    for result in both_engines(federation, [theta], served):
        assert result.personal.min == result.personal.max == sum(SIZES[-2:])
        if mode == "faithful":
            assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * sum(SIZES)
