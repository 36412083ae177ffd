"""pFedSim: similarities and mean bases by hand, and whole runs against a plain loop."""

import math
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from by_hand import run_program, update_of, vector
from plain_loops import (
    RATES,
    batches,
    both_engines,
    each_round,
    flat,
    mean,
    network_loss,
    sgd,
    small_federation,
    theta_0,
)
from torch import nn

from fedobp.algorithms import METHODS
from fedobp.algorithms.pfedsim import base_weights, head_similarity
from fedobp.errors import FedobpError
from fedobp.method import CohortUpdate, RoundContext, Train
from fedobp.models import NETS, Model
from fedobp.records import take

METHOD = METHODS["pfedsim"](rho=0.25)


@pytest.fixture
def model(monkeypatch):
    """Entries: fc.weight 0 and 1, classifier.weight 2 to 5 (two rows of two), classifier.bias 6 and 7."""
    layers = {"fc": lambda: nn.Linear(1, 2, bias=False), "classifier": lambda: nn.Linear(2, 2)}
    build = lambda shape, classes: nn.Sequential(OrderedDict({k: make() for k, make in layers.items()}))  # noqa: E731
    monkeypatch.setitem(NETS, "tiny", build)
    return Model("tiny", (1,), 2)


def context(round, *cohort, model=None):
    return RoundContext(model, round, rounds=4, clients=3, epochs=5, cohort=torch.tensor(cohort))


def play_round(ctx, server, states, *steps):
    """Play a round; training adds `steps`. Return the server, and the models that clients received."""
    download, records = METHOD.download(ctx, server, {})
    assert list(download) == ["theta"]
    trained = []
    for at, (client, step) in enumerate(zip(ctx.cohort.tolist(), steps, strict=True)):
        program = METHOD.client_update(ctx)
        done, phases = run_program(ctx.model, program, states[client], take(download, at), [step])
        assert phases == [Train(5)]
        assert list(done.upload) == ["theta"]
        states[client] = done.state
        trained.append(done)
    server, records = METHOD.aggregate(ctx, server, records, update_of(trained, 1, 3))
    assert records == {}
    return server, download["theta"]


@pytest.mark.essential
def test_four_rounds_by_hand(model):
    theta = vector(1, 1, 1, 0, 1, 0, 7, 7)
    server, records, state = METHOD.init(model, theta, 0)
    assert records == {}
    states = [state] * 3
    # Round 1 is the warm-up by FedAvg, with weights by samples.
    steps = vector(4, *[0] * 7), vector(0, 4, *[0] * 6)
    server, _ = play_round(context(1, 0, 1, model=model), server, states, *steps)
    start = [2, 4, 1, 0, 1, 0, 7, 7]
    assert server["theta"].tolist() == start
    assert list(server) == ["theta"]
    assert not any(state["seen"] for state in states)
    # Round 2: the initial model of all clients is that of the warm-up; there are no weights by samples.
    rotation = vector(10, 0, 0, 0, -1, 1, 1, 1)  # the second row turns from (1, 0) to (0, 1)
    steps = rotation, vector(-10, 0, 0, 0, 0, 0, 0, 0)
    server, sent = play_round(context(2, 0, 1, model=model), server, states, *steps)
    assert sent.tolist() == [start, start]
    models = [[12, 4, 1, 0, 0, 1, 8, 8], [-8, 4, 1, 0, 1, 0, 7, 7], start]
    assert server["models"].tolist() == models
    assert server["theta"].tolist() == start
    assert torch.allclose(server["similarity"], torch.tensor([[0.9999, 0.5, 0], [0.5, 0.9999, 0], [0, 0, 0.9999]]))
    # Round 3: client 1 gets a mean of its base and that of client 0, client 2 its own base; both get their heads.
    server, sent = play_round(context(3, 1, 2, model=model), server, states, torch.zeros(8), torch.zeros(8))
    weight = math.log(2) / (math.log(2) + math.log(10_000))
    mixed = [12 * weight - 8 * (1 - weight), 4, *models[1][2:]]
    assert sent[0].tolist() == pytest.approx(mixed, rel=1e-5)  # 1 - 0.9999 in float32
    assert sent[1].tolist() == start
    # Clients 1 and 2 have equal heads, and the similarity of a client with itself; that of 0 and 1 stays.
    expected = torch.tensor([[0.9999, 0.5, 0], [0.5, 0.9999, 0.9999], [0, 0.9999, 0.9999]])
    assert torch.allclose(server["similarity"], expected)
    assert server["models"][0].tolist() == models[0]
    assert server["models"][1].equal(sent[0])
    # At test each client uses its last model; a client without one uses that of the warm-up.
    ctx = context(4, 0, 1, 2, model=model)
    download, _ = METHOD.download(ctx, server, {})
    for client, expected in ((0, models[0]), (1, mixed)):
        served, _ = run_program(model, METHOD.personalize(ctx), states[client], take(download, client))
        assert served.theta.tolist() == pytest.approx(expected, rel=1e-5)
        assert served.scratch["mine"].all()
    served, _ = run_program(model, METHOD.personalize(ctx), state, take(download, 2))
    assert not served.scratch["mine"].any()
    served, _ = run_program(model, METHOD.personalize(context(1, 0, model=model)), state, {"theta": theta})
    assert served.theta.equal(theta)
    assert "mine" not in served.scratch


