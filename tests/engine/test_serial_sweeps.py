"""Sweeps of the serial engine, and predictions of a method's own."""

import torch
from serial_cases import BATCH, DATA, MODEL, SEED, THETA, Alone, moment, numbers

from fedobp.engine import Counters, PoolJob
from fedobp.engine.batch_order import batches, step_key, subset
from fedobp.keys import Purpose, fold
from fedobp.method import Sweep


def note(model, client, batch):
    """Write down what a step can see, one line after the other."""
    line = torch.stack([batch.y.sum(), batch.weight.sum().long(), batch.key, batch.step, batch.epoch])
    at = torch.nn.functional.one_hot(client.scratch["lines"], len(client.scratch["notes"]))[:, None]
    return client.set(notes=client.scratch["notes"] + at * line, lines=client.scratch["lines"] + 1)


def a_notebook(model, client):
    return client.set(theta=THETA, notes=torch.zeros(40, 5, dtype=torch.int64), lines=torch.tensor(0))


def upload_notes(model, client):
    return client.send(notes=client.scratch["notes"], steps=client.data["steps"])


def swept(client, sweep):
    """Return the lines that a client wrote, and how many batches it says it had."""
    up = Alone().train(moment(client, round=2), [a_notebook, sweep, upload_notes]).upload
    steps = int(up["steps"][0])
    assert not up["notes"][0, steps:].any()
    return up["notes"][0, :steps].tolist()


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
    assert len({line[2] for line in swept(0, Sweep(note, 5))}) == 15, "every step has a key of its own"


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


def test_a_sweep_ends_when_it_is_told_to():
    assert len(swept(0, Sweep(note, 9, more=lambda model, client: client.scratch["lines"] < 4))) == 6  # whole epochs
    assert swept(0, Sweep(note, 9, more=lambda model, client: client.scratch["lines"] < 0)) == []


def test_what_is_computed_in_a_sweep_is_counted():
    one = Alone()
    one.train(moment(0, 1), [a_notebook, Sweep(note, 2, smallest=2), upload_notes])
    assert one.engine.counters == Counters(steps=6 + 4, slots=22 + 16, samples=22 + 16)
    one.train(moment(0), [a_notebook, Sweep(note, 2, smallest=2, passes=3), upload_notes])
    assert one.engine.counters.samples == 22 + 16 + 3 * 22


# Predictions of one's own.


def test_a_task_can_say_how_logits_come_about():
    def mixed(model, scratch, x):
        return model.logits(scratch["theta"], x) * scratch["sign"]

    def take_sign(model, client):
        return client.set(theta=THETA, sign=torch.tensor(-1.0, dtype=THETA.dtype))

    one, ctx = Alone(), moment(0, 1)
    task = PoolJob(ctx, [take_sign], numbers(), {}, mixed, clients=one.clients)
    served = one.engine.personalize(task)
    assert served["sign"].tolist() == [-1, -1]
    found = one.engine.predict(task, served["theta"], "test", served)
    for client, labels in zip((0, 1), found, strict=True):
        assert labels.equal(MODEL.logits(THETA, DATA.inputs(client, "test")).argmin(dim=1))
    plain = one.engine.predict(task, served["theta"], "test")
    assert not torch.equal(torch.cat(plain), torch.cat(found))
