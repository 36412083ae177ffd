"""APFL against a plain loop with modules and optimisers, and at the ends of its mixing weight."""

import pytest
import torch
from contexts import with_model
from plain import RATES, SIZES, batches, both_engines, each_round, flat, mean, small, theta_0
from sweeps import draw, numbers, padded, visit
from torch.nn import functional
from walk import moment, row

from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate
from fedobp.models import Model

APFL = METHODS["apfl"]
CTX = moment(0, 1, epochs=2)
MODEL = Model("mlp", (4,), 3)
THETA = MODEL.initial(0).double()
NUMBERS = {"lr": 0.3, "momentum": 0.6, "weight_decay": 0.05}
BATCHES = {0: draw(1, [5, 3, 2]), 1: draw(2, [4, 1])}  # a batch of one sample is skipped
MODES = [
    {}, {"adaptive": "on"}, {"mode": "as-published"}, {"mode": "as-published", "adaptive": "on"}, {"mix": 0.9},
    {"mix": 0.9, "adaptive": "on"},
]  # fmt: skip


def plain_visit(model, v, w, a, epochs, adaptive, published, **rates):
    """Train two modules on the same batches, as the authors' code does, or with the framework's slips."""
    mine, ours = model.module(v), model.module(w)
    own, shared = (torch.optim.SGD(module.parameters(), **rates) for module in (mine, ours))
    steps = 0
    for epoch, data in enumerate(epochs):
        for x, y in data:
            if len(y) == 1:
                continue
            shared.zero_grad()
            functional.cross_entropy(ours(x), y).backward()
            shared.step()
            own.zero_grad()
            if published:
                logits = a * mine(x) + (1 - a) * ours(x).detach()
            else:
                shared.zero_grad()
                logits = a * mine(x) + (1 - a) * ours(x)
            functional.cross_entropy(logits, y).backward()
            own.step()
            if published:
                shared.step()  # with the gradient that is still there
            steps += 1
            if (epoch == 0) if published else (adaptive and steps == 1):
                slope = 0.02 * a
                for one, other in zip(mine.parameters(), ours.parameters(), strict=True):
                    slope += float(((one - other).detach() * (a * one.grad + (1 - a) * other.grad)).sum())
                a = min(1.0, max(0.0, a - rates["lr"] * slope))
    return model.read(mine), model.read(ours), a


