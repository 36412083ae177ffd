"""FedPAC: the combination of heads against other solvers, and whole rounds against a plain loop."""

from itertools import combinations

import numpy as np
import pytest
import torch
from by_hand import context
from plain_loops import (
    RATES,
    SIZES,
    batches,
    both_engines,
    each_round,
    hidden,
    mean,
    network_loss,
    samples,
    sgd,
    small_federation,
    theta_0,
)
from scipy.optimize import minimize
from torch.nn.functional import cross_entropy

from fedobp.algorithms import METHODS
from fedobp.algorithms.fedpac import add_features, alignment_loss, combination, on_simplex
from fedobp.method import Batch, Client, CohortUpdate, Sweep, Train
from fedobp.models import Model

METHOD = METHODS["fedpac"]()
MODEL = Model("mlp", (4,), 3)
WIDTH = MODEL.head(MODEL.initial(0))[0].shape[1]


# The quadratic programme


def problems(seed, m, rank, count=6):
    draw = np.random.RandomState(seed)
    factors = draw.randn(count, m, rank) * draw.rand(count, m, 1) ** 3
    diagonals = np.stack([np.diag(v) for v in draw.rand(count, m) / 9])
    return torch.from_numpy(factors @ factors.transpose(0, 2, 1) + diagonals)


@pytest.mark.parametrize(("m", "rank"), [(1, 1), (2, 3), (5, 2), (10, 30), (40, 5)])
def test_the_weights_are_those_of_scipy(m, rank):
    matrices = problems(m, m, rank)
    found = on_simplex(matrices, torch.ones(len(matrices), m, dtype=torch.bool))
    zeros = 0
    for q, a in zip(matrices.numpy(), found.numpy(), strict=True):
        expected = minimize(
            lambda x, q=q: x @ q @ x,
            np.full(m, 1 / m),
            jac=lambda x, q=q: 2 * q @ x,
            bounds=[(0, 1)] * m,
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 1000},
        ).x
        np.testing.assert_allclose(a, expected, atol=1e-5)
        # The conditions of a minimum: equal slopes where a > 0, none smaller elsewhere.
        slopes = q @ a
        assert (slopes >= a @ q @ a - 1e-8 * np.diag(q).mean()).all()
        zeros += (a == 0).sum()
    assert m < 10 or zeros > 0


def test_entries_that_are_not_allowed_are_0():
    allowed = torch.tensor([[True, False, True, True], [False, True, False, False]])
    found = on_simplex(problems(3, 4, 2, count=2), allowed)
    assert (found[0, 1], found[1].tolist()) == (0, [0, 1, 0, 0])
    [inner] = on_simplex(problems(3, 4, 2, count=2)[:1, [0, 2, 3]][:, :, [0, 2, 3]], allowed.new_ones(1, 3))
    torch.testing.assert_close(found[0, [0, 2, 3]], inner, rtol=0, atol=1e-8)


def test_equal_distributions_are_weighted_by_the_inverse_of_their_variance():
    h, n = torch.ones(3, 4), torch.tensor([5, 5, 5])
    found = combination(h, torch.tensor([1.0, 2.0, 4.0]), n)
    torch.testing.assert_close(found, torch.tensor([[4, 2, 1]] * 3).double() / 7)


@pytest.mark.essential
def test_two_clients_by_hand():
    # For client 0: a0^2 v0 + a1^2 (v1 + d), so a1 / a0 = v0 / (v1 + d) with d = |h_0 - h_1|^2 = 4.
    found = combination(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1.0, 2.0]), torch.tensor([9, 9]))
    torch.testing.assert_close(found, torch.tensor([[6 / 7, 1 / 7], [2 / 7, 5 / 7]]).double())


def test_far_away_heads_are_dropped():
    found = combination(torch.tensor([[0.0], [40.0]]), torch.tensor([1.0, 1.0]), torch.tensor([9, 9]))
    assert found.tolist() == [[1, 0], [0, 1]]  # 1 / 1602 is less than 1e-3


