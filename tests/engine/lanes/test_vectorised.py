"""Functions of methods on stacks of lanes: losses, sweeps and BatchNorm; step by step, and as graphs replay them."""

import gc
import weakref

import pytest
import torch
from lanes_cases import BATCH, CHANGES, FAST, PHASES, Plan, agree, compare, make_model, run_rounds, uses_logits

from fedobp.engine import Lanes, Serial
from fedobp.engine.lanes.vectorised import Vectorised
from fedobp.method import Sweep

pytestmark = pytest.mark.usefixtures("networks")


@pytest.mark.parametrize("hparams", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", [name for name, items in PHASES.items() if not uses_logits(items)])
def test_batch_norm_equals_the_oracle(hparams, phases):
    found = compare(make_model("normed"), [Plan(phases, hparams), Plan(phases, seed=9, cohort=(4, 0))])
    statistics = found[0]["upload theta"][:, make_model("normed").layout.learned :]
    assert (statistics[0] != statistics[4]).any() or phases in ("no epochs", "another vector", "head")


# As graphs replay them.


@pytest.fixture
def replaying(monkeypatch):
    """Replay a method's functions on the CPU, as on CUDA; lanes are padded to multiples of three, so some are idle."""

    def replayed(self, lanes, given, moving, plan, steps, make):
        return self._graphs.run_steps(lanes[0].phase.group, given, moving, plan, steps, make)

    monkeypatch.setattr(Vectorised, "_run_steps", replayed)
    monkeypatch.setattr("fedobp.engine.cuda_graphs.padded_lanes", lambda lanes: -(-lanes // 3) * 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # buffers are for one stack at a time


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("hparams", [{}, FAST], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("phases", [name for name, items in PHASES.items() if uses_logits(items)])
def test_custom_functions_equal_the_oracle_in_rounds_of_all_sizes(phases, hparams):
    model = make_model("mlp")
    engine, serial = Lanes(model, BATCH), Serial(model, BATCH)
    for plans, rounds in (
        ([Plan(phases, hparams)], CHANGES),
        ([Plan(phases, hparams), Plan(phases, FAST, seed=9)], CHANGES[::-1]),
    ):
        agree(run_rounds(engine, model, plans, rounds=rounds), run_rounds(serial, model, plans, rounds=rounds))


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("phases", ["plain", "mask", "base"])
def test_batch_norm_equals_the_oracle_in_rounds_of_all_sizes(phases):
    model, plans = make_model("normed"), [Plan(phases, FAST), Plan(phases, FAST, seed=9, cohort=(4, 0))]
    engine = Lanes(model, BATCH)
    agree(
        run_rounds(engine, model, plans, rounds=CHANGES),
        run_rounds(Serial(model, BATCH), model, plans, rounds=CHANGES),
    )


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("phases", ["loss", "a sweep"])
def test_graphs_are_freed_with_their_engine_without_garbage_collection(phases):
    """They hold GPU memory."""
    model = make_model("mlp")
    engine = Lanes(model, BATCH)
    run_rounds(engine, model, [Plan(phases)])
    kept = weakref.ref(engine._trainer._graphs)
    assert kept()._cache
    gc.disable()
    try:
        del engine
        assert kept() is None
    finally:
        gc.enable()


TEACHER = torch.nn.Linear(64, 3).double()


def learn(model, client, batch):
    """A step that uses another module, whose parameters require gradients."""
    return client.set(theta=client.theta + batch.mean(TEACHER(batch.x.flatten(1)).sum(dim=1)) / 10)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_may_use_another_module(graphs, request, monkeypatch):
    if graphs:
        request.getfixturevalue("replaying")
    monkeypatch.setitem(PHASES, "teacher", [Sweep(learn, 2)])
    model, plans = make_model("mlp"), [Plan("teacher")]
    found = run_rounds(Lanes(model, BATCH), model, plans)
    agree(found, run_rounds(Serial(model, BATCH), model, plans))
