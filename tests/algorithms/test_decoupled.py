"""Interchangeable importance scores: against FedOBP, by hand, and against a plain loop over single samples."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from by_hand import vector
from plain_loops import (
    RATES,
    batches,
    both_engines,
    each_round,
    flat,
    mean,
    network_loss,
    samples,
    sgd,
    small_federation,
    theta_0,
)
from torch.nn import functional

from fedobp.algorithms import METHODS
from fedobp.algorithms.decoupled import STEPS, add_gradient, add_squares, random_scores, take_last
from fedobp.engine import global_gradient
from fedobp.errors import FedobpError
from fedobp.method import Batch, Client, CohortUpdate, RoundContext, Sparse, Sweep, Train
from fedobp.models import Layout, Model

Decoupled = METHODS["decoupled"]
TINY = SimpleNamespace(layout=Layout(("fc.weight", "fc.bias", "classifier.weight"), ((3,), (1,), (4,))))
SCORES = ("squared", "product", "gradient", "fisher", "fisher-batch", "obd", "taylor", "magnitude", "random")


def context(*cohort, round=2, seed=0):
    return RoundContext(TINY, round, rounds=9, clients=9, epochs=5, cohort=torch.tensor(cohort), seed=seed)


def records_of(*models, seen=True, **more):
    return {"theta": torch.stack(models), "seen": torch.full((len(models),), seen), **more}


def personal(method, theta, records, ctx=None):
    """Return the entries of each client that are not sent."""
    download, _ = method.download(ctx or context(*range(len(records["seen"]))), {"theta": theta}, records)
    assert list(download) == ["theta"]
    assert isinstance(download["theta"], Sparse)
    return [(~keep).nonzero()[:, 0].tolist() for keep in download["theta"].keep]


# FedOBP


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize(
    "options",
    [{"q": 0.99}, {"q": 0.9, "norm": "layer", "ema": 0.5}, {"q": 0.9, "score": "product", "scope": "classifier",
                                                   "start": "literal"}],
)  # fmt: skip
def test_with_its_score_and_pool_it_is_fedobp_bit_for_bit(engine, options):
    federation = small_federation("decoupled", "one batch", engine=engine)
    ours, fedobp = (federation.run(name, **options) for name in ("decoupled", "fedobp"))
    for client in (None, *range(4)):
        assert flat(ours.state_dict(client).values()).equal(flat(fedobp.state_dict(client).values()))
    assert (ours.bytes, ours.history, ours.personal) == (fedobp.bytes, fedobp.history, fedobp.personal)
    assert ours.personal.max > 0


# Pools


def test_a_quantile_in_each_tensor_chooses_entries_in_each():
    last = vector(1, 2, 3, 9, 40, 30, 20, 10)  # medians: of all 9.5, by tensor 2, 9 and 25
    records = records_of(last)
    assert personal(Decoupled(q=0.5), torch.zeros(8), records) == [[4, 5, 6, 7]]
    assert personal(Decoupled(q=0.5, pool="tensor"), torch.zeros(8), records) == [[2, 4, 5]]
    assert personal(Decoupled(q=0.5, pool="tensor", norm="layer"), torch.zeros(8), records) == [[2, 4, 5]]
    assert personal(Decoupled(q=0.5, pool="tensor", scope="classifier"), torch.zeros(8), records) == [[4, 5]]
    assert personal(Decoupled(q=1.0, pool="tensor"), torch.zeros(8), records) == [[]]


# Scores on the server


def test_magnitude_depends_on_the_clients_model_alone():
    records = records_of(vector(-9, 0, 0, 0, 0, 0, 0, 1), vector(0, 0, 0, 0, 0, -2, 0, 0))
    assert personal(Decoupled(q=0.8, score="magnitude"), records["theta"][0], records) == [[0, 7], [5]]


def test_gradient_is_the_change_of_an_entry_in_the_last_training():
    method = Decoupled(q=0.8, score="gradient")
    server, record, state = method.init(TINY, torch.zeros(8), 0)
    assert set(record) == {"theta", "seen", "change"}
    assert list(state) == ["theta"]
    records, ctx = {name: value[None] for name, value in record.items()}, context(0)
    download, sent = method.download(ctx, server, records)
    assert download["theta"].keep.all()
    upload = vector(1, 2, 3, 4, 5, 6, 7, -8)[None]
    server, records = method.aggregate(ctx, server, sent, CohortUpdate({"theta": upload}, torch.tensor([3])))
    assert records.keys() == record.keys()
    assert records["change"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    # Whatever the global model is by then, entries 6 and 7 are personal: there the client starts from its last values.
    server = {"theta": vector(100, 0, 0, 0, 0, 0, 0, 0)}
    download, sent = method.download(ctx, server, records)
    assert (~download["theta"].keep).nonzero()[:, 1].tolist() == [6, 7]
    _, records = method.aggregate(ctx, server, sent, CohortUpdate({"theta": upload}, torch.tensor([3])))
    assert records["change"].tolist() == [[99, 2, 3, 4, 5, 6, 0, 0]]


def test_an_evaluation_leaves_the_records_as_they_are():
    method = Decoupled(q=0.8, score="gradient", ema=0.5)
    records = {name: value[None] for name, value in method.init(TINY, torch.zeros(8), 0).record.items()}
    kept = {name: value.clone() for name, value in records.items()}
    method.download(context(0), {"theta": torch.ones(8)}, records)
    assert records.keys() == kept.keys()
    assert all(records[name].equal(kept[name]) for name in kept)


def test_random_scores_depend_on_seed_round_and_client():
    like = torch.zeros(2, 2000)
    first = random_scores(context(3, 4), like)
    assert first.equal(random_scores(context(4, 3), like).flip(0))
    for other in (context(5, 6), context(3, 4, round=3), context(3, 4, seed=1)):
        assert not (random_scores(other, like) == first).any()
    assert not (first[0] == first[1]).any()
    assert ((first > -1) & (first < 0)).all()
    assert torch.histc(first, bins=4, min=-1, max=0).tolist() == pytest.approx([1000] * 4, abs=110)  # four deviations
    assert torch.allclose(random_scores(context(3, 4), like.double()).float(), first)
    records = records_of(*torch.zeros(2, 8))
    chosen = [
        personal(Decoupled(q=0.6, score="random"), torch.zeros(8), records, context(3, 4, round=r)) for r in (1, 2)
    ]
    assert chosen[0] != chosen[1]
    assert all(len(one) == 3 for one in chosen[0] + chosen[1])  # 8 - 1 - floor(0.6 * 7)


def test_random_scores_hardly_tie_in_float32():
    scores = random_scores(context(0), torch.zeros(1, 900_000))[0]
    top = scores.topk(1000).values
    assert len(top.unique()) == 1000


# Scores on the client


@pytest.fixture(scope="module")
def mlp():
    return Model("mlp", (1, 3, 3), 3)


def batch_of(x, y, weight):
    return Batch(x, y, weight, *(torch.zeros((), dtype=torch.int64),) * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_are_sums_over_batches_without_their_padding(mlp, dtype):
    theta = mlp.initial(0).to(dtype)
    x = torch.linspace(-1, 2, 45, dtype=dtype).sin().view(5, 1, 3, 3)
    y, ones = torch.tensor([0, 2, 1, 1, 0]), torch.ones(5, dtype=dtype)
    each = []
    for i in range(5):
        w = theta.clone().requires_grad_()
        functional.cross_entropy(mlp.logits(w, x[i : i + 1]), y[i : i + 1]).backward()
        each.append(w.grad)
    each = torch.stack(each)
    padded = torch.cat([x[3:], 99 * torch.ones_like(x[:2])]), torch.cat([y[3:], y[:2]]), ones[:4] * vector(1, 1, 0, 0)
    for step, expected in ((add_squares, each.square().sum(dim=0)), (add_gradient, each.sum(dim=0))):
        client = take_last(mlp, Client({"theta": theta}, {}, {}, {}, {}))
        for batch in (batch_of(x[:3], y[:3], ones[:3]), batch_of(padded[0], padded[1], padded[2].to(dtype))):
            client = step(mlp, client, batch)
        assert client.scratch["score"].dtype == dtype
        torch.testing.assert_close(client.scratch["score"], expected, rtol=1e-4, atol=1e-7)
        assert client.theta.equal(theta)


def merged(method, total, n, theta, **state):
    """Merge on a client whose last model is 1, ..., 8, with a given sum over n samples."""
    state = {"theta": torch.arange(1.0, 9), "seen": torch.tensor(True), **state}
    scratch = {"theta": state["theta"], "score": total}
    client = Client(state, {"theta": theta}, scratch, {}, {}, {"n": torch.tensor(n)})
    take, sweep, merge = method.personalize(context(0))
    assert (take, sweep) == (take_last, Sweep(STEPS[method.score], per_sample=method.score != "fisher-batch"))
    return merge(TINY, client)


@pytest.mark.essential
def test_the_three_scores_that_need_samples():
    sums, theta = vector(30, 0, 0, 0, 0, 0, -40, 10), torch.full((8,), 50.0)
    fisher = merged(Decoupled(q=0.8, score="fisher"), sums, 10, theta)
    assert fisher.theta.tolist() == [1, 50, 50, 50, 50, 50, 50, 8]  # 3 and 1 are above, -4 is not
    batch = merged(Decoupled(q=0.8, score="fisher-batch"), sums, 10, theta)
    assert batch.scratch["mine"].nonzero()[:, 0].tolist() == [0, 6]  # 9 and 16
    obd = merged(Decoupled(q=0.9, score="obd"), sums, 10, theta)
    assert obd.scratch["mine"].nonzero()[:, 0].tolist() == [7]  # 3 * 1 / 2 and 1 * 64 / 2
    by_tensor = merged(Decoupled(q=0.9, score="fisher", pool="tensor"), sums, 10, theta)
    assert by_tensor.scratch["mine"].nonzero()[:, 0].tolist() == [0, 7]


def test_a_client_without_samples_or_without_a_last_model_takes_the_global_one():
    theta, some = torch.full((8,), 50.0), torch.arange(8.0)
    without = merged(Decoupled(q=0.5, score="fisher"), torch.zeros(8), 0, theta)
    assert without.theta.equal(theta)
    assert not without.scratch["mine"].any()
    never = {"seen": torch.tensor(False)}
    assert merged(Decoupled(q=0.5, score="fisher"), some, 1, theta, **never).theta.equal(theta)
    literal = merged(Decoupled(q=0.5, score="fisher", start="literal"), some, 1, theta, **never)
    assert literal.scratch["mine"].tolist() == [False] * 4 + [True] * 4


def test_the_client_smooths_its_own_scores():
    method, theta = Decoupled(q=0.8, score="fisher", ema=0.75), torch.full((8,), 50.0)
    _, record, state = method.init(TINY, theta, 0)
    assert record == {}
    assert set(state) == {"theta", "seen", "score", "scored"}
    initial = {name: state[name] for name in ("score", "scored")}
    first = merged(method, vector(0, 8, 0, 0, 0, 0, 4, 0), 2, theta, **initial)
    assert first.state["score"].tolist() == [0, 4, 0, 0, 0, 0, 2, 0]  # the first value is the score itself
    assert first.state["scored"].tolist() is True
    kept = {name: first.state[name] for name in ("score", "scored")}
    second = merged(method, vector(8, 0, 0, 0, 0, 0, 0, 0), 2, theta, **kept)
    assert second.state["score"].tolist() == [1, 3, 0, 0, 0, 0, 1.5, 0]
    assert second.scratch["mine"].nonzero()[:, 0].tolist() == [1, 6]
    new = merged(method, torch.ones(8), 2, theta, seen=torch.tensor(False), **initial)
    assert new.state["scored"].tolist() is False  # a score of theta^0 does not count in the client's next round
    squared = merged(replace(method, score="fisher-batch"), vector(8, 0, 0, 0, 0, 0, 0, 0), 2, theta, **kept)
    assert squared.state["score"].tolist() == [4, 3, 0, 0, 0, 0, 1.5, 0]  # the square of the mean, smoothed


def test_a_client_that_scores_receives_all_entries_and_has_no_record():
    method = Decoupled(score="fisher")
    download, records = method.download(context(0, 1), {"theta": torch.arange(8.0)}, {})
    assert download["theta"].equal(torch.arange(8.0).expand(2, -1))
    assert records == {}
    program = method.client_update(context(0))
    assert [item for item in program if isinstance(item, Train)] == [Train(5)]
    update = CohortUpdate({"theta": torch.stack([torch.zeros(8), torch.ones(8)])}, torch.tensor([1, 3]))
    server, records = method.aggregate(context(0, 1), {}, {}, update)
    assert server["theta"].tolist() == [0.75] * 8
    assert records == {}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("score", STEPS)
def test_runs_equal_a_plain_loop(score, rates):
    """The plain loop computes importance sample by sample."""
    federation = small_federation("decoupled", rates, {"q": 0.9, "score": score}, clients=8, participation=0.25)
    theta, last = theta_0(federation), {}

    def gradient(values, x, y):
        values = [value.clone().requires_grad_() for value in values]
        return flat(torch.autograd.grad(network_loss(values, x, y), values))

    def merge(client):
        if client not in last:
            return theta
        x, y = samples(federation, client)
        if score == "fisher-batch":
            scores = gradient(last[client], x, y) ** 2
        else:
            scores = sum(gradient(last[client], x[i : i + 1], y[i : i + 1]) ** 2 for i in range(len(y))) / len(y)
        local = flat(last[client])
        scores = scores * local**2 / 2 if score == "obd" else scores
        kept = scores > scores.quantile(0.9)
        return [*federation.model.layout.views(torch.where(kept, local, flat(theta))).values()]

    trained = 0
    for round, cohort in each_round(federation):
        models = [
            sgd(federation, merge(client), network_loss, batches(federation, client, round, phase=3, epochs=2))
            for client in cohort
        ]
        last |= dict(zip(cohort, models, strict=True))
        theta, trained = mean(federation, cohort, models), trained + len(cohort)
    assert len(last) < trained  # a client trains a second time
    for result in both_engines(federation, theta, {client: merge(client) for client in range(8)}):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * federation.model.layout.size


# The score that only a simulation can compute


def test_taylor_is_the_global_gradient_times_the_distance(monkeypatch):
    federation = small_federation("decoupled", "one batch")
    model, data = federation.model, federation.data
    monkeypatch.setattr("fedobp.engine.gradients._ROWS", 2)
    monkeypatch.setattr("fedobp.engine.gradients._SAMPLES", 100)
    theta = torch.stack([model.initial(seed).double() for seed in range(3)])
    x = torch.cat([data.inputs(client, "train") for client in range(data.clients)])
    y = torch.cat([data.targets(client, "train") for client in range(data.clients)])
    expected = []
    for point in theta:
        at = point.clone().requires_grad_()
        expected.append(torch.autograd.grad(functional.cross_entropy(model.logits(at, x), y), at)[0])
    found = global_gradient(model, data, "fp64", theta)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12)
    ctx = replace(context(0, 1, 2), global_gradient=partial(global_gradient, model, data, "fp64"))
    method, server = Decoupled(score="taylor"), {"theta": model.initial(9).double()}
    score = method.scores(ctx, server, {"theta": theta})
    torch.testing.assert_close(score, (torch.stack(expected) * (server["theta"] - theta)).abs(), rtol=0, atol=1e-12)


def test_taylor_is_refused_outside_a_simulation():
    records = {"theta": torch.ones(1, 8), "seen": torch.tensor([True])}
    with pytest.raises(FedobpError, match="needs the data of all clients, which only a simulation has"):
        Decoupled(score="taylor").download(context(0), {"theta": torch.zeros(8)}, records)


# Options


def test_every_option_changes_a_run():
    federation = small_federation("decoupled", "one batch")
    changes = [*({"score": score} for score in SCORES), {"pool": "tensor"}, {"q": 0.5}, {"norm": "layer"},
               {"scope": "classifier"}, {"ema": 0.9}, {"start": "literal"}]  # fmt: skip
    changes += [{"score": "fisher", **change} for change in changes[len(SCORES) :]]
    models = [flat(federation.run(**{"q": 0.9, **change}).state_dict().values()) for change in changes]
    assert len({tuple(model.tolist()) for model in models}) == len(changes)


def test_scores_that_cannot_be_computed_are_refused():
    with pytest.raises(FedobpError, match=r"^score=gradient does not go with start=literal: .* use start=global$"):
        Decoupled.configure({"score": "gradient", "start": "literal"})
    with pytest.raises(FedobpError, match="unknown value of option 'score' of decoupled 'fischer': did you mean"):
        Decoupled.configure({"score": "fischer"})
    assert set(next(spec for spec in Decoupled.options() if spec.name == "score").metadata["choices"]) == set(SCORES)
