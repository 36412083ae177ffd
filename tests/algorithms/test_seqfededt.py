"""SeqFedEDT: a model that walks, by hand and against a plain loop."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from walk import vector

from fedobp import Config, Federation
from fedobp.algorithms import METHODS, Client, Moment, Sparse, Train
from fedobp.course import cohorts
from fedobp.models import Layout

SeqFedEDT = METHODS["seqfededt"]
SMALL = {"clients": 5, "participation": 0.6, "rounds": 3, "epochs": 2, "lr": 0.1, "model": "mlp", "device": "cpu"}


@pytest.fixture
def model():
    """Two entries of a base, and one tensor of a head with two."""
    return SimpleNamespace(layout=Layout(("fc.weight", "classifier.weight"), ((2,), (2,))))


class Walk:
    """Two clients and the model that passes between them."""

    def __init__(self, method, model, theta):
        self.method, self.model = method, model
        start = method.begin(model, theta, 0)
        self.server, self.own = start.server, [start.own, start.own]
        self.rows = [{name: value[None] for name, value in start.row.items()} for _ in range(2)]

    def _sent(self, client):
        now = Moment(1, 9, 2, 5, torch.tensor([client]))
        down, rows = self.method.send(self.model, now, self.server, self.rows[client])
        assert list(down) == ["theta"]
        sent = down["theta"]
        unsent = sent.values[0].masked_fill(~sent.keep[0], math.nan)
        return now, Client(self.own[client], {"theta": Sparse(unsent, sent.keep[0])}, {}, {}, {}), rows

    def visit(self, client, step, n=1):
        """Let a client train, which adds `step`; return what it started from."""
        now, state, rows = self._sent(client)
        begun = None
        for item in self.method.local(self.model, now):
            if isinstance(item, Train):
                assert item == Train(5)
                begun, state = state.theta, state.set(theta=state.theta + step)
            else:
                state = item(self.model, state)
        self.own[client] = state.own
        up = {"theta": state.up["theta"][None]}
        received = self.method.receive(self.model, now, self.server, rows, up, torch.tensor([n]))
        self.server, self.rows[client] = received
        return begun.tolist()

    def served(self, client):
        now, state, _ = self._sent(client)
        for item in self.method.serve(self.model, now):
            state = item(self.model, state)
        return state.theta.tolist(), state.work["mine"].tolist()


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
    assert SeqFedEDT().together is False
    assert (SeqFedEDT().score, SeqFedEDT().q) == ("product", 0.999)


def flat(state):
    return torch.cat([tensor.flatten() for tensor in state.values()])


def test_every_option_changes_a_run():
    federation = Federation(Config(**SMALL))
    changes = [{"score": "squared"}, {"q": 0.5}, {"norm": "layer"}, {"scope": "classifier"}, {"ema": 0.9},
               {"start": "literal"}]  # fmt: skip
    models = [flat(federation.run("seqfededt", **{"q": 0.9, **change}).state_dict()) for change in ({}, *changes)]
    assert len({tuple(model.tolist()) for model in models}) == len(models)


@pytest.mark.parametrize("score", ["product", "squared"])
def test_runs_are_those_of_a_plain_loop(score):
    """Full-batch clients on the digits, coded again without the library's engines."""
    config = Config(**SMALL, method="seqfededt", batch_size=2000, precision="fp64", partition="iid",
                    options={"q": 0.9, "score": score})  # fmt: skip
    federation = Federation(config)
    data, model = federation.data, federation.model
    passing, last, sent = model.initial(config.seed).double(), {}, 0

    def merged(client):
        if client not in last:
            return passing, 0
        own = last[client]
        each = own - passing if score == "squared" else own
        marks = ((own - passing) * each).abs()
        kept = marks > marks.quantile(0.9)
        return torch.where(kept, own, passing), int(kept.sum())

    for cohort in cohorts(config):
        for client in cohort.tolist():
            start, kept = merged(client)
            sent += 8 * (len(start) - kept) + min(4 * kept, math.ceil(len(start) / 8))
            w = start.clone().requires_grad_()
            optimizer = torch.optim.SGD([w], 0.1)
            for _ in range(2):
                optimizer.zero_grad()
                logits = model.logits(w, data.inputs(client, "train"))
                functional.cross_entropy(logits, data.targets(client, "train")).backward()
                optimizer.step()
            passing = last[client] = w.detach()
    assert any(merged(client)[1] for client in range(5))
    for engine in ("serial", "lanes"):
        result = Federation(replace(config, engine=engine), beside=federation).run()
        torch.testing.assert_close(flat(result.state_dict()), passing, rtol=0, atol=1e-10)
        for client in range(5):
            torch.testing.assert_close(flat(result.state_dict(client)), merged(client)[0], rtol=0, atol=1e-10)
        assert result.bytes.up_total == 3 * 3 * 8 * model.layout.size
        assert result.bytes.down_total == sent