def test_similarity_is_the_mean_cosine_of_rows_between_0_and_that_of_equal_heads():
    heads = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[4.0, 3.0], [5.0, 0.0]], [[-3.0, -4.0], [0.0, 0.0]]])
    found = head_similarity(heads)
    assert torch.allclose(found, torch.tensor([[0.9999, 0.98, 0], [0.98, 0.9999, 0], [0, 0, 0.5]]))
    assert torch.allclose(head_similarity(7 * heads), found)


def test_the_similarity_with_itself_is_the_same_for_a_head_of_zeros(model):
    server, uploads = {"theta": torch.ones(8)}, {"theta": torch.zeros(2, 8)}
    server, _ = METHOD.aggregate(context(2, 0, 1, model=model), server, {}, CohortUpdate(uploads, torch.tensor([1, 1])))
    assert torch.allclose(server["similarity"], 0.9999 * torch.eye(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_equal_clients_are_equal_and_finite(dtype):
    similarity = head_similarity(torch.ones(4, 3, 2, dtype=dtype))
    assert base_weights(similarity).dtype == dtype
    assert torch.allclose(base_weights(similarity), torch.full((4, 4), 0.25, dtype=dtype))
    alone = base_weights(torch.tensor([0.9999, 0, 0], dtype=dtype))
    assert alone.tolist() == [1, 0, 0]


def test_the_warm_up_is_a_share_of_the_rounds():
    for rho, rounds, first in ((0.5, 4, 3), (0.5, 5, 3), (0.0, 4, 1), (1.0, 4, 5), (0.29, 100, 30)):
        method = METHODS["pfedsim"](rho=rho)
        when = [method.personal(replace(context(at, 0), rounds=rounds)) for at in range(1, rounds + 1)]
        assert when == [at >= first for at in range(1, rounds + 1)]
    assert METHODS["pfedsim"]().rho == 0.5
    with pytest.raises(FedobpError, match="'rho' of pfedsim must be between"):
        METHODS["pfedsim"].configure({"rho": 1.5})


def test_a_run_that_is_all_warm_up_is_fedavg():
    federation = small_federation("pfedsim", "one batch", {"rho": 1.0})
    ours, fedavg = federation.run(), federation.run("fedavg")
    assert flat(ours.state_dict().values()).equal(flat(fedavg.state_dict().values()))
    assert (ours.accuracy, ours.personal, ours.bytes) == (fedavg.accuracy, fedavg.personal, fedavg.bytes)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_runs_equal_a_plain_loop(rho, rates):
    federation = small_federation("pfedsim", rates, {"rho": rho}, clients=5, participation=0.6, rounds=5)
    theta, models, similarity = theta_0(federation), None, {}

    def start(i):
        if models is None:
            return theta
        weights = [-math.log(1 - (0.9999 if i == j else min(similarity.get((i, j), 0.0), 0.9999))) for j in range(5)]
        bases = [sum(w * one[at] for w, one in zip(weights, models, strict=True)) / sum(weights) for at in (0, 1)]
        return [*bases, *models[i][2:]]

    for round, cohort in each_round(federation):
        warm = round <= rho * 5
        if not warm and models is None:
            models = [theta] * 5
        trained = [
            sgd(federation, start(i), network_loss, batches(federation, i, round, phase=1, epochs=2)) for i in cohort
        ]
        if warm:
            theta = mean(federation, cohort, trained)
            continue
        for i, one in zip(cohort, trained, strict=True):
            models[i] = one
        for i in cohort:
            for j in set(cohort) - {i}:
                pairs = zip(models[i][2], models[j][2], strict=True)
                similarity[i, j] = max(0, sum(float(a @ b / (a.norm() * b.norm())) for a, b in pairs) / 10)
    assert 0.3 < min(similarity.values()) < max(similarity.values()) < 0.9999
    for result in both_engines(federation, theta, dict(enumerate(models))):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 3 * 8 * federation.model.layout.size
