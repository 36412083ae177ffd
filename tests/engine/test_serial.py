"""The serial engine against a plain loop, and what a client can and cannot read, keep and change."""

import pytest
import torch
from torch.nn import functional

import fedobp.engine.serial as serial_module
from engine.serial_cases import (
    BATCH,
    DATA,
    MODEL,
    SEED,
    THETA,
    SerialRun,
    broadcast,
    close,
    context,
    numbers,
    plain_loop,
    remember_theta,
    upload_theta,
    use_download,
    use_state,
)
from fedobp.engine import Counters, PoolJob
from fedobp.engine.batch_order import batches, step_key, subset
from fedobp.keys import Purpose, fold
from fedobp.method import Sparse, Sweep, Train

# Training.

RATES = {"plain": (0.1, 0.0, 0.0), "momentum": (0.1, 0.9, 0.0), "decay": (0.1, 0.0, 0.3), "both": (0.05, 0.7, 0.1)}


@pytest.mark.essential
@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_training_equals_a_plain_loop(rates):
    ctx = context(3, 0, 1, round=2)
    update = SerialRun().train(ctx, [use_download, Train(3), upload_theta], broadcast(THETA, ctx), numbers(*rates))
    for position, client in enumerate((3, 0, 1)):
        expected, loss = plain_loop(client, {1: 3}, *rates, round=2)
        close(update.upload["theta"][position], expected)
        assert update.loss[position].item() == pytest.approx(loss, abs=1e-12)
        assert (expected - THETA).abs().max() > 0.01
    assert update.n.tolist() == [6, 11, 9]
    assert update.finite.tolist() == [True, True, True]


def test_momentum_starts_anew_with_each_phase():
    ctx, rates = context(0), (0.1, 0.9, 0.0)
    program = [use_download, Train(2), Train(1), upload_theta]
    found = SerialRun().train(ctx, program, broadcast(THETA, ctx), numbers(*rates)).upload["theta"][0]
    close(found, plain_loop(0, {1: 2, 2: 1}, *rates)[0])
    carried, _ = plain_loop(0, {1: 2, 2: 1}, *rates, restart=False)
    assert (found - carried).abs().max() > 1e-3


def test_momentum_starts_anew_with_each_round():
    one, ctx, rates = SerialRun(), context(0), (0.1, 0.9, 0.0)
    for _ in range(2):
        found = one.train(ctx, [use_download, Train(2), upload_theta], broadcast(THETA, ctx), numbers(*rates)).upload[
            "theta"
        ][0]
        close(found, plain_loop(0, {1: 2}, *rates)[0])


def test_a_client_does_not_depend_on_the_rest_of_its_cohort():
    program, results = [use_download, Train(1), upload_theta], []
    for cohort in ((1,), (0, 1, 3), (3, 1)):
        ctx = context(*cohort)
        update = SerialRun().train(ctx, program, broadcast(THETA, ctx), numbers(0.1, 0.5))
        results.append(update.upload["theta"][cohort.index(1)])
    assert all(torch.equal(result, results[0]) for result in results)


def test_rounds_have_different_batches():
    first, second = (
        SerialRun()
        .train(context(0, round=r), [use_download, Train(1), upload_theta], broadcast(THETA, context(0)), numbers())
        .upload["theta"]
        for r in (1, 2)
    )
    assert not torch.equal(first, second)


def test_a_client_with_one_training_sample_takes_no_step():
    one, ctx = SerialRun(), context(2, 0)
    update = one.train(ctx, [use_download, Train(5), upload_theta], broadcast(THETA, ctx), numbers(0.1, 0.9, 0.5))
    assert torch.equal(update.upload["theta"][0], THETA)
    assert update.loss.isnan().tolist() == [True, False]
    assert update.finite.tolist() == [True, True]
    assert update.n.tolist() == [1, 11]


def test_the_download_is_not_changed_by_training():
    download = THETA.clone().expand(1, -1)
    SerialRun().train(context(0), [use_download, Train(2), upload_theta], {"theta": download}, numbers())
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
    current = {name: vector.clone() for name, vector in vectors.items()}
    velocity = {name: torch.zeros_like(vector) for name, vector in vectors.items()}
    for epoch in range(epochs):
        for picked in batches(fold(SEED, 1, client, Purpose.TRAIN, position, epoch), len(y), BATCH):
            leaves = {name: vector.requires_grad_() for name, vector in current.items()}
            gradients = torch.autograd.grad(loss(leaves, x[picked], y[picked]), list(leaves.values()))
            current = {name: vector.detach() for name, vector in leaves.items()}
            for at, ((name, vector), slope) in enumerate(zip(current.items(), gradients, strict=True)):
                slope = slope + (push(vector) if at == 0 else 0.0) + hparams["weight_decay"] * vector
                velocity[name] = hparams["momentum"] * velocity[name] + slope
                step = hparams[lr] * velocity[name]
                current[name] = vector - (step * free if at == 0 else step)
    return current


