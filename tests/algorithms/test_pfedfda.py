"""pFedFDA: discriminants, estimates and beta against other ways to compute them, and rounds against a plain loop."""

import math

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
    flat,
    hidden,
    mean,
    network_loss,
    phase_key,
    samples,
    sgd,
    small_federation,
    theta_0,
)
from scipy.optimize import minimize
from torch.distributions import MultivariateNormal
from torch.nn.functional import cross_entropy, one_hot

from fedobp.algorithms import METHODS
from fedobp.algorithms.gaussians import CrossValidation, best_beta, discriminant, estimate, shrunk
from fedobp.algorithms.pfedfda import log_prior, replace_rare_means
from fedobp.engine.batch_order import batches as positions
from fedobp.engine.batch_order import step_key
from fedobp.keys import Purpose, fold
from fedobp.method import Batch, Client, CohortUpdate, Sweep, Train
from fedobp.models import Model
from fedobp.records import take

METHOD = METHODS["pfedfda"]()
MODEL = Model("mlp", (4,), 3)
WIDTH = MODEL.head(MODEL.initial(0))[0].shape[1]
EPS = 1e-4


def drawn(seed, *shape):
    return torch.from_numpy(np.random.RandomState(seed).randn(*shape))


def covariance_of(seed, size):
    factor = drawn(seed, size, size)
    return factor @ factor.T / size + torch.eye(size).double()


# Gaussians


def test_the_discriminant_is_bayes_rule_for_gaussians():
    mean, covariance, prior = drawn(0, 3, 5), covariance_of(1, 5), torch.tensor([0.2, 0.5, 0.3]).double()
    weight, bias = discriminant(mean, covariance, prior.log())
    x = drawn(2, 7, 5)
    narrow = (1 - EPS) * covariance + EPS * covariance.trace() / 5 * torch.eye(5).double()
    density = torch.stack([MultivariateNormal(one, narrow).log_prob(x) for one in mean], dim=1).exp() * prior
    found = (x @ weight.T + bias).softmax(dim=1)
    torch.testing.assert_close(found, density / density.sum(dim=1, keepdim=True))


@pytest.mark.essential
def test_estimates_by_hand():
    x = torch.tensor([[1.0, 0], [3, 0], [0, 5], [7, 7]])
    labels = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]])  # the last is padding
    mean, covariance = estimate(x, labels, torch.full((3, 2), 9.0))
    assert mean.tolist() == [[2, 0], [0, 5], [9, 9]]
    # Centred: (-1, 0), (1, 0), (0, 0); over n - 1 = 2, plus I, plus 1e-4 everywhere.
    torch.testing.assert_close(covariance, torch.tensor([[2.0, 0], [0, 1]]) + EPS)
    _, alone = estimate(x, labels * torch.tensor([[1.0], [0], [0], [0]]), mean)
    torch.testing.assert_close(alone, torch.eye(2) + EPS)  # one sample: no scatter, and no division by 0


def problem(seed, far=1.0):
    """Return two folds of 12 samples, of which two are never held out."""
    y, size = torch.arange(12) % 3, 4
    features = drawn(seed, 12, size) + 2 * one_hot(y, size).double()
    folds = torch.tensor([[1, 0] * 5 + [0, 0], [0, 1] * 5 + [0, 0]]).double()
    mean, covariance = drawn(seed + 50, 3, size) * far, covariance_of(seed + 51, size)
    means = torch.stack([2 * torch.eye(size)[:3].double() + 0.5 * drawn(seed + k, 3, size) for k in (52, 53)])
    covariances = torch.stack([covariance_of(seed + k, size) for k in (54, 55)])
    prior = torch.tensor([0.3, 0.3, 0.4]).double().log()
    start, change = (mean, shrunk(covariance)), (means - mean, shrunk(covariances - covariance))
    validation = CrossValidation(features, one_hot(y, 3) * folds[..., None], prior, *start, *change)

    def loss(beta):
        total = 0
        for k in range(2):
            mixed = beta[0] * means[k] + (1 - beta[0]) * mean
            weight, bias = discriminant(mixed, beta[1] * covariances[k] + (1 - beta[1]) * covariance, prior)
            at = folds[k] > 0
            total = total + cross_entropy(features[at] @ weight.T + bias, y[at])
        return total

    return validation, loss


