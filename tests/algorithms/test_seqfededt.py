"""SeqFedEDT: one model that passes from client to client, by hand and against a plain loop."""

import math
from types import SimpleNamespace

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from plain_loops import (
    RATES,
    SIZES,
    batches,
    both_engines,
    each_round,
    flat,
    network_loss,
    sgd,
    small_federation,
    theta_0,
)

from fedobp.algorithms import METHODS
from fedobp.method import Train
from fedobp.models import Layout
from fedobp.records import mask_unsent, take

SeqFedEDT = METHODS["seqfededt"]


@pytest.fixture
def model():
    """Two entries of a base, and one tensor of a head with two."""
    return SimpleNamespace(layout=Layout(("fc.weight", "classifier.weight"), ((2,), (2,))))


class Passing:
    """Two clients and the model that passes between them."""

    def __init__(self, method, model, theta):
        self.method, self.model = method, model
        initial = method.init(model, theta, 0)
        self.server, self.states = initial.server, [initial.state, initial.state]
        self.records = [{name: value[None] for name, value in initial.record.items()} for _ in range(2)]

    def _download(self, client):
        ctx = context(client, model=self.model)
        download, records = self.method.download(ctx, self.server, self.records[client])
        assert list(download) == ["theta"]
        return ctx, mask_unsent(take(download, 0)), records

    def train(self, client, step, n=1):
        """Let a client train, which adds `step`; return the model that it started from."""
        ctx, download, records = self._download(client)
        merged, _ = run_program(self.model, self.method.personalize(ctx), self.states[client], download)
        trained, phases = run_program(self.model, self.method.client_update(ctx), self.states[client], download, [step])
        assert phases == [Train(5)]
        assert trained.theta.equal(merged.theta + step)
        self.states[client] = trained.state
        update = update_of([trained], n)
        self.server, self.records[client] = self.method.aggregate(ctx, self.server, records, update)
        return merged.theta.tolist()

    def served(self, client):
        ctx, download, _ = self._download(client)
        served, _ = run_program(self.model, self.method.personalize(ctx), self.states[client], download)
        return served.theta.tolist(), served.scratch["mine"].tolist()


@pytest.mark.essential
def test_the_model_passes_from_one_client_to_the_next(model):
    clients = Passing(SeqFedEDT(q=0.6), model, vector(1, 1, 1, 1))
    assert clients.train(0, vector(2, 0, 0, 1)) == [1, 1, 1, 1]  # becomes 3 1 1 2
    assert clients.train(1, vector(-3, 4, 0, 0)) == [3, 1, 1, 2]  # a new client takes all; becomes 0 5 1 2
    assert clients.server["theta"].tolist() == [0, 5, 1, 2]
    # Client 0 had 3 1 1 2: |difference * last| is 9 4 0 0, its 0.6-quantile is 3.2.
    assert clients.train(0, vector(0, 0, 0, 0), n=7) == [3, 1, 1, 2]
    assert clients.server["theta"].tolist() == [3, 1, 1, 2]  # no mean, whatever the sizes
    # Client 1 had 0 5 1 2: |difference * last| is 0 20 0 0.
    assert clients.served(1) == ([3, 5, 1, 2], [False, True, False, False])
    assert clients.served(0) == ([3, 1, 1, 2], [False] * 4)


def test_the_squared_score_depends_on_the_distance_alone(model):
    for score, kept in (("product", 1), ("squared", 0)):  # last 0 5 1 1, passing 9 1 1 1
        clients = Passing(SeqFedEDT(q=0.75, score=score), model, vector(0, 0, 0, 0))
        clients.train(0, vector(0, 5, 1, 1))
        clients.train(1, vector(9, -4, 0, 0))
        assert clients.served(0)[1].index(True) == kept


def test_a_literal_start_goes_back_to_theta_0(model):
    for start, expected in (("global", [1, 9, 1, 1]), ("literal", [1, 1, 1, 1])):
        clients = Passing(SeqFedEDT(q=0.75, start=start), model, vector(1, 1, 1, 1))
        clients.train(0, vector(0, 8, 0, 0))
        assert clients.train(1, torch.zeros(4)) == expected


def test_it_is_sequential():
    assert SeqFedEDT().sequential
    assert (SeqFedEDT().score, SeqFedEDT().q) == ("product", 0.999)


def test_every_option_changes_a_run():
    federation = small_federation("seqfededt", "one batch")
    changes = [{"score": "squared"}, {"q": 0.5}, {"norm": "layer"}, {"scope": "classifier"}, {"ema": 0.9},
               {"start": "literal"}]  # fmt: skip
    models = [flat(federation.run(**{"q": 0.9, **change}).state_dict().values()) for change in ({}, *changes)]
    assert len({tuple(model.tolist()) for model in models}) == len(models)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("score", ["product", "squared"])
def test_runs_equal_a_plain_loop(score, rates):
    federation = small_federation("seqfededt", rates, {"q": 0.9, "score": score})
    passing, last, sent, size = theta_0(federation), {}, 0, sum(SIZES)

    def merged(client):
        if client not in last:
            return passing, 0
        local, received = flat(last[client]), flat(passing)
        scores = ((local - received) * (local - received if score == "squared" else local)).abs()
        kept = scores > scores.quantile(0.9)
        return [*federation.model.layout.views(torch.where(kept, local, received)).values()], int(kept.sum())

    for round, cohort in each_round(federation):
        for client in cohort:
            start, kept = merged(client)
            sent += 8 * (size - kept) + min(4 * kept, math.ceil(size / 8))
            data = batches(federation, client, round, phase=1, epochs=2)
            passing = last[client] = sgd(federation, start, network_loss, data)
    served = {client: merged(client)[0] for client in range(4)}
    assert (
        sum(merged(client)[1] > 0 for client in last) == 2
    )  # all but the last trained client, whose model is the passing one
    for result in both_engines(federation, passing, served):
        assert (result.bytes.up_total, result.bytes.down_total) == (3 * 2 * 8 * size, sent)