HEAD = torch.arange(len(THETA)) >= 768 + 128
MASK = torch.arange(len(THETA)) % 3 != 0
ANCHOR = torch.linspace(-1, 1, len(THETA), dtype=torch.float64)
DRIFT = torch.linspace(0.3, -0.2, len(THETA), dtype=torch.float64)


def prepare(model, client):
    scratch = {"mask": MASK, "anchor": ANCHOR, "drift": DRIFT, "scale": torch.linspace(0.5, 2, 3, dtype=torch.float64)}
    return use_download(model, client).set(**scratch, other=-THETA)


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
    hparams, ctx = {**numbers(*rates), "mu": 0.7, "slow": 0.03}, context(3, 0)
    up = SerialRun().train(ctx, [prepare, phase, send_up], broadcast(THETA, ctx), hparams).upload
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
    ctx = context(0)
    up = SerialRun().train(ctx, [prepare, Train(2, learn=("other",)), send_up], broadcast(THETA, ctx), numbers()).upload
    close(up["other"][0], by_hand(0, {"theta": -THETA}, numbers())["theta"])
    assert torch.equal(up["theta"][0], THETA)


def test_a_phase_of_no_epochs_changes_nothing_and_has_no_loss():
    ctx = context(0)
    update = SerialRun().train(ctx, [use_download, Train(0), upload_theta], broadcast(THETA, ctx), numbers())
    assert torch.equal(update.upload["theta"][0], THETA)
    assert update.loss.isnan().all()


def test_programs_have_numbers_as_tensors_in_the_models_type():
    seen = []

    def look(model, client):
        seen.append(client.hparams)
        return use_download(model, client)

    SerialRun().train(context(0), [look], broadcast(THETA, context(0)), {"lr": 0.1, "q": 0.25})
    [hparams] = seen
    assert {name: (value.dtype, value.shape, value.item()) for name, value in hparams.items()} == {
        "lr": (torch.float64, (), 0.1), "q": (torch.float64, (), 0.25),
    }  # fmt: skip


def test_the_counters_count_steps_and_samples():
    one, ctx = SerialRun(), context(0, 1, 2, 3)
    one.train(ctx, [use_download, Train(2), upload_theta], broadcast(THETA, ctx), numbers())
    # Two epochs of 3, 2, 0 and 2 batches; single samples of clients 1 and 2 are skipped.
    assert one.engine.counters == Counters(steps=14, slots=2 * (11 + 8 + 6), samples=2 * (11 + 8 + 6))
    assert one.engine.counters.occupancy == 1.0


# Sweeps.


def note(model, client, batch):
    """Append a line with what a step reads."""
    line = torch.stack([batch.y.sum(), batch.weight.sum().long(), batch.key, batch.step, batch.epoch])
    at = torch.nn.functional.one_hot(client.scratch["lines"], len(client.scratch["notes"]))[:, None]
    return client.set(notes=client.scratch["notes"] + at * line, lines=client.scratch["lines"] + 1)


def empty_notes(model, client):
    return client.set(theta=THETA, notes=torch.zeros(40, 5, dtype=torch.int64), lines=torch.tensor(0))


def upload_notes(model, client):
    return client.send(notes=client.scratch["notes"], steps=client.data["steps"])


def swept(client, sweep):
    """Return the lines that a client wrote, as many as it had batches."""
    upload = SerialRun().train(context(client, round=2), [empty_notes, sweep, upload_notes]).upload
    steps = int(upload["steps"][0])
    assert not upload["notes"][0, steps:].any()
    return upload["notes"][0, :steps].tolist()


def expected_notes(client, epochs, size=BATCH, smallest=1, fraction=1.0):
    key, y, lines = fold(SEED, 2, client, Purpose.TRAIN, 1), DATA.targets(client, "train"), []
    if fraction < 1:
        y = y[subset(key, len(y), fraction)]
    for epoch in range(epochs):
        for at, picked in enumerate(batches(fold(key, epoch), len(y), size, smallest=smallest)):
            lines.append([int(y[picked].sum()), len(picked), int(step_key(key, epoch, at)), len(lines), epoch])
    return lines