def test_the_curve_is_that_of_the_held_out_cross_entropy():
    validation, loss = problem(1)
    beta = torch.tensor([0.3, 0.8]).double()
    value, slope, curvature = validation.curve(beta)
    torch.testing.assert_close(value, loss(beta))
    torch.testing.assert_close(slope, torch.func.grad(loss)(beta))
    assert (torch.linalg.eigvalsh(curvature) > 0).all()


def search(loss, tied=False):
    def both(x):
        beta = torch.tensor(x, requires_grad=True)
        value = loss(beta.expand(2) if tied else beta)
        return value.item(), torch.autograd.grad(value, beta)[0].numpy()

    size = 1 if tied else 2
    tight = {"ftol": 1e-14, "gtol": 1e-10}
    return minimize(both, np.full(size, 0.5), jac=True, bounds=[(0, 1)] * size, method="L-BFGS-B", options=tight).x


@pytest.mark.parametrize("tied", [False, True])
def test_beta_equals_that_of_scipy(tied):
    inside = at_bound = 0
    for seed in range(10):  # seeds 10 and 24 have two minima each
        validation, loss = problem(seed, far=(0.3, 1, 3)[seed % 3])
        found, expected = best_beta(validation, 10, tied), search(loss, tied)
        assert loss(found) <= loss(torch.from_numpy(expected).expand(2)) + 5e-4  # after 10 steps
        np.testing.assert_allclose(best_beta(validation, 30, tied), np.broadcast_to(expected, 2), atol=2e-3)
        inside += bool(((found > 0.01) & (found < 0.99)).all())
        at_bound += bool(((found == 0) | (found == 1)).any())
    assert inside
    assert at_bound


def test_with_betas_own_the_clients_gaussians_are_used():
    one, batch = client(torch.tensor([0, 1, 0, 0, 1]))
    assert METHODS["pfedfda"](betas="own")._measure(MODEL, one, batch).scratch["beta"].tolist() == [1, 1]


def test_without_steps_beta_is_a_half():
    assert best_beta(problem(0)[0], 0, False).tolist() == [0.5, 0.5]


# The client


def client(y, weight=None, seed=0, dtype=torch.float64, method=METHOD):
    """Return a client with its download, and all its samples as one batch."""
    weight = torch.ones(len(y)) if weight is None else weight
    counts = torch.bincount(y[weight > 0], minlength=3)
    theta, x = MODEL.initial(3).to(dtype), drawn(seed, len(y), 4).to(dtype) + y[:, None]
    server = METHOD.init(MODEL, theta, 5).server
    download = take(METHOD.download(context(0, model=MODEL), server, {})[0], 0)
    one = Client({}, download, {}, {}, {}, {"n": counts.sum(), "counts": counts})
    batch = Batch(x, y, weight.to(dtype), fold(7, 8), torch.tensor(0), torch.tensor(0))
    return method.client_update(context(0, model=MODEL))[0](MODEL, one), batch


def test_the_base_is_trained_under_the_head_of_the_global_gaussians():
    one, batch = client(torch.tensor([0, 0, 2, 0]))
    mean, covariance = one.scratch["mean"], one.scratch["covariance"]
    assert covariance.equal(torch.eye(WIDTH).double())
    assert ((mean > 0) & (mean < 1)).all()
    prior = torch.tensor([0.75 + EPS, EPS, 0.25 + EPS]).double()
    expected = MODEL.features(one.theta, batch.x) @ mean.T - (mean**2).sum(dim=1) / 2 + (prior / prior.sum()).log()
    torch.testing.assert_close(MODEL.logits(one.theta, batch.x), expected)
    assert one.scratch["mine"].equal(MODEL.layout.is_head())
    program = METHOD.client_update(context(0, model=MODEL))
    assert program[1:3] == [Train(5, part="base"), Sweep(METHOD._measure, whole=True)]


