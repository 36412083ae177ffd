"""A method that fails in any of its functions ends its own runs only; other runs are the same as without it."""

import json
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from lanes_cases import same

from fedobp import Config, Federation, FedobpError, SweepError, sweep
from fedobp.algorithms import METHODS
from fedobp.algorithms.fedavg import FedAvg, take_global, upload_model
from fedobp.errors import Stopped
from fedobp.method import Sparse, Sweep, Train, option

TINY = {"clients": 6, "rounds": 2, "participation": 0.5, "epochs": 1, "model": "mlp", "save_models": "none"}


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def fail(*_):
    raise ValueError("no\nmore")


def leave(*_):
    sys.exit(3)


def endless(*given):
    return endless(*given)


def return_none(model, client):
    return None


def short(model, client):
    return client.set(theta=client.theta[1:])


def double(model, client):
    return client.set(theta=client.theta.double())


def without_theta(model, client):
    return replace(client, scratch={})


class Unhashable:
    __hash__ = None

    def __call__(self, *_):
        return torch.zeros(())


PLACES = [
    "init", "cohorts", "no cohorts", "no program", "download", "aggregate", "personalize", "predict", "nan",
    "wrong server", "hparams",
]  # fmt: skip


@dataclass(frozen=True)
class Boom(FedAvg):
    """FedAvg that fails in a given function."""

    name: ClassVar[str] = "boom"
    summary: ClassVar[str] = "fails"
    paper: ClassVar[str] = "none"
    where: str = option("nowhere", "which function fails", choices=["nowhere", *PLACES])
    program: int = option(99, "which of PROGRAMS clients run")

    @property
    def predict(self):
        return fail if self.where == "predict" else None

    def hparams(self):
        return fail() if self.where == "hparams" else {}

    def cohorts(self, round, rounds):
        return fail() if self.where == "cohorts" else () if self.where == "no cohorts" else ("sampled",)

    def init(self, model, theta, seed):
        return leave() if self.where == "init" else super().init(model, theta, seed)

    def download(self, ctx, server, records):
        if self.where == "download" and ctx.round == 2:
            raise Unprintable
        return super().download(ctx, server, records)

    def client_update(self, ctx):
        if self.where == "no program":
            return None
        return PROGRAMS[self.program] if self.program < len(PROGRAMS) else super().client_update(ctx)

    def aggregate(self, ctx, server, records, update):
        if self.where == "aggregate":
            endless()
        found, records = super().aggregate(ctx, server, records, update)
        if self.where == "nan":
            return {"theta": found["theta"] * torch.nan}, records
        return {"theta": found["theta"][1:] if self.where == "wrong server" else found["theta"]}, records

    def personalize(self, ctx):
        return [take_global, fail] if self.where == "personalize" else super().personalize(ctx)


TRAIN = Train(1)
PROGRAMS = [
    [fail],
    [take_global, leave, TRAIN, upload_model],
    [take_global, return_none],
    [take_global, short, TRAIN, upload_model],
    [take_global, Train(1, learn=("nothing",)), upload_model],
    [take_global, Train(1, mask="nothing"), upload_model],
    [take_global, Train(1, lr="nothing"), upload_model],
    [take_global, Train(1, loss=fail), upload_model],
    [take_global, Train(1, loss=lambda model, client, batch: batch.y.double()), upload_model],
    [take_global, Sweep(fail), upload_model],
    [take_global, Sweep(take_global, more=leave), upload_model],
    [take_global, Sweep(take_global, epochs="many"), upload_model],
    [take_global, TRAIN, short],
    [take_global, TRAIN, without_theta],
    [take_global, TRAIN],  # nothing is uploaded
    [take_global, TRAIN, lambda model, client: client.send(theta=Sparse(client.theta, client.theta[1:] > 0))],
    [take_global, TRAIN, lambda model, client: client.send(theta=3)],
    [take_global, 3],
    3,
    [take_global, double, TRAIN, upload_model],  # fails in float32
]
CASES = [
    *(("lanes", {"where": place}) for place in PLACES),
    *(("lanes", {"program": at}) for at in range(len(PROGRAMS) - 1)),
    *(("serial", {"where": place}) for place in ("init", "download", "wrong server")),
    *(("serial", {"program": at}) for at in (0, 3, 7)),
]


@pytest.fixture
def boom(monkeypatch):
    monkeypatch.setitem(METHODS, "boom", Boom)


def expected(**given):
    """Return the results of the other runs without the one that fails."""
    return sweep([Config(**TINY, **given, method="fedavg"), Config(**TINY, **given, method="fedper")])


@pytest.fixture(scope="module")
def others():
    return {engine: expected(precision="fp64", engine=engine) for engine in ("lanes", "serial")}


