"""PSPFL with two clients, worked out by hand: far entries stay, entries that move far are not sent."""

import math
from types import SimpleNamespace

import pytest
import torch
from contexts import with_model
from plain import RATES, batches, both_engines, each_round, flat, mean, sgd, small, theta_0
from torch.nn import functional
from walk import moment, row, vector, walk

from fedobp import Config, Federation
from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate, Sparse
from fedobp.models import Layout

METHOD = METHODS["pspfl"](keep=0.5, share=0.2)
CTX = moment(0, 1)
MODEL = SimpleNamespace(layout=Layout(("fc.weight",), ((4,),)))


@pytest.mark.essential
def test_two_visits_by_hand():
    server, records, own = METHOD.init(MODEL, vector(0, 0, 0, 0), 0)
    download, records = METHOD.download(with_model(MODEL, CTX), server, records)
    done = []
    for client, step in ((0, vector(1, 2, 3, 4)), (1, vector(8, 4, 2, 1))):
        state, _ = walk(MODEL, METHOD.client_update(with_model(MODEL, CTX)), own, row(download, client), [step])
        assert state.state["theta"].tolist() == step.tolist()
        assert list(state.upload) == ["theta"]
        done.append(state)
    # Of four changes three lie above the 0.2-quantile, at position 0.6: they stay at home.
    assert done[0].upload["theta"].keep.tolist() == [True, False, False, False]
    assert done[1].upload["theta"].keep.tolist() == [False, False, False, True]
    values, keep = (torch.stack([getattr(one.upload["theta"], name) for one in done]) for name in ("values", "keep"))
    server, _ = METHOD.aggregate(
        with_model(MODEL, CTX), server, records, CohortUpdate({"theta": Sparse(values, keep)}, torch.tensor([1, 3]))
    )
    assert server["theta"].tolist() == [0.25, 0, 0, 0.75]  # what was not sent counts as the old value, 0
    merged, _ = walk(MODEL, METHOD.personalize(with_model(MODEL, CTX)), done[0].state, {"theta": server["theta"]}, [])
    # Distances 0.75, 2, 3, 3.25: two lie above the median.
    assert merged.scratch["mine"].tolist() == [False, False, True, True]
    assert merged.theta.tolist() == [0.25, 0, 3, 4]
    tied, _ = walk(MODEL, METHOD.personalize(with_model(MODEL, CTX)), done[0].state, {"theta": vector(0, 1, 2, 1)}, [])
    assert tied.scratch["mine"].tolist() == [False, False, False, True]  # 1, 1, 1, 3: ties at the threshold are shared


def test_a_client_that_comes_back_by_hand():
    """What it sends is told by how far training moved it from the merged model, not from the download."""
    own = {"theta": vector(0, 0, 0, 9), "seen": torch.tensor(True)}
    state, _ = walk(MODEL, METHODS["pspfl"](keep=0.7, share=0.6).client_update(with_model(MODEL, CTX)), own, {"theta": vector(1, 2, 3, 4)},
                    [vector(1, 4, 3, 2)])  # fmt: skip
    # Distances 1, 2, 3, 5: the last entry stays, and training starts from 1, 2, 3, 9.
    assert state.scratch["begun"].tolist() == [1, 2, 3, 9]
    assert state.state["theta"].tolist() == state.upload["theta"].values.tolist() == [2, 6, 6, 11]
    # Changes 1, 4, 3, 2: two lie above the 0.6-quantile. From the download they would be 1, 4, 3, 7.
    assert state.upload["theta"].keep.tolist() == [True, False, False, True]


@pytest.mark.parametrize("rates", RATES)
def test_runs_are_those_of_a_plain_loop(rates):
    federation = small("pspfl", rates, {"keep": 0.8, "share": 0.6})
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
            begun = merged(client)
            [last[client]] = sgd(federation, [begun], loss, batches(federation, client, round, phase=1, epochs=2))
            change = (last[client] - begun).abs()
            still = change <= change.quantile(0.6)
            uploads.append([torch.where(still, last[client], theta)])
            kept = int(still.sum())
            sent += 8 * kept + min(4 * (len(theta) - kept), math.ceil(len(theta) / 8))
        [theta] = mean(federation, cohort, uploads)
    for result in both_engines(federation, [theta], {client: [merged(client)] for client in range(4)}):
        assert (result.bytes.down_total, result.bytes.up_total) == (6 * 8 * len(theta), sent)


def test_a_client_never_selected_is_served_the_global_model():
    own = METHOD.init(MODEL, vector(0, 0, 0, 0), 0).state
    served, _ = walk(MODEL, METHOD.personalize(with_model(MODEL, CTX)), own, {"theta": vector(5, 1, 2, 3)}, [])
    assert served.theta.tolist() == [5, 1, 2, 3]
    assert not served.scratch["mine"].any()


def test_statistics_of_batch_norm_do_not_compete():
    model = SimpleNamespace(layout=Layout(("fc.weight", "norm.running_mean"), ((2,), (2,))))
    own = METHOD.init(model, vector(0, 0, 0, 0), 0).state
    state, _ = walk(
        model, METHOD.client_update(with_model(model, CTX)), own, {"theta": vector(0, 0, 0, 0)}, [vector(1, 2, 90, 80)]
    )
    assert state.upload["theta"].keep.tolist() == [True, False, True, True]
    merged, _ = walk(model, METHOD.personalize(with_model(model, CTX)), state.state, {"theta": vector(0, 0, 0, 0)}, [])
    assert merged.theta.tolist() == [0, 2, 0, 0]


def test_sending_everything_is_fedobp():
    """Above the quantile of |d| lies what is above that of d^2, and a client's own last model is its last upload."""
    config = Config(clients=4, rounds=4, participation=0.5, epochs=1, model="mlp", precision="fp64", eval_every=1)
    federation = Federation(config)
    ours, theirs = federation.run("pspfl", keep=0.9, share=1.0), federation.run("fedobp", q=0.9)
    assert ours.history == theirs.history
    for client in range(4):
        assert all(map(torch.equal, ours.state_dict(client).values(), theirs.state_dict(client).values()))
