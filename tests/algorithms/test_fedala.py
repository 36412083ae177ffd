"""FedALA: the mixing weights against a plain loop with a module, when they are learned, and the state that leaks."""

import numpy as np
import pytest
import torch
from by_hand import context, draw_batches, hyper_parameters, run_sweeps, update_of
from plain_loops import (
    RATES,
    SIZES,
    batches,
    both_engines,
    each_round,
    flat,
    mean,
    network_loss,
    phase_key,
    samples,
    sgd,
    small_federation,
    theta_0,
)
from torch.nn import functional

from fedobp.algorithms import METHODS
from fedobp.engine.batch_order import batches as positions
from fedobp.engine.batch_order import subset
from fedobp.keys import Purpose, fold
from fedobp.method import Client, CohortUpdate, Sweep, Train
from fedobp.models import Model
from fedobp.records import take

FedALA = METHODS["fedala"]
PUBLISHED = FedALA(mode="as-published")
MODEL = Model("mlp", (4,), 3)
CTX = context(0, 1, model=MODEL)
THETA = MODEL.initial(0).double()
LOCAL, GLOBAL = (MODEL.initial(seed).double() * 2 for seed in (1, 2))
BATCHES = draw_batches(1, [5, 3, 1])  # one of a single sample is not skipped
HARD = (BATCHES[1][0] * 30, BATCHES[1][1])
HPARAMS = hyper_parameters(eta=1.0)


def still(epoch):
    return BATCHES


def changing(until):
    """Return batches of which the last one, and with it its loss, changes in every epoch before `until`."""
    return lambda epoch: [BATCHES[0], HARD] if epoch < until and epoch % 2 else BATCHES


def top_of(method, theta):
    return theta[sum(MODEL.layout.sizes[: -method.tensors]) :]


def state_of(method, local=LOCAL, weight=1.0, started=False):
    top = top_of(method, local)
    return {"top": top, "mixing": torch.full_like(top, weight), "started": torch.tensor(started)}


def plain_weights(model, method, state, other, weights, batches, started):
    """Learn the weights on a module, tensor by tensor; return the mixed model, the weights and the epochs."""
    p, module = method.tensors, model.module(other)
    local, shared = (list(model.module(theta).parameters())[-p:] for theta in (state, other))
    mixed = list(module.parameters())[-p:]
    weights = [
        part.view_as(tensor) for part, tensor in zip(weights.split([t.numel() for t in local]), local, strict=True)
    ]

    @torch.no_grad()
    def mix():
        for tensor, state, other, share in zip(mixed, local, shared, weights, strict=True):
            tensor.copy_(state + (other - state) * share)

    mix()
    losses = []
    while any(not one.equal(two) for one, two in zip(local, shared, strict=True)):
        for x, y in batches(len(losses)):
            module.zero_grad()
            loss = functional.cross_entropy(module(x), y)
            loss.backward()
            for at, (tensor, state, other) in enumerate(zip(mixed, local, shared, strict=True)):
                weights[at] = (weights[at] - method.eta * tensor.grad * (other - state)).clamp(0, 1).detach()
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
def test_a_round_equals_a_plain_loop(options, weight, batches, started, epochs):
    method = FedALA.configure(options)
    state, hparams = state_of(method, weight=weight, started=started), hyper_parameters(**method.hparams())
    mixed, weights, taken = plain_weights(MODEL, method, LOCAL, GLOBAL, state["mixing"], batches, started)
    assert taken == epochs
    assert not torch.allclose(mixed, GLOBAL)
    done, sweeps = run_sweeps(MODEL, method.client_update(CTX), state, {"theta": GLOBAL}, hparams, batches, step=0.5)
    assert sweeps == [epochs]
    torch.testing.assert_close(done.theta, mixed + 0.5, rtol=0, atol=1e-12)
    torch.testing.assert_close(done.state["mixing"], weights, rtol=0, atol=1e-12)
    assert done.state["top"].equal(top_of(method, done.theta))
    assert bool(done.state["started"])
    assert list(done.upload) == ["theta"]
    assert done.upload["theta"].equal(done.theta)
    served, sweeps = run_sweeps(MODEL, method.personalize(CTX), state, {"theta": GLOBAL}, hparams, batches)
    assert sweeps == [epochs]
    torch.testing.assert_close(served.theta, mixed, rtol=0, atol=1e-12)
    assert served.state == state
    mine, size = served.scratch["mine"], len(state["top"])
    assert int(mine.sum()) == size == int(mine[-size:].sum())