@pytest.mark.usefixtures("boom")
@pytest.mark.parametrize(("engine", "options"), CASES, ids=str)
def test_a_method_that_fails_ends_its_own_run_only(options, engine, others, tmp_path):
    given = {**TINY, "precision": "fp64", "engine": engine}
    configs = [Config(**given, method="fedavg"), Config(**given, method="boom", options=options),
               Config(**given, method="fedper")]  # fmt: skip
    with pytest.raises(SweepError) as caught:
        sweep(configs, out=[tmp_path / name for name in "abc"])
    first, failed, third = caught.value.results
    assert failed is None
    same(first, others[engine][0])
    same(third, others[engine][1])
    assert (tmp_path / "a/result.json").exists()
    assert (tmp_path / "c/result.json").exists()
    assert not (tmp_path / "b/result.json").exists()
    [failure] = caught.value.failed
    assert (failure.method, failure.seed) == ("boom", 42)
    assert "\n" not in failure.error
    if options not in ({"where": "nan"}, {"where": "no cohorts"}):  # which the package itself reports
        assert f"(method 'boom', {__file__}:" in failure.error


@pytest.mark.usefixtures("boom")
@pytest.mark.parametrize("options", [{"where": "init"}, *({"program": at} for at in (3, 5, 7, -1))], ids=str)
def test_a_run_that_fails_before_it_has_trained_changes_no_bit_of_the_others(options):
    first, _, third = failing(Config(**TINY, method="fedavg"), Config(**TINY, method="boom", options=options),
                              Config(**TINY, method="fedper")).results  # fmt: skip
    for one, other in zip((first, third), expected(), strict=True):
        same(one, other, atol=0)


def failing(*configs):
    with pytest.raises(SweepError) as caught:
        sweep(configs)
    return caught.value


@pytest.mark.usefixtures("boom")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"where": "init"}, r"SystemExit: 3 \(method 'boom', .*test_failing_methods.py:\d+\)"),
        ({"where": "aggregate"}, r"RecursionError: maximum recursion depth exceeded.*test_failing_methods.py:\d+\)"),
        ({"where": "download"}, r"Unprintable \(method 'boom', .*test_failing_methods.py:\d+\)"),
        ({"program": 0}, r"ValueError: no \(method 'boom', .*test_failing_methods.py:\d+\)"),
        ({"program": 6}, r"KeyError: 'nothing' \(method 'boom', .*test_failing_methods.py:\d+\)"),
    ],
)
def test_a_single_run_reports_the_same_in_one_sentence(options, sentence):
    with pytest.raises(FedobpError, match=f"^{sentence}$") as caught:
        Federation(Config(**TINY)).run("boom", **options)
    assert caught.value.__cause__ is not None  # with the traceback


@pytest.mark.usefixtures("boom")
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(15)])
def test_an_interrupt_is_not_a_failure(monkeypatch, stop):
    def interrupt(*_):
        raise stop

    monkeypatch.setattr(Boom, "aggregate", interrupt)
    with pytest.raises(type(stop)):
        sweep([Config(**TINY, method="fedavg"), Config(**TINY, method="boom")])


def test_a_bug_in_a_built_in_method_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(METHODS["fedper"], "aggregate", fail)
    with pytest.raises(ValueError, match="no"):
        Federation(Config(**TINY)).run("fedper")
    error = failing(Config(**TINY, method="fedavg"), Config(**TINY, method="fedper"))
    assert isinstance(error.__cause__, ValueError)
    assert str(error).startswith("fedper, seed 42: ValueError: no (")


@pytest.mark.parametrize("declared", [{"epochs": 1.5}, {"epochs": -1}, {"part": "tail"}, {"loss": Unhashable()}])
def test_an_invalid_phase_is_refused_when_it_is_constructed(declared):
    with pytest.raises((ValueError, TypeError)):
        Train(**{"epochs": 1, **declared})


@pytest.mark.usefixtures("boom")
def test_an_error_of_several_seeds_is_reported_once():
    configs = [Config(**TINY, method="boom", options={"where": "init"}, seed=seed) for seed in (1, 2)]
    error = failing(*configs, Config(**{**TINY, "method": "fedavg"}))
    assert str(error).startswith("boom, seeds 1, 2: SystemExit: 3 (")
    assert [one.seed for one in error.failed] == [1, 2]
    assert str(failing(*configs)).startswith("SystemExit: 3 (method 'boom', ")


def test_an_error_of_all_runs_is_reported_once(monkeypatch):
    monkeypatch.setattr("fedobp.federation.partition", lambda *_, **__: (_ for _ in ()).throw(FedobpError("no data")))
    assert str(failing(Config(**TINY), Config(**TINY, method="fedavg"), Config(**TINY, seed=3))) == "no data"


@dataclass(frozen=True)
class Late(FedAvg):
    """FedAvg that cannot plan its second round."""

    name: ClassVar[str] = "late"

    def client_update(self, ctx):
        return fail() if ctx.round == 2 else super().client_update(ctx)


def test_a_round_is_logged_although_the_next_one_cannot_be_planned(monkeypatch, tmp_path):
    """The next round is planned while a round trains."""
    monkeypatch.setitem(METHODS, "late", Late)
    with pytest.raises(FedobpError, match="ValueError: no"):
        Federation(Config(**TINY, method="late")).run(out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1]
