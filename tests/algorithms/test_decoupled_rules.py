"""Threshold rules of `decoupled`: by hand, at their limits, against plain loops, and on both engines."""

import math
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import vector
from plain_loops import (
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
from torch import nn

from fedobp import Config, Federation
from fedobp.algorithms import METHODS
from fedobp.algorithms.decoupled import add_both, add_curvature, refit, take_global
from fedobp.algorithms.fedavg import keep_and_upload
from fedobp.errors import FedobpError
from fedobp.method import Batch, Client, RoundContext, Sparse, Sweep, Train
from fedobp.models import Layout, Model

Decoupled = METHODS["decoupled"]
TINY = SimpleNamespace(layout=Layout(("fc.weight", "fc.bias", "classifier.weight"), ((3,), (1,), (4,))))


def context(*cohort, round=2):
    return RoundContext(TINY, round, rounds=9, clients=9, epochs=5, cohort=torch.tensor(cohort))


def personal(method, last, theta, round=2, **more):
    """Return the entries that are not sent to a client with a given last model."""
    records = {"theta": last[None], "seen": torch.tensor([True]), **more}
    download, _ = method.download(context(0, round=round), {"theta": theta}, records)
    assert isinstance(download["theta"], Sparse)
    return (~download["theta"].keep[0]).nonzero()[:, 0].tolist()


# rms


def test_rms_keeps_entries_far_above_the_root_mean_square():
    last, zero = vector(3, 0, 0, 0, 1, -5, 1, 0), torch.zeros(8)  # the mean of squares is 36 / 8 = 4.5
    assert personal(Decoupled(rule="rms", c=1.0), last, zero) == [0, 5]  # 9 and 25 are above 4.5
    assert personal(Decoupled(rule="rms", c=1.5), last, zero) == [5]  # above 10.125
    assert personal(Decoupled(rule="rms", c=2.5), last, zero) == []  # 25 is not above 28.125
    assert personal(Decoupled(rule="rms", c=2.5), last + 7, zero + 7) == []
    assert personal(Decoupled(rule="rms"), last, zero) == []  # 20: at most 1 in 400 entries
    # By tensor: 9 / 3 = 3; 0; 27 / 4 = 6.75.
    assert personal(Decoupled(rule="rms", c=1.5, pool="tensor"), last, zero) == [0, 5]
    assert personal(Decoupled(rule="rms", c=1.5, scope="classifier"), vector(90, 0, 0, 0, 1, -5, 1, 0), zero) == [5]


def test_rms_of_a_client_with_the_global_model_keeps_nothing():
    for pool in ("global", "tensor"):
        assert personal(Decoupled(rule="rms", c=0.0, pool=pool), torch.ones(8), torch.ones(8)) == []


def test_rms_with_another_score_is_its_mean():
    last = vector(1, 1, 1, 1, 1, -7, 1, 3)  # the mean of |theta| is 2
    method = Decoupled(rule="rms", c=1.2, score="magnitude")
    assert personal(method, last, last) == [5, 7]  # above 1.44 * 2 = 2.88
    assert personal(Decoupled(rule="rms", c=1.3, score="magnitude"), last, last) == [5]  # above 3.38


# Warm-up


@pytest.mark.parametrize(("round", "q"), [(1, 0.9), (2, 0.99), (3, 0.999), (4, 0.9999), (5, 0.9999), (9, 0.9999)])
def test_warm_up_raises_q_by_one_factor_of_its_distance_from_1(round, q):
    method = Decoupled(q=0.9999, warmup=3).in_round(round)
    assert method.q == pytest.approx(q, abs=1e-12)
    assert method.warmup == 0


@pytest.mark.parametrize(("q", "expected"), [(0.9, [0.9] * 3), (0.5, [0.5] * 3), (1.0, [0.9, 1.0, 1.0])])
def test_warm_up_never_lowers_q(q, expected):
    assert [Decoupled(q=q, warmup=2).in_round(round).q for round in (1, 2, 3)] == expected


def test_more_entries_are_personal_early_wherever_scores_are_computed():
    layout = Layout(("fc.weight", "classifier.weight"), ((900,), (100,)))
    model, last = SimpleNamespace(layout=layout), torch.arange(1000.0)
    records = {"theta": last[None], "seen": torch.tensor([True])}
    for round, count in ((1, 100), (2, 32), (3, 10), (4, 10)):  # 1 - q: 0.1, 0.0316, 0.01
        ctx = RoundContext(model, round, rounds=9, clients=9, epochs=1, cohort=torch.tensor([0]))
        server = {"theta": torch.full((1000,), -1.0)}
        download, _ = Decoupled(q=0.99, warmup=2).download(ctx, server, records)
        assert int((~download["theta"].keep).sum()) == count
        *_, merge = Decoupled(q=0.99, warmup=2, score="fisher").personalize(ctx)
        state = {"theta": last, "seen": torch.tensor(True)}
        client = Client(state, server, {"theta": last, "score": last}, {}, {}, {"n": torch.tensor(1)})
        assert int(merge(model, client).scratch["mine"].sum()) == count


# The statistic


def line(shape, classes):
    return nn.Sequential(OrderedDict(classifier=nn.Linear(shape[0], classes)))


def after_test(model, theta, x, y, **options):
    """Run the statistic's program on one batch with a sample of padding."""
    method, x, y = Decoupled(rule="statistic", **options), torch.tensor(x).double(), torch.tensor(y)
    n = torch.tensor(len(y))
    batch = Batch(torch.cat([x, x[:1] + 9]), torch.cat([y, y[:1]]), (torch.arange(len(y) + 1) < n).double(),
                  *[torch.tensor(0)] * 3)  # fmt: skip
    state = {"theta": torch.full_like(theta, 77), "seen": torch.tensor(False)}
    client = Client(state, {"theta": theta}, {}, {}, {}, {"n": n})
    program = method.personalize(context(0))
    sweeps = [Sweep(add_both, per_sample=True, passes=2), Sweep(add_curvature, passes=2)]
    assert program == [take_global, sweeps[0], method._choose_step, sweeps[1], refit]
    for item in program:
        client = item.step(model, client, batch) if isinstance(item, Sweep) else item(model, client)
    return client


def test_the_statistic_of_a_linear_model_by_hand():
    """Two samples, x = 1 of class 0 and x = -2 of class 1, at theta = 0, where p = 1/2.

    Gradients are (p - y) x. Weight of class 0: -1/2 and -1; their sum g = -3/2, of squares f = 5/4, z^2 = 9/5. Biases:
    -1/2 and 1/2, z = 0. In a tensor of two, 2 ln 2 = 1.39: both weights are personal. s = (r, -r, 0, 0), r^2 = 9/5.
    J s is (r, -r) and (-2r, 2r), whose variances are r^2 and 4 r^2: s^T G s = 9, -g.s = 3 r, alpha = r / 3.
    """
    model = Model(line, (1,), 2)
    found = after_test(model, torch.zeros(4).double(), [[1], [-2]], [0, 1], pool="tensor")
    torch.testing.assert_close(found.theta, torch.tensor([0.6, -0.6, 0, 0]).double())  # r^2 / 3
    assert found.scratch["mine"].tolist() == [True, True, False, False]
    # Of all four entries the threshold is 2 ln 4 = 2.77, and z^2 is at most the number of samples.
    alone = after_test(model, torch.zeros(4).double(), [[1], [-2]], [0, 1])
    assert alone.theta.tolist() == [0] * 4
    assert not alone.scratch["mine"].any()
    twice = after_test(model, torch.zeros(4).double(), [[1], [-2]] * 2, [0, 1] * 2)  # z^2 = 18/5, and the same step
    torch.testing.assert_close(twice.theta, found.theta)


def test_an_entry_without_a_gradient_is_never_personal():
    model = Model(line, (2,), 2)
    found = after_test(model, torch.zeros(6).double(), [[1, 0], [3, 0], [2, 0]] * 3, [1] * 9)
    assert found.scratch["mine"].tolist() == [True, False, True, False, True, True]
    assert found.theta[[1, 3]].tolist() == [0, 0]
    assert found.theta.isfinite().all()


def test_rounding_noise_is_no_gradient():
    """z does not depend on the size of an input, so without a floor the second one would always be refitted too."""
    model, eps = Model(line, (2,), 2), torch.finfo(torch.float64).eps
    for small, is_personal in ((900 * eps, False), (1100 * eps, True)):
        found = after_test(model, torch.zeros(6).double(), [[1, small]] * 9, [1] * 9)
        assert found.scratch["mine"].tolist() == [True, is_personal] * 2 + [True] * 2


def test_where_the_softmax_is_saturated_no_step_is_taken():
    """p of the true class is e^-80: gradients are 1, and the curvature is as small as p."""
    theta = torch.tensor([0, 0, 80, 0]).double()
    found = after_test(Model(line, (1,), 2), theta, [[1]] * 9, [1] * 9)
    assert found.scratch["step"].any()
    assert found.theta.equal(theta)
    assert not found.scratch["mine"].any()


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_the_key_bias_of_attention_is_never_personal(engine, precision):
    """The softmax does not depend on it. With equal samples the noise of all is the same, and z^2 is their number."""
    tokens, client = np.tile([3, 1, 4, 1, 5, 9], (120, 1)), np.repeat([0, 1], 60)
    config = Config(engine=engine, precision=precision, rounds=1, model="transformer", device="cpu")
    federation = Federation.from_data(tokens, client, client=client, tokens=True, vocabulary=12, config=config)
    result = federation.run("decoupled", rule="statistic")
    shared, served = result.state_dict(), result.state_dict(client=0)
    assert not served["classifier.bias"].equal(shared["classifier.bias"])
    biases = [name for name in shared if name.endswith("key.bias")]
    assert len(biases) == 2
    assert all(served[name].equal(shared[name]) for name in biases)


def test_the_statistic_of_a_client_without_samples_is_the_global_model():
    method, theta = Decoupled(rule="statistic"), torch.arange(8.0)
    client = Client({}, {"theta": theta}, {}, {}, {}, {"n": torch.tensor(0)})
    for item in method.personalize(context(0)):
        client = client if isinstance(item, Sweep) else item(TINY, client)
    assert client.theta.equal(theta)
    assert not client.scratch["mine"].any()


def test_a_client_that_tests_is_sent_the_whole_model_and_keeps_its_last():
    method = Decoupled(rule="statistic")
    _, record, state = method.init(TINY, torch.zeros(8), 0)
    assert (record, set(state)) == ({}, {"theta", "seen"})
    download, _ = method.download(context(0, 1), {"theta": torch.arange(8.0)}, {})
    assert download["theta"].equal(torch.arange(8.0).expand(2, -1))
    assert method.client_update(context(0)) == [take_global, Train(5), keep_and_upload]


def test_runs_with_the_statistic_equal_a_plain_loop():
    """The plain loop computes gradients sample by sample, and the curvature from the logits' Jacobian."""
    federation = small_federation(
        "decoupled",
        "batches, momentum and decay",
        {"rule": "statistic"},
        clients=8,
        participation=0.25,
        rounds=2,
        eval_every=2,
    )
    theta, model = theta_0(federation), federation.model
    threshold, chosen = 2 * math.log(model.layout.size), 0

    def merge(client):
        nonlocal chosen
        x, y = samples(federation, client)
        each = []
        for i in range(len(y)):
            values = [value.clone().requires_grad_() for value in theta]
            each.append(flat(torch.autograd.grad(network_loss(values, x[i : i + 1], y[i : i + 1]), values)))
        each = torch.stack(each)
        z = each.sum(dim=0) / each.square().sum(dim=0).sqrt()
        step = torch.where(z**2 > threshold, -z, 0)
        logits = lambda at: model.logits(at, x)  # noqa: E731
        change = torch.autograd.functional.jacobian(logits, flat(theta), vectorize=True) @ step
        p = logits(flat(theta)).softmax(dim=1)
        covariance = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        curved = torch.einsum("na,nab,nb->", change, covariance, change)
        chosen += int((step != 0).sum())
        moved = flat(theta) + (-(each.sum(dim=0) @ step) / curved if curved > 0 else 0) * step
        return list(model.layout.views(moved).values())

    for round, cohort in each_round(federation):
        models = [
            sgd(federation, theta, network_loss, batches(federation, client, round, phase=1, epochs=2))
            for client in cohort
        ]
        theta = mean(federation, cohort, models)
    served = {client: merge(client) for client in range(3)}
    assert chosen > 100
    for result in both_engines(federation, theta, served):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * model.layout.size
        assert 0 < result.personal.max < model.layout.size


# Soft merging


def merged(method, last, theta, seen=True):
    state = {"theta": last, "seen": torch.tensor(seen)}
    [merge] = method.personalize(context(0))
    return merge(TINY, Client(state, {"theta": theta}, {}, {}, {}, {"n": torch.tensor(3)}))


def test_soft_merging_moves_personal_entries_a_part_of_the_way():
    last, theta = vector(10, 11, 9, 10, 13, 6, 10, 10), torch.full((8,), 10.0)  # scores 0, 1, 1, 0, 9, 16, 0, 0
    found = merged(Decoupled(q=0.7, soft=1.0), last, theta)  # the threshold is 1
    assert found.theta.tolist() == pytest.approx([10, 10, 10, 10, 10 + 3 * 8 / 9, 10 - 4 * 15 / 16, 10, 10])
    assert found.scratch["mine"].nonzero()[:, 0].tolist() == [4, 5]
    hard = merged(Decoupled(q=0.7, soft=1e-3), last, theta)
    assert hard.theta.tolist() == [10, 10, 10, 10, 13, 6, 10, 10]
    thresholding = merged(Decoupled(rule="rms", c=1.0, soft=2.0), last, theta)  # the mean of the scores is 27 / 8
    shrunk = math.sqrt(27 / 8)
    assert thresholding.theta.tolist() == pytest.approx([10] * 4 + [13 - shrunk, 6 + shrunk, 10, 10])
    assert merged(Decoupled(q=0.7, soft=1.0), last, theta, seen=False).theta.equal(theta)
    assert not merged(Decoupled(q=0.7, soft=1.0), theta, theta).scratch["mine"].any()


def test_a_client_that_mixes_is_sent_the_whole_model_and_scores_by_itself():
    method = Decoupled(soft=1.0, ema=0.5)
    _, record, state = method.init(TINY, torch.zeros(8), 0)
    assert (record, set(state)) == ({}, {"theta", "seen", "score", "scored"})
    download, _ = method.download(context(0, 1), {"theta": torch.arange(8.0)}, {})
    assert download["theta"].equal(torch.arange(8.0).expand(2, -1))


def test_soft_merging_of_a_run_tends_to_the_mask():
    federation = small_federation("decoupled", "one batch", {"q": 0.9}, rounds=4, eval_every=4)
    hard, nearly = federation.run(), federation.run(soft=1e-6)
    for client in (None, *range(4)):
        assert flat(nearly.state_dict(client).values()).equal(flat(hard.state_dict(client).values()))
    assert nearly.personal == hard.personal
    assert nearly.personal.max > 0


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize("options", [{"rule": "rms", "c": 1.0}, {"q": 0.5, "soft": 0.5}])
def test_batch_norms_statistics_are_never_personal(options):
    settings = {"model": "normed", "participation": 1.0}
    serial, lanes = (
        small_federation("decoupled", "one batch", options, engine=engine, **settings).run()
        for engine in ("serial", "lanes")
    )
    shared = serial.state_dict()
    for client in range(4):
        own = serial.state_dict(client)
        assert all(own[name].equal(shared[name]) for name in own if "running" in name)
        assert any(not own[name].equal(shared[name]) for name in own)
        torch.testing.assert_close(lanes.state_dict(client), own, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("networks")
def test_the_statistic_with_batch_norm_is_refused_before_training(tmp_path):
    federation = small_federation("decoupled", "one batch", {"rule": "statistic"}, model="normed")
    with pytest.raises(FedobpError, match="is not made for BatchNorm"):
        federation.run(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Engines, settings, errors


VARIANTS = [{"rule": "rms", "c": 2.0}, {"rule": "rms", "c": 3.0}, {"rule": "statistic"}, {"warmup": 2}, {"soft": 0.5},
            {"soft": 2.0}, {"rule": "rms", "c": 2.0, "soft": 1.0}, {"rule": "rms", "c": 2.0, "pool": "tensor"},
            {"rule": "statistic", "pool": "tensor"}, {"rule": "rms", "c": 2.0, "score": "fisher"}]  # fmt: skip


def test_every_option_changes_a_run():
    federation = small_federation("decoupled", "one batch")
    # Of a client that has trained: the statistic changes what is served alone.
    models = [flat(federation.run(**{"q": 0.99, **one}).state_dict(1).values()) for one in ({}, *VARIANTS)]
    assert len({tuple(model.tolist()) for model in models}) == len(VARIANTS) + 1


def test_options_that_a_rule_does_not_use_change_nothing():
    federation = small_federation("decoupled", "one batch")
    for one, other in (({"c": 3.0}, {}), ({"rule": "rms", "c": 3.0, "q": 0.5}, {"rule": "rms", "c": 3.0})):
        assert flat(federation.run(**one).state_dict().values()).equal(
            flat(federation.run(**other).state_dict().values())
        )


def test_new_clients_are_served_refitted_values_before_their_first_visit():
    settings = {"clients": 8, "holdout_clients": 3, "participation": 1.0, "eval_every": 3}
    lanes, serial = (
        small_federation("decoupled", "one batch", {"rule": "statistic"}, engine=engine, **settings).run()
        for engine in ("lanes", "serial")
    )
    assert lanes.new_clients == serial.new_clients
    plain = small_federation("fedavg", "one batch", **settings).run().new_clients
    assert serial.new_clients.served.pooled > plain.served.pooled + 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "rms", "score": "random"}, "rule=rms does not go with score=random: these scores are negative, so "),
        ({"rule": "statistic", "score": "fisher"}, "rule=statistic computes its own score at the global model: leave "),
        ({"rule": "statistic", "ema": 0.5}, "leave out score, norm, ema and start"),
        ({"rule": "statistic", "soft": 0.5}, "soft mixes a client's last values, which rule=statistic does not use"),
        ({"rule": "rms", "warmup": 3}, "warmup raises q, which rule=rms does not use: leave it out"),
        ({"soft": 0.1, "score": "taylor"}, "soft does not go with score=taylor: clients compute the weights, and "),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(FedobpError, match=message):
        Decoupled.configure(options)
