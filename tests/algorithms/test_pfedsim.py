"""pFedSim: similarities and mixtures worked out by hand, and whole runs against a plain loop."""

import math
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from contexts import with_model
from plain import RATES, batches, both_engines, each_round, fit, flat, mean, sgd, small, theta_0
from torch import nn
from walk import vector, walk

from fedobp.algorithms import METHODS
from fedobp.algorithms.pfedsim import alikeness, shares
from fedobp.errors import FedobpError
from fedobp.method import CohortUpdate, RoundContext, Train
from fedobp.models import NETS, Model

METHOD = METHODS["pfedsim"](rho=0.25)


@pytest.fixture
def model(monkeypatch):
    """Entries: fc.weight 0 and 1, classifier.weight 2 to 5 (two rows of two), classifier.bias 6 and 7."""
    layers = {"fc": lambda: nn.Linear(1, 2, bias=False), "classifier": lambda: nn.Linear(2, 2)}
    build = lambda shape, classes: nn.Sequential(OrderedDict({k: make() for k, make in layers.items()}))  # noqa: E731
    monkeypatch.setitem(NETS, "tiny", build)
    return Model("tiny", (1,), 2)


def moment(round, *cohort):
    return RoundContext(model=None, round=round, rounds=4, clients=3, epochs=5, cohort=torch.tensor(cohort))


def round_of(model, ctx, server, owns, *steps):
    """Play a round; training adds `steps`. Return the server, and what each client was sent."""
    download, records = METHOD.download(with_model(model, ctx), server, {})
    assert list(download) == ["theta"]
    done = []
    for at, (client, step) in enumerate(zip(ctx.cohort.tolist(), steps, strict=True)):
        state, phases = walk(
            model, METHOD.client_update(with_model(model, ctx)), owns[client], {"theta": download["theta"][at]}, [step]
        )
        assert phases == [Train(5)]
        assert list(state.upload) == ["theta"]
        owns[client] = state.state
        done.append(state.upload["theta"])
    server, records = METHOD.aggregate(
        with_model(model, ctx), server, records, CohortUpdate({"theta": torch.stack(done)}, torch.tensor([1, 3]))
    )
    assert records == {}
    return server, download["theta"]


@pytest.mark.essential
def test_four_rounds_by_hand(model):
    theta = vector(1, 1, 1, 0, 1, 0, 7, 7)
    server, records, own = METHOD.init(model, theta, 0)
    assert records == {}
    owns = [own] * 3
    # Round 1 is FedAvg's: sizes count.
    server, _ = round_of(model, moment(1, 0, 1), server, owns, vector(4, *[0] * 7), vector(0, 4, *[0] * 6))
    start = [2, 4, 1, 0, 1, 0, 7, 7]
    assert server["theta"].tolist() == start
    assert list(server) == ["theta"]
    assert not any(own["seen"] for own in owns)
    # Round 2: everyone's own model is that of the warm-up; sizes count no more.
    turn = vector(10, 0, 0, 0, -1, 1, 1, 1)  # the second row turns from (1, 0) to (0, 1)
    server, sent = round_of(model, moment(2, 0, 1), server, owns, turn, vector(-10, 0, 0, 0, 0, 0, 0, 0))
    assert sent.tolist() == [start, start]
    models = [[12, 4, 1, 0, 0, 1, 8, 8], [-8, 4, 1, 0, 1, 0, 7, 7], start]
    assert server["models"].tolist() == models
    assert server["theta"].tolist() == start
    assert torch.allclose(server["alike"], torch.tensor([[0.9999, 0.5, 0], [0.5, 0.9999, 0], [0, 0, 0.9999]]))
    # Round 3: client 1 gets a mean of the bases of 0 and itself, client 2 its own; heads are their own.
    server, sent = round_of(model, moment(3, 1, 2), server, owns, torch.zeros(8), torch.zeros(8))
    weight = math.log(2) / (math.log(2) + math.log(10_000))
    mixed = [12 * weight - 8 * (1 - weight), 4, *models[1][2:]]
    assert sent[0].tolist() == pytest.approx(mixed, rel=1e-5)  # 1 - 0.9999 in float32
    assert sent[1].tolist() == start
    # 1 and 2 have equal heads, and are as much alike as one is like oneself; 0 and 1 keep what was known.
    expected = torch.tensor([[0.9999, 0.5, 0], [0.5, 0.9999, 0.9999], [0, 0.9999, 0.9999]])
    assert torch.allclose(server["alike"], expected)
    assert server["models"][0].tolist() == models[0]
    assert server["models"][1].equal(sent[0])
    # At test everyone has what it stored; a client that has stored nothing has the warm-up's model.
    ctx = moment(4, 0, 1, 2)
    download, _ = METHOD.download(with_model(model, ctx), server, {})
    for client, expected in ((0, models[0]), (1, mixed)):
        served, _ = walk(
            model, METHOD.personalize(with_model(model, ctx)), owns[client], {"theta": download["theta"][client]}, []
        )
        assert served.theta.tolist() == pytest.approx(expected, rel=1e-5)
        assert served.scratch["mine"].all()
    served, _ = walk(model, METHOD.personalize(with_model(model, ctx)), own, {"theta": download["theta"][2]}, [])
    assert not served.scratch["mine"].any()
    served, _ = walk(model, METHOD.personalize(with_model(model, moment(1, 0))), own, {"theta": theta}, [])
    assert served.theta.equal(theta)
    assert "mine" not in served.scratch