def test_clients_without_samples_or_variance():
    h, variance = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.5, 0.5]]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    found = combination(h, variance, torch.tensor([4, 0, 1, 4]))
    assert found[1].tolist() == [0, 1, 0, 0]  # keeps its head
    assert found[:, 1].tolist() == [0, 1, 0, 0]  # which no other client uses
    assert found[2].tolist() == [0, 0, 1, 0]  # one sample: no variance, so its own head counts as perfect
    assert (found[3] > 0).tolist() == [True, False, True, True]
    torch.testing.assert_close(found.sum(dim=1), torch.ones(4).double())


# The client


def measured(y, weight):
    """Return a client that has computed the statistics of its samples, and these as a batch."""
    zero, counts = torch.tensor(0), torch.bincount(y[weight > 0], minlength=3)
    base, head = MODEL.layout.split(MODEL.initial(3).double())
    x = torch.linspace(-1, 2, 4 * len(y), dtype=torch.float64).view(-1, 4).sin()
    prototypes, has_prototype = torch.arange(3.0 * WIDTH).double(), torch.tensor([False, True, True])
    download = {"base": base, "head": head, "prototypes": prototypes, "has_prototype": has_prototype}
    client = Client({}, download, {}, {}, {"lam": torch.tensor(0.5).double()}, {"n": counts.sum(), "counts": counts})
    program = METHOD.client_update(context(0, round=2, model=MODEL))
    client = program[0](MODEL, client)
    batch = Batch(x, y, weight, zero, zero, zero)
    if len(y):
        client = add_features(MODEL, client, batch)
    return program[2](MODEL, client), batch


def test_statistics_of_padded_features():
    y, weight = torch.tensor([0, 1, 0, 2, 1]), torch.tensor([1.0, 1, 1, 0, 0]).double()
    client, batch = measured(y, weight)
    z = MODEL.features(client.theta, batch.x)
    h = torch.stack([(z[0] + z[2]) / 3, z[1] / 3, torch.zeros(WIDTH).double()])
    torch.testing.assert_close(client.upload["h"], h.flatten())
    torch.testing.assert_close(client.upload["variance"], ((z[:3] ** 2).sum() / 3 - (h**2).sum()) / 3)
    shared = torch.arange(3.0 * WIDTH).double().view(3, -1)
    torch.testing.assert_close(client.scratch["target"], torch.stack([(z[0] + z[2]) / 2, shared[1], shared[2]]))
    loss = alignment_loss(MODEL, client, batch)
    distances = ((z - client.scratch["target"][y]) ** 2).mean(dim=1)
    expected = (cross_entropy(MODEL.logits(client.theta, batch.x)[:3], y[:3]) + 0.5 * distances[:3].mean()).detach()
    torch.testing.assert_close(loss, expected)


