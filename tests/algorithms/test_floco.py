"""FLOCO: the simplex, the draws, the projection against scikit-learn and SciPy, and whole runs against a plain loop."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from contexts import with_model
from plain import RATES, SIZES, batches, both_engines, each_round, fit, flat, key, mean, sgd, small, theta_0
from scipy.optimize import brentq
from scipy.spatial.distance import pdist
from sklearn.decomposition import PCA
from walk import moment, row, walk

from fedobp.algorithms import METHODS, floco
from fedobp.engine.batch_order import step_key
from fedobp.keys import fold, uniform
from fedobp.method import Batch, Client, CohortUpdate, Train
from fedobp.models import Model

METHOD = METHODS["floco"](endpoints=3, tau=1)
MODEL = Model("mlp", (4,), 3)
THETA = MODEL.initial(1).double()
WEIGHT = MODEL.layout.mask(lambda name: name == "classifier.weight")
CENTRE = torch.tensor([0.2, 0.5, 0.3]).double()


def rows(count, width, seed=0, dtype=torch.float64):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# The projection


def components(data, count):
    """Scikit-learn's, the largest loading of each made positive, as versions from 1.5 on do themselves."""
    pca = PCA(count, svd_solver="full").fit(data)
    largest = np.abs(pca.components_).argmax(axis=1)
    return pca.transform(data) * np.sign(pca.components_[range(count), largest])


@pytest.mark.parametrize(("clients", "width", "count"), [(9, 40, 4), (9, 5, 5), (30, 7, 3), (5, 200, 5)])
def test_components_are_those_of_scikit_learn_signs_included(clients, width, count):
    data = records(clients, width)
    found, expected = floco.principal(data, count).numpy(), components(data.numpy(), count)
    np.testing.assert_allclose(found, expected, atol=1e-10)  # 5 centred rows span 4 directions: the others are 0


def test_components_that_the_clients_do_not_span_are_0():
    found = floco.principal(records(3, 50), 6)
    assert found.shape == (3, 6)
    assert found[:, 2:].abs().max() < 1e-12
    assert floco.principal(records(1, 50), 4).eq(0).all()


def test_rounding_does_not_choose_a_sign():
    """Two entries that differ by as much, in opposite directions: the first of them decides."""
    for seed in range(20):
        pair, noise = records(2, 30, seed), 1e-15 * records(2, 30, seed + 100)
        pair[:, 4], pair[:, 9] = torch.tensor([9.0, -9.0]), torch.tensor([-9.0, 9.0])
        found = floco.principal(pair, 2)
        assert found[0, 0] > 0 > found[1, 0]
        torch.testing.assert_close(floco.principal(pair + noise, 2), found, rtol=0, atol=1e-12)


def nearest(point, z):
    """The Euclidean projection, by a root search for the shift."""
    shift = brentq(lambda t: np.maximum(point - t, 0).sum() - z, point.min() - z, point.max(), xtol=1e-15)
    return np.maximum(point - shift, 0)


