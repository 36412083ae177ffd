"""The label prior in the head's bias: by hand, against an optimiser, and on every method that can have it."""

from dataclasses import replace

import pytest
import torch
from by_hand import context
from lanes_cases import NETWORKS
from plain_loops import small_federation
from test_checkpoint import SMALL, begin, contents, go_on
from torch import nn

from fedobp import Config, Federation, FedobpError
from fedobp.algorithms import METHODS
from fedobp.label_prior import LabelPrior, label_prior, log_prior
from fedobp.method import Client, Train
from fedobp.models import Model
from fedobp.records import take
from fedobp.wrapped import inner_of

# Methods whose programs are plain functions and training by cross-entropy, and that predict by one model.
PLAIN = ("fedobp", "decoupled", "local", "fedavg", "fedavg-ft", "fedavg-last", "fedper", "lg-fedavg", "fedrep",
         "fedselect", "ditto", "fedbabu", "group-oracle", "pfedsim", "pspfl", "seqfededt", "fedprox", "scaffold",
         "fedbn", "fedacg", "counterdrift")  # fmt: skip


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


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_a_client_trains_with_the_prior_and_uploads_without_it(name):
    method = label_prior(METHODS[name](), "train", "off")
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
    method = label_prior(METHODS["fedrep"](), "train", "off")
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
    method = label_prior(METHODS["fedavg-last"](), "train", "off")
    server, records, state = method.init(MODEL, MODEL.initial(0), 0)
    ctx = context(0, model=MODEL)
    download, _ = method.download(ctx, server, records)
    trained, _ = client_of(method.client_update(ctx), state, take(download, 0), step=0.5)
    served, _ = client_of(method.personalize(ctx), trained.state, take(download, 0))
    torch.testing.assert_close(served.theta, trained.theta)


@pytest.mark.parametrize("prior", ["serve", "train"])
def test_the_prior_is_served(prior):
    method = label_prior(METHODS["fedavg"](), prior, "off")
    theta = MODEL.initial(0)
    client, _ = client_of(method.personalize(context(0, model=MODEL)), {}, {"theta": theta})
    torch.testing.assert_close(client.theta[BIAS], theta[BIAS] + OFFSET)
    assert client.theta[: BIAS.start].equal(theta[: BIAS.start])
    assert client.scratch["mine"].nonzero()[:, 0].tolist() == list(range(BIAS.start, BIAS.stop))


def test_fine_tuning_starts_from_the_prior():
    method = label_prior(METHODS["fedavg-ft"](), "serve", "off")
    theta = MODEL.initial(0)
    client, [got] = client_of(method.personalize(context(0, model=MODEL)), {}, {"theta": theta})
    torch.testing.assert_close(got["theta"][BIAS], theta[BIAS] + OFFSET)
    assert client.scratch["mine"].all()


def test_phases_keep_their_place_in_the_program():
    """So a run with a prior draws the same batches as the plain one."""
    ctx = replace(context(0, model=MODEL), groups=torch.tensor([0, 0]))
    for name in PLAIN:
        plain = METHODS[name]()
        for prior in ("serve", "train"):
            method = label_prior(plain, prior, "off")
            for one, other in (
                (plain.client_update(ctx), method.client_update(ctx)),
                (plain.personalize(ctx), method.personalize(ctx)),
            ):
                places = [[(at, item) for at, item in enumerate(p) if isinstance(item, Train)] for p in (one, other)]
                assert places[0] == places[1], (name, prior)
                assert len(one) == len(other) or not places[0]


def test_it_wraps_a_method():
    plain = METHODS["fedobp"]()
    assert label_prior(plain, "off", "off") is plain
    found = label_prior(plain, "train", "off")
    assert isinstance(found, LabelPrior)
    assert inner_of(found) is plain
    # With prior=train, state["theta"] has no prior, and is not the last model.
    assert [label_prior(plain, p, "off").keeps_last_model for p in ("serve", "train")] == [True, False]
    with pytest.raises(FedobpError, match="--calibrate bias fits the biases that --prior serve would add"):
        label_prior(plain, "serve", "bias")


# Runs.


