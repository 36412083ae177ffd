"""The serial engine against a plain loop, and what a client can and cannot see, keep and change."""

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from contexts import with_model
from serial_cases import (
    BATCH,
    DATA,
    ENGINES,
    MODEL,
    SEED,
    THETA,
    Alone,
    close,
    everyone,
    moment,
    numbers,
    plain_loop,
    remember,
    take,
    take_own,
    upload,
)
from torch.nn import functional

import fedobp.engine.serial as serial_module
from fedobp import Config, Federation, FedobpError
from fedobp.algorithms import METHODS
from fedobp.algorithms.fedobp import FedOBP, keep_and_upload
from fedobp.engine import Counters
from fedobp.engine.batch_order import batches
from fedobp.keys import Purpose, fold
from fedobp.method import Sparse, Train
from fedobp.sampling import cohorts

# Training.

RATES = {"plain": (0.1, 0.0, 0.0), "momentum": (0.1, 0.9, 0.0), "decay": (0.1, 0.0, 0.3), "both": (0.05, 0.7, 0.1)}


@pytest.mark.essential
@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_training_equals_a_plain_loop(rates):
    ctx = moment(3, 0, 1, round=2)
    answer = Alone().train(ctx, [take, Train(3), upload], everyone(THETA, ctx), numbers(*rates))
    for position, client in enumerate((3, 0, 1)):
        expected, loss = plain_loop(client, {1: 3}, *rates, round=2)
        close(answer.upload["theta"][position], expected)
        assert answer.loss[position].item() == pytest.approx(loss, abs=1e-12)
        assert (expected - THETA).abs().max() > 0.01
    assert answer.n.tolist() == [6, 11, 9]
    assert answer.finite.tolist() == [True, True, True]


def test_momentum_starts_anew_with_each_phase():
    ctx, rates = moment(0), (0.1, 0.9, 0.0)
    program = [take, Train(2), Train(1), upload]
    found = Alone().train(ctx, program, everyone(THETA, ctx), numbers(*rates)).upload["theta"][0]
    close(found, plain_loop(0, {1: 2, 2: 1}, *rates)[0])
    carried, _ = plain_loop(0, {1: 2, 2: 1}, *rates, restart=False)
    assert (found - carried).abs().max() > 1e-3


def test_momentum_starts_anew_with_each_visit():
    one, ctx, rates = Alone(), moment(0), (0.1, 0.9, 0.0)
    for _ in range(2):
        found = one.train(ctx, [take, Train(2), upload], everyone(THETA, ctx), numbers(*rates)).upload["theta"][0]
        close(found, plain_loop(0, {1: 2}, *rates)[0])


def test_a_client_does_not_depend_on_who_trains_beside_it():
    program, results = [take, Train(1), upload], []
    for cohort in ((1,), (0, 1, 3), (3, 1)):
        ctx = moment(*cohort)
        answer = Alone().train(ctx, program, everyone(THETA, ctx), numbers(0.1, 0.5))
        results.append(answer.upload["theta"][cohort.index(1)])
    assert all(torch.equal(result, results[0]) for result in results)


def test_rounds_have_batches_of_their_own():
    first, second = (
        Alone()
        .train(moment(0, round=r), [take, Train(1), upload], everyone(THETA, moment(0)), numbers())
        .upload["theta"]
        for r in (1, 2)
    )
    assert not torch.equal(first, second)


def test_a_client_with_one_training_sample_takes_no_step():
    one, ctx = Alone(), moment(2, 0)
    answer = one.train(ctx, [take, Train(5), upload], everyone(THETA, ctx), numbers(0.1, 0.9, 0.5))
    assert torch.equal(answer.upload["theta"][0], THETA)
    assert answer.loss.isnan().tolist() == [True, False]
    assert answer.finite.tolist() == [True, True]
    assert answer.n.tolist() == [1, 11]


def test_the_download_is_not_changed_by_training():
    download = THETA.clone().expand(1, -1)
    Alone().train(moment(0), [take, Train(2), upload], {"theta": download}, numbers())
    assert torch.equal(download[0], THETA)


# Phases with options, written out on flat vectors.


def logits_of(theta, x):
    """The mlp of 6 inputs and 3 classes, by hand."""
    w1, b1, w2, b2 = theta.split([768, 128, 384, 3])
    return (x @ w1.view(128, 6).T + b1).relu() @ w2.view(3, 128).T + b2


def entropy(vectors, x, y):
    return functional.cross_entropy(logits_of(vectors["theta"], x), y)