@pytest.mark.parametrize("options", MODES)
def test_two_rounds_are_those_of_a_plain_loop(options):
    method = APFL.configure(options)
    hparams = numbers(**NUMBERS)
    adaptive, published = method.adaptive == "on", method.mode == "as-published"
    server, records, own = method.init(MODEL, THETA, 0)
    owns = [own, own]
    shared, personal, mixes = THETA, [THETA, THETA], [method.mix, method.mix]
    for _ in range(2):
        download, records = method.download(with_model(MODEL, CTX), server, records)
        up, models = [], []
        for client in (0, 1):
            program = method.client_update(with_model(MODEL, CTX))
            done, epochs = visit(
                MODEL, program, owns[client], row(download, client), hparams, lambda _, c=client: BATCHES[c]
            )
            personal[client], w, mixes[client] = plain_visit(
                MODEL, personal[client], shared, mixes[client], [BATCHES[client]] * 2, adaptive, published, **NUMBERS
            )
            assert epochs == [2]
            assert list(done.upload) == ["theta"]
            torch.testing.assert_close(done.state["theta"], personal[client], rtol=0, atol=1e-12)
            torch.testing.assert_close(done.upload["theta"], w, rtol=0, atol=1e-12)
            assert float(done.state["mix"]) == pytest.approx(mixes[client], abs=1e-12)
            assert done.theta.equal(done.state["theta"])  # the last local model is v
            owns[client] = done.state
            up.append(done.upload["theta"])
            models.append(w)
        server, records = method.aggregate(
            with_model(MODEL, CTX), server, records, CohortUpdate({"theta": torch.stack(up)}, torch.tensor([1, 3]))
        )
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
def test_when_the_weight_moves(options, moves):
    method = APFL.configure(options)
    program, own = method.client_update(with_model(MODEL, CTX)), method.init(MODEL, THETA, 0).state
    client, _ = visit(MODEL, program[:2], own, {"theta": -THETA}, numbers(), lambda _: [])
    moved = []
    for step, (x, y) in enumerate(BATCHES[0] * 2):
        before, client = client.scratch["mix"], program[2].step(MODEL, client, padded(x, y, step, step // 3))
        moved.append(bool(client.scratch["mix"] != before))
    assert moved == moves


def test_the_weight_stays_between_0_and_1():
    method, found = APFL(adaptive="on"), []
    for personal, shared in ((THETA * 100, THETA), (THETA, THETA * 100)):
        own, download = method.init(MODEL, personal, 0).state, {"theta": shared}
        done, _ = visit(
            MODEL, method.client_update(with_model(MODEL, CTX)), own, download, numbers(lr=0.01), lambda _: BATCHES[0]
        )
        found.append(float(done.state["mix"]))
    assert found == [0, 1]


def test_without_a_batch_nothing_moves():
    method = APFL(adaptive="on")
    own = {"theta": THETA * 2, "mix": torch.tensor(0.7, dtype=torch.float64)}
    for none in ([], draw(0, [1])):
        done, _ = visit(
            MODEL, method.client_update(with_model(MODEL, CTX)), own, {"theta": THETA}, numbers(), lambda _, b=none: b
        )
        assert done.state["theta"].equal(THETA * 2)
        assert float(done.state["mix"]) == 0.7
        assert done.upload["theta"].equal(THETA)


@pytest.mark.essential
def test_it_serves_the_mixture_with_the_current_global_model():
    method = APFL(mix=0.25)
    own = method.init(MODEL, THETA, 0).state
    served, _ = visit(
        MODEL, method.personalize(with_model(MODEL, CTX)), own, {"theta": THETA * 3}, numbers(), lambda _: []
    )
    assert served.theta.equal(THETA)
    assert served.scratch["mine"].all()
    x = BATCHES[0][0][0]
    expected = 0.25 * MODEL.module(THETA)(x) + 0.75 * MODEL.module(THETA * 3)(x)
    torch.testing.assert_close(method.predict(MODEL, served.scratch, x), expected)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("options", [{"mix": 0.8, "adaptive": "on"}, {"mode": "as-published"}])
def test_runs_are_those_of_a_plain_loop(options, rates):
    federation = small("apfl", rates, options)
    config, method = federation.config, APFL.configure(options)
    kind = method.adaptive == "on", method.mode == "as-published"
    shared = flat(theta_0(federation))
    personal, mixes = dict.fromkeys(range(4), shared), dict.fromkeys(range(4), method.mix)
    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            data = list(batches(federation, client, round, phase=2, epochs=2))
            epochs = data[: len(data) // 2], data[len(data) // 2 :]
            personal[client], w, mixes[client] = plain_visit(
                federation.model, personal[client], shared, mixes[client], epochs, *kind,
                lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay,
            )  # fmt: skip
            models.append([w])
        [shared] = mean(federation, cohort, models)
    for result in both_engines(federation, [shared], {client: [v] for client, v in personal.items()}):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * sum(SIZES)


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize(("mix", "other"), [(0.0, "fedavg"), (1.0, "local")])
def test_at_its_ends_it_is_a_known_method(engine, mix, other):
    """All of one model is FedAvg, all of the other Local-Only. A client's samples are one batch, in any order."""
    federation = small("apfl", "one batch", {"mix": mix}, engine=engine, eval_every=1)
    found, expected = federation.run(), federation.run(other)
    assert found.history == expected.history
    assert found.accuracy == expected.accuracy
