"""APFL against a plain loop with modules and optimisers, and at mixing weights 0 and 1."""

import pytest
import torch
from by_hand import context, draw_batches, hyper_parameters, padded_batch, run_sweeps, update_of
from plain_loops import RATES, SIZES, batches, both_engines, each_round, flat, mean, small_federation, theta_0
from torch.nn import functional

from fedobp.algorithms import METHODS
from fedobp.models import Model
from fedobp.records import take

APFL = METHODS["apfl"]
MODEL = Model("mlp", (4,), 3)
CTX = context(0, 1, epochs=2, model=MODEL)
THETA = MODEL.initial(0).double()
SGD = {"lr": 0.3, "momentum": 0.6, "weight_decay": 0.05}
BATCHES = {0: draw_batches(1, [5, 3, 2]), 1: draw_batches(2, [4, 1])}  # a batch of one sample is skipped
MODES = [
    {}, {"adaptive": "on"}, {"mode": "as-published"}, {"mode": "as-published", "adaptive": "on"}, {"mix": 0.9},
    {"mix": 0.9, "adaptive": "on"},
]  # fmt: skip


def plain_training(model, v, w, a, epochs, adaptive, published, **rates):
    """Train two modules on the same batches, as the authors' code does, or with the framework's bugs."""
    personal, shared = model.module(v), model.module(w)
    personal_sgd, shared_sgd = (torch.optim.SGD(module.parameters(), **rates) for module in (personal, shared))
    steps = 0
    for epoch, data in enumerate(epochs):
        for x, y in data:
            if len(y) == 1:
                continue
            shared_sgd.zero_grad()
            functional.cross_entropy(shared(x), y).backward()
            shared_sgd.step()
            personal_sgd.zero_grad()
            if published:
                logits = a * personal(x) + (1 - a) * shared(x).detach()
            else:
                shared_sgd.zero_grad()
                logits = a * personal(x) + (1 - a) * shared(x)
            functional.cross_entropy(logits, y).backward()
            personal_sgd.step()
            if published:
                shared_sgd.step()  # with the gradient of the first step
            steps += 1
            if (epoch == 0) if published else (adaptive and steps == 1):
                slope = 0.02 * a
                for one, other in zip(personal.parameters(), shared.parameters(), strict=True):
                    slope += float(((one - other).detach() * (a * one.grad + (1 - a) * other.grad)).sum())
                a = min(1.0, max(0.0, a - rates["lr"] * slope))
    return model.read(personal), model.read(shared), a


@pytest.mark.parametrize("options", MODES)
def test_two_rounds_equal_a_plain_loop(options):
    method = APFL.configure(options)
    hparams = hyper_parameters(**SGD)
    adaptive, published = method.adaptive == "on", method.mode == "as-published"
    server, records, state = method.init(MODEL, THETA, 0)
    states = [state, state]
    shared, personal, mixes = THETA, [THETA, THETA], [method.mix, method.mix]
    for _ in range(2):
        download, records = method.download(CTX, server, records)
        trained, models = [], []
        for client in (0, 1):
            program, received = method.client_update(CTX), take(download, client)
            done, epochs = run_sweeps(MODEL, program, states[client], received, hparams, lambda _, c=client: BATCHES[c])
            personal[client], w, mixes[client] = plain_training(
                MODEL, personal[client], shared, mixes[client], [BATCHES[client]] * 2, adaptive, published, **SGD
            )
            assert epochs == [2]
            assert list(done.upload) == ["theta"]
            torch.testing.assert_close(done.state["theta"], personal[client], rtol=0, atol=1e-12)
            torch.testing.assert_close(done.upload["theta"], w, rtol=0, atol=1e-12)
            assert float(done.state["mix"]) == pytest.approx(mixes[client], abs=1e-12)
            assert done.theta.equal(done.state["theta"])  # the last local model is v
            states[client] = done.state
            trained.append(done)
            models.append(w)
        server, records = method.aggregate(CTX, server, records, update_of(trained, 1, 3))
        shared = (models[0] + 3 * models[1]) / 4
        torch.testing.assert_close(server["theta"], shared, rtol=0, atol=1e-12)
    assert (mixes != [method.mix] * 2) == (adaptive or published)