@pytest.mark.parametrize("z", [1e-4, 0.3, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_projection_onto_a_simplex_is_that_of_a_root_search(z, scale):
    points = scale * records(20, 6)
    found = floco.to_simplex(points, torch.tensor(z, dtype=torch.float64))
    np.testing.assert_allclose(found, [nearest(point, z) for point in points.numpy()], atol=1e-12 * max(1, scale))
    assert found.ge(0).all()


def test_points_of_the_simplex_stay_and_equal_coordinates_share():
    point = torch.tensor([[0.2, 0.0, 0.8], [3.0, 3.0, 3.0], [9.0, 0.0, 0.0]]).double()
    expected = [[0.2, 0, 0.8], [1 / 3, 1 / 3, 1 / 3], [1, 0, 0]]
    np.testing.assert_allclose(floco.to_simplex(point, torch.tensor(1.0)), expected, atol=1e-15)


def placed(points):
    """The search, one z and one client at a time."""
    found = [np.array([nearest(point, z) / z for point in points]) for z in np.linspace(1e-4, 1, 1000)]
    energy = [math.log(sum(1 / max(distance, 1e-4) ** 2 for distance in pdist(one))) for one in found]
    return next(one for one, value in zip(found, energy, strict=True) if value <= min(energy) + 1e-12)


@pytest.mark.parametrize(("scale", "seed"), [(0.05, 0), (0.3, 1), (2.0, 2)])
def test_the_search_finds_the_least_energy(scale, seed):
    points = scale * records(4, 3, seed)
    found = floco.spread(points)
    np.testing.assert_allclose(found, placed(points.numpy()), atol=1e-8)
    np.testing.assert_allclose(found.sum(dim=1), 1)


def test_those_who_cannot_be_told_apart_stay_in_the_middle():
    for clients in (1, 4):
        same = records(1, 30).expand(clients, -1)
        torch.testing.assert_close(floco.spread(floco.principal(same, 5)), torch.full((clients, 5), 0.2).double())


# Training


@pytest.fixture
def points(monkeypatch):
    """The points that a loss draws for many keys."""

    def draw(loss, rho=0.1, count=2000):
        seen = []
        monkeypatch.setattr(floco, "loss_at", lambda model, client, batch, point: seen.append(point))
        client = Client({}, {}, {"centre": CENTRE}, {}, {"rho": torch.tensor(rho).double()})
        for drawn in fold(1, torch.arange(count)):
            loss(None, client, Batch(*[torch.zeros(1)] * 3, drawn, torch.tensor(0), torch.tensor(0)))
        return torch.stack(seen)

    return draw


def test_before_tau_points_are_uniform_on_the_simplex(points):
    found = points(floco.simplex_loss)
    assert found.gt(0).all()
    torch.testing.assert_close(found.sum(dim=1), torch.ones(2000).double())
    assert torch.allclose(found.mean(dim=0), torch.tensor(1 / 3).double(), atol=0.02)
    # Uniform (Dirichlet of ones): a coordinate is below c with probability 1 - (1 - c)^2.
    for c in (0.1, 0.5, 0.9):
        assert (found < c).double().mean() == pytest.approx(1 - (1 - c) ** 2, abs=0.02)


def test_after_tau_points_lie_within_rho_of_the_centre(points):
    found = points(floco.region_loss) - CENTRE
    distance = found.abs().sum(dim=1)
    assert distance.max() <= 0.1
    assert torch.histc(distance, 4, 0, 0.1).sub(500).abs().max() < 80  # the radius is uniform
    assert found.mean(dim=0).abs().max() < 0.002
    assert found.gt(0).double().mean() == pytest.approx(0.5, abs=0.02)
    torch.testing.assert_close(points(floco.region_loss, rho=0.2) - CENTRE, 2 * found)


def test_the_loss_is_that_of_the_mixed_model():
    ends, x, y = records(3, 3 * 128).flatten(), records(4, 4, 5), torch.tensor([0, 2, 1, 1])
    client = Client({}, {}, {"theta": THETA, "ends": ends, "centre": CENTRE}, {}, {})
    weight = sum(share * end.view(3, 128) for share, end in zip(CENTRE, ends.split(3 * 128), strict=True))
    theta = MODEL.with_head(THETA, weight, MODEL.head(THETA)[1])
    expected = torch.nn.functional.cross_entropy(MODEL.logits(theta, x[:3]), y[:3])
    padded = Batch(x, y, torch.tensor([1.0, 1, 1, 0]).double(), *[torch.tensor(0)] * 3)
    torch.testing.assert_close(floco.loss_at(MODEL, client, padded, CENTRE), expected)


# Rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_endpoints_are_drawn_from_the_seed(dtype):
    theta = THETA.to(dtype)
    server, record, own = METHODS["floco"]().init(MODEL, theta, 7)
    ends = server["ends"].view(20, 3, 128)
    assert server["theta"][~WEIGHT].equal(theta[~WEIGHT])
    torch.testing.assert_close(server["theta"][WEIGHT], ends.mean(dim=0).flatten())
    assert ends.dtype == record["centre"].dtype == dtype
    assert float(ends.std()) == pytest.approx(math.sqrt(2 / (3 + 128)), rel=0.05)
    assert len(ends.unique()) > 7000
    assert record["centre"].tolist() == pytest.approx([0.05] * 20)
    assert own == {}
    assert METHODS["floco"]().init(MODEL, theta, 7).server["ends"].equal(server["ends"])
    assert not METHODS["floco"]().init(MODEL, theta, 8).server["ends"].equal(server["ends"])


def visit(server, record, round, steps, everyone=False):
    """A turn of two clients with one and three samples, whose training adds `steps` to all but the endpoints."""
    ctx = replace(moment(0, 1, round=round), full_participation=everyone)
    download, record = METHOD.download(with_model(MODEL, ctx), server, record)
    assert sorted(download) == ["centre", "ends", "rest"]
    states = [
        walk(MODEL, METHOD.client_update(with_model(MODEL, ctx)), {}, row(download, at), [step])[0]
        for at, step in enumerate(steps)
    ]
    names = ["ends"] if everyone else ["ends", "rest"]  # the projection takes nothing else
    assert all(sorted(state.upload) == names for state in states)
    up = {name: torch.stack([state.upload[name] for state in states]) for name in names}
    up["ends"] += torch.stack(steps)[:, :1]  # `walk` moves the first vector only
    return states, METHOD.aggregate(with_model(MODEL, ctx), server, record, CohortUpdate(up, torch.tensor([1, 3])))


@pytest.mark.essential
def test_two_rounds_with_the_projection_between_them_by_hand():
    start = METHOD.init(MODEL, THETA, 0)
    record = {"centre": start.record["centre"].repeat(2, 1)}
    steps = [torch.full_like(THETA, 4.0), torch.zeros_like(THETA)]
    states, (server, record) = visit(start.server, record, 1, steps)
    ends = start.server["ends"].view(3, -1)
    torch.testing.assert_close(states[0].theta[WEIGHT], ends.mean(dim=0))  # the last local model is at the centre
    torch.testing.assert_close(states[0].theta[~WEIGHT], THETA[~WEIGHT] + 4)
    torch.testing.assert_close(server["ends"], ends.flatten() + 1)
    torch.testing.assert_close(server["theta"][~WEIGHT], THETA[~WEIGHT] + 1)
    torch.testing.assert_close(server["theta"][WEIGHT], ends.mean(dim=0) + 1)
    assert record["centre"].eq(1 / 3).all()
    _, (after, record) = visit(server, record, 2, steps, full_participation=True)
    assert all(after[name].equal(server[name]) for name in server)  # the projection leaves the model as it is
    expected = placed(np.array([[1.0, 0, 0], [-1, 0, 0]]) * 2 * math.sqrt(3 * 3 * 128))  # 4 apart in every entry
    np.testing.assert_allclose(record["centre"], expected, atol=1e-8)
    states, _ = visit(after, record, 2, steps)
    for at, state in enumerate(states):
        weight = sum(share * end for share, end in zip(record["centre"][at], after["ends"].view(3, -1), strict=True))
        torch.testing.assert_close(state.theta[WEIGHT], weight)


@pytest.mark.parametrize(("round", "everyone", "loss", "mine"),
                         [(1, False, "simplex_loss", 0), (2, True, "simplex_loss", 384), (2, False, "region_loss", 384),
                          (3, False, "region_loss", 384)])  # fmt: skip
def test_programs_change_after_tau_rounds(round, everyone, loss, mine):
    ctx = replace(moment(0, 1, round=round), full_participation=everyone)
    [phase] = [item for item in METHOD.client_update(with_model(MODEL, ctx)) if isinstance(item, Train)]
    assert phase == Train(5, learn=("theta", "ends"), loss=getattr(floco, loss))
    ends = records(3, 384).flatten()
    download = {"rest": THETA[~WEIGHT], "ends": ends, "centre": CENTRE}
    served, _ = walk(MODEL, METHOD.personalize(with_model(MODEL, ctx)), {}, download, [])
    assert int(served.scratch.get("mine", torch.zeros(1)).sum()) == mine
    torch.testing.assert_close(served.theta[WEIGHT], CENTRE @ ends.view(3, -1))
    assert served.theta[~WEIGHT].equal(THETA[~WEIGHT])


@pytest.mark.parametrize(("options", "endpoints", "rho", "tau"), [
    ({}, 20, 0.01, {400: 200, 7: 3, 2: 1}),
    ({"mode": "as-published"}, 10, 0.1, {400: 10, 11: 10}),
    ({"mode": "as-published", "endpoints": 4, "rho": 0.5, "tau": 3}, 4, 0.5, {400: 3, 4: 3}),
])  # fmt: skip
def test_modes_and_options(options, endpoints, rho, tau):
    method = METHODS["floco"].configure(options)
    assert len(method.init(MODEL, THETA, 0).record["centre"]) == endpoints
    assert method.hparams() == {"rho": rho}
    for rounds, before in tau.items():  # before so many rounds and one there is the projection, then the cohort trains
        turns = [method.cohorts(round, rounds) for round in range(1, rounds + 1)]
        assert turns[before] == ("everyone", "cohort")
        assert turns.count(("cohort",)) == rounds - 1


@pytest.mark.parametrize(("options", "rounds"), [({}, 1), ({"mode": "as-published"}, 10), ({"tau": 6}, 6)])
def test_without_a_round_after_tau_all_clients_stay_in_the_middle(options, rounds):
    method = METHODS["floco"].configure(options)
    for round in range(1, rounds + 1):
        ctx = replace(moment(0, 1, round=round), rounds=rounds)
        assert method.cohorts(round, rounds) == ("cohort",)
        assert method.client_update(with_model(MODEL, ctx))[1].loss is floco.simplex_loss
        assert floco.mark_weight not in method.personalize(with_model(MODEL, ctx))


@pytest.mark.parametrize("rates", RATES)
def test_runs_are_those_of_a_plain_loop(rates):
    """Two rounds before the projection, and one that begins with it."""
    clients, count, rho = 4, 3, 0.4
    federation = small("floco", rates, {"endpoints": count, "tau": 2, "rho": rho})
    config, model, first = federation.config, federation.model, theta_0(federation)
    drawn = METHODS["floco"].configure(config.options).init(model, flat(first), config.seed).server["ends"]
    shared = [*first[:2], first[3], *drawn.view(count, 10, 8)]
    centres = [np.full(count, 1 / count)] * clients

    def point(draw, client, projected):
        if not projected:
            shares = [-math.log(number) for number in uniform(draw, count).tolist()]
            return [share / sum(shares) for share in shares]
        radius, *sides = uniform(draw, count + 1).tolist()
        length = sum(abs(2 * side - 1) for side in sides)
        return [centre + rho * radius * (2 * side - 1) / length
                for centre, side in zip(centres[client], sides, strict=True)]  # fmt: skip

    def with_model(point, values):
        return [*values[:2], sum(share * end for share, end in zip(point, values[3:], strict=True)), values[2]]

    def trained(client, round, projected):
        data, phase = list(batches(federation, client, round, 1, epochs=2)), key(federation, client, round, 1)
        draws = (step_key(phase, epoch, step) for epoch in range(2) for step in range(len(data) // 2))
        points = (point(draw, client, projected) for draw in draws)
        return sgd(federation, shared, lambda values, x, y: fit(with_model(next(points), values), x, y), iter(data))

    for round, cohort in each_round(federation):
        if round == 3:  # which all clients begin with the projection; of that nothing else is kept
            ends = np.stack([flat(trained(client, 3, False)[3:]).numpy() for client in range(clients)])
            centres = placed(components(ends, count))
        shared = mean(federation, cohort, [trained(client, round, round == 3) for client in cohort])
    served = {client: with_model(centres[client], shared) for client in range(clients)}
    visits, entries = 2 + 2 + clients + 2, sum(SIZES) + (count - 1) * SIZES[2]
    for result in both_engines(federation, at([1 / count] * count, shared), served, atol=1e-9):
        assert result.bytes.up_total == 8 * (6 * entries + clients * count * SIZES[2])
        assert result.bytes.down_total == visits * 8 * (entries + count)
        assert result.personal.min == result.personal.max == SIZES[2]
