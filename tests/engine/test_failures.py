"""Failures: which are caught, which are raised, and what is reported when weights are no longer finite."""

from dataclasses import replace

import pytest
import torch

from fedobp import FedobpError
from fedobp.algorithms import METHODS
from fedobp.engine import caught, diverged
from fedobp.engine.failures import refuse_batch_norm, refuse_programs, without_failures
from fedobp.errors import Stopped
from fedobp.label_prior import label_prior
from fedobp.method import CohortUpdate, RoundContext
from fedobp.models import Model

MODEL = Model("mlp", (4,), 2)


def raising(error):
    def fail():
        raise error

    return fail


def test_exceptions_are_returned_and_interrupts_are_raised():
    assert caught(lambda: 7) == 7
    for error in (ValueError("no"), SystemExit(3), GeneratorExit()):
        assert caught(raising(error)) is error
    for error in (KeyboardInterrupt(), Stopped(15)):
        with pytest.raises(type(error)):
            caught(raising(error))


def test_updates_are_returned_unless_one_of_them_is_an_exception():
    updates = [CohortUpdate({}, torch.tensor([n])) for n in range(2)]
    assert without_failures(updates) == updates
    with pytest.raises(ValueError, match="first"):
        without_failures([updates[0], ValueError("first"), ValueError("second")])


def test_batch_norm_is_refused_with_what_to_do():
    refuse_batch_norm(MODEL)
    model = Model("resnet8-bn", (1, 8, 8), 10)  # for which the network `cnn` is too large
    with pytest.raises(
        FedobpError, match=r"^this method computes .* BatchNorm \('resnet8-bn'\): choose a --model without"
    ):
        refuse_batch_norm(model)


@pytest.mark.parametrize(
    ("method", "calibrate", "cause"),
    [
        ("fedrod", "off", "--method fedrod"),
        ("decoupled", "off", "--method decoupled"),
        ("fedavg", "bias", "--calibrate"),
    ],
)
def test_what_computes_logits_itself_is_named(method, calibrate, cause):
    options = {"rule": "statistic"} if method == "decoupled" else {}
    one = label_prior(METHODS[method](**options), "off", calibrate)
    ctx = RoundContext(Model("cnn-bn", (1, 28, 28), 10), round=1, rounds=9, clients=8, epochs=1, cohort=torch.arange(2))
    with pytest.raises(FedobpError, match=f"^{cause} computes logits by itself"):
        refuse_programs(one, ctx)
    refuse_programs(one, replace(ctx, model=MODEL))
    refuse_programs(METHODS["fedavg"](), ctx)


def error_of(method, **hparams):
    ctx = RoundContext(MODEL, round=3, rounds=9, clients=8, epochs=1, cohort=torch.tensor([6, 2, 5]))
    one = METHODS[method]()
    numbers = {"lr": 0.25, "momentum": 0.0, "weight_decay": 0.0, **one.hparams(), **hparams}
    return diverged(ctx, torch.tensor([True, False, False]), numbers, one)


def test_the_first_client_that_is_not_finite_is_named():
    error = error_of("fedavg")
    assert isinstance(error, FedobpError)
    assert str(error).startswith("round 3, client 2: ")


@pytest.mark.parametrize(
    ("method", "hparams", "cause"),
    [
        ("fedavg", {}, "--lr (it is 0.25)"),
        ("fedavg", {"weight_decay": 8.0}, "--lr (it is 0.25)"),
        ("fedavg", {"weight_decay": 8.1}, "--weight-decay (it is 8.1)"),
        ("fedavg", {"weight_decay": 1e30, "lr": 0.01}, "--weight-decay (it is 1e+30)"),
        ("fedavg", {"weight_decay": 8.1, "momentum": 0.9}, "--lr (it is 0.25) or --momentum (it is 0.9)"),
        ("fedavg", {"weight_decay": 5e-4, "lr": 1e9}, "--lr (it is 1e+09)"),
        ("fedobp", {"q": 0.99999}, "--lr (it is 0.25)"),
        ("fedprox", {"mu": 1e3}, "--set mu (it is 1000)"),
        ("ditto", {"lam": 9.0}, "--set lam (it is 9)"),
        ("ditto", {"lam": 9.0, "weight_decay": 10.0}, "--weight-decay (it is 10) or --set lam (it is 9)"),
        ("pfedme", {"eta_p": 0.5, "lr": 0.01}, "--lr (it is 0.01) or --set eta_p (it is 0.5)"),
    ],
)
def test_a_number_large_enough_to_diverge_is_named_and_the_learning_rate_otherwise(method, hparams, cause):
    assert str(error_of(method, **hparams)).endswith(f"; use a smaller {cause}")