def by_hand(
    client, vectors, hparams, *, epochs=2, lr="lr", loss=entropy, push=lambda theta: 0.0, free=True, position=1
):
    """Train vectors together; `push` is added to the gradient of the first one, of which only `free` entries move."""
    x, y = DATA.inputs(client, "train"), DATA.targets(client, "train")
    ctx = {name: vector.clone() for name, vector in vectors.items()}
    velocity = {name: torch.zeros_like(vector) for name, vector in vectors.items()}
    for epoch in range(epochs):
        for picked in batches(fold(SEED, 1, client, Purpose.TRAIN, position, epoch), len(y), BATCH):
            leaves = {name: vector.requires_grad_() for name, vector in ctx.items()}
            gradients = torch.autograd.grad(loss(leaves, x[picked], y[picked]), list(leaves.values()))
            ctx = {name: vector.detach() for name, vector in leaves.items()}
            for at, ((name, vector), slope) in enumerate(zip(ctx.items(), gradients, strict=True)):
                slope = slope + (push(vector) if at == 0 else 0.0) + hparams["weight_decay"] * vector
                velocity[name] = hparams["momentum"] * velocity[name] + slope
                step = hparams[lr] * velocity[name]
                ctx[name] = vector - (step * free if at == 0 else step)
    return ctx


HEAD = torch.arange(len(THETA)) >= 768 + 128
MASK = torch.arange(len(THETA)) % 3 != 0
ANCHOR = torch.linspace(-1, 1, len(THETA), dtype=torch.float64)
DRIFT = torch.linspace(0.3, -0.2, len(THETA), dtype=torch.float64)


def prepare(model, client):
    scratch = {"mask": MASK, "anchor": ANCHOR, "drift": DRIFT, "scale": torch.linspace(0.5, 2, 3, dtype=torch.float64)}
    return take(model, client).set(**scratch, other=-THETA)


def send_up(model, client):
    return client.send(theta=client.theta, scale=client.scratch["scale"], other=client.scratch["other"])


def scaled_loss(model, client, batch):
    """Cross-entropy of scaled outputs, and a smooth term: two vectors are learned with it."""
    logits = model.logits(client.theta, batch.x) * client.scratch["scale"]
    return batch.mean(functional.cross_entropy(logits, batch.y, reduction="none")) + client.theta.sin().mean()


def scaled_by_hand(vectors, x, y):
    logits = logits_of(vectors["theta"], x) * vectors["scale"]
    return functional.cross_entropy(logits, y) + vectors["theta"].sin().mean()


def pull(theta):
    return 0.7 * (theta - ANCHOR)


BOTH = ("theta", "scale")
PHASES = {
    "head": (Train(2, part="head"), {"free": HEAD}),
    "base": (Train(2, part="base"), {"free": ~HEAD}),
    "mask": (Train(2, mask="mask"), {"free": MASK}),
    "mask in the head": (Train(2, part="head", mask="mask"), {"free": MASK & HEAD}),
    "pull": (Train(2, pull=("anchor", "mu")), {"push": pull}),
    "drift": (Train(2, drift="drift"), {"push": lambda theta: DRIFT}),
    "rate": (Train(2, lr="slow"), {"lr": "slow"}),
    "loss": (Train(2, learn=BOTH, loss=scaled_loss), {"loss": scaled_by_hand}),
    "everything": (
        Train(2, BOTH, "base", "mask", ("anchor", "mu"), "drift", scaled_loss, "slow"),
        {"loss": scaled_by_hand, "free": MASK & ~HEAD, "push": lambda theta: pull(theta) + DRIFT, "lr": "slow"},
    ),
}