def test_a_client_without_samples_has_finite_statistics():
    client, _ = measured(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert not client.upload["h"].any()
    assert client.upload["variance"] == 0


def test_the_phases_share_the_local_epochs():
    phases = [item for item in METHOD.client_update(context(0, model=MODEL)) if isinstance(item, Train | Sweep)]
    features = Sweep(add_features)
    assert phases == [features, Train(1, part="head", lr="head_lr"), Train(4, part="base"), features]
    later = METHODS["fedpac"](head_epochs=2).client_update(context(0, round=2, model=MODEL))
    trained = [item for item in later if isinstance(item, Train)]
    assert trained == [Train(2, part="head", lr="head_lr"), Train(3, part="base", loss=alignment_loss)]


# Rounds


def best_of_all_supports(q):
    """Minimise a'qa on the simplex by trying every set of positive entries."""
    best = None
    for size in range(1, len(q) + 1):
        for support in map(list, combinations(range(len(q)), size)):
            x = torch.linalg.solve(q[support][:, support], torch.ones(size, dtype=q.dtype))
            a = torch.zeros(len(q), dtype=q.dtype)
            a[support] = x / x.sum()
            if (a >= 0).all() and (best is None or a @ q @ a < best @ q @ best):
                best = a
    best[best < 1e-3] = 0
    return best / best.sum()


@pytest.mark.parametrize("rates", RATES)
def test_runs_equal_a_plain_loop(rates):
    federation = small_federation(
        "fedpac", rates, {"head_lr": 0.05, "lam": 0.7}, alpha=0.3, epochs=3, participation=0.75
    )
    first = theta_0(federation)
    base, prototypes, heads = first[:2], {}, dict.fromkeys(range(4), first[2:])

    def means(z, y):
        return {c: z[y == c].mean(dim=0) for c in y.unique().tolist()}

    def statistics(z, y, centres):
        h = torch.stack([centres[c] * (y == c).double().mean() if c in centres else z[0] * 0 for c in range(10)])
        return h, ((z**2).sum() / len(y) - (h**2).sum()) / len(y)

    for round, cohort in each_round(federation):
        models, found, protos, sizes = [], [], [], []
        for client in cohort:
            x, y = samples(federation, client)
            centres = means(hidden(base, x), y)
            found.append(statistics(hidden(base, x), y, centres))

            def alignment_loss(values, x, y, centres=centres, prototypes=prototypes):
                target = torch.stack([prototypes.get(c, centres[c]) for c in y.tolist()])
                return network_loss(values, x, y) + 0.7 * ((hidden(values, x) - target) ** 2).mean()

            data = (batches(federation, client, round, phase, epochs) for phase, epochs in ((3, 1), (4, 2)))
            model = [*base, *heads[client]]
            model = sgd(federation, model, network_loss, next(data), lr=0.05, moving=[False, False, True, True])
            loss = alignment_loss if round > 1 else network_loss
            model = sgd(federation, model, loss, next(data), moving=[True, True, False, False])
            models.append(model)
            protos.append(means(hidden(model, x), y))
            sizes.append(torch.bincount(y, minlength=10).double())
        base = mean(federation, cohort, models)[:2]
        prototypes = {
            c: sum(size[c] * p[c] for size, p in zip(sizes, protos, strict=True) if c in p) / sum(s[c] for s in sizes)
            for c in range(10)
            if any(c in p for p in protos)
        }
        h, v = zip(*found, strict=True)
        for i, client in enumerate(cohort):
            differences = torch.stack([(h[i] - other).flatten() for other in h])
            a = best_of_all_supports(torch.stack(v).diag() + differences @ differences.T)
            heads[client] = [sum(w * one[k] for w, one in zip(a, models, strict=True)) for k in (2, 3)]
    assert not heads[1][0].equal(heads[3][0])
    size, features = sum(SIZES), 8
    served = {client: [*base, *head] for client, head in heads.items()}
    for result in both_engines(federation, [*base, *first[2:]], served, atol=1e-8):
        assert result.bytes.down_per_round == 3 * (8 * (size + 10 * features) + 10)
        assert result.bytes.up_per_round == 3 * 8 * (size + 2 * 10 * features + 10 + 1)


def test_every_option_changes_the_model():
    federation = small_federation("fedpac", "one batch", rounds=2)
    changes = {}, {"lam": 5.0}, {"head_epochs": 2}, {"head_lr": 0.01}
    usual, *others = (federation.run(**change).state_dict()["fc.weight"] for change in changes)
    assert not any(torch.allclose(usual, other, atol=1e-6) for other in others)


def test_only_classes_of_the_cohort_have_prototypes():
    theta = MODEL.initial(0)
    server, record, _ = METHOD.init(MODEL, theta, 0)
    assert not server["has_prototype"].any()
    prototypes = torch.stack([torch.full((3 * WIDTH,), 1.0), torch.full((3 * WIDTH,), 5.0)])
    upload = {
        "theta": theta.repeat(2, 1), "prototypes": prototypes, "counts": torch.tensor([[1.0, 2, 0], [3, 0, 0]]),
        "h": torch.zeros(2, 3 * WIDTH), "variance": torch.ones(2),
    }  # fmt: skip
    records = {name: value.repeat(2, 1) for name, value in record.items()}
    server["has_prototype"] = torch.tensor([False, False, True])  # of the previous cohort
    update = CohortUpdate(upload, torch.tensor([3, 3]))
    server, records = METHOD.aggregate(context(0, 1, model=MODEL), server, records, update)
    assert server["has_prototype"].tolist() == [True, True, False]
    assert server["prototypes"].view(3, -1)[:, 0].tolist() == [4, 1, 0]
    assert server["theta"].equal(theta)
    assert records["head"][1].equal(MODEL.layout.split(theta)[1])  # equal heads combine to that head