@pytest.mark.essential
@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({}, [False] * 6),
        ({"adaptive": "on"}, [True] + [False] * 5),
        ({"mode": "as-published"}, [True] * 3 + [False] * 3),
    ],
)
def test_when_the_mixing_weight_is_updated(options, moves):
    method = APFL.configure(options)
    program, state = method.client_update(CTX), method.init(MODEL, THETA, 0).state
    client, _ = run_sweeps(MODEL, program[:2], state, {"theta": -THETA}, hyper_parameters(), lambda _: [])
    moved = []
    for step, (x, y) in enumerate(BATCHES[0] * 2):
        before, client = client.scratch["mix"], program[2].step(MODEL, client, padded_batch(x, y, step, step // 3))
        moved.append(bool(client.scratch["mix"] != before))
    assert moved == moves


def test_the_mixing_weight_stays_between_0_and_1():
    method, found = APFL(adaptive="on"), []
    for personal, shared in ((THETA * 100, THETA), (THETA, THETA * 100)):
        state, download = method.init(MODEL, personal, 0).state, {"theta": shared}
        hparams = hyper_parameters(lr=0.01)
        done, _ = run_sweeps(MODEL, method.client_update(CTX), state, download, hparams, lambda _: BATCHES[0])
        found.append(float(done.state["mix"]))
    assert found == [0, 1]


def test_without_a_batch_nothing_changes():
    method = APFL(adaptive="on")
    state = {"theta": THETA * 2, "mix": torch.tensor(0.7, dtype=torch.float64)}
    program, download, hparams = method.client_update(CTX), {"theta": THETA}, hyper_parameters()
    for none in ([], draw_batches(0, [1])):
        done, _ = run_sweeps(MODEL, program, state, download, hparams, lambda _, b=none: b)
        assert done.state["theta"].equal(THETA * 2)
        assert float(done.state["mix"]) == 0.7
        assert done.upload["theta"].equal(THETA)


@pytest.mark.essential
def test_the_mixture_with_the_current_global_model_is_served():
    method = APFL(mix=0.25)
    state = method.init(MODEL, THETA, 0).state
    download, hparams = {"theta": THETA * 3}, hyper_parameters()
    served, _ = run_sweeps(MODEL, method.personalize(CTX), state, download, hparams, lambda _: [])
    assert served.theta.equal(THETA)
    assert served.scratch["mine"].all()
    x = BATCHES[0][0][0]
    expected = 0.25 * MODEL.module(THETA)(x) + 0.75 * MODEL.module(THETA * 3)(x)
    torch.testing.assert_close(method.predict(MODEL, served.scratch, x), expected)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("options", [{"mix": 0.8, "adaptive": "on"}, {"mode": "as-published"}])
def test_runs_equal_a_plain_loop(options, rates):
    federation = small_federation("apfl", rates, options)
    config, method = federation.config, APFL.configure(options)
    kind = method.adaptive == "on", method.mode == "as-published"
    shared = flat(theta_0(federation))
    personal, mixes = dict.fromkeys(range(4), shared), dict.fromkeys(range(4), method.mix)
    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            data = list(batches(federation, client, round, phase=2, epochs=2))
            epochs = data[: len(data) // 2], data[len(data) // 2 :]
            personal[client], w, mixes[client] = plain_training(
                federation.model, personal[client], shared, mixes[client], epochs, *kind,
                lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay,
            )  # fmt: skip
            models.append([w])
        [shared] = mean(federation, cohort, models)
    for result in both_engines(federation, [shared], {client: [v] for client, v in personal.items()}):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * sum(SIZES)


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize(("mix", "other"), [(0.0, "fedavg"), (1.0, "local")])
def test_with_weight_0_or_1_it_is_another_method(engine, mix, other):
    """All of w is FedAvg, all of v Local-Only. A client's samples are one batch, whose order does not matter."""
    federation = small_federation("apfl", "one batch", {"mix": mix}, engine=engine, eval_every=1)
    found, expected = federation.run(), federation.run(other)
    assert found.history == expected.history
    assert found.accuracy == expected.accuracy