def test_a_sweep_goes_through_every_batch_of_every_epoch():
    assert swept(1, Sweep(note, 2)) == expected_notes(1, 2)
    assert [line[1] for line in swept(1, Sweep(note, 2))] == [4, 4, 1, 4, 4, 1]
    assert [line[1] for line in swept(1, Sweep(note, smallest=2))] == [4, 4]
    assert len({line[2] for line in swept(0, Sweep(note, 5))}) == 15, "the key of every step is different"


def test_a_sweep_of_a_part_sees_the_same_samples_in_every_epoch():
    lines = swept(0, Sweep(note, 3, fraction=0.5))
    assert lines == expected_notes(0, 3, fraction=0.5)
    assert [line[1] for line in lines] == [4, 1] * 3  # int(0.5 * 11) samples
    sums = {sum(line[0] for line in lines[at : at + 2]) for at in (0, 2, 4)}
    assert len(sums) == 1


def test_a_sweep_of_all_at_once_is_one_batch():
    assert swept(0, Sweep(note, 2, whole=True)) == expected_notes(0, 2, size=11)
    assert [line[1] for line in swept(2, Sweep(note, whole=True))] == [1]
    assert swept(2, Sweep(note, whole=True, smallest=2)) == []


def test_a_sweep_ends_when_its_condition_says_so():
    assert len(swept(0, Sweep(note, 9, more=lambda model, client: client.scratch["lines"] < 4))) == 6  # whole epochs
    assert swept(0, Sweep(note, 9, more=lambda model, client: client.scratch["lines"] < 0)) == []


def test_the_counters_count_the_passes_of_a_sweep():
    one = SerialRun()
    one.train(context(0, 1), [empty_notes, Sweep(note, 2, smallest=2), upload_notes])
    assert one.engine.counters == Counters(steps=6 + 4, slots=22 + 16, samples=22 + 16)
    one.train(context(0), [empty_notes, Sweep(note, 2, smallest=2, passes=3), upload_notes])
    assert one.engine.counters.samples == 22 + 16 + 3 * 22


# State.


def test_a_client_keeps_its_state_until_its_next_round_and_shares_it_with_no_other():
    one, ctx = SerialRun({"theta": torch.zeros_like(THETA)}), context(1)
    trained = one.train(
        ctx, [use_download, Train(1), remember_theta, upload_theta], broadcast(THETA, ctx), numbers()
    ).upload["theta"][0]
    both = one.train(context(0, 1, round=2), [use_state, upload_theta], {}, numbers()).upload["theta"]
    assert torch.equal(both[1], trained)
    assert torch.equal(both[0], torch.zeros_like(THETA))


def test_personalization_has_another_batch_order_and_changes_no_state():
    one, ctx = SerialRun({"theta": THETA}), context(0, 3)
    download, given = broadcast(THETA, ctx), (broadcast(THETA, ctx), numbers(0.1, 0.9))
    found = one.personalize(ctx, [use_download, Train(2), remember_theta], *given).theta
    for position, client in enumerate((0, 3)):
        close(found[position], plain_loop(client, {1: 2}, 0.1, 0.9, 0.0, purpose=Purpose.PERSONALIZE)[0])
    assert torch.equal(one.personalize(ctx, [use_download, Train(2), remember_theta], *given).theta, found)
    assert torch.equal(one.personalize(ctx, [use_state], {}, numbers()).theta, download["theta"])
    assert (one.clients.last(0), one.clients.last(3)) == (None, None)
    program = [use_download, Train(2), upload_theta]
    trained = one.train(ctx, program, download, numbers()).upload["theta"]
    assert torch.equal(trained, SerialRun().train(ctx, program, download, numbers()).upload["theta"])


def test_personal_models_have_the_personal_entries_that_the_program_marks():
    mine = torch.arange(len(THETA)) % 3 == 0

    def mark(model, client):
        return use_download(model, client).set(mine=mine)

    ctx = context(0, 1)
    found = SerialRun().personalize(ctx, [mark], broadcast(THETA, ctx), numbers())
    assert torch.equal(found.mine, mine.expand(2, -1))
    assert not SerialRun().personalize(ctx, [use_download], broadcast(THETA, ctx), numbers()).mine.any()


def test_the_pool_keeps_the_last_local_models():
    one, otherwise = SerialRun(), torch.full_like(THETA, 7.0)
    for round in (1, 2):
        ctx = context(2, 0, round=round)
        program = [use_download, Train(1), upload_theta]
        uploads = one.train(ctx, program, broadcast(THETA, ctx), numbers()).upload["theta"]
    found = one.clients.last_models(torch.arange(4), otherwise)
    assert torch.equal(found, torch.stack([uploads[1], otherwise, uploads[0], otherwise]))


