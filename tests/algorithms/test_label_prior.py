"""The label prior in the head's bias: by hand, against an optimiser, and on every method that can have it."""

import math
from dataclasses import replace

import pytest
import torch
from by_hand import context
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes_cases import NETWORKS
from plain_loops import small_federation
from test_checkpoint import SMALL, begin, contents, go_on
from torch.nn import functional

from fedobp import Config, Federation, FedobpError
from fedobp.algorithms import METHODS
from fedobp.label_prior import LabelPrior, calibration, label_prior, log_prior
from fedobp.method import Client, Train
from fedobp.models import Model
from fedobp.records import take
from fedobp.wrapped import inner_of

# Methods whose programs are plain functions and training by cross-entropy, and that predict by one model.
PLAIN = ("fedobp", "decoupled", "local", "fedavg", "fedavg-ft", "fedavg-last", "fedper", "lg-fedavg", "fedrep",
         "fedselect", "ditto", "fedbabu", "pfedsim", "pspfl", "seqfededt", "fedprox", "scaffold", "fedbn")  # fmt: skip


# The numbers.


@pytest.mark.essential
def test_log_prior_by_hand():
    """Counts 3, 1, 0, 0 with half a sample a class: 3.5, 1.5, 0.5, 0.5 of 6, and K p = 4/6 of these."""
    found = log_prior(torch.tensor([3, 1, 0, 0]))
    assert found.tolist() == pytest.approx([math.log(v * 4 / 6) for v in (3.5, 1.5, 0.5, 0.5)])
    assert log_prior(torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


@pytest.mark.essential
@pytest.mark.parametrize("level", [0.0, -3.0])
def test_inputs_that_say_nothing_give_the_prior(level):
    y = torch.tensor([0, 0, 0, 1, 3])
    scale, biases = calibration(torch.full((5, 4), level), y, torch.ones(5))
    expected = log_prior(torch.bincount(y, minlength=4))
    torch.testing.assert_close(biases, expected - expected.mean())
    assert float(scale) == 1


def objective(z, y, a, b):
    """The problem of the module's docstring, in other words: pseudo-samples are added as samples."""
    k = z.shape[1]
    z = z - z.mean(dim=1, keepdim=True)
    real = functional.cross_entropy(a * z + b, y, reduction="sum")
    pseudo = functional.cross_entropy(b.expand(k, k), torch.arange(k), reduction="sum") / 2
    return real + pseudo + k / 4 * z.var(dim=1, correction=0).mean() * (a - 1) ** 2


def problem(seed, n, k, spread):
    stream = torch.Generator().manual_seed(seed)
    y = torch.randint(0, max(1, k // 2), (n,), generator=stream)  # half of the classes do not occur
    z = spread * torch.randn(n, k, generator=stream, dtype=torch.float64)
    return z + spread * functional.one_hot(y, k), y


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 12), st.sampled_from([0.01, 0.3, 1.0, 5.0, 10.0]))
def test_calibration_finds_the_minimum(seed, n, k, spread):
    """The gradient is 0 there; the problem is convex."""
    z, y = problem(seed, n, k, spread)
    a, b = (value.requires_grad_() for value in calibration(z, y, torch.ones(n)))
    slopes = torch.autograd.grad(objective(z, y, a, b), (a, b))
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-5 * (1 + spread) * n


def test_padding_and_a_constant_in_the_logits_change_nothing():
    z, y = problem(0, 20, 5, 1.0)
    expected = calibration(z, y, torch.ones(20))
    padded = calibration(
        torch.cat([z, torch.full((3, 5), 7.0)]), torch.cat([y, y[:3]]), torch.tensor([1.0] * 20 + [0.0] * 3)
    )
    moved = calibration(z + torch.arange(20.0)[:, None], y, torch.ones(20))
    for found in (padded, moved):
        torch.testing.assert_close(found, expected)


def test_classes_may_be_renamed():
    z, y = problem(1, 30, 4, 1.0)
    order = torch.tensor([2, 0, 3, 1])
    a, b = calibration(z, y, torch.ones(30))
    again, renamed = calibration(z[:, order], order.argsort()[y], torch.ones(30))
    torch.testing.assert_close((again, renamed), (a, b[order]))


def test_biases_are_those_of_the_shift_where_the_model_is_right():
    """Gaussian classes with equal priors give exact logits; a client with other priors finds log p_i again."""
    stream, prior = torch.Generator().manual_seed(3), torch.tensor([0.7, 0.2, 0.1])
    y = torch.multinomial(prior, 60_000, replacement=True, generator=stream)
    x = 2 * functional.one_hot(y, 3) + torch.randn(len(y), 3, generator=stream)
    a, b = calibration(2 * x, y, torch.ones(len(y)))  # log p(x | y) = 2 x_y + what all classes have
    torch.testing.assert_close(b - b[0], (prior.log() - prior.log()[0]).double(), atol=0.05, rtol=0)
    assert float(a) == pytest.approx(1, abs=0.02)


# The programs.

MODEL = Model("mlp", (4,), 3)
BIAS = MODEL.layout.slices["classifier.bias"]
COUNTS = torch.tensor([3, 0, 1])
OFFSET = log_prior(COUNTS).float()


def client_of(program, state, download, step=0.0):
    """Run a program in which training adds `step` to what learns; return the client, and what each phase got."""
    data = {"n": COUNTS.sum(), "counts": COUNTS, "steps": torch.tensor(1)}
    client, got = Client(state, download, {}, {}, {"mu": torch.tensor(1.0)}, data), []
    for item in program:
        if isinstance(item, Train):
            got.append({name: client.scratch[name] for name in (*item.learn, *(item.pull or ())[:1])})
            client = client.set(**{item.learn[0]: client.scratch[item.learn[0]] + step})
        else:
            client = item(MODEL, client)
    return client, got


@pytest.mark.essential
@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_a_client_trains_with_the_prior_and_uploads_without_it(name):
    method = label_prior(METHODS[name](), "train", False)
    server, records, state = method.init(MODEL, MODEL.initial(0), 0)
    ctx = context(0, model=MODEL)
    download, _ = method.download(ctx, server, records)
    theta = server["theta"]
    client, [got] = client_of(method.client_update(ctx), state, take(download, 0), step=0.25)
    for vector_ in got.values():  # the model, and the anchor of FedProx
        torch.testing.assert_close(vector_[BIAS], theta[BIAS] + OFFSET)
        assert vector_[: BIAS.start].equal(theta[: BIAS.start])
    torch.testing.assert_close(client.upload["theta"], theta + 0.25)
    torch.testing.assert_close(client.theta[BIAS], theta[BIAS] + 0.25 + OFFSET)  # the last model is the trained one
    assert sorted(client.upload) == ["theta"]


def test_phases_that_follow_each_other_have_the_prior_once():
    method = label_prior(METHODS["fedrep"](), "train", False)
    server, records, state = method.init(MODEL, MODEL.initial(0), 0)
    ctx = context(0, model=MODEL)
    download, _ = method.download(ctx, server, records)
    client, got = client_of(method.client_update(ctx), state, take(download, 0), step=0.0)
    assert len(got) == 2
    for one in got:
        torch.testing.assert_close(one["theta"][BIAS], server["theta"][BIAS] + OFFSET)
    torch.testing.assert_close(client.state["private"][-3:], server["theta"][BIAS])


def test_the_last_model_of_a_client_is_served_as_it_was_trained():
    """FedAvg-Last keeps it without the prior, and serves it with the prior."""
    method = label_prior(METHODS["fedavg-last"](), "train", False)
    server, records, state = method.init(MODEL, MODEL.initial(0), 0)
    ctx = context(0, model=MODEL)
    download, _ = method.download(ctx, server, records)
    trained, _ = client_of(method.client_update(ctx), state, take(download, 0), step=0.5)
    served, _ = client_of(method.personalize(ctx), trained.state, take(download, 0))
    torch.testing.assert_close(served.theta, trained.theta)


@pytest.mark.essential
@pytest.mark.parametrize("prior", ["serve", "train"])
def test_the_prior_is_served(prior):
    method = label_prior(METHODS["fedavg"](), prior, False)
    theta = MODEL.initial(0)
    client, _ = client_of(method.personalize(context(0, model=MODEL)), {}, {"theta": theta})
    torch.testing.assert_close(client.theta[BIAS], theta[BIAS] + OFFSET)
    assert client.theta[: BIAS.start].equal(theta[: BIAS.start])
    assert client.scratch["mine"].nonzero()[:, 0].tolist() == list(range(BIAS.start, BIAS.stop))


def test_fine_tuning_starts_from_the_prior():
    method = label_prior(METHODS["fedavg-ft"](), "serve", False)
    theta = MODEL.initial(0)
    client, [got] = client_of(method.personalize(context(0, model=MODEL)), {}, {"theta": theta})
    torch.testing.assert_close(got["theta"][BIAS], theta[BIAS] + OFFSET)
    assert client.scratch["mine"].all()


def test_phases_keep_their_place_in_the_program():
    """So a run with a prior draws the same batches as the plain one."""
    ctx = context(0, model=MODEL)
    for name in PLAIN:
        plain = METHODS[name]()
        for prior in ("serve", "train"):
            method = label_prior(plain, prior, False)
            for one, other in (
                (plain.client_update(ctx), method.client_update(ctx)),
                (plain.personalize(ctx), method.personalize(ctx)),
            ):
                places = [[(at, item) for at, item in enumerate(p) if isinstance(item, Train)] for p in (one, other)]
                assert places[0] == places[1], (name, prior)
                assert len(one) == len(other) or not places[0]


def test_it_wraps_a_method():
    plain = METHODS["fedobp"]()
    assert label_prior(plain, "off", False) is plain
    found = label_prior(plain, "train", False)
    assert isinstance(found, LabelPrior)
    assert inner_of(found) is plain
    # With prior=train, state["theta"] has no prior, and is not the last model.
    assert [label_prior(plain, p, False).keeps_last_model for p in ("serve", "train")] == [True, False]
    with pytest.raises(FedobpError, match="--calibrate on fits the biases that --prior serve would add"):
        label_prior(plain, "serve", True)


# Runs.


@pytest.mark.parametrize("parts", [{"prior": "serve"}, {"prior": "train"}, {"calibrate": "on"}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_both_engines_agree_and_others_refuse(name, parts):
    federations = [small_federation(name, "one batch", engine=engine, **parts) for engine in ("serial", "lanes")]
    if name not in PLAIN:
        with pytest.raises(FedobpError, match=f"plain cross-entropy, and {name} does not"):
            federations[1].run()
        return
    serial, lanes = (federation.run() for federation in federations)
    for client in (None, 0, 1, 2, 3):
        for key, value in serial.state_dict(client).items():
            torch.testing.assert_close(lanes.state_dict(client)[key], value, rtol=0, atol=1e-6)
    assert serial.personal.min >= 10  # the bias of ten classes, and what the method keeps


@pytest.mark.parametrize("parts", [{"prior": "serve"}, {"calibrate": "on"}], ids=str)
def test_what_is_trained_stays_and_ten_numbers_are_personal(parts):
    config = Config(**SMALL, method="fedavg")
    plain, other = Federation(config).run(), Federation(replace(config, **parts)).run()
    assert other.last == plain.last
    assert other.bytes == plain.bytes
    assert (other.personal.min, other.personal.max) == (10, 10)
    assert other.compute.use == (1.0 if "calibrate" in parts else 0.0)
    assert other.accuracy.pooled > plain.accuracy.pooled
    for name, value in other.state_dict().items():
        assert value.equal(plain.state_dict()[name])
        assert value.equal(other.state_dict(client=3)[name]) == (name != "classifier.bias")


def test_a_client_without_samples_uses_the_model_as_it_is():
    config = Config(dataset="digits", clients=4, partition=_first_has_none, rounds=1, model="mlp", method="fedavg")
    for parts in ({"prior": "train"}, {"calibrate": "on"}):
        result = Federation(replace(config, **parts)).run()
        for name, value in result.state_dict().items():
            assert value.equal(result.state_dict(client=0)[name])


def _first_has_none(task):
    """One sample, which is for training; the others have the rest."""
    return [[], *(range(at, len(task.y), 3) for at in range(3))]


def test_what_has_no_linear_head_with_a_bias_is_refused():
    config = Config(**{**SMALL, "model": NETWORKS["without-bias"]}, method="fedavg", prior="serve")
    with pytest.raises(FedobpError, match="needs a classifier that is one linear layer with a bias"):
        Federation(config).run()


def test_next_tokens_are_refused():
    tokens = torch.arange(400).view(40, 10).numpy() % 7
    for parts in ({"prior": "serve"}, {"calibrate": "on"}):
        with pytest.raises(FedobpError, match="predicts every next token: leave them out"):
            Federation.from_data(tokens, tokens=True, config=Config(rounds=1, method="fedavg", **parts))


@pytest.mark.parametrize("parts", [{"prior": "train"}, {"calibrate": "on", "average": 0.9}], ids=str)
@pytest.mark.parametrize("method", ["fedobp", "scaffold"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(method, parts, tmp_path):
    config = Config(**SMALL, method=method, **parts)
    Federation(config).run(out=tmp_path / "whole", checkpoint_every=0)
    begin(config, tmp_path / "cut")
    assert go_on(config, tmp_path / "cut") == [4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_new_clients_use_their_own_prior():
    config = Config(method="fedavg", clients=8, holdout_clients=2, rounds=3, model="mlp")
    plain, other = (Federation(replace(config, calibrate=value)).run() for value in ("off", "on"))
    assert other.new_clients.served.pooled > plain.new_clients.served.pooled


def test_settings_from_before_have_the_same_hash():
    """Checkpoints of runs without these settings can be resumed."""
    config = Config(rounds=3)
    assert 'prior = "off"' in config.to_toml()
    assert config.hash == Config(rounds=3, prior="off", calibrate="off", average=0.0).hash
    assert len({replace(config, **one).hash for one in ({}, {"prior": "serve"}, {"average": 0.5})}) == 3