@pytest.mark.parametrize("parts", [{"prior": "serve"}, {"prior": "train"}, {"calibrate": "bias"}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_both_engines_agree_and_others_refuse(name, parts):
    federations = [small_federation(name, "one batch", engine=engine, **parts) for engine in ("serial", "lanes")]
    if name not in PLAIN:
        with pytest.raises(FedobpError, match=f"plain cross-entropy, without a fit of their own, and {name} does not"):
            federations[1].run()
        return
    serial, lanes = (federation.run() for federation in federations)
    for client in (None, 0, 1, 2, 3):
        for key, value in serial.state_dict(client).items():
            torch.testing.assert_close(lanes.state_dict(client)[key], value, rtol=0, atol=1e-6)
    assert serial.personal.min >= 10  # the bias of ten classes, and what the method keeps


@pytest.mark.parametrize("parts", [{"prior": "serve"}, {"calibrate": "bias"}], ids=str)
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
    for parts in ({"prior": "train"}, {"calibrate": "bias"}):
        result = Federation(replace(config, **parts)).run()
        for name, value in result.state_dict().items():
            assert value.equal(result.state_dict(client=0)[name])


def _first_has_none(task):
    """One sample, which is for training; the others have the rest."""
    return [[], *(range(at, len(task.y), 3) for at in range(3))]


def test_what_has_no_linear_head_with_a_bias_is_refused():
    config = Config(**{**SMALL, "model": NETWORKS["without-bias"]}, method="fedavg", prior="serve")
    with pytest.raises(FedobpError, match="need a last layer that is linear and has a bias"):
        Federation(config).run()


class Scaled(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.classifier = nn.Linear(64, classes)

    def forward(self, x):
        return 5 * self.classifier(x.flatten(1))


@pytest.mark.parametrize("parts", [{"prior": "serve"}, {"prior": "train"}, {"calibrate": "head"}], ids=str)
def test_a_network_that_changes_its_last_layers_outputs_is_refused(parts):
    config = Config(**{**SMALL, "model": lambda shape, classes: Scaled(classes)}, method="fedavg", **parts)
    with pytest.raises(FedobpError, match="need a last layer that is linear and has a bias"):
        Federation(config).run()


@pytest.mark.parametrize("level", ["bias", "head"])
def test_a_fit_with_batch_norm_is_refused_before_training(level, tmp_path):
    config = Config(**{**SMALL, "model": NETWORKS["normed"]}, method="fedavg", calibrate=level)
    with pytest.raises(FedobpError, match=r"^--calibrate computes logits by itself, which is not made for BatchNorm"):
        Federation(config).run(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_next_tokens_are_refused():
    tokens = torch.arange(400).view(40, 10).numpy() % 7
    for parts in ({"prior": "serve"}, {"calibrate": "bias"}):
        with pytest.raises(FedobpError, match="predicts every next token: leave them out"):
            Federation.from_data(tokens, tokens=True, config=Config(rounds=1, method="fedavg", **parts))


@pytest.mark.parametrize("parts", [{"prior": "train"}, {"calibrate": "bias", "average": 0.9}], ids=str)
@pytest.mark.parametrize("method", ["fedobp", "scaffold"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(method, parts, tmp_path):
    config = Config(**SMALL, method=method, **parts)
    Federation(config).run(out=tmp_path / "whole", checkpoint_every=0)
    begin(config, tmp_path / "cut")
    assert go_on(config, tmp_path / "cut") == [4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_new_clients_use_their_own_prior():
    config = Config(method="fedavg", clients=8, holdout_clients=2, rounds=3, model="mlp")
    plain, other = (Federation(replace(config, calibrate=value)).run() for value in ("off", "bias"))
    assert other.new_clients.served.pooled > plain.new_clients.served.pooled


def test_settings_from_before_have_the_same_hash():
    """Checkpoints of runs without these settings can be resumed."""
    config = Config(rounds=3)
    assert 'prior = "off"' in config.to_toml()
    assert config.hash == Config(rounds=3, prior="off", calibrate="off", average=0.0).hash
    assert len({replace(config, **one).hash for one in ({}, {"prior": "serve"}, {"average": 0.5})}) == 3


def test_options_that_came_later_do_not_change_a_hash():
    """Runs of `decoupled` and of the partition `feature` can be resumed that are older than some of their options."""
    old = Config(method="decoupled", options={"q": 0.9}, partition="feature", partition_options={"noise": 0.1})
    new = replace(
        old,
        options={"q": 0.9, "rule": "quantile", "c": 20.0, "warmup": 0, "soft": 0.0},
        partition_options={"noise": 0.1, "strength": 0.8, "groups": 0, "labels": "iid"},
    )
    assert new.hash == old.hash
    assert replace(new, options={**new.options, "rule": "rms"}).hash != old.hash