def test_the_program():
    _, _, learning, training, _ = FedALA().client_update(CTX)
    assert isinstance(learning, Sweep)
    assert (learning.epochs, learning.fraction, learning.smallest) == (100, 0.8, 1)
    assert training == Train(5)


@pytest.mark.parametrize(("epochs", "spread", "more"), [(11, 0.099, False), (11, 0.101, True), (10, 0.0, True)])
def test_the_first_adaptation_ends_when_the_loss_has_converged(epochs, spread, more):
    """After more than 10 epochs, if the standard deviation (of a population) of the last 10 losses is below 0.1."""
    losses = torch.tensor([1 + spread, 1 - spread] * 5).double()
    scratch = {"epochs": torch.tensor(epochs), "losses": losses, "started": torch.tensor(False)}
    client = Client({}, {}, {**scratch, "top": LOCAL, "shared": GLOBAL}, {}, {})
    assert bool(FedALA().client_update(CTX)[2].more(MODEL, client)) == more


def test_on_equal_models_nothing_is_learned_and_the_first_adaptation_is_still_to_come():
    method = FedALA()
    server, records, state = method.init(MODEL, THETA, 0)
    download, _ = method.download(CTX, server, records)
    assert list(download) == ["theta"]
    done, sweeps = run_sweeps(MODEL, method.client_update(CTX), state, take(download, 0), HPARAMS, still, step=0.5)
    assert sweeps == [0]
    assert done.theta.equal(THETA + 0.5)
    assert done.state["mixing"].eq(1).all()
    assert not bool(done.state["started"])


def test_a_client_without_samples_mixes_with_its_current_weights():
    method, top = FedALA(), top_of(FedALA(), GLOBAL)
    state = state_of(method, weight=0.25)
    done, _ = run_sweeps(MODEL, method.client_update(CTX), state, {"theta": GLOBAL}, HPARAMS, lambda _: [])
    torch.testing.assert_close(done.state["top"], top_of(method, LOCAL) * 0.75 + top * 0.25)
    assert done.state["mixing"].eq(0.25).all()
    assert not bool(done.state["started"])


def test_one_class_is_enough():
    (x, y), program, state = BATCHES[0], FedALA().personalize(CTX), state_of(FedALA())
    done, _ = run_sweeps(MODEL, program, state, {"theta": GLOBAL}, HPARAMS, lambda _: [(x, torch.zeros_like(y))])
    assert done.theta.isfinite().all()
    assert not done.theta.equal(GLOBAL)


def test_the_server_averages_by_samples():
    uploads, n = torch.stack([LOCAL, GLOBAL]), torch.tensor([1, 3])
    server, _ = FedALA().aggregate(CTX, {"theta": THETA}, {}, CohortUpdate({"theta": uploads}, n))
    assert list(server) == ["theta"]
    torch.testing.assert_close(server["theta"], (LOCAL + 3 * GLOBAL) / 4, rtol=0, atol=1e-12)


def train_one(server, client, round, n, step):
    """Let one client train in the published mode; return (server, its model, what it received, epochs of its sweep)."""
    ctx = context(client, model=MODEL, round=round)
    download, records = PUBLISHED.download(ctx, server, {})
    program, received = PUBLISHED.client_update(ctx), take(download, 0)
    done, epochs = run_sweeps(MODEL, program, {}, received, HPARAMS, still if n else lambda _: [], step=step)
    after, _ = PUBLISHED.aggregate(ctx, server, records, update_of([done], n))
    assert done.state == {}
    return after, done.theta, received, epochs


