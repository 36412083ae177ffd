"""pFedMe against a plain loop with modules."""

import pytest
import torch
from by_hand import context, draw_batches, hyper_parameters, padded_batch, run_sweeps, update_of, vector
from plain_loops import RATES, SIZES, batches, both_engines, each_round, flat, mean, small_federation, theta_0
from torch.nn import functional

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate
from fedobp.models import Model
from fedobp.records import take

PFedMe = METHODS["pfedme"]
MODEL = Model("mlp", (4,), 3)
CTX = context(0, 1, epochs=2, model=MODEL)
THETA = MODEL.initial(0).double()
BATCHES = {0: draw_batches(1, [5, 3, 2]), 1: draw_batches(2, [4, 1])}  # a batch of one sample is skipped
MANY = {"inner": 3, "lam": 4.0, "eta_p": 0.07, "mu": 0.2, "beta": 1.5}


def plain_training(model, received, data, lr, method):
    """Train two modules, parameter by parameter."""
    personal, shared = model.module(received), model.module(received)
    for x, y in data:
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
    return model.read(personal), model.read(shared)


@pytest.mark.parametrize("options", [{}, MANY, *({name: value} for name, value in MANY.items())])
def test_two_rounds_equal_a_plain_loop(options):
    method = PFedMe.configure(options)
    unused = {"momentum": 0.9, "weight_decay": 0.3}
    hparams = hyper_parameters(lr=0.05, **unused, **method.hparams())
    server, records, state = method.init(MODEL, THETA, 0)
    shared, states = THETA, [state, state]
    for _ in range(2):
        download, records = method.download(CTX, server, records)
        assert list(download) == ["theta"]
        trained, models = [], []
        for client in (0, 1):
            program, received = method.client_update(CTX), take(download, client)
            done, epochs = run_sweeps(MODEL, program, states[client], received, hparams, lambda _, c=client: BATCHES[c])
            theta, w = plain_training(MODEL, shared, BATCHES[client] * 2, 0.05, method)
            assert epochs == [2]
            assert list(done.upload) == ["theta"]
            torch.testing.assert_close(done.state["theta"], theta, rtol=0, atol=1e-12)
            torch.testing.assert_close(done.upload["theta"], w, rtol=0, atol=1e-12)
            assert done.theta.equal(done.state["theta"])
            states[client] = done.state
            trained.append(done)
            models.append(w)
        server, records = method.aggregate(CTX, server, records, update_of(trained, 1, 3))
        shared = (1 - method.beta) * shared + method.beta * (models[0] + 3 * models[1]) / 4
        torch.testing.assert_close(server["theta"], shared, rtol=0, atol=1e-12)
    served, _ = run_sweeps(MODEL, method.personalize(CTX), states[1], {"theta": shared}, hparams, lambda _: [])
    assert served.theta.equal(states[1]["theta"])
    assert served.scratch["mine"].all()


@pytest.mark.essential
@pytest.mark.parametrize(("beta", "expected"), [(0, [1, 2]), (0.5, [2.5, 4]), (1, [4, 6]), (2, [7, 10])])
def test_the_server_interpolates_by_beta(beta, expected):
    uploads = torch.stack([vector(1, 9), vector(5, 5)])
    method, server = PFedMe(beta=beta), {"theta": vector(1, 2)}
    after, _ = method.aggregate(CTX, server, {}, CohortUpdate({"theta": uploads}, torch.tensor([1, 3])))
    assert after["theta"].tolist() == expected


def test_without_a_batch_the_received_model_is_kept_and_uploaded():
    method = PFedMe()
    for none in ([], draw_batches(0, [1])):
        state, download, hparams = {"theta": THETA * 2}, {"theta": THETA}, hyper_parameters(**method.hparams())
        done, _ = run_sweeps(MODEL, method.client_update(CTX), state, download, hparams, lambda _, b=none: b)
        assert done.state["theta"].equal(THETA)
        assert done.upload["theta"].equal(THETA)


def test_a_client_that_has_never_trained_uses_theta_0():
    state = PFedMe().init(MODEL, THETA, 0).state
    program, download = PFedMe().personalize(CTX), {"theta": THETA * 5}
    served, _ = run_sweeps(MODEL, program, state, download, hyper_parameters(), lambda _: [])
    assert served.theta.equal(THETA)


@pytest.mark.parametrize(("eta_p", "converges"), [(0.5, True), (0.75, True), (1.25, False)])
def test_the_proximal_term_converges_below_2(eta_p, converges):
    """With a constant loss only the term lam/2 |theta - w|^2 is left: eta_p lam is 1, 1.5 and 2.5."""

    class Constant:
        def logits(self, theta, x):
            return x

    method = PFedMe.configure({"lam": 2.0, "mu": 0.0, "eta_p": eta_p, "inner": 30})
    _, sweep, _ = method.client_update(CTX)
    [(x, y)], hparams = draw_batches(0, [4]), hyper_parameters(lr=0.0, **method.hparams())
    client = Client(state={}, download={}, scratch={"theta": THETA + 1, "shared": THETA}, upload={}, hparams=hparams)
    distance = (sweep.step(Constant(), client, padded_batch(x, y, 0, 0)).theta - THETA).abs()
    assert (distance < 1e-8).all() if converges else (distance > 1e5).all()


@pytest.mark.parametrize("rates", RATES)
def test_runs_equal_a_plain_loop(rates):
    federation = small_federation("pfedme", rates, MANY, lr=0.05)
    method, shared = PFedMe.configure(MANY), flat(theta_0(federation))
    personal = dict.fromkeys(range(4), shared)
    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            data = batches(federation, client, round, phase=1, epochs=2)
            personal[client], w = plain_training(federation.model, shared, data, 0.05, method)
            models.append([w])
        [middle] = mean(federation, cohort, models)
        shared = (1 - method.beta) * shared + method.beta * middle
    for result in both_engines(federation, [shared], {client: [theta] for client, theta in personal.items()}):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * sum(SIZES)
