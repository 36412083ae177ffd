"""Counterdrift with two clients, by hand: each starts ahead of its own drift, and the server knows the drifts."""

from dataclasses import replace

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from plain_loops import small_federation

from fedobp.algorithms import METHODS
from fedobp.method import Train
from fedobp.records import stack, take

METHOD = METHODS["counterdrift"](beta=0.5, share=0.75)


def begin(clients=2):
    server, record, state = METHOD.init(None, vector(0, 0), 0)
    assert state == {}
    return server, stack([record] * clients)


def play(server, records, moves, steps=(1, 2), method=METHOD):
    """Play a round of the first clients, which make these moves in so many steps; return also where they start."""
    cohort = list(range(len(moves)))
    ctx = context(*cohort)
    download, given = method.download(ctx, server, take(records, cohort))
    clients = []
    for at, move in enumerate(moves):
        program, count = method.client_update(ctx), torch.tensor(steps[at])
        client, phases = run_program(None, program, {}, take(download, at), [move], {"steps": count})
        assert phases == [Train(5)]
        clients.append(client)
    server, after = method.aggregate(
        ctx, server, given, update_of(clients, *(32 * count for count in steps[: len(moves)]))
    )
    rest = {name: value[len(moves) :] for name, value in records.items()}
    return server, {name: torch.cat([value, rest[name]]) for name, value in after.items()}, download["theta"].tolist()


@pytest.mark.essential
def test_three_rounds_by_hand():
    server, records = begin()
    server, records, starts = play(server, records, (vector(4, 0), vector(0, 8)))
    assert starts == [[0, 0], [0, 0]]  # nobody is known to drift
    assert server["theta"].tolist() == server["move"].tolist() == [2, 4]
    assert records["rate"].tolist() == [[4, 0], [0, 4]]  # in 1 and 2 steps
    # The mean rate is (2, 2): to take off are (2, 2) - (4, 0) and 2 ((2, 2) - (0, 4)), three quarters before training.
    server, records, starts = play(server, records, (vector(4, 0), vector(0, 8)))
    assert starts == [[3 - 1.5, 6 + 1.5], [3 + 3, 6 - 3]]  # (2, 4) + (1, 2) + those
    assert server["theta"].tolist() == [6, 9]  # the mean of (5.5, 7.5) + (-0.5, 0.5) and (6, 11) + (1, -1)
    assert server["move"].tolist() == [4, 5]
    # Client 0 alone, which does not move now: what it drifted the last time is taken off all the same.
    server, records, starts = play(server, records, (vector(0, 0),))
    assert starts == [[8 - 1.5, 11.5 + 1.5]]
    assert server["theta"].tolist() == [6.5 - 0.5, 13 + 0.5]
    assert records["rate"].tolist() == [[0, 0], [0, 4]]
    assert server["rates"].tolist() == [0, 4]
    assert server["seen"] == 2
    served, _ = METHOD.download(replace(context(0, 1), serving=True), server, records)
    assert served["theta"].tolist() == [server["theta"].tolist()] * 2


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_of_constant_moves_the_common_part_is_left(share):
    """Whatever the share: from the second round on, a client stands for the mean rate times its steps."""
    method = METHODS["counterdrift"](beta=0.0, share=share)
    server, records = begin()
    for _ in range(3):
        before = server["theta"]
        server, records, starts = play(server, records, (vector(4, 0), vector(0, 8)), method=method)
    assert (server["theta"] - before).tolist() == [3, 3]  # (2, 2) in 1.5 steps
    drift = torch.stack([vector(-2, 2), vector(4, -4)])
    assert (torch.tensor(starts) - before).equal(share * drift)


def test_a_client_that_took_no_step_is_not_known_to_drift():
    server, records = begin()
    server, records, _ = play(server, records, (vector(0, 0), vector(0, 6)), steps=(0, 3))
    assert server["theta"].tolist() == [0, 6]
    assert records["steps"].tolist() == [0, 3]
    assert server["seen"] == 1
    _, _, starts = play(server, records, (vector(0, 0), vector(0, 6)), steps=(0, 3))
    assert starts == [[0, 9], [0, 9]]  # client 1 is the only one: its rate is the common one


def test_a_client_cannot_have_taken_more_steps_than_it_has_samples():
    server, records = begin()
    program, ctx = METHOD.client_update(context(0, 1)), context(0, 1)
    download, _ = METHOD.download(ctx, server, records)
    clients = [run_program(None, program, {}, take(download, at), [vector(5, 0)], {"steps": torch.tensor(10**15)})[0]
               for at in (0, 1)]  # fmt: skip
    _, records = METHOD.aggregate(ctx, server, records, update_of(clients, 1, 2))
    assert records["steps"].tolist() == [5, 10]  # 5 epochs
    assert records["rate"].tolist() == [[1, 0], [0.5, 0]]


def test_the_server_s_sums_are_those_of_the_clients():
    torch.manual_seed(0)
    server, records = begin(5)
    steps = (1, 2, 3, 4, 5)
    for count in (5, 2, 3, 5, 1, 4):
        server, records, _ = play(server, records, torch.randn(count, 2).unbind(), steps)
    torch.testing.assert_close(server["rates"], records["rate"].sum(0))
    assert server["seen"] == 5
    still = {**server, "theta": vector(0, 0), "move": vector(0, 0)}
    download, _ = METHOD.download(context(*range(5)), still, records)
    drifts = (download["theta"] / torch.tensor(steps)[:, None]).sum(0)  # for a step, they cancel
    torch.testing.assert_close(drifts, vector(0, 0), rtol=0, atol=1e-5)


def test_clients_that_move_alike_have_no_drift():
    """Then it is FedACG."""
    fedacg = METHODS["fedacg"](beta=0.5)
    (server, records), other = begin(), fedacg.init(None, vector(0, 0), 0).server
    for move in (vector(4, 0), vector(-1, 2), vector(0, 1)):
        server, records, _ = play(server, records, (move, move), steps=(2, 2))
        other, _, _ = play(other, {}, (move, move), steps=(2, 2), method=fedacg)
        torch.testing.assert_close(server["theta"], other["theta"])


def test_both_engines_agree():
    serial, lanes = (
        small_federation("counterdrift", "one batch", engine=engine).run() for engine in ("serial", "lanes")
    )
    for key, value in serial.state_dict().items():
        torch.testing.assert_close(lanes.state_dict()[key], value, rtol=0, atol=1e-6)