# Predictions.


@pytest.mark.parametrize("at_once", [1024, 2])
def test_predictions_are_each_models_own_and_empty_where_there_is_nothing_to_test(monkeypatch, at_once):
    monkeypatch.setattr(serial_module, "_TEST_BATCH", at_once)
    thetas = torch.stack([THETA, -THETA, THETA.flip(0)])
    one, ctx = SerialRun(), context(3, 0, 1)
    found, logits = one.predict(ctx, thetas, "test"), one.engine.logits(one.job(ctx), thetas, "test")
    assert (found[0].shape, logits[0].shape) == ((0,), (0, MODEL.classes))
    assert found[0].dtype == torch.int64
    for labels, scores, client, theta in zip(found[1:], logits[1:], (0, 1), thetas[1:], strict=True):
        with torch.no_grad():
            expected = MODEL.module(theta)(DATA.inputs(client, "test"))
        assert torch.equal(labels, expected.argmax(dim=1))
        close(scores, expected)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_predictions_are_as_many_as_samples(split):
    found = SerialRun().predict(context(0, 1, 2, 3), THETA.expand(4, -1), split)
    assert [len(labels) for labels in found] == [DATA.size(client, split) for client in range(4)]


def test_a_job_may_have_its_own_prediction_function():
    def negated(model, scratch, x):
        return model.logits(scratch["theta"], x) * scratch["sign"]

    def set_sign(model, client):
        return client.set(theta=THETA, sign=torch.tensor(-1.0, dtype=THETA.dtype))

    one, ctx = SerialRun(), context(0, 1)
    job = PoolJob(ctx, [set_sign], numbers(), {}, negated, clients=one.clients)
    models = one.engine.personalize(job)
    assert models.scratch["sign"].tolist() == [-1, -1]
    found = one.engine.predict(job, models.theta, "test", models.scratch)
    for client, labels in zip((0, 1), found, strict=True):
        assert labels.equal(MODEL.logits(THETA, DATA.inputs(client, "test")).argmin(dim=1))
    [_, logits] = one.engine.logits(job, models.theta, "test", models.scratch)
    close(logits, -MODEL.logits(THETA, DATA.inputs(1, "test")))
    plain = one.engine.predict(job, models.theta, "test")
    assert not torch.equal(torch.cat(plain), torch.cat(found))


# Entries that are not sent.


def peek(model, client):
    return client.set(theta=client.download["theta"].values).send(theta=client.download["theta"].values)


def keeps(clients):
    return torch.stack([torch.arange(len(THETA)) % (client + 2) != 0 for client in clients])


@pytest.mark.parametrize("verb", ["train", "personalize"])
def test_a_client_that_reads_entries_it_was_not_sent_finds_nan(verb):
    ctx, keep = context(1, 0), keeps((1, 0))
    download = {"theta": Sparse(THETA.expand(2, -1), keep)}
    if verb == "train":
        found = SerialRun().train(ctx, [peek], download, numbers()).upload["theta"]
    else:
        found = SerialRun().personalize(ctx, [peek], download, numbers()).theta
    assert torch.equal(found.isnan(), ~keep)
    assert torch.equal(found[keep], THETA.expand(2, -1)[keep])
    assert THETA.isfinite().all()


def test_training_on_entries_that_were_not_sent_is_not_finite():
    ctx, keep = context(1, 0), keeps((1, 0))
    keep[0] = True
    update = SerialRun().train(ctx, [peek, Train(1)], {"theta": Sparse(THETA.expand(2, -1), keep)}, numbers())
    assert update.finite.tolist() == [True, False]


def test_sparse_uploads_are_stacked_and_the_server_finds_nan_in_what_was_not_sent():
    ctx, keep = context(2, 1, 0), keeps((2, 1, 0))

    def upload_part(model, client):
        count = client.download["step"]
        return client.set(theta=THETA).send(part=Sparse(THETA, torch.arange(len(THETA)) % count != 0), step=count)

    update = SerialRun().train(ctx, [upload_part], {"step": torch.tensor([4, 3, 2])}, numbers())
    part = update.upload["part"]
    assert isinstance(part, Sparse)
    assert torch.equal(part.keep, keep)
    assert torch.equal(part.values.isnan(), ~keep)
    assert torch.equal(part.values[keep], THETA.expand(3, -1)[keep])
    assert update.upload["step"].tolist() == [4, 3, 2]
    assert THETA.isfinite().all(), "the client's vector must not change"
