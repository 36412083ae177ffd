"""SeqFedEDT: a model that walks, by hand and against a plain loop."""

import math
from types import SimpleNamespace

import pytest
import torch
from contexts import with_model
from plain import RATES, SIZES, batches, both_engines, each_round, fit, flat, sgd, small, theta_0
from walk import vector

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate, RoundContext, Sparse, Train
from fedobp.models import Layout

SeqFedEDT = METHODS["seqfededt"]


@pytest.fixture
def model():
    """Two entries of a base, and one tensor of a head with two."""
    return SimpleNamespace(layout=Layout(("fc.weight", "classifier.weight"), ((2,), (2,))))


class Walk:
    """Two clients and the model that passes between them."""

    def __init__(self, method, model, theta):
        self.method, self.model = method, model
        start = method.init(model, theta, 0)
        self.server, self.state = start.server, [start.state, start.state]
        self.rows = [{name: value[None] for name, value in start.record.items()} for _ in range(2)]

    def _sent(self, client):
        ctx = RoundContext(None, 1, 9, 2, 5, torch.tensor([client]))
        download, records = self.method.download(with_model(self.model, ctx), self.server, self.rows[client])
        assert list(download) == ["theta"]
        sent = download["theta"]
        unsent = sent.values[0].masked_fill(~sent.keep[0], math.nan)
        return ctx, Client(self.state[client], {"theta": Sparse(unsent, sent.keep[0])}, {}, {}, {}), records

    def visit(self, client, step, n=1):
        """Let a client train, which adds `step`; return what it started from."""
        ctx, state, records = self._sent(client)
        begun = None
        for item in self.method.client_update(with_model(self.model, ctx)):
            if isinstance(item, Train):
                assert item == Train(5)
                begun, state = state.theta, state.set(theta=state.theta + step)
            else:
                state = item(self.model, state)
        self.state[client] = state.state
        up = {"theta": state.upload["theta"][None]}
        received = self.method.aggregate(
            with_model(self.model, ctx), self.server, records, CohortUpdate(up, torch.tensor([n]))
        )
        self.server, self.rows[client] = received
        return begun.tolist()

    def served(self, client):
        ctx, state, _ = self._sent(client)
        for item in self.method.personalize(with_model(self.model, ctx)):
            state = item(self.model, state)
        return state.theta.tolist(), state.scratch["mine"].tolist()


@pytest.mark.essential
def test_the_model_passes_from_one_client_to_the_next(model):
    walk = Walk(SeqFedEDT(q=0.6), model, vector(1, 1, 1, 1))
    assert walk.visit(0, vector(2, 0, 0, 1)) == [1, 1, 1, 1]  # leaves 3 1 1 2
    assert walk.visit(1, vector(-3, 4, 0, 0)) == [3, 1, 1, 2]  # never here before: takes all; leaves 0 5 1 2
    assert walk.server["theta"].tolist() == [0, 5, 1, 2]
    # Client 0 had 3 1 1 2: |difference * own| is 9 4 0 0, its 0.6-quantile is 3.2.
    assert walk.visit(0, vector(0, 0, 0, 0), n=7) == [3, 1, 1, 2]
    assert walk.server["theta"].tolist() == [3, 1, 1, 2]  # no mean, whatever the sizes
    # Client 1 had 0 5 1 2: |difference * own| is 0 20 0 0.
    assert walk.served(1) == ([3, 5, 1, 2], [False, True, False, False])
    assert walk.served(0) == ([3, 1, 1, 2], [False] * 4)


def test_the_other_score_looks_at_the_distance_alone(model):
    for score, kept in (("product", 1), ("squared", 0)):  # own 0 5 1 1, passing 9 1 1 1
        walk = Walk(SeqFedEDT(q=0.75, score=score), model, vector(0, 0, 0, 0))
        walk.visit(0, vector(0, 5, 1, 1))
        walk.visit(1, vector(9, -4, 0, 0))
        assert walk.served(0)[1].index(True) == kept


def test_a_literal_start_goes_back_to_theta_0(model):
    for start, begun in (("global", [1, 9, 1, 1]), ("literal", [1, 1, 1, 1])):
        walk = Walk(SeqFedEDT(q=0.75, start=start), model, vector(1, 1, 1, 1))
        walk.visit(0, vector(0, 8, 0, 0))
        assert walk.visit(1, torch.zeros(4)) == begun


def test_clients_take_turns():
    assert SeqFedEDT().sequential
    assert (SeqFedEDT().score, SeqFedEDT().q) == ("product", 0.999)


def test_every_option_changes_a_run():
    federation = small("seqfededt", "one batch")
    changes = [{"score": "squared"}, {"q": 0.5}, {"norm": "layer"}, {"scope": "classifier"}, {"ema": 0.9},
               {"start": "literal"}]  # fmt: skip
    models = [flat(federation.run(**{"q": 0.9, **change}).state_dict().values()) for change in ({}, *changes)]
    assert len({tuple(model.tolist()) for model in models}) == len(models)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("score", ["product", "squared"])
def test_runs_are_those_of_a_plain_loop(score, rates):
    federation = small("seqfededt", rates, {"q": 0.9, "score": score})
    passing, last, sent, size = theta_0(federation), {}, 0, sum(SIZES)

    def merged(client):
        if client not in last:
            return passing, 0
        own, arrived = flat(last[client]), flat(passing)
        marks = ((own - arrived) * (own - arrived if score == "squared" else own)).abs()
        kept = marks > marks.quantile(0.9)
        return [*federation.model.layout.views(torch.where(kept, own, arrived)).values()], int(kept.sum())

    for round, cohort in each_round(federation):
        for client in cohort:
            begun, kept = merged(client)
            sent += 8 * (size - kept) + min(4 * kept, math.ceil(size / 8))
            passing = last[client] = sgd(federation, begun, fit, batches(federation, client, round, phase=1, epochs=2))
    served = {client: merged(client)[0] for client in range(4)}
    assert sum(merged(client)[1] > 0 for client in last) == 2  # the last one's model is the one that passes
    for result in both_engines(federation, passing, served):
        assert (result.bytes.up_total, result.bytes.down_total) == (3 * 2 * 8 * size, sent)