@pytest.mark.parametrize("betas", ["two", "one"])
def test_folds_are_stratified_and_beta_is_chosen_on_them(betas):
    method = METHODS["pfedfda"](betas=betas, beta_steps=30)
    y = torch.tensor([0, 1, 0, 0, 2, 0, 1, 0, 1, 1, 0])  # class 2 has one sample and is excluded
    one, batch = client(y)
    done = method._measure(MODEL, one, batch)
    z = MODEL.features(one.theta, batch.x)
    mean, covariance = one.scratch["mean"], one.scratch["covariance"]
    met, folds = [0, 0, 0], [[], []]
    for at, label in enumerate(y.tolist()):
        met[label] += 1
        if label != 2:
            folds[(met[label] + int(fold(batch.key, label))) % 2].append(at)
    assert [len(one) for one in folds] == [5, 5]

    def gaussians(at):
        centres = {c: z[at][y[at] == c].mean(dim=0) for c in y[at].unique().tolist()}
        apart = torch.stack([z[i] - centres[int(y[i])] for i in at])
        spread = apart.T @ apart / (len(at) - 1) + torch.eye(WIDTH).double() + EPS
        return torch.stack([centres.get(c, mean[c]) for c in range(3)]), spread

    def loss(beta):
        total = 0
        for kept, out in (folds, folds[::-1]):
            centres, spread = gaussians(kept)
            mixed = beta[0] * centres + (1 - beta[0]) * mean, beta[1] * spread + (1 - beta[1]) * covariance
            weight, bias = discriminant(*mixed, log_prior(one))
            total = total + cross_entropy(z[out] @ weight.T + bias, y[out])
        return total

    expected = torch.from_numpy(search(loss, tied=betas == "one")).expand(2)
    torch.testing.assert_close(done.scratch["beta"], expected, rtol=0, atol=2e-3)
    assert (done.scratch["beta"] > 0).all()
    expected = gaussians(list(range(len(y))))
    torch.testing.assert_close((done.scratch["own_mean"], done.scratch["own_covariance"]), expected)


