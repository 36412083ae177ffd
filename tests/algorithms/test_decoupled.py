"""Interchangeable importance scores: against FedOBP, by hand, and against a plain loop over single samples."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from contexts import with_model
from plain import RATES, batches, both_engines, each_round, fit, flat, mean, samples, sgd, small, theta_0
from torch.nn import functional
from walk import vector

from fedobp.algorithms import METHODS
from fedobp.algorithms.decoupled import STEPS, add_gradient, add_squares, draw, take_own
from fedobp.engine import global_gradient
from fedobp.errors import FedobpError
from fedobp.method import Batch, Client, CohortUpdate, RoundContext, Sparse, Sweep, Train
from fedobp.models import Layout, Model

Decoupled = METHODS["decoupled"]
TINY = SimpleNamespace(layout=Layout(("fc.weight", "fc.bias", "classifier.weight"), ((3,), (1,), (4,))))
SCORES = ("squared", "product", "gradient", "fisher", "fisher-batch", "obd", "taylor", "magnitude", "random")


def moment(*cohort, round=2, seed=0):
    return RoundContext(model=None, round=round, rounds=9, clients=9, epochs=5, cohort=torch.tensor(cohort), seed=seed)


def rows_of(*models, seen=True, **more):
    return {"theta": torch.stack(models), "seen": torch.full((len(models),), seen), **more}


def personal(method, theta, records, ctx=None):
    download, _ = method.download(
        with_model(TINY, ctx or moment(*range(len(records["seen"])))), {"theta": theta}, records
    )
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
    federation = small("decoupled", "one batch", engine=engine)
    ours, fedobp = (federation.run(name, **options) for name in ("decoupled", "fedobp"))
    for client in (None, *range(4)):
        assert flat(ours.state_dict(client).values()).equal(flat(fedobp.state_dict(client).values()))
    assert (ours.bytes, ours.history, ours.personal) == (fedobp.bytes, fedobp.history, fedobp.personal)
    assert ours.personal.max > 0


# Pools


def test_a_quantile_in_each_tensor_leaves_something_in_each():
    own = vector(1, 2, 3, 9, 40, 30, 20, 10)  # medians: of all 9.5, by tensor 2, 9 and 25
    records = rows_of(own)
    assert personal(Decoupled(q=0.5), torch.zeros(8), records) == [[4, 5, 6, 7]]
    assert personal(Decoupled(q=0.5, pool="tensor"), torch.zeros(8), records) == [[2, 4, 5]]
    assert personal(Decoupled(q=0.5, pool="tensor", norm="layer"), torch.zeros(8), records) == [[2, 4, 5]]
    assert personal(Decoupled(q=0.5, pool="tensor", scope="classifier"), torch.zeros(8), records) == [[4, 5]]
    assert personal(Decoupled(q=1.0, pool="tensor"), torch.zeros(8), records) == [[]]


# Scores on the server


def test_magnitude_looks_at_the_client_alone():
    records = rows_of(vector(-9, 0, 0, 0, 0, 0, 0, 1), vector(0, 0, 0, 0, 0, -2, 0, 0))
    assert personal(Decoupled(q=0.8, score="magnitude"), records["theta"][0], records) == [[0, 7], [5]]


def test_gradient_is_how_far_an_entry_moved_in_the_last_training():
    method = Decoupled(q=0.8, score="gradient")
    server, row, own = method.init(TINY, torch.zeros(8), 0)
    assert set(row) == {"theta", "seen", "moved"}
    assert list(own) == ["theta"]
    records, ctx = {name: value[None] for name, value in row.items()}, moment(0)
    download, sent = method.download(with_model(TINY, ctx), server, records)
    assert download["theta"].keep.all()
    upload = vector(1, 2, 3, 4, 5, 6, 7, -8)[None]
    server, records = method.aggregate(
        with_model(TINY, ctx), server, sent, CohortUpdate({"theta": upload}, torch.tensor([3]))
    )
    assert records.keys() == row.keys()
    assert records["moved"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    # However far the global model goes meanwhile, entries 6 and 7 are personal; the client starts from its own there.
    server = {"theta": vector(100, 0, 0, 0, 0, 0, 0, 0)}
    download, sent = method.download(with_model(TINY, ctx), server, records)
    assert (~download["theta"].keep).nonzero()[:, 1].tolist() == [6, 7]
    _, records = method.aggregate(
        with_model(TINY, ctx), server, sent, CohortUpdate({"theta": upload}, torch.tensor([3]))
    )
    assert records["moved"].tolist() == [[99, 2, 3, 4, 5, 6, 0, 0]]


def test_what_moved_is_where_training_began_whoever_asks_in_between():
    method = Decoupled(q=0.8, score="gradient", ema=0.5)
    records = {name: value[None] for name, value in method.init(TINY, torch.zeros(8), 0).record.items()}
    kept = {name: value.clone() for name, value in records.items()}
    method.download(with_model(TINY, moment(0)), {"theta": torch.ones(8)}, records)
    assert records.keys() == kept.keys()
    assert all(records[name].equal(kept[name]) for name in kept)


def test_random_scores_belong_to_a_seed_a_round_and_a_client():
    like = torch.zeros(2, 2000)
    first = draw(moment(3, 4), like)
    assert first.equal(draw(moment(4, 3), like).flip(0))
    for other in (moment(5, 6), moment(3, 4, round=3), moment(3, 4, seed=1)):
        assert not (draw(other, like) == first).any()
    assert not (first[0] == first[1]).any()
    assert ((first > -1) & (first < 0)).all()
    assert torch.histc(first, bins=4, min=-1, max=0).tolist() == pytest.approx([1000] * 4, abs=110)  # four deviations
    assert torch.allclose(draw(moment(3, 4), like.double()).float(), first)
    records = rows_of(*torch.zeros(2, 8))
    chosen = [
        personal(Decoupled(q=0.6, score="random"), torch.zeros(8), records, moment(3, 4, round=r)) for r in (1, 2)
    ]
    assert chosen[0] != chosen[1]
    assert all(len(one) == 3 for one in chosen[0] + chosen[1])  # 8 - 1 - floor(0.6 * 7)


def test_random_scores_hardly_tie_in_float32():
    scores = draw(moment(0), torch.zeros(1, 900_000))[0]
    top = scores.topk(1000).values
    assert len(top.unique()) == 1000


# Scores on the client


@pytest.fixture(scope="module")
def mlp():
    return Model("mlp", (1, 3, 3), 3)


def batch_of(x, y, weight):
    return Batch(x, y, weight, *(torch.zeros((), dtype=torch.int64),) * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_add_up_over_batches_and_padding_counts_for_nothing(mlp, dtype):
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
        client = take_own(mlp, Client({"theta": theta}, {}, {}, {}, {}))
        for batch in (batch_of(x[:3], y[:3], ones[:3]), batch_of(padded[0], padded[1], padded[2].to(dtype))):
            client = step(mlp, client, batch)
        assert client.scratch["score"].dtype == dtype
        torch.testing.assert_close(client.scratch["score"], expected, rtol=1e-4, atol=1e-7)
        assert client.theta.equal(theta)


def merged(method, total, n, theta, **own):
    """Merge on a client whose own last model is 1, ..., 8, with a given sum over n samples."""
    own = {"theta": torch.arange(1.0, 9), "seen": torch.tensor(True), **own}
    scratch = {"theta": own["theta"], "score": total}
    client = Client(own, {"theta": theta}, scratch, {}, {}, {"n": torch.tensor(n)})
    take, sweep, merge = method.personalize(with_model(TINY, moment(0)))
    assert (take, sweep) == (take_own, Sweep(STEPS[method.score], per_sample=method.score != "fisher-batch"))
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


def test_a_client_without_samples_or_without_a_model_takes_the_global_one():
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
    row, own = method.init(TINY, theta, 0)[1:]
    assert row == {}
    assert set(own) == {"theta", "seen", "score", "scored"}
    first = merged(method, vector(0, 8, 0, 0, 0, 0, 4, 0), 2, theta, score=own["score"], scored=own["scored"])
    assert first.state["score"].tolist() == [0, 4, 0, 0, 0, 0, 2, 0]  # the first value is the score itself
    assert first.state["scored"].tolist() is True
    kept = {name: first.state[name] for name in ("score", "scored")}
    second = merged(method, vector(8, 0, 0, 0, 0, 0, 0, 0), 2, theta, **kept)
    assert second.state["score"].tolist() == [1, 3, 0, 0, 0, 0, 1.5, 0]
    assert second.scratch["mine"].nonzero()[:, 0].tolist() == [1, 6]
    new = merged(method, torch.ones(8), 2, theta, seen=torch.tensor(False), score=own["score"], scored=own["scored"])
    assert new.state["scored"].tolist() is False  # of theta^0, that is: it does not count at the next visit
    squared = merged(replace(method, score="fisher-batch"), vector(8, 0, 0, 0, 0, 0, 0, 0), 2, theta, **kept)
    assert squared.state["score"].tolist() == [4, 3, 0, 0, 0, 0, 1.5, 0]  # the square of the mean, smoothed


def test_the_client_that_scores_gets_everything_and_the_server_keeps_nothing():
    method = Decoupled(score="fisher")
    download, records = method.download(with_model(TINY, moment(0, 1)), {"theta": torch.arange(8.0)}, {})
    assert download["theta"].equal(torch.arange(8.0).expand(2, -1))
    assert records == {}
    program = method.client_update(with_model(TINY, moment(0)))
    assert [item for item in program if isinstance(item, Train)] == [Train(5)]
    server, records = method.aggregate(
        with_model(TINY, moment(0, 1)),
        {},
        {},
        CohortUpdate({"theta": torch.stack([torch.zeros(8), torch.ones(8)])}, torch.tensor([1, 3])),
    )
    assert server["theta"].tolist() == [0.75] * 8
    assert records == {}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("score", STEPS)
def test_runs_are_those_of_a_plain_loop(score, rates):
    """With importance taken sample by sample."""
    federation = small("decoupled", rates, {"q": 0.9, "score": score}, clients=8, participation=0.25)
    theta, last = theta_0(federation), {}

    def gradient(values, x, y):
        values = [value.clone().requires_grad_() for value in values]
        return flat(torch.autograd.grad(fit(values, x, y), values))

    def merge(client):
        if client not in last:
            return theta
        x, y = samples(federation, client)
        if score == "fisher-batch":
            found = gradient(last[client], x, y) ** 2
        else:
            found = sum(gradient(last[client], x[i : i + 1], y[i : i + 1]) ** 2 for i in range(len(y))) / len(y)
        own = flat(last[client])
        found = found * own**2 / 2 if score == "obd" else found
        return [*federation.model.layout.views(torch.where(found > found.quantile(0.9), own, flat(theta))).values()]

    visits = 0
    for round, cohort in each_round(federation):
        models = [
            sgd(federation, merge(client), fit, batches(federation, client, round, phase=3, epochs=2))
            for client in cohort
        ]
        last |= dict(zip(cohort, models, strict=True))
        theta, visits = mean(federation, cohort, models), visits + len(cohort)
    assert len(last) < visits  # somebody came back
    for result in both_engines(federation, theta, {client: merge(client) for client in range(8)}):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * federation.model.layout.size


# What only a simulation knows


def test_taylor_is_the_pooled_gradient_times_the_distance(monkeypatch):
    federation = small("decoupled", "one batch")
    model, data = federation.model, federation.data
    monkeypatch.setattr("fedobp.engine.pooled._ROWS", 2)
    monkeypatch.setattr("fedobp.engine.pooled._SAMPLES", 100)
    theta = torch.stack([model.initial(seed).double() for seed in range(3)])
    x = torch.cat([data.inputs(client, "train") for client in range(data.clients)])
    y = torch.cat([data.targets(client, "train") for client in range(data.clients)])
    expected = []
    for vector_ in theta:
        at = vector_.clone().requires_grad_()
        expected.append(torch.autograd.grad(functional.cross_entropy(model.logits(at, x), y), at)[0])
    found = global_gradient(model, data, "fp64", theta)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12)
    ctx = replace(moment(0, 1, 2), pooled=partial(global_gradient, model, data, "fp64"))
    method, server = Decoupled(score="taylor"), {"theta": model.initial(9).double()}
    score = method.scores(ctx, server, {"theta": theta})
    torch.testing.assert_close(score, (torch.stack(expected) * (server["theta"] - theta)).abs(), rtol=0, atol=1e-12)


def test_taylor_is_refused_where_nobody_knows_it():
    records = {"theta": torch.ones(1, 8), "seen": torch.tensor([True])}
    with pytest.raises(FedobpError, match="needs everybody's data, which only a simulation has"):
        Decoupled(score="taylor").download(with_model(TINY, moment(0)), {"theta": torch.zeros(8)}, records)


# Options


def test_every_option_changes_a_run():
    federation = small("decoupled", "one batch")
    changes = [*({"score": score} for score in SCORES), {"pool": "tensor"}, {"q": 0.5}, {"norm": "layer"},
               {"scope": "classifier"}, {"ema": 0.9}, {"start": "literal"}]  # fmt: skip
    changes += [{"score": "fisher", **change} for change in changes[len(SCORES) :]]
    models = [flat(federation.run(**{"q": 0.9, **change}).state_dict().values()) for change in changes]
    assert len({tuple(model.tolist()) for model in models}) == len(changes)


def test_what_has_no_meaning_is_refused():
    with pytest.raises(FedobpError, match=r"^score=gradient does not go with start=literal: .* use start=global$"):
        Decoupled.configure({"score": "gradient", "start": "literal"})
    with pytest.raises(FedobpError, match="unknown value of option 'score' of decoupled 'fischer': did you mean"):
        Decoupled.configure({"score": "fischer"})
    assert set(next(spec for spec in Decoupled.options() if spec.name == "score").metadata["choices"]) == set(SCORES)