@pytest.mark.parametrize("rates", [(0.1, 0.0, 0.0), (0.1, 0.8, 0.2)], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("name", PHASES)
def test_a_phase_with_options_equals_a_plain_loop(name, rates):
    phase, options = PHASES[name]
    hparams, ctx = {**numbers(*rates), "mu": 0.7, "slow": 0.03}, moment(3, 0)
    up = Alone().train(ctx, [prepare, phase, send_up], everyone(THETA, ctx), hparams).upload
    start = {"theta": THETA, "scale": torch.linspace(0.5, 2, 3, dtype=torch.float64)}
    for position, client in enumerate((3, 0)):
        expected = by_hand(client, {name: start[name] for name in phase.learn}, hparams, **options)
        for learned in BOTH:
            close(up[learned][position], expected.get(learned, start[learned]))
        assert torch.equal(up["other"][position], -THETA)
        assert (up["theta"][position] - THETA).abs().max() > 1e-3
        kept = ~torch.as_tensor(options.get("free", True)).expand_as(THETA)
        assert torch.equal(up["theta"][position][kept], THETA[kept])


def test_another_vector_can_be_trained_in_place_of_theta():
    ctx = moment(0)
    up = Alone().train(ctx, [prepare, Train(2, learn=("other",)), send_up], everyone(THETA, ctx), numbers()).upload
    close(up["other"][0], by_hand(0, {"theta": -THETA}, numbers())["theta"])
    assert torch.equal(up["theta"][0], THETA)


def test_a_phase_of_no_epochs_changes_nothing_and_has_no_loss():
    ctx = moment(0)
    answer = Alone().train(ctx, [take, Train(0), upload], everyone(THETA, ctx), numbers())
    assert torch.equal(answer.upload["theta"][0], THETA)
    assert answer.loss.isnan().all()


def test_programs_have_numbers_as_tensors_in_the_models_type():
    seen = []

    def look(model, client):
        seen.append(client.hparams)
        return take(model, client)

    Alone().train(moment(0), [look], everyone(THETA, moment(0)), {"lr": 0.1, "q": 0.25})
    [hparams] = seen
    assert {name: (value.dtype, value.shape, value.item()) for name, value in hparams.items()} == {
        "lr": (torch.float64, (), 0.1), "q": (torch.float64, (), 0.25),
    }  # fmt: skip


def test_the_counters_count_steps_and_samples():
    one, ctx = Alone(), moment(0, 1, 2, 3)
    one.train(ctx, [take, Train(2), upload], everyone(THETA, ctx), numbers())
    # Two epochs of 3, 2, 0 and 2 batches; single samples of clients 1 and 2 are skipped.
    assert one.engine.counters == Counters(steps=14, slots=2 * (11 + 8 + 6), samples=2 * (11 + 8 + 6))
    assert one.engine.counters.occupancy == 1.0


# State.


def test_what_a_client_remembers_is_there_at_its_next_visit_and_is_nobody_elses():
    one, ctx = Alone({"theta": torch.zeros_like(THETA)}), moment(1)
    trained = one.train(ctx, [take, Train(1), remember, upload], everyone(THETA, ctx), numbers()).upload["theta"][0]
    both = one.train(moment(0, 1, round=2), [take_own, upload], {}, numbers()).upload["theta"]
    assert torch.equal(both[1], trained)
    assert torch.equal(both[0], torch.zeros_like(THETA))


def test_serving_trains_with_an_order_of_its_own_and_changes_no_state():
    one, ctx = Alone({"theta": THETA}), moment(0, 3)
    download = everyone(THETA, ctx)
    served = one.personalize(with_model(ctx, [take, Train(2), remember]), download, numbers(0.1, 0.9))
    for position, client in enumerate((0, 3)):
        close(served["theta"][position], plain_loop(client, {1: 2}, 0.1, 0.9, 0.0, purpose=Purpose.SERVE)[0])
    assert torch.equal(
        one.personalize(with_model(ctx, [take, Train(2), remember]), download, numbers(0.1, 0.9))["theta"],
        served["theta"],
    )
    assert torch.equal(one.personalize(with_model(ctx, [take_own]), {}, numbers())["theta"], download["theta"])
    nobody = torch.full_like(THETA, 7.0)
    assert torch.equal(one.last(ctx, nobody), nobody.expand(2, -1))
    program = [take, Train(2), upload]
    trained = one.train(ctx, program, download, numbers()).upload["theta"]
    assert torch.equal(trained, Alone().train(ctx, program, download, numbers()).upload["theta"])


def test_serving_marks_personal_entries_where_the_program_does():
    mine = torch.arange(len(THETA)) % 3 == 0

    def mark(model, client):
        return take(model, client).set(mine=mine)

    ctx = moment(0, 1)
    assert torch.equal(
        Alone().personalize(with_model(ctx, [mark]), everyone(THETA, ctx), numbers())["mine"], mine.expand(2, -1)
    )
    assert not Alone().personalize(with_model(ctx, [take]), everyone(THETA, ctx), numbers())["mine"].any()


def test_last_is_the_last_local_model_or_else_the_given_one():
    one, otherwise = Alone(), torch.full_like(THETA, 7.0)
    for round in (1, 2):
        ctx = moment(2, 0, round=round)
        up = one.train(ctx, [take, Train(1), upload], everyone(THETA, ctx), numbers()).upload["theta"]
    found = one.last(moment(0, 1, 2, 3), otherwise)
    assert torch.equal(found, torch.stack([up[1], otherwise, up[0], otherwise]))


# Predictions.


@pytest.mark.parametrize("at_once", [1024, 2])
def test_predictions_are_each_models_own_and_empty_where_there_is_nothing_to_test(monkeypatch, at_once):
    monkeypatch.setattr(serial_module, "_TEST_BATCH", at_once)
    thetas = torch.stack([THETA, -THETA, THETA.flip(0)])
    found = Alone().predict(moment(3, 0, 1), thetas, "test")
    assert found[0].shape == (0,)
    assert found[0].dtype == torch.int64
    for labels, client, theta in zip(found[1:], (0, 1), thetas[1:], strict=True):
        with torch.no_grad():
            assert torch.equal(labels, MODEL.module(theta)(DATA.inputs(client, "test")).argmax(dim=1))


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_predictions_are_as_many_as_samples(split):
    found = Alone().predict(moment(0, 1, 2, 3), THETA.expand(4, -1), split)
    assert [len(labels) for labels in found] == [DATA.size(client, split) for client in range(4)]


# What does not cross the wire.


def peek(model, client):
    return client.set(theta=client.download["theta"].values).send(theta=client.download["theta"].values)


def keeps(clients):
    return torch.stack([torch.arange(len(THETA)) % (client + 2) != 0 for client in clients])


@pytest.mark.parametrize("run", ["train", "serve"])
def test_a_client_that_looks_at_entries_it_was_not_sent_finds_nan(run):
    ctx, keep = moment(1, 0), keeps((1, 0))
    download = {"theta": Sparse(THETA.expand(2, -1), keep)}
    if run == "train":
        found = Alone().train(ctx, [peek], download, numbers()).upload["theta"]
    else:
        found = Alone().personalize(with_model(ctx, [peek]), download, numbers())["theta"]
    assert torch.equal(found.isnan(), ~keep)
    assert torch.equal(found[keep], THETA.expand(2, -1)[keep])
    assert THETA.isfinite().all()


def test_training_on_entries_that_were_not_sent_is_not_finite():
    ctx, keep = moment(1, 0), keeps((1, 0))
    keep[0] = True
    answer = Alone().train(ctx, [peek, Train(1)], {"theta": Sparse(THETA.expand(2, -1), keep)}, numbers())
    assert answer.finite.tolist() == [True, False]


def test_sparse_uploads_are_stacked_and_the_server_finds_nan_in_what_was_not_sent():
    ctx, keep = moment(2, 1, 0), keeps((2, 1, 0))

    def upload_part(model, client):
        count = client.download["step"]
        return client.set(theta=THETA).send(part=Sparse(THETA, torch.arange(len(THETA)) % count != 0), step=count)

    answer = Alone().train(ctx, [upload_part], {"step": torch.tensor([4, 3, 2])}, numbers())
    part = answer.upload["part"]
    assert isinstance(part, Sparse)
    assert torch.equal(part.keep, keep)
    assert torch.equal(part.values.isnan(), ~keep)
    assert torch.equal(part.values[keep], THETA.expand(3, -1)[keep])
    assert answer.upload["step"].tolist() == [4, 3, 2]
    assert THETA.isfinite().all(), "the client's own vector must stay as it was"


@dataclass(frozen=True)
class Cheat(FedOBP):
    """FedOBP that takes the whole global model, also the entries that were not sent."""

    name: ClassVar[str] = "cheat"

    def client_update(self, model, ctx):
        def take_all(model, client):
            return client.set(theta=client.download["theta"].values)

        return [take_all, Train(ctx.epochs), keep_and_upload]


@ENGINES
def test_a_method_that_cheats_does_not_get_through_a_run(monkeypatch, engine):
    monkeypatch.setitem(METHODS, "cheat", Cheat)
    config = Config(clients=5, rounds=2, epochs=1, model="mlp", participation=1, eval_every=2, engine=engine)
    with pytest.raises(FedobpError, match="round 2, client"):
        Federation(config).run("cheat", q=0.9)


# Whole runs.


@ENGINES
def test_diverging_training_names_round_and_client_and_the_way_out(engine):
    config = Config(clients=5, rounds=2, epochs=1, model="mlp", lr=1e9, engine=engine)
    (client,) = next(cohorts(config)).tolist()
    sentence = rf"round 1, client {client}: .* no longer finite; use a smaller --lr \(it is 1e\+09\)"
    with pytest.raises(FedobpError, match=sentence):
        Federation(config).run("fedavg")


def generators():
    name, state, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), (name, state.tolist(), rest), random.getstate()


@ENGINES
@pytest.mark.parametrize("sampling", ["keyed", "published"])
@pytest.mark.parametrize("method", ["fedobp", "fedavg-ft"])
def test_a_run_neither_uses_nor_changes_anybodys_generator(method, sampling, engine):
    settings = {"clients": 5, "rounds": 2, "epochs": 1, "model": "mlp", "val_ratio": 0.2, "finetune_epochs": 1}
    config = Config(**settings, sampling=sampling, engine=engine)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = generators()
        results.append(Federation(config).run(method))
        assert generators() == before
    first, second = results
    assert first.history == second.history
    for name, tensor in first.state_dict(3).items():
        assert torch.equal(tensor, second.state_dict(3)[name])
