"""The lanes engine against the serial engine, its oracle: programs, networks, state, predictions and precisions."""

from dataclasses import replace

import pytest
import torch
from lanes_cases import (
    BATCH,
    CHANGES,
    CLASSES,
    CLIENTS,
    FAST,
    MIXED,
    NETWORKS,
    ONE_ROUND,
    PHASES,
    TEST,
    TRAIN,
    Plan,
    agree,
    compare,
    make_job,
    make_model,
    make_pool,
    run_rounds,
)
from torch import nn

from fedobp import Config, Federation, FedobpError
from fedobp.engine import Lanes, Serial
from fedobp.engine.lanes import predictor
from fedobp.method import Sparse
from fedobp.models import NETS

pytestmark = pytest.mark.usefixtures("networks")


# Phases.


@pytest.mark.parametrize("hparams", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", PHASES)
def test_every_kind_of_phase_equals_the_oracle(phases, hparams):
    compare(make_model("mlp"), [Plan(phases, hparams)])


@pytest.mark.parametrize("phases", ["plain", "all but a loss", "everything", "three vectors"])
@pytest.mark.parametrize("hparams", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("name", ["cnn-small", *(name for name in NETWORKS if name != "normed")])
def test_every_kind_of_network_equals_the_oracle(name, hparams, phases):
    compare(make_model(name), [Plan(phases, hparams)])


def test_a_network_that_is_all_head_has_no_base_to_train():
    compare(make_model("products"), [Plan("base", FAST)])


def test_the_cases_differ_from_each_other():
    """Every phase changes the model, and each in another way: otherwise agreement would prove little."""
    model = make_model("mlp")
    found = {
        phases: run_rounds(Lanes(model, BATCH), model, [Plan(phases, FAST)], rounds=ONE_ROUND)[0] for phases in PHASES
    }
    moved = {phases: ("upload other" if phases == "another vector" else "upload theta") for phases in PHASES}
    ends = {phases: found[phases][moved[phases]] for phases in PHASES if "no epochs" not in phases}
    still = found["no epochs"]["upload theta"]
    for phases, end in ends.items():
        changed = (end[0] - (still[0] / 2 if phases == "another vector" else still[0])).abs().max()
        assert changed > 1e-3, phases
    same = {"an end without epochs": "plain"}
    for one, end in ends.items():
        for other, another in ends.items():
            alike = one == other or same.get(one) == other or same.get(other) == one
            assert torch.allclose(end, another, rtol=0, atol=1e-6) == alike, (one, other)


def test_a_client_without_a_step_keeps_its_model_and_has_no_loss():
    [found] = run_rounds(Lanes(make_model("mlp"), BATCH), make_model("mlp"), [Plan("pull", FAST)], rounds=ONE_ROUND)
    [still] = run_rounds(Lanes(make_model("mlp"), BATCH), make_model("mlp"), [Plan("no epochs")], rounds=ONE_ROUND)
    idle = [client for client, n in enumerate(TRAIN) if n < 2]
    assert torch.equal(found["upload theta"][idle], still["upload theta"][idle])
    assert found["loss"].isnan().nonzero().flatten().tolist() == idle == [2, 3]
    assert found["finite"].all()
    assert found["n"].tolist() == list(TRAIN)


# Runs side by side, and rounds one after the other.


@pytest.mark.parametrize("name", ["mlp", "strided", "residual"])
def test_runs_side_by_side_equal_the_oracle_and_each_run_alone(name):
    model = make_model(name)
    side_by_side = compare(model, MIXED)
    for plan, found in zip(MIXED, side_by_side, strict=True):
        agree(run_rounds(Lanes(model, BATCH), model, [plan]), [found])


def test_an_engine_has_no_memory_of_earlier_jobs():
    model = make_model("mlp")
    engine = Lanes(model, BATCH)
    run_rounds(engine, model, MIXED[::-1])
    agree(run_rounds(engine, model, MIXED), run_rounds(Lanes(model, BATCH), model, MIXED), atol=0)


@pytest.mark.essential
def test_cohorts_and_epochs_may_differ_from_round_to_round():
    model = make_model("mlp")
    for plan in (Plan("plain", FAST), Plan("everything", FAST)):
        ours, theirs = (run_rounds(engine(model, BATCH), model, [plan], rounds=CHANGES) for engine in (Lanes, Serial))
        agree(ours, theirs)


def test_the_counters_are_the_oracles_but_for_padding():
    model = make_model("mlp")
    ours, oracle = Lanes(model, BATCH), Serial(model, BATCH)
    for engine in (ours, oracle):
        run_rounds(engine, model, MIXED)
    assert (ours.counters.steps, ours.counters.samples) == (oracle.counters.steps, oracle.counters.samples)
    assert ours.counters.slots > oracle.counters.slots == oracle.counters.samples


# State, personal models and predictions.


def theta_of(model):
    return model.initial(3).double()


def both(model):
    """Return each engine with its clients."""
    return [(engine(model, BATCH), make_pool(model)) for engine in (Lanes, Serial)]


@pytest.mark.parametrize("phases", ["plain", "everything", "two phases"])
def test_personal_models_equal_the_oracles_and_change_no_state(phases):
    model, plan, found = make_model("mlp"), Plan(phases, FAST), []
    otherwise = torch.full_like(theta_of(model), 7.0)
    for engine, clients in both(model):

        def kept(clients=clients):
            return {
                **clients.state.gather(range(CLIENTS)),
                "last": clients.last_models(torch.arange(CLIENTS), otherwise),
            }

        engine.train([make_job(replace(plan, cohort=(0, 4)), clients, theta_of(model))])
        before = kept()
        found.append(engine.personalize(make_job(plan, clients, theta_of(model), round=2)))
        again = engine.personalize(make_job(plan, clients, theta_of(model), round=2))
        assert torch.equal(again.theta, found[-1].theta)
        assert kept().keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in kept().items())
        assert torch.equal(before["last"][1], otherwise)
    agree_on_models(*found)
    assert not found[0].mine.any()


def agree_on_models(ours, theirs):
    assert (ours.scratch, ours.processed) == (theirs.scratch, theirs.processed)
    agree([{"theta": ours.theta, "mine": ours.mine}], [{"theta": theirs.theta, "mine": theirs.mine}])


def test_personal_models_have_the_personal_entries_that_the_program_marks():
    model = make_model("mlp")

    def mark(model, client):
        return client.set(theta=client.download["theta"], mine=client.download["part"].keep)

    found = []
    for engine, clients in both(model):
        job = make_job(Plan(), clients, theta_of(model))
        found.append(engine.personalize(replace(job, program=[mark])))
        assert torch.equal(found[-1].mine, job.download["part"].keep)
    agree_on_models(*found)


@pytest.mark.parametrize("at_once", [256, 2])
@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small", "residual", "in-place", "normed"])
def test_predictions_are_the_oracles(monkeypatch, name, split, at_once):
    monkeypatch.setattr(predictor, "_TEST_BATCH", at_once)
    model = make_model(name)
    thetas = torch.stack([theta_of(model) * (1 + client) - client / 50 for client in range(CLIENTS)])
    found, logits = [], []
    for engine, clients in both(model):
        job = make_job(Plan(cohort=(4, 2, 0, 5, 1, 3)), clients, theta_of(model))
        found.append(engine.predict(job, thetas, split))
        logits.append(engine.logits(job, thetas, split))
        assert all(map(torch.equal, found[-1], (one.argmax(dim=1) for one in logits[-1])))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(*logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert len({tuple(labels.tolist()) for labels in found[0]}) > 1


def test_clients_without_samples_have_no_predictions():
    model = make_model("mlp")
    [(engine, clients), _] = both(model)
    idle = [client for client, n in enumerate(TEST) if not n]
    job = make_job(Plan(cohort=tuple(idle)), clients, theta_of(model))
    thetas = theta_of(model).expand(2, -1)
    assert [labels.shape for labels in engine.predict(job, thetas, "test")] == [(0,), (0,)]
    assert [logits.shape for logits in engine.logits(job, thetas, "test")] == [(0, CLASSES), (0, CLASSES)]


# Entries that are not sent, and values that are not finite.


def peek(model, client):
    return client.set(theta=client.download["part"].values).send(part=client.download["part"])


@pytest.mark.parametrize("verb", ["train", "personalize"])
def test_a_client_that_reads_entries_it_was_not_sent_finds_nan(verb):
    model = make_model("mlp")
    [(engine, clients), _] = both(model)
    job = replace(make_job(Plan(), clients, theta_of(model)), program=[peek])
    found = engine.personalize(job).theta if verb == "personalize" else engine.train([job])[0].upload["part"].values
    keep = job.download["part"].keep
    assert torch.equal(found.isnan(), ~keep)
    assert torch.equal(found[keep], theta_of(model).expand_as(found)[keep])
    assert job.download["part"].values.isfinite().all()


def test_the_server_finds_nan_in_what_was_not_uploaded():
    model = make_model("mlp")
    [(engine, clients), _] = both(model)
    [update] = engine.train([make_job(Plan(), clients, theta_of(model))])
    part = update.upload["part"]
    assert isinstance(part, Sparse)
    assert torch.equal(part.values.isnan(), ~part.keep)
    assert torch.equal(part.values[part.keep], update.upload["theta"][part.keep])


@pytest.mark.parametrize("phases", ["plain", "everything"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small", "residual"])
def test_only_the_lane_that_diverges_is_not_finite(name, phases):
    model = make_model(name)
    calm, wild = Plan(phases, FAST), Plan(phases, {**FAST, "lr": 1e200, "slow": 1e200}, cohort=(0, 3, 4))
    found = run_rounds(Lanes(model, BATCH), model, [calm, wild], rounds=ONE_ROUND)
    agree(found[:1], run_rounds(Serial(model, BATCH), model, [calm], rounds=ONE_ROUND))
    assert found[0]["finite"].all()
    assert found[1]["finite"].tolist() == [False, True, False]  # client 3 takes no step


def test_a_client_that_diverges_does_not_affect_the_others():
    model = make_model("mlp")
    finite = []
    for engine, clients in both(model):
        job = make_job(Plan(), clients, theta_of(model))
        job.download["theta"][4] *= 1e200
        [update] = engine.train([job])
        finite.append(update.finite.tolist())
        assert update.upload["theta"][[0, 1, 5]].isfinite().all()
    assert finite == [[client != 4 for client in range(CLIENTS)]] * 2


# Precision.


@pytest.mark.parametrize("name", ["mlp", "cnn-small", "residual"])
def test_float32_is_close_to_the_oracle(name):
    model, plans = make_model(name), [Plan("plain", FAST), Plan("everything", FAST)]
    ours, theirs = (
        run_rounds(engine(model, BATCH), model, plans, dtype=torch.float32, rounds=ONE_ROUND)
        for engine in (Lanes, Serial)
    )
    assert ours[0]["upload theta"].dtype == torch.float32
    agree(ours, theirs, atol=1e-4)


# Models without a vectorised form, and unused parameters.


class Idle(nn.Module):
    """A network with a parameter that it does not use."""

    def __init__(self, entries, classes):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))
        self.classifier = nn.Linear(entries, classes)

    def forward(self, x):
        return self.classifier(x.flatten(1))


class Branching(Idle):
    """A network that decides by values."""

    def forward(self, x):
        return super().forward(x if x.mean() > 0 else -x)


@pytest.fixture
def strange(monkeypatch):
    for name, network in {"idle": Idle, "branching": Branching}.items():
        monkeypatch.setitem(
            NETS, name, lambda shape, classes, network=network: network(shape[0] * shape[1] * shape[2], classes)
        )


@pytest.mark.usefixtures("strange")
@pytest.mark.parametrize("hparams", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", ["plain", "pull", "loss"])
def test_a_parameter_that_is_not_used_has_no_gradient(phases, hparams):
    compare(make_model("idle"), [Plan(phases, hparams)])


@pytest.mark.usefixtures("strange")
def test_a_model_that_cannot_be_vectorised_is_refused_with_what_to_do():
    settings = {"model": "branching", "rounds": 1, "clients": 6}
    with pytest.raises(FedobpError, match=r"model 'branching' cannot .*: use --engine serial"):
        Federation(Config(**settings, engine="lanes")).run("fedavg")
    assert Federation(Config(**settings, engine="serial")).run("fedavg").accuracy.pooled > 0
