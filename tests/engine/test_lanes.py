"""The lanes engine against the serial one, its oracle: every method, every option of a phase, every kind of network."""

from dataclasses import replace

import pytest
import torch
from lanes_cases import (
    BATCH,
    CHANGES,
    CLIENTS,
    FAST,
    NETWORKS,
    PHASES,
    TEST,
    TRAIN,
    Plan,
    agree,
    federated,
    made,
    played,
    task,
    uses_logits,
)
from torch import nn

import fedobp.engine.lanes as lanes_module
from fedobp import Config, Federation, FedobpError
from fedobp.engine import Budget, ClientPool, Counters, Lanes, Serial
from fedobp.method import Sparse
from fedobp.models import NETS

pytestmark = pytest.mark.usefixtures("networks")


ONE = ({},)  # round


def two_workers(model, **options):
    """Return an engine as on a machine with two cores; this one may be busy, so its own threads stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        return Lanes(model, BATCH, **options)


def compare(model, plans, engine=None):
    """Play the same on both engines."""
    ours = played(engine or Lanes(model, BATCH), model, plans)
    agree(ours, played(Serial(model, BATCH), model, plans))
    return ours


# Phases.


@pytest.mark.parametrize("hp", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", PHASES)
def test_every_kind_of_phase_equals_the_oracle(phases, hparams):
    compare(made("mlp"), [Plan(phases, hparams)])


@pytest.mark.parametrize("phases", ["plain", "all but a loss", "everything", "three vectors"])
@pytest.mark.parametrize("hp", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("name", ["cnn-small", *(name for name in NETWORKS if name != "normed")])
def test_every_kind_of_network_equals_the_oracle(name, hparams, phases):
    compare(made(name), [Plan(phases, hparams)])


@pytest.mark.parametrize("hp", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", [name for name, items in PHASES.items() if not uses_logits(items)])
def test_batch_norm_equals_the_oracle(hparams, phases):
    found = compare(made("normed"), [Plan(phases, hparams), Plan(phases, seed=9, cohort=(4, 0))])
    statistics = found[0]["up theta"][:, made("normed").layout.learned :]
    assert (statistics[0] != statistics[4]).any() or phases in ("no epochs", "another vector", "head")


@pytest.mark.parametrize("engine", [Lanes, Serial])
@pytest.mark.parametrize("phases", ["loss", "a sweep"])
def test_batch_norm_is_refused_where_a_method_looks_at_logits_itself(engine, phases):
    with pytest.raises(FedobpError, match="not made for BatchNorm"):
        played(engine(made("normed"), BATCH), made("normed"), [Plan(phases)])


def test_a_network_that_is_all_head_has_no_base_to_train():
    compare(made("products"), [Plan("base", FAST)])


def test_the_cases_show_what_they_should():
    """Every phase moves something, and each differently, or agreement would say little."""
    model = made("mlp")
    found = {phases: played(Lanes(model, BATCH), model, [Plan(phases, FAST)], rounds=ONE)[0] for phases in PHASES}
    moved = {phases: ("up other" if phases == "another vector" else "up theta") for phases in PHASES}
    ends = {phases: found[phases][moved[phases]] for phases in PHASES if "no epochs" not in phases}
    still = found["no epochs"]["up theta"]
    for phases, end in ends.items():
        changed = (end[0] - (still[0] / 2 if phases == "another vector" else still[0])).abs().max()
        assert changed > 1e-3, phases
    same = {"an end without epochs": "plain"}
    for one, end in ends.items():
        for other, another in ends.items():
            alike = one == other or same.get(one) == other or same.get(other) == one
            assert torch.allclose(end, another, rtol=0, atol=1e-6) == alike, (one, other)


def test_a_client_without_a_step_stays_where_it_was_and_has_no_loss():
    [found] = played(Lanes(made("mlp"), BATCH), made("mlp"), [Plan("pull", FAST)], rounds=ONE)
    [still] = played(Lanes(made("mlp"), BATCH), made("mlp"), [Plan("no epochs")], rounds=ONE)
    idle = [client for client, n in enumerate(TRAIN) if n < 2]
    assert torch.equal(found["up theta"][idle], still["up theta"][idle])
    assert found["loss"].isnan().nonzero().flatten().tolist() == idle == [2, 3]
    assert found["finite"].all()
    assert found["n"].tolist() == list(TRAIN)


# Stacks, cores and runs side by side.

MIXED = [
    Plan(),
    Plan(hparams={"lr": 0.02}, seed=6),
    Plan(hparams=FAST, deal=1, cohort=(5, 0, 3)),
    Plan(cohort=(4,), epochs=3),
    Plan("mask", {"lr": 0.3}, cohort=(1,), epochs=3),
    Plan("everything", FAST),
    Plan("everything", {"mu": 0.9}, seed=8, cohort=(4, 1), deal=1, epochs=1),
    Plan("two phases", epochs=1),
    Plan("no epochs"),
    Plan("plain, then loss", {"momentum": 0.5}, deal=1),
    Plan("rate", {"slow": 0.2, "weight_decay": 0.2}),
    Plan("mask in the base", cohort=(3, 2)),
]


@pytest.mark.parametrize("name", ["mlp", "strided", "residual"])
def test_runs_side_by_side_equal_the_oracle_and_each_run_alone(name):
    model = made(name)
    together = compare(model, MIXED)
    for plan, found in zip(MIXED, together, strict=True):
        agree(played(Lanes(model, BATCH), model, [plan]), [found])


@pytest.mark.parametrize("memory", [1.0, 3e6, 1e7])
@pytest.mark.parametrize("phases", ["plain", "everything"])
def test_a_small_memory_splits_the_lanes_and_changes_nothing(phases, memory):
    model = made("mlp")
    compare(model, [Plan(phases, FAST), Plan(phases, seed=9, epochs=1)], Lanes(model, BATCH, memory=memory))


def test_the_memory_bounds_the_lanes_of_a_stack():
    model = made("mlp")
    slots = {}
    for memory in (1.0, float("inf")):
        engine = Lanes(model, BATCH, memory=memory)
        played(engine, model, [Plan(epochs=1)], rounds=ONE)
        slots[memory] = engine.counters
    # Batches of 4, 4, 3; 4, 4; 4, 2; 4, 4. Alone nothing is padded; together 4 lanes twice 4 wide, then one 3 wide.
    assert slots[1.0] == Counters(steps=9, slots=33, samples=33)
    assert slots[float("inf")] == Counters(steps=9, slots=4 * 4 + 4 * 4 + 3, samples=33)
    assert slots[float("inf")].occupancy == pytest.approx(33 / 35)


@pytest.mark.parametrize(("name", "memory"), [("mlp", float("inf")), ("mlp", 1.0), ("residual", 1.0)])
def test_two_workers_equal_the_oracle(name, memory):
    model = made(name)
    compare(model, MIXED, two_workers(model, memory=memory))


def test_two_workers_share_the_lanes():
    model = made("mlp")
    engine = two_workers(model)
    played(engine, model, [Plan(epochs=1)], rounds=ONE)
    # Longest first, dealt out in turn: batches of 4, 4, 3 beside 4, 2, and of 4, 4 beside 4, 4.
    assert engine.counters == Counters(steps=9, slots=8 + 8 + 3 + 16, samples=33)


def test_workers_leave_the_callers_threads_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = made("mlp")
        plan = Plan("plain", FAST, cohort=(0, 1))
        found = played(Lanes(model, BATCH), model, [plan])  # a lane and a core each
        assert torch.get_num_threads() == 2
        agree(found, played(Serial(model, BATCH), model, [plan]))
    finally:
        torch.set_num_threads(before)


def test_two_workers_give_the_same_bytes_every_time():
    model = made("cnn-small")
    first, second = (played(two_workers(model), model, MIXED[:5], dtype=torch.float32) for _ in range(2))
    agree(first, second, atol=0)


def test_an_engine_has_no_memory_of_earlier_tasks():
    model = made("mlp")
    engine = Lanes(model, BATCH)
    played(engine, model, MIXED[::-1])
    agree(played(engine, model, MIXED), played(Lanes(model, BATCH), model, MIXED), atol=0)


@pytest.mark.essential
def test_cohorts_and_epochs_may_differ_from_round_to_round():
    model = made("mlp")
    for plan in (Plan("plain", FAST), Plan("everything", FAST)):
        ours, theirs = (played(engine(model, BATCH), model, [plan], rounds=CHANGES) for engine in (Lanes, Serial))
        agree(ours, theirs)


def test_the_counters_are_the_oracles_but_for_padding():
    model = made("mlp")
    ours, oracle = Lanes(model, BATCH), Serial(model, BATCH)
    for engine in (ours, oracle):
        played(engine, model, MIXED)
    assert (ours.counters.steps, ours.counters.samples) == (oracle.counters.steps, oracle.counters.samples)
    assert ours.counters.slots > oracle.counters.slots == oracle.counters.samples


def test_what_is_prepared_for_the_next_round_changes_nothing():
    model = made("mlp")
    clients = [ClientPool(federated(), own(model), start(model), 5, Budget()) for _ in range(2)]
    for engine, one, prepares in zip((Lanes(model, BATCH), Lanes(model, BATCH)), clients, (True, False), strict=True):
        for round in (1, 2):
            ctx = task(Plan(), one, start(model), round)
            engine.train([ctx])
            if prepares:
                engine.prepare([replace(task(Plan(), one, start(model), round + 1), download={})])
    assert torch.equal(*(one.state.gather(range(CLIENTS))["theta"] for one in clients))


# State, serving and predictions.


def start(model):
    return model.initial(3).double()


def own(model):
    return {"theta": start(model).flip(0), "visits": torch.tensor(0)}


def both(model, seed=5):
    """Return one population a engine."""
    return [
        (engine, ClientPool(federated(), own(model), start(model), seed, Budget()))
        for engine in (Lanes(model, BATCH), Serial(model, BATCH))
    ]


@pytest.mark.parametrize("phases", ["plain", "everything", "two phases"])
def test_serving_equals_the_oracle_and_changes_no_state(phases):
    model, served = made("mlp"), []
    for engine, clients in both(model):
        plan, nobody = Plan(phases, FAST), torch.full_like(start(model), 7.0)
        engine.train([task(replace(plan, cohort=(0, 4)), clients, start(model))])
        kept = clients.state.gather(range(CLIENTS)), engine.last(task(plan, clients, start(model)), nobody)
        served.append(engine.personalize(task(plan, clients, start(model), round=2)))
        again = engine.personalize(task(plan, clients, start(model), round=2))
        assert torch.equal(again["theta"], served[-1]["theta"])
        ctx = clients.state.gather(range(CLIENTS)), engine.last(task(plan, clients, start(model)), nobody)
        assert all(torch.equal(kept[0][name], ctx[0][name]) for name in kept[0])
        assert torch.equal(kept[1], ctx[1])
        assert torch.equal(kept[1][1], nobody)
    agree(served[:1], served[1:])
    assert not served[0]["mine"].any()


def test_serving_marks_what_the_program_marks():
    model = made("mlp")

    def mark(model, client):
        return client.set(theta=client.download["theta"], mine=client.download["part"].keep)

    found = []
    for engine, clients in both(model):
        whole = task(Plan(), clients, start(model))
        found.append(engine.personalize(replace(whole, program=[mark])))
        assert torch.equal(found[-1]["mine"], whole.download["part"].keep)
    agree(found[:1], found[1:])


@pytest.mark.parametrize("at_once", [256, 2])
@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small", "residual", "in-place", "normed"])
def test_predictions_are_the_oracles(monkeypatch, name, split, at_once):
    monkeypatch.setattr(lanes_module, "_TEST_BATCH", at_once)
    model = made(name)
    thetas = torch.stack([start(model) * (1 + client) - client / 50 for client in range(CLIENTS)])
    found = []
    for engine, clients in both(model):
        ctx = task(Plan(cohort=(4, 2, 0, 5, 1, 3)), clients, start(model))
        found.append(engine.predict(ctx, thetas, split))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs)
    assert len({tuple(labels.tolist()) for labels in found[0]}) > 1


def test_nobody_has_anything_to_predict():
    model = made("mlp")
    [(engine, clients), _] = both(model)
    idle = [client for client, n in enumerate(TEST) if not n]
    ctx = task(Plan(cohort=tuple(idle)), clients, start(model))
    assert [labels.shape for labels in engine.predict(ctx, start(model).expand(2, -1), "test")] == [(0,), (0,)]


# What does not cross the wire, and what is not finite.


def peek(model, client):
    return client.set(theta=client.download["part"].values).send(part=client.download["part"])


@pytest.mark.parametrize("verb", ["train", "serve"])
def test_a_client_that_looks_at_entries_it_was_not_sent_finds_nan(verb):
    model = made("mlp")
    [(engine, clients), _] = both(model)
    ctx = replace(task(Plan(), clients, start(model)), program=[peek])
    found = engine.personalize(ctx)["theta"] if verb == "serve" else engine.train([ctx])[0].upload["part"].values
    keep = ctx.download["part"].keep
    assert torch.equal(found.isnan(), ~keep)
    assert torch.equal(found[keep], start(model).expand_as(found)[keep])
    assert ctx.download["part"].values.isfinite().all()


def test_the_server_finds_nan_in_what_was_not_uploaded():
    model = made("mlp")
    [(engine, clients), _] = both(model)
    [answer] = engine.train([task(Plan(), clients, start(model))])
    part = answer.upload["part"]
    assert isinstance(part, Sparse)
    assert torch.equal(part.values.isnan(), ~part.keep)
    assert torch.equal(part.values[part.keep], answer.upload["theta"][part.keep])


@pytest.mark.parametrize("phases", ["plain", "everything"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small", "residual"])
def test_only_the_lane_that_diverges_is_not_finite(name, phases):
    model = made(name)
    calm, wild = Plan(phases, FAST), Plan(phases, {**FAST, "lr": 1e200, "slow": 1e200}, cohort=(0, 3, 4))
    both_runs = played(Lanes(model, BATCH), model, [calm, wild], rounds=ONE)
    agree(both_runs[:1], played(Serial(model, BATCH), model, [calm], rounds=ONE))
    assert both_runs[0]["finite"].all()
    assert both_runs[1]["finite"].tolist() == [False, True, False]  # client 3 takes no step


def test_a_client_that_diverges_takes_nobody_with_it():
    model = made("mlp")
    finite = []
    for engine, clients in both(model):
        ctx = task(Plan(), clients, start(model))
        ctx.download["theta"][4] *= 1e200
        [answer] = engine.train([ctx])
        finite.append(answer.finite.tolist())
        assert answer.upload["theta"][[0, 1, 5]].isfinite().all()
    assert finite == [[client != 4 for client in range(CLIENTS)]] * 2


# Precision.


@pytest.mark.parametrize("name", ["mlp", "cnn-small", "residual"])
def test_float32_is_close_to_the_oracle(name):
    model, plans = made(name), [Plan("plain", FAST), Plan("everything", FAST)]
    ours, theirs = (
        played(engine(model, BATCH), model, plans, dtype=torch.float32, rounds=ONE) for engine in (Lanes, Serial)
    )
    assert ours[0]["up theta"].dtype == torch.float32
    agree(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("engine", [Lanes, Serial])
@pytest.mark.parametrize("phases", ["plain", "everything"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small"])
def test_bfloat16_is_roughly_float32_and_keeps_float32_weights(name, phases, engine):
    model, plan = made(name), Plan(phases)
    [exact], [rough] = (
        played(engine(model, BATCH, precision), model, [plan], dtype=torch.float32, rounds=ONE)
        for precision in ("fp32", "bf16")
    )
    assert rough["up theta"].dtype == rough["loss"].dtype == torch.float32
    agree([rough], [exact], atol=0.05)
    assert not torch.equal(rough["up theta"], exact["up theta"])


@pytest.mark.parametrize("engine", [Lanes, Serial])
def test_predictions_in_bfloat16_are_each_models_own(engine):
    model = made("mlp")
    first = model.initial(3)
    thetas = torch.stack([first * (-1) ** client * (1 + client) for client in range(CLIENTS)])
    ctx = task(Plan(), ClientPool(federated(dtype=torch.float32), {}, first, 5, Budget()), first)
    exact, rough = (
        torch.cat(engine(model, BATCH, precision).predict(ctx, thetas, "train")) for precision in ("fp32", "bf16")
    )
    assert (exact == rough).double().mean() > 0.9


# Models that are not made for it.


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
    for name, kind in {"idle": Idle, "branching": Branching}.items():
        monkeypatch.setitem(NETS, name, lambda shape, classes, kind=kind: kind(shape[0] * shape[1] * shape[2], classes))


@pytest.mark.usefixtures("strange")
@pytest.mark.parametrize("hp", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", ["plain", "pull", "loss"])
def test_a_parameter_that_is_not_used_has_no_gradient(phases, hparams):
    compare(made("idle"), [Plan(phases, hparams)])


@pytest.mark.usefixtures("strange")
def test_a_model_that_cannot_be_vectorised_is_refused_with_what_to_do():
    settings = {"model": "branching", "rounds": 1, "clients": 6}
    with pytest.raises(FedobpError, match=r"model 'branching' cannot .*: use --engine serial"):
        Federation(Config(**settings)).run("fedavg")
    assert Federation(Config(**settings, engine="serial")).run("fedavg").accuracy.pooled > 0