def test_padding_changes_nothing():
    y, weight = torch.tensor([0, 1, 0, 0, 1, 0, 2]), torch.tensor([1.0] * 5 + [0, 0])
    padded, plain = client(y, weight), client(y)[1]
    short = client(y[:5])[0], Batch(plain.x[:5], y[:5], torch.ones(5).double(), *plain[3:])
    found, expected = METHOD._measure(MODEL, *padded).scratch, METHOD._measure(MODEL, *short).scratch
    for name in ("beta", "own_mean", "own_covariance"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("y", [[0], [0, 1, 2], [1, 1], [1, 1, 1]])
def test_where_cross_validation_is_impossible_beta_is_0(y):
    one, batch = client(torch.tensor(y))
    done = METHOD._measure(MODEL, one, batch)
    assert done.scratch["beta"].tolist() == [0, 0]
    used = METHOD.personalize(context(0, model=MODEL))[-1](MODEL, done)
    assert used.theta.equal(one.theta)  # the head of the global Gaussians


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_class_is_enough_and_dtypes_are_kept(dtype):
    one, batch = client(torch.tensor([1, 1, 1, 1]), dtype=dtype)
    done = METHOD._measure(MODEL, one, batch)
    assert done.scratch["beta"].isfinite().all()
    assert {done.scratch[name].dtype for name in ("beta", "own_mean", "own_covariance")} == {dtype}


def test_the_upload_interpolates_between_the_global_gaussians_and_the_clients():
    """Three quarters of the way for the means, a quarter for the covariance."""
    one, _ = client(torch.tensor([0, 0, 2, 0]))
    mean, covariance = one.scratch["mean"], one.scratch["covariance"]
    scratch = {"own_mean": mean + 4, "own_covariance": 9 * covariance, "beta": torch.tensor([0.75, 0.25]).double()}
    *_, adapting, sending = METHOD.client_update(context(0, model=MODEL))
    done = sending(MODEL, adapting(MODEL, one.set(**scratch)))
    assert sorted(done.upload) == ["base", "covariance", "mean"]
    torch.testing.assert_close(done.upload["mean"], mean.flatten() + 3)
    torch.testing.assert_close(done.upload["covariance"], 3 * covariance.flatten())
    torch.testing.assert_close(MODEL.head(done.theta)[0], (mean + 3) / 3)  # also the head of the last local model


def test_a_client_without_samples_has_uniform_priors():
    one, _ = client(torch.zeros(0, dtype=torch.int64))
    torch.testing.assert_close(log_prior(one), torch.full((3,), -math.log(3)).double())
    assert one.theta.isfinite().all()


def test_in_use_rare_classes_have_the_global_mean():
    one, batch = client(torch.tensor([0, 0, 0, 1, 1]))
    done = replace_rare_means(MODEL, METHOD._measure(MODEL, one, batch))
    changed = (done.scratch["own_mean"] != one.scratch["mean"]).any(dim=1)
    assert changed.tolist() == [True, False, False]
    assert replace_rare_means in METHOD.personalize(context(0, model=MODEL))
    assert replace_rare_means not in METHOD.client_update(context(0, model=MODEL))


def test_the_initial_means_depend_on_the_seed():
    first, again, other = (METHOD.init(MODEL, MODEL.initial(0), seed).server["mean"] for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    assert 0.45 < first.mean() < 0.55


def test_all_clients_can_take_part_in_the_last_round():
    assert all(METHOD.cohorts(round, 9) == ("sampled",) for round in range(1, 10))
    cohorts = [METHODS["pfedfda"](last="all").cohorts(round, 9) for round in (1, 8, 9)]
    assert cohorts == [("sampled",), ("sampled",), ("all",)]


# Rounds


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("betas", ["two", "one"])
def test_runs_equal_a_plain_loop(betas, rates):
    """The plain loop uses ordinary matrices; only the search for beta is that of the package."""
    federation, size = small_federation("pfedfda", rates, {"betas": betas}, lr=0.05), 8
    method, model, first = METHODS["pfedfda"](betas=betas), federation.model, theta_0(federation)
    eye = torch.eye(size).double()
    base, covariance = first[:2], eye
    centres = METHOD.init(model, flat(first), federation.config.seed).server["mean"].view(10, size)
    used = []

    def head(centres, covariance, y):
        prior = torch.bincount(y, minlength=10).double() / len(y) + EPS
        inverse = ((1 - EPS) * covariance + EPS * covariance.trace() / size * eye).inverse()
        return [centres @ inverse, (prior / prior.sum()).log() - (centres @ inverse @ centres.T).diag() / 2]

    def beta(base, client, drawn):
        """Search for beta on the samples in the order in which an engine draws them."""
        x, y = samples(federation, client)
        [order] = positions(fold(drawn, 0), len(y), len(y))
        counts, zero = torch.bincount(y, minlength=10), torch.tensor(0)
        scratch = {"theta": flat([*base, *first[2:]]), "mean": centres, "covariance": covariance}
        one = Client({}, {}, {**scratch, "beta": eye[0, :2]}, {}, {}, {"n": counts.sum(), "counts": counts})
        batch = Batch(x[order], y[order], torch.ones(len(y)).double(), step_key(drawn, 0, 0), zero, zero)
        used.append(method._measure(model, one, batch).scratch["beta"].tolist())
        return used[-1]

    def adapted(base, client, few, *when):
        x, y = samples(federation, client)
        z = hidden(base, x)
        means = torch.stack([z[y == c].mean(dim=0) if c in y else centres[c] for c in range(10)])
        scatter = (z - means[y]).T @ (z - means[y])
        kept = torch.stack([one if (y == c).sum() > few else centres[c] for c, one in enumerate(means)])
        for_mean, for_scatter = beta(base, client, phase_key(federation, client, *when))
        spread = scatter / (len(y) - 1) + eye + EPS
        return [for_mean * kept + (1 - for_mean) * centres, for_scatter * spread + (1 - for_scatter) * covariance]

    for round, cohort in each_round(federation):
        uploads = []
        for client in cohort:
            start = [*base, *head(centres, covariance, samples(federation, client)[1])]
            data = batches(federation, client, round, phase=1, epochs=2)
            mine = sgd(federation, start, network_loss, data, moving=[True, True, False, False])[:2]
            uploads.append([*mine, *adapted(mine, client, 0, round, 2)])
        *base, centres, covariance = mean(federation, cohort, uploads)
    served = {}
    for client in range(4):
        gaussians = adapted(base, client, 2, 3, 1, Purpose.PERSONALIZE)
        served[client] = [*base, *head(*gaussians, samples(federation, client)[1])]
    assert any(0.1 < for_mean < 0.9 for for_mean, _ in used)
    assert any(a != b for a, b in used) == (betas == "two")
    wire = 2 * 8 * (sum(SIZES[:2]) + 10 * size + size**2)
    for result in both_engines(federation, [*base, *first[2:]], served, atol=1e-9):
        assert result.bytes.down_per_round == result.bytes.up_per_round == wire


def test_as_published_training_is_that_of_fedavg():
    federation = small_federation("pfedfda", "one batch")
    published, fedavg = federation.run("pfedfda", mode="as-published"), federation.run("fedavg")
    for name, tensor in published.state_dict().items():
        assert tensor.equal(fedavg.state_dict()[name])
    assert not published.state_dict(0)["classifier.weight"].equal(published.state_dict()["classifier.weight"])
    assert published.bytes.up_per_round == 2 * 8 * federation.model.layout.size


def test_as_published_the_gaussians_are_never_updated():
    method, theta = METHODS["pfedfda"](mode="as-published"), MODEL.initial(0)
    server, records, _ = method.init(MODEL, theta, 0)
    download, _ = method.download(context(0, 1, model=MODEL), server, records)
    assert sorted(download) == ["covariance", "mean", "theta"]
    update = CohortUpdate({"theta": theta.repeat(2, 1) + 1}, torch.ones(2))
    after, _ = method.aggregate(context(0, 1, model=MODEL), server, records, update)
    assert after["theta"].equal(theta + 1)
    assert after["mean"].equal(server["mean"])
    assert after["covariance"].equal(server["covariance"])


def test_as_published_beta_has_its_initial_values():
    """The client's means, except for classes of up to two samples, in the scatter too; half of its covariance."""
    method, y = METHODS["pfedfda"](mode="as-published"), torch.tensor([0, 0, 0, 1, 1])
    one, batch = client(y)
    _, sweep, *rest = method.personalize(context(0, model=MODEL))
    done = sweep.step(MODEL, one, batch)
    for function in rest:
        done = function(MODEL, done)
    features, shared = MODEL.features(one.theta, batch.x), one.scratch["mean"]
    mean = torch.stack([features[:3].mean(dim=0), shared[1], shared[2]])
    deviations = features - mean[y]
    covariance = deviations.T @ deviations / 4 + torch.eye(WIDTH).double() + EPS
    torch.testing.assert_close(done.scratch["mean"], mean)
    torch.testing.assert_close(done.scratch["covariance"], (covariance + torch.eye(WIDTH).double()) / 2)


def test_as_published_takes_the_global_gaussians_where_no_class_occurs_twice():
    one, batch = client(torch.tensor([0, 1, 2]))
    done = METHODS["pfedfda"](mode="as-published").personalize(context(0, model=MODEL))[1].step(MODEL, one, batch)
    assert done.scratch["beta"].tolist() == [0, 0]


def test_every_option_changes_the_models():
    federation = small_federation("pfedfda", "one batch", rounds=1)
    changes = {}, {"betas": "one"}, {"betas": "own"}, {"beta_steps": 1}, {"mode": "as-published"}
    usual, *others = (federation.run(**change).state_dict(0)["classifier.weight"] for change in changes)
    assert not any(torch.allclose(usual, other, atol=1e-6) for other in others)


def test_a_last_round_of_all_clients_changes_the_model():
    federation = small_federation("pfedfda", "one batch", {"betas": "own"})
    sample, every = (federation.run(last=last).state_dict()["fc.weight"] for last in ("sample", "all"))
    assert not torch.allclose(sample, every, atol=1e-6)
