"""Every method with compressed messages: both sides hold the same references, and both engines agree."""

from functools import cache

import pytest
import torch
from plain_loops import small_federation
from test_all_methods import CASES, OPTIONS, advance

from fedobp import wire
from fedobp.algorithms import METHODS
from fedobp.engine import Budget
from fedobp.grouping import engine_for
from fedobp.launch import simulate
from fedobp.records import mask_unsent, take


def federation_of(name, options, engine="serial", down="8bit", up="8bit"):
    return small_federation(
        name, "one batch", dict(options), rounds=4, epochs=1, engine=engine, eval_every=4, compress_down=down,
        compress_up=up,
    )  # fmt: skip


@cache
def rounds_of(name, options):
    """Run a compressed method on the serial engine; return its jobs with updates and states, and run and clients."""
    federation = federation_of(name, options)
    config = federation.config
    engine = engine_for(config, federation.model)
    run, clients = simulate(federation.plan(config, federation.method), engine, Budget())
    steps = []
    for number in range(1, config.rounds + 1):
        round = run.round(run.plan(number))
        job = next(round)
        while job is not None:
            before = [clients.state[client] for client in job.ctx.cohort.tolist()]
            [update] = engine.train([clients.assign(job)])
            steps.append((job, update, before))
            job = advance(round, update)
    return federation.method, steps, run, clients


@pytest.mark.parametrize(("name", "options"), CASES)
def test_both_sides_hold_the_same_references(name, options):
    method, _, run, clients = rounds_of(name, options)
    trained = [client for client in range(4) if client in clients.state]
    assert len(trained) >= 3
    for client in trained:
        record, state = run.records[client], clients.state[client]
        references = [key for key in record if key.startswith("sent.")]
        assert references or name == "local"
        for key in references:
            assert record[key].equal(state[key]), (client, key)
        if name == "fedobp":  # the server scores what the client will merge
            assert record["theta"].equal(state["theta"])
    assert method.keeps_last_model == METHODS[name].keeps_last_model
    if method.keeps_last_model:
        assert all(torch.equal(clients.last(client), clients.state[client]["theta"]) for client in trained)


def test_a_personal_entry_has_the_upload_as_its_reference():
    """So its next upload is a small difference, too, although the server sends no value of it."""
    _, steps, run, _ = rounds_of("fedobp", tuple(OPTIONS["fedobp"].items()))
    job, _, _ = steps[-1]
    keep = job.download["theta"].keep
    assert (~keep).sum() > 20
    for at, client in enumerate(job.ctx.cohort.tolist()):
        record = run.records[client]
        assert record["sent.theta"][~keep[at]].equal(record["theta"][~keep[at]])
        assert not record["sent.theta"][keep[at]].equal(record["theta"][keep[at]])


@pytest.mark.parametrize(("name", "options"), CASES)
def test_messages_pass_the_wire_as_the_receiver_expects_them(name, options):
    method, steps, run, _ = rounds_of(name, options)
    sizes = []
    for job, update, before in steps:
        down = mask_unsent(job.download)
        for at, state in enumerate(before):
            expected = method.expected_upload(job.ctx, take(down, at), state)
            for record, like in ((take(update.upload, at), expected), (take(down, at), take(down, at))):
                message = wire.encode(record)
                sizes.append(len(message) - wire.header_bytes(message))
                found = wire.decode_expected(message, like)
                for key, value in record.items():
                    torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True)
    assert run.accounting.bytes_down + run.accounting.bytes_up == sum(sizes)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_both_engines_agree(name, options):
    serial, lanes = (federation_of(name, options, engine).run() for engine in ("serial", "lanes"))
    near = 1e-6 if name == "fedobp-auto" else 1e-10  # b / a of a fit amplifies rounding where a is small
    for client in (None, 0, 1, 2, 3):
        for key, value in serial.state_dict(client).items():
            torch.testing.assert_close(lanes.state_dict(client)[key], value, rtol=0, atol=near)
    # Scales differ in their last bits, so the zstd frames may.
    assert lanes.bytes.down_total == pytest.approx(serial.bytes.down_total, rel=0.02)
    assert lanes.bytes.up_total == pytest.approx(serial.bytes.up_total, rel=0.02)


@pytest.mark.parametrize(("down", "up"), [("none", "8bit"), ("8bit", "none"), ("4bit", "sparse"), ("sparse", "4bit")])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_with_every_level(name, down, up):
    result = federation_of(name, (), "lanes", down, up).run()
    assert 0 <= result.accuracy.pooled <= 100
