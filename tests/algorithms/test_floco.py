"""FLOCO: the simplex, the draws, the projection against scikit-learn and SciPy, and whole runs against a plain loop."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import context, run_program, update_of
from plain_loops import (
    RATES,
    SIZES,
    batches,
    both_engines,
    each_round,
    flat,
    mean,
    network_loss,
    phase_key,
    sgd,
    small_federation,
    theta_0,
)
from scipy.optimize import brentq
from scipy.spatial.distance import pdist
from sklearn.decomposition import PCA

from fedobp.algorithms import METHODS, floco
from fedobp.engine.batch_order import step_key
from fedobp.keys import fold, uniform
from fedobp.method import Batch, Client, Train
from fedobp.models import Model
from fedobp.records import take

METHOD = METHODS["floco"](endpoints=3, tau=1)
MODEL = Model("mlp", (4,), 3)
THETA = MODEL.initial(1).double()
WEIGHT = MODEL.layout.mask(lambda name: name == "classifier.weight")
CENTRE = torch.tensor([0.2, 0.5, 0.3]).double()


def random_points(count, width, seed=0, dtype=torch.float64):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# The projection


def components(data, count):
    """Return the components of scikit-learn, with the largest loading of each made positive, as from version 1.5 on."""
    pca = PCA(count, svd_solver="full").fit(data)
    largest = np.abs(pca.components_).argmax(axis=1)
    return pca.transform(data) * np.sign(pca.components_[range(count), largest])


@pytest.mark.parametrize(("clients", "width", "count"), [(9, 40, 4), (9, 5, 5), (30, 7, 3), (5, 200, 5)])
def test_components_equal_those_of_scikit_learn_with_their_signs(clients, width, count):
    data = random_points(clients, width)
    found, expected = floco.principal_components(data, count).numpy(), components(data.numpy(), count)
    np.testing.assert_allclose(found, expected, atol=1e-10)  # 5 centred points span 4 directions: the others are 0


def test_components_that_the_clients_do_not_span_are_0():
    found = floco.principal_components(random_points(3, 50), 6)
    assert found.shape == (3, 6)
    assert found[:, 2:].abs().max() < 1e-12
    assert floco.principal_components(random_points(1, 50), 4).eq(0).all()


def test_rounding_does_not_decide_a_sign():
    """Two entries with equal and opposite differences: the first of them decides."""
    for seed in range(20):
        pair, noise = random_points(2, 30, seed), 1e-15 * random_points(2, 30, seed + 100)
        pair[:, 4], pair[:, 9] = torch.tensor([9.0, -9.0]), torch.tensor([-9.0, 9.0])
        found = floco.principal_components(pair, 2)
        assert found[0, 0] > 0 > found[1, 0]
        torch.testing.assert_close(floco.principal_components(pair + noise, 2), found, rtol=0, atol=1e-12)


def nearest(point, z):
    """Return the Euclidean projection, by a root search for the shift."""
    shift = brentq(lambda t: np.maximum(point - t, 0).sum() - z, point.min() - z, point.max(), xtol=1e-15)
    return np.maximum(point - shift, 0)


@pytest.mark.parametrize("z", [1e-4, 0.3, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_the_projection_onto_a_simplex_equals_that_of_a_root_search(z, scale):
    points = scale * random_points(20, 6)
    found = floco.project_to_simplex(points, torch.tensor(z, dtype=torch.float64))
    np.testing.assert_allclose(found, [nearest(point, z) for point in points.numpy()], atol=1e-12 * max(1, scale))
    assert found.ge(0).all()


def test_points_of_the_simplex_stay_and_equal_coordinates_share():
    point = torch.tensor([[0.2, 0.0, 0.8], [3.0, 3.0, 3.0], [9.0, 0.0, 0.0]]).double()
    expected = [[0.2, 0, 0.8], [1 / 3, 1 / 3, 1 / 3], [1, 0, 0]]
    np.testing.assert_allclose(floco.project_to_simplex(point, torch.tensor(1.0)), expected, atol=1e-15)


def placed(points):
    """Search for z as FLOCO does, one z and one client at a time."""
    found = [np.array([nearest(point, z) / z for point in points]) for z in np.linspace(1e-4, 1, 1000)]
    energy = [math.log(sum(1 / max(distance, 1e-4) ** 2 for distance in pdist(one))) for one in found]
    return next(one for one, value in zip(found, energy, strict=True) if value <= min(energy) + 1e-12)


@pytest.mark.parametrize(("scale", "seed"), [(0.05, 0), (0.3, 1), (2.0, 2)])
def test_the_search_finds_the_least_energy(scale, seed):
    points = scale * random_points(4, 3, seed)
    found = floco.place_on_simplex(points)
    np.testing.assert_allclose(found, placed(points.numpy()), atol=1e-8)
    np.testing.assert_allclose(found.sum(dim=1), 1)


def test_clients_with_equal_endpoints_stay_at_the_centre():
    for clients in (1, 4):
        same = random_points(1, 30).expand(clients, -1)
        torch.testing.assert_close(
            floco.place_on_simplex(floco.principal_components(same, 5)), torch.full((clients, 5), 0.2).double()
        )


# Training


@pytest.fixture
def points(monkeypatch):
    """Return the points that a loss draws for many keys."""

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


def test_the_loss_is_that_of_the_model_at_a_point():
    ends, x, y = random_points(3, 3 * 128).flatten(), random_points(4, 4, 5), torch.tensor([0, 2, 1, 1])
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
    server, record, state = METHODS["floco"]().init(MODEL, theta, 7)
    ends = server["ends"].view(20, 3, 128)
    assert server["theta"][~WEIGHT].equal(theta[~WEIGHT])
    torch.testing.assert_close(server["theta"][WEIGHT], ends.mean(dim=0).flatten())
    assert ends.dtype == record["centre"].dtype == dtype
    assert float(ends.std()) == pytest.approx(math.sqrt(2 / (3 + 128)), rel=0.05)
    assert len(ends.unique()) > 7000
    assert record["centre"].tolist() == pytest.approx([0.05] * 20)
    assert state == {}
    assert METHODS["floco"]().init(MODEL, theta, 7).server["ends"].equal(server["ends"])
    assert not METHODS["floco"]().init(MODEL, theta, 8).server["ends"].equal(server["ends"])


def train_cohort(server, records, round, steps, projection=False):
    """Train two clients with one and three samples; training adds `steps`, to the endpoints their first entry."""
    ctx = replace(context(0, 1, model=MODEL, round=round), full_participation=projection)
    download, records = METHOD.download(ctx, server, records)
    assert sorted(download) == ["centre", "ends", "rest"]
    program, clients = METHOD.client_update(ctx), []
    for at, step in enumerate(steps):
        clients.append(run_program(MODEL, program, {}, take(download, at), [step])[0])
    names = ["ends"] if projection else ["ends", "rest"]  # the projection needs only endpoints
    assert all(sorted(client.upload) == names for client in clients)
    update = update_of(clients, 1, 3)
    update.upload["ends"] += torch.stack(steps)[:, :1]  # `run_program` changes the first vector only
    return clients, METHOD.aggregate(ctx, server, records, update)


@pytest.mark.essential
def test_two_rounds_with_the_projection_between_them_by_hand():
    initial = METHOD.init(MODEL, THETA, 0)
    records = {"centre": initial.record["centre"].repeat(2, 1)}
    steps = [torch.full_like(THETA, 4.0), torch.zeros_like(THETA)]
    clients, (server, records) = train_cohort(initial.server, records, 1, steps)
    ends = initial.server["ends"].view(3, -1)
    torch.testing.assert_close(clients[0].theta[WEIGHT], ends.mean(dim=0))  # the last local model is at the centre
    torch.testing.assert_close(clients[0].theta[~WEIGHT], THETA[~WEIGHT] + 4)
    torch.testing.assert_close(server["ends"], ends.flatten() + 1)
    torch.testing.assert_close(server["theta"][~WEIGHT], THETA[~WEIGHT] + 1)
    torch.testing.assert_close(server["theta"][WEIGHT], ends.mean(dim=0) + 1)
    assert records["centre"].eq(1 / 3).all()
    _, (after, records) = train_cohort(server, records, 2, steps, projection=True)
    assert all(after[name].equal(server[name]) for name in server)  # the projection does not change the model
    expected = placed(np.array([[1.0, 0, 0], [-1, 0, 0]]) * 2 * math.sqrt(3 * 3 * 128))  # 4 apart in every entry
    np.testing.assert_allclose(records["centre"], expected, atol=1e-8)
    clients, _ = train_cohort(after, records, 2, steps)
    for point, client in zip(records["centre"], clients, strict=True):
        weight = sum(share * end for share, end in zip(point, after["ends"].view(3, -1), strict=True))
        torch.testing.assert_close(client.theta[WEIGHT], weight)


@pytest.mark.parametrize(("round", "projection", "loss", "mine"),
                         [(1, False, "simplex_loss", 0), (2, True, "simplex_loss", 384), (2, False, "region_loss", 384),
                          (3, False, "region_loss", 384)])  # fmt: skip
def test_programs_change_after_tau_rounds(round, projection, loss, mine):
    ctx = replace(context(0, 1, model=MODEL, round=round), full_participation=projection)
    [phase] = [item for item in METHOD.client_update(ctx) if isinstance(item, Train)]
    assert phase == Train(5, learn=("theta", "ends"), loss=getattr(floco, loss))
    ends = random_points(3, 384).flatten()
    download = {"rest": THETA[~WEIGHT], "ends": ends, "centre": CENTRE}
    served, _ = run_program(MODEL, METHOD.personalize(ctx), {}, download)
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
    for rounds, before in tau.items():  # round tau + 1 starts with the projection
        cohorts = [method.cohorts(round, rounds) for round in range(1, rounds + 1)]
        assert cohorts[before] == ("all", "sampled")
        assert cohorts.count(("sampled",)) == rounds - 1


@pytest.mark.parametrize(("options", "rounds"), [({}, 1), ({"mode": "as-published"}, 10), ({"tau": 6}, 6)])
def test_without_a_round_after_tau_all_clients_stay_at_the_centre(options, rounds):
    method = METHODS["floco"].configure(options)
    for round in range(1, rounds + 1):
        ctx = replace(context(0, 1, model=MODEL, round=round), rounds=rounds)
        assert method.cohorts(round, rounds) == ("sampled",)
        assert method.client_update(ctx)[1].loss is floco.simplex_loss
        assert floco.mark_weight not in method.personalize(ctx)


@pytest.mark.parametrize("rates", RATES)
def test_runs_equal_a_plain_loop(rates):
    """Two rounds before the projection, and one that starts with it."""
    clients, count, rho = 4, 3, 0.4
    federation = small_federation("floco", rates, {"endpoints": count, "tau": 2, "rho": rho})
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

    def model_at(point, values):
        return [*values[:2], sum(share * end for share, end in zip(point, values[3:], strict=True)), values[2]]

    def train(client, round, projected):
        data, phase = list(batches(federation, client, round, 1, epochs=2)), phase_key(federation, client, round, 1)
        draws = (step_key(phase, epoch, step) for epoch in range(2) for step in range(len(data) // 2))
        points = (point(draw, client, projected) for draw in draws)

        def loss(values, x, y):
            return network_loss(model_at(next(points), values), x, y)

        return sgd(federation, shared, loss, iter(data))

    for round, cohort in each_round(federation):
        if round == 3:  # the projection: of this training only the points are kept
            ends = np.stack([flat(train(client, 3, False)[3:]).numpy() for client in range(clients)])
            centres = placed(components(ends, count))
        shared = mean(federation, cohort, [train(client, round, round == 3) for client in cohort])
    served = {client: model_at(centres[client], shared) for client in range(clients)}
    downloads, entries = 2 + 2 + clients + 2, sum(SIZES) + (count - 1) * SIZES[2]
    centre = model_at([1 / count] * count, shared)
    for result in both_engines(federation, centre, served, atol=1e-9):
        assert result.bytes.up_total == 8 * (6 * entries + clients * count * SIZES[2])
        assert result.bytes.down_total == downloads * 8 * (entries + count)
        assert result.personal.min == result.personal.max == SIZES[2]
