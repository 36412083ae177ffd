"""PSPFL by hand and against a plain loop: distant entries are kept, and entries that change much are not sent."""

import math
from types import SimpleNamespace

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from plain_loops import RATES, batches, both_engines, each_round, flat, mean, sgd, small_federation, theta_0
from torch.nn import functional

from fedobp import Config, Federation
from fedobp.algorithms import METHODS
from fedobp.models import Layout
from fedobp.records import take

METHOD = METHODS["pspfl"](keep=0.5, share=0.2)
MODEL = SimpleNamespace(layout=Layout(("fc.weight",), ((4,),)))
CTX = context(0, 1, model=MODEL)


@pytest.mark.essential
def test_two_rounds_by_hand():
    server, records, state = METHOD.init(MODEL, vector(0, 0, 0, 0), 0)
    download, records = METHOD.download(CTX, server, records)
    clients = []
    for client, step in ((0, vector(1, 2, 3, 4)), (1, vector(8, 4, 2, 1))):
        done, _ = run_program(MODEL, METHOD.client_update(CTX), state, take(download, client), [step])
        assert done.state["theta"].tolist() == step.tolist()
        assert list(done.upload) == ["theta"]
        clients.append(done)
    # Of four changes three lie above the 0.2-quantile, at position 0.6: they are not sent.
    assert clients[0].upload["theta"].keep.tolist() == [True, False, False, False]
    assert clients[1].upload["theta"].keep.tolist() == [False, False, False, True]
    server, _ = METHOD.aggregate(CTX, server, records, update_of(clients, 1, 3))
    assert server["theta"].tolist() == [0.25, 0, 0, 0.75]  # unsent entries count as the old value, 0
    merged, _ = run_program(MODEL, METHOD.personalize(CTX), clients[0].state, {"theta": server["theta"]})
    # Distances 0.75, 2, 3, 3.25: two lie above the median.
    assert merged.scratch["mine"].tolist() == [False, False, True, True]
    assert merged.theta.tolist() == [0.25, 0, 3, 4]
    tied, _ = run_program(MODEL, METHOD.personalize(CTX), clients[0].state, {"theta": vector(0, 1, 2, 1)})
    assert tied.scratch["mine"].tolist() == [False, False, False, True]  # 1, 1, 1, 3: ties at the threshold are shared


def test_a_client_in_its_second_round_by_hand():
    """What it sends depends on the change from the merged model, not from the download."""
    state = {"theta": vector(0, 0, 0, 9), "seen": torch.tensor(True)}
    program = METHODS["pspfl"](keep=0.7, share=0.6).client_update(CTX)
    done, _ = run_program(MODEL, program, state, {"theta": vector(1, 2, 3, 4)}, [vector(1, 4, 3, 2)])
    # Distances 1, 2, 3, 5: the last entry stays, and training starts from 1, 2, 3, 9.
    assert done.scratch["start"].tolist() == [1, 2, 3, 9]
    assert done.state["theta"].tolist() == done.upload["theta"].values.tolist() == [2, 6, 6, 11]
    # Changes 1, 4, 3, 2: two lie above the 0.6-quantile. From the download they would be 1, 4, 3, 7.
    assert done.upload["theta"].keep.tolist() == [True, False, False, True]


@pytest.mark.parametrize("rates", RATES)
def test_runs_equal_a_plain_loop(rates):
    federation = small_federation("pspfl", rates, {"keep": 0.8, "share": 0.6})
    theta, last, sent = flat(theta_0(federation)), {}, 0

    def merged(client):
        if client not in last:
            return theta
        far = (last[client] - theta).abs()
        return torch.where(far > far.quantile(0.8), last[client], theta)

    def loss(values, x, y):
        return functional.cross_entropy(federation.model.logits(*values, x), y)

    for round, cohort in each_round(federation):
        uploads = []
        for client in cohort:
            start = merged(client)
            [last[client]] = sgd(federation, [start], loss, batches(federation, client, round, phase=1, epochs=2))
            change = (last[client] - start).abs()
            sends = change <= change.quantile(0.6)
            uploads.append([torch.where(sends, last[client], theta)])
            kept = int(sends.sum())
            sent += 8 * kept + min(4 * (len(theta) - kept), math.ceil(len(theta) / 8))
        [theta] = mean(federation, cohort, uploads)
    for result in both_engines(federation, [theta], {client: [merged(client)] for client in range(4)}):
        assert (result.bytes.down_total, result.bytes.up_total) == (6 * 8 * len(theta), sent)


def test_a_client_that_has_never_trained_is_served_the_global_model():
    state = METHOD.init(MODEL, vector(0, 0, 0, 0), 0).state
    served, _ = run_program(MODEL, METHOD.personalize(CTX), state, {"theta": vector(5, 1, 2, 3)})
    assert served.theta.tolist() == [5, 1, 2, 3]
    assert not served.scratch["mine"].any()


def test_statistics_of_batch_norm_do_not_compete():
    model = SimpleNamespace(layout=Layout(("fc.weight", "norm.running_mean"), ((2,), (2,))))
    ctx, download = context(0, 1, model=model), {"theta": vector(0, 0, 0, 0)}
    state = METHOD.init(model, vector(0, 0, 0, 0), 0).state
    done, _ = run_program(model, METHOD.client_update(ctx), state, download, [vector(1, 2, 90, 80)])
    assert done.upload["theta"].keep.tolist() == [True, False, True, True]
    merged, _ = run_program(model, METHOD.personalize(ctx), done.state, download)
    assert merged.theta.tolist() == [0, 2, 0, 0]


def test_uploading_all_entries_is_fedobp():
    """Entries above the quantile of |d| are those above that of d^2, and a client's last model is its last upload."""
    config = Config(clients=4, rounds=4, participation=0.5, epochs=1, model="mlp", precision="fp64", eval_every=1)
    federation = Federation(config)
    ours, theirs = federation.run("pspfl", keep=0.9, share=1.0), federation.run("fedobp", q=0.9)
    assert ours.history == theirs.history
    for client in range(4):
        assert all(map(torch.equal, ours.state_dict(client).values(), theirs.state_dict(client).values()))