def test_alikeness_is_the_mean_cosine_of_rows_between_0_and_that_of_equals():
    heads = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[4.0, 3.0], [5.0, 0.0]], [[-3.0, -4.0], [0.0, 0.0]]])
    found = alikeness(heads)
    assert torch.allclose(found, torch.tensor([[0.9999, 0.98, 0], [0.98, 0.9999, 0], [0, 0, 0.5]]))
    assert torch.allclose(alikeness(7 * heads), found)


def test_a_client_is_like_itself_even_without_a_head(model):
    server, uploads = {"theta": torch.ones(8)}, {"theta": torch.zeros(2, 8)}
    server, _ = METHOD.aggregate(
        with_model(model, moment(2, 0, 1)), server, {}, CohortUpdate(uploads, torch.tensor([1, 1]))
    )
    assert torch.allclose(server["alike"], 0.9999 * torch.eye(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_equal_clients_are_equal_and_finite(dtype):
    alike = alikeness(torch.ones(4, 3, 2, dtype=dtype))
    assert shares(alike).dtype == dtype
    assert torch.allclose(shares(alike), torch.full((4, 4), 0.25, dtype=dtype))
    lonely = shares(torch.tensor([0.9999, 0, 0], dtype=dtype))
    assert lonely.tolist() == [1, 0, 0]


def test_the_warm_up_is_a_share_of_the_rounds():
    for rho, rounds, first in ((0.5, 4, 3), (0.5, 5, 3), (0.0, 4, 1), (1.0, 4, 5), (0.29, 100, 30)):
        method = METHODS["pfedsim"](rho=rho)
        when = [method.personal(replace(moment(at, 0), rounds=rounds)) for at in range(1, rounds + 1)]
        assert when == [at >= first for at in range(1, rounds + 1)]
    assert METHODS["pfedsim"]().rho == 0.5
    with pytest.raises(FedobpError, match="'rho' of pfedsim must be between"):
        METHODS["pfedsim"].configure({"rho": 1.5})


def test_a_run_of_nothing_but_warm_up_is_fedavg():
    federation = small("pfedsim", "one batch", {"rho": 1.0})
    ours, fedavg = federation.run(), federation.run("fedavg")
    assert flat(ours.state_dict().values()).equal(flat(fedavg.state_dict().values()))
    assert (ours.accuracy, ours.personal, ours.bytes) == (fedavg.accuracy, fedavg.personal, fedavg.bytes)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_runs_are_those_of_a_plain_loop(rho, rates):
    federation = small("pfedsim", rates, {"rho": rho}, clients=5, participation=0.6, rounds=5)
    theta, models, alike = theta_0(federation), None, {}

    def taken(i):
        if models is None:
            return theta
        weights = [-math.log(1 - (0.9999 if i == j else min(alike.get((i, j), 0.0), 0.9999))) for j in range(5)]
        bases = [sum(w * one[at] for w, one in zip(weights, models, strict=True)) / sum(weights) for at in (0, 1)]
        return [*bases, *models[i][2:]]

    for round, cohort in each_round(federation):
        warm = round <= rho * 5
        if not warm and models is None:
            models = [theta] * 5
        trained = [sgd(federation, taken(i), fit, batches(federation, i, round, phase=1, epochs=2)) for i in cohort]
        if warm:
            theta = mean(federation, cohort, trained)
            continue
        for i, one in zip(cohort, trained, strict=True):
            models[i] = one
        for i in cohort:
            for j in set(cohort) - {i}:
                pairs = zip(models[i][2], models[j][2], strict=True)
                alike[i, j] = max(0, sum(float(a @ b / (a.norm() * b.norm())) for a, b in pairs) / 10)
    assert 0.3 < min(alike.values()) < max(alike.values()) < 0.9999
    for result in both_engines(federation, theta, dict(enumerate(models))):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 3 * 8 * federation.model.layout.size
