"""What every method declares is true in every round of a run, in every mode: uploads, and where its last model is."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from plain_loops import small_federation
from torch import Tensor

from fedobp.algorithms import METHODS
from fedobp.engine import Budget, ClientJob
from fedobp.grouping import engine_for
from fedobp.launch import simulate
from fedobp.method import CohortUpdate
from fedobp.records import Tensors, mask_unsent, shapes_of, take, types_of

# Options with which a run of a few rounds has all kinds of rounds, uploads and states.
OPTIONS = {
    "floco": {"endpoints": 3, "tau": 2},  # round 3 starts with the projection
    "fedrep": {"final_epochs": 1},  # after the last round all clients train their heads
    "flute": {"final_epochs": 1},  # in the last round all clients train their heads
    "pfedfda": {"last": "all"},
    "pfedsim": {"rho": 0.5},  # rounds 1 and 2 are the warm-up
    "fedselect": {"every": 1},
    "fedobp": {"q": 0.9, "ema": 0.5},
}
# Rules of `decoupled` with which some entries are personal.
RULES = (
    (("rule", "rms"), ("c", 2.0)),
    (("rule", "statistic"),),
    (("warmup", 2),),
    (("q", 0.9), ("soft", 1.0)),
)


def cases():
    """Yield (name, options) of every method in every mode, and of every score and rule of `decoupled`."""
    for name, method in METHODS.items():
        modes = [choice for spec in method.options() if spec.name == "mode" for choice in spec.metadata["choices"]]
        for mode in modes or [None]:
            yield name, (*OPTIONS.get(name, {}).items(), *([("mode", mode)] if mode else []))
    [scores] = [spec.metadata["choices"] for spec in METHODS["decoupled"].options() if spec.name == "score"]
    yield from (("decoupled", (("q", 0.9), ("score", score))) for score in scores)
    yield from (("decoupled", options) for options in RULES)


CASES = [
    pytest.param(name, options, id="-".join([name, *(str(value) for _, value in options)])) for name, options in cases()
]


class Step(NamedTuple):
    """One cohort's training."""

    job: ClientJob
    update: CohortUpdate
    before: list[Tensors]  # the clients' states
    after: list[Tensors]
    trained: Tensor  # their models at the end of the program: [clients, N]


@cache
def steps_of(name, options):
    """Run a method on the serial engine; return its cohorts' steps, round by round."""
    federation = small_federation(name, "one batch", dict(options), rounds=4, epochs=1, engine="serial", eval_every=4)
    config, method = federation.config, METHODS[name].configure(dict(options))
    engine = engine_for(config, federation.model)
    run, clients = simulate(federation.plan(config, method), engine, Budget())
    kept, keep = [], clients.keep

    def spy(cohort, state, theta):
        kept.append(theta)
        keep(cohort, state, theta)

    clients.keep = spy
    found = []
    for number in range(1, config.rounds + 1):
        round = run.round(run.plan(number))
        job = next(round)
        while job is not None:
            cohort = job.ctx.cohort.tolist()
            before = [clients.state[client] for client in cohort]
            [update] = engine.train([clients.assign(job)])
            after = [clients.state[client] for client in cohort]
            found.append(Step(job, update, before, after, torch.cat(kept)))
            kept.clear()
            job = advance(round, update)
    return found


def advance(round, update):
    """Return the round's next job; None: it is over."""
    try:
        return round.send(update)
    except StopIteration:
        return None


@pytest.mark.parametrize(("name", "options"), CASES)
def test_expected_uploads_have_the_shapes_and_types_of_real_ones(name, options):
    method = METHODS[name].configure(dict(options))
    for step in steps_of(name, options):
        download = mask_unsent(step.job.download)
        for at, state in enumerate(step.before):
            expected, real = (
                method.expected_upload(step.job.ctx, take(download, at), state),
                take(step.update.upload, at),
            )
            assert shapes_of(expected) == shapes_of(real), (step.job.ctx.round, at)
            assert types_of(expected) == types_of(real), (step.job.ctx.round, at)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("floco", [{"ends", "rest"}, {"ends", "rest"}, {"ends"}, {"ends", "rest"}, {"ends", "rest"}]),
        ("fedrep", [{"shared"}] * 4 + [set()]),
        ("flute", [{"base", "head", "present"}] * 3 + [{"head"}]),
    ],
)
def test_uploads_differ_between_kinds_of_rounds(name, kinds):
    """So the test above has seen all of them."""
    options = (*OPTIONS[name].items(), ("mode", "faithful"))
    assert [set(step.update.upload) for step in steps_of(name, options)] == kinds


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_method_keeps_the_last_model_in_its_state_if_and_only_if_it_says_so(name, options):
    """Where it says so, the engine's clients do not store that model a second time."""
    keeps = [
        "theta" in state and state["theta"].equal(trained)
        for step in steps_of(name, options)
        for state, trained in zip(step.after, step.trained, strict=True)
    ]
    assert len(keeps) >= 8
    assert all(keeps) == METHODS[name].keeps_last_model


def test_pfedsim_keeps_the_last_model_after_its_warm_up_only():
    """So it must not declare `keeps_last_model`, although its state has a model under that name in every round."""
    steps = steps_of("pfedsim", tuple(OPTIONS["pfedsim"].items()))
    for step in steps:
        for state, trained in zip(step.after, step.trained, strict=True):
            assert state["theta"].equal(trained) == (step.job.ctx.round > 2)