@pytest.mark.essential
def test_as_published_each_client_continues_from_the_previous_one():
    assert (FedALA().sequential, PUBLISHED.sequential) == (False, True)
    server, _, state = PUBLISHED.init(MODEL, THETA, 0)
    assert state == {}
    server, first, received, epochs = train_one(server, 0, 1, 1, step=0.5)
    assert (sorted(received), epochs) == (["mixing", "start", "theta", "top"], [0])
    assert first.equal(THETA + 0.5)
    server, second, received, epochs = train_one(server, 1, 1, 3, step=-0.25)
    assert epochs == [1]  # the first client, on equal models, has had the first adaptation of all clients
    assert received["start"].equal(THETA)  # this round's model, not yet the mean
    assert received["top"].equal(top_of(PUBLISHED, first))
    below = len(THETA) - len(received["top"])
    assert second[:below].equal(THETA[:below] - 0.25)
    assert not torch.allclose(second, THETA - 0.25)
    mean = (first + 3 * second) / 4
    torch.testing.assert_close(server["theta"], mean, rtol=0, atol=1e-12)
    assert not server["mixing"].eq(1).all()
    weights = server["mixing"]
    server, third, received, _ = train_one(server, 0, 2, 0, step=0.0)  # no samples: only the leaked state changes
    torch.testing.assert_close(received["start"], mean, rtol=0, atol=1e-12)
    assert received["top"].equal(top_of(PUBLISHED, second))
    assert server["mixing"].equal(weights)
    torch.testing.assert_close(server["theta"], mean, rtol=0, atol=1e-12)
    server, fourth, received, _ = train_one(server, 1, 2, 7, step=1.0)
    torch.testing.assert_close(received["start"], mean, rtol=0, atol=1e-12)
    assert received["top"].equal(top_of(PUBLISHED, third))
    assert server["theta"].equal(fourth)


def test_as_published_all_clients_are_served_from_the_state_of_the_last_trained_one():
    server, _, _ = PUBLISHED.init(MODEL, THETA, 0)
    server, _, _, _ = train_one(server, 0, 1, 2, step=0.5)
    server, last, _, _ = train_one(server, 1, 1, 2, step=-0.5)
    download, _ = PUBLISHED.download(CTX, server, {})
    for client in (0, 1):
        received = take(download, client)
        assert received["theta"].equal(server["theta"])
        served, epochs = run_sweeps(MODEL, PUBLISHED.personalize(CTX), {}, received, HPARAMS, still)
        assert epochs == [1]
        assert served.scratch["top"].equal(top_of(PUBLISHED, last))
        below = len(THETA) - len(served.scratch["top"])
        assert served.theta[:below].equal(server["theta"][:below])


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("mode", ["faithful", "as-published"])
def test_runs_equal_a_plain_loop(mode, rates):
    federation = small_federation("fedala", rates, {"mode": mode})
    method, model = FedALA(mode=mode), federation.model
    theta = flat(theta_0(federation))
    weights = torch.ones(sum(SIZES[-2:])).double()
    never = theta, weights, mode == "as-published"  # the last model, the weights, whether the first adaptation is done
    states, worker = {}, never

    def mixed(client, theta, round, purpose):
        """Learn W on a share of the samples, and mix."""
        (x, y), drawn = samples(federation, client), phase_key(federation, client, round, 2, purpose)
        x, y = (part[subset(drawn, len(y), 0.8)] for part in (x, y))

        def epoch(at):
            return [(x[b], y[b]) for b in positions(fold(drawn, at), len(y), federation.config.batch_size, None, 1)]

        local, weights, started = worker if mode == "as-published" else states.get(client, never)
        found, weights, epochs = plain_weights(model, method, local, theta, weights, epoch, started)
        return found, weights, started or epochs > 0

    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            start, weights, started = mixed(client, theta, round, Purpose.TRAIN)
            data = batches(federation, client, round, phase=3, epochs=2)
            trained = sgd(federation, model.layout.views(start).values(), network_loss, data)
            states[client] = worker = flat(trained), weights, started
            models.append([flat(trained)])
        [theta] = mean(federation, cohort, models)
    served = {client: [mixed(client, theta, 3, Purpose.PERSONALIZE)[0]] for client in range(4)}
    for result in both_engines(federation, [theta], served):
        assert result.personal.min == result.personal.max == sum(SIZES[-2:])
        if mode == "faithful":
            assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * sum(SIZES)
