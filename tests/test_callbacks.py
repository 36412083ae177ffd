"""Callbacks: when they are called, with what, and what happens if they raise."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from handmade import made
from resolved import resolved
from test_run import Evaluation, server_side

from fedobp import Callback, Config, Federation, FedobpError, Result, SweepError, sweep
from fedobp.callbacks import report_end
from fedobp.errors import Stopped

TINY = {"clients": 6, "rounds": 4, "participation": 0.5, "epochs": 1, "model": "mlp", "eval_every": 2}


class Recorder(Callback):
    """Keeps what it is called with, and does harm to it."""

    def __init__(self):
        self.rounds, self.ends = [], []

    def on_round(self, config, line):
        self.rounds.append((config, json.dumps(line)))
        line.clear()

    def on_end(self, config, result):
        self.ends.append((config, result))
        if isinstance(result, Result):
            result.history.clear()


class Broken(Callback):
    """Raises an error in a round of one method's run, and keeps how runs ended."""

    def __init__(self, error=None, method="fedavg"):
        self.error, self.method, self.ends = error, method, {}

    def on_round(self, config, line):
        if config.method == self.method and line["round"] == 2:
            raise self.error

    def on_end(self, config, result):
        self.ends[config.method] = result


@pytest.mark.essential
def test_every_round_of_every_run_is_reported_once_in_order_as_it_is_logged(tmp_path):
    recorder, changes = Recorder(), [{"method": "fedavg"}, {"method": "local", "rounds": 2}, {"batch_size": 16}]
    configs = [Config(**{**TINY, **change}) for change in changes]
    outs = [tmp_path / name for name in "abc"]
    results = sweep(configs, out=outs, callbacks=[recorder, Recorder(), recorder])
    for result, out in zip(results, outs, strict=True):
        lines = (out / "metrics.jsonl").read_text().splitlines()
        seen = [line for config, line in recorder.rounds if config == result.config]
        assert seen == [line for line in lines for _ in range(2)]  # it is in the list twice
        assert ["accuracy" in line for line in lines] == [False, True] * (len(lines) // 2)
        assert [point[0] for point in result.history] == [2, 4][: len(lines) // 2]
        ends = [end for config, end in recorder.ends if config == result.config]
        assert [(end.config, end.accuracy, end.out) for end in ends] == [(result.config, result.accuracy, out)] * 2


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_callbacks_change_no_result_and_need_no_folder(engine):
    federation, recorder = Federation(Config(**TINY, engine=engine)), Recorder()
    with_callbacks, without = federation.run("fedper", callbacks=[recorder, Callback()]), federation.run("fedper")
    assert {**with_callbacks.to_json(), "seconds": 0} == {**without.to_json(), "seconds": 0}
    assert all(
        torch.equal(value, without.state_dict(client)[name])
        for client in (None, *range(6))
        for name, value in with_callbacks.state_dict(client).items()
    )
    assert [json.loads(line)["round"] for _, line in recorder.rounds] == [1, 2, 3, 4]
    assert {config.method for config, _ in recorder.rounds} == {"fedper"}


def test_a_round_that_a_device_still_computes_is_reported_with_the_next_one():
    """On CUDA a round is logged late: when the next one has ended, or at an evaluation."""
    recorder, pending = Recorder(), []
    run = server_side(resolved(**{**TINY, "rounds": 9, "eval_every": 3}), evaluate=Evaluation(), callbacks=[recorder])
    run.server = {"theta": SimpleNamespace(is_cuda=True)}

    class Accounting:
        pending = property(lambda self: len(pending))

        def settle(self):
            return {"round": pending.pop(0)}

    run.accounting, reported = Accounting(), []
    for number in (1, 2, 3, 4):
        pending.append(number)
        run.evaluate_and_log(number)
        reported.append([json.loads(line)["round"] for _, line in recorder.rounds])
    assert reported == [[], [1], [1, 2, 3], [1, 2, 3]]
    assert ["accuracy" in line for _, line in recorder.rounds] == [False, False, True]


# Callbacks that raise.


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit("boom"), KeyError("boom")])
def test_a_callback_that_raises_ends_its_run_alone_and_is_named(error, tmp_path):
    broken, other = Broken(error), Broken(method="none")
    configs = [Config(**TINY, method=method) for method in ("fedavg", "local")]
    with pytest.raises(SweepError) as caught:
        sweep(configs, callbacks=[broken, other], out=[tmp_path / "a", tmp_path / "b"])
    [failure] = caught.value.failed
    said = rf"{type(error).__name__}: '?boom'? \(callback 'Broken', on_round of round 2, .*test_callbacks.py:\d+\)"
    with pytest.raises(FedobpError, match=said):
        raise failure.exception
    assert failure.exception.__cause__ is error
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 2
    assert caught.value.results[1].history[-1][0] == 4
    for one in (broken, other):
        assert one.ends["fedavg"] is failure.exception
        assert isinstance(one.ends["local"], Result)


def test_an_error_at_the_end_is_the_end_of_the_run_unless_it_has_failed_before():
    class BrokenEnd(Callback):
        def on_end(self, config, result):
            raise ValueError("late")

    recorder, result = Recorder(), made()
    error = report_end([recorder, BrokenEnd(), recorder, BrokenEnd()], result.config, result)
    assert str(error).startswith("ValueError: late (callback 'BrokenEnd', on_end, ")
    assert [end for _, end in recorder.ends[1:]] == [error]
    assert isinstance(recorder.ends[0][1], Result)
    first = FedobpError("diverged")
    assert report_end([BrokenEnd(), recorder], result.config, first) is first
    with pytest.raises(FedobpError, match="ValueError: late"):
        Federation(Config(**TINY)).run(callbacks=[BrokenEnd()])


def test_a_user_error_of_a_callback_is_said_as_it_is():
    with pytest.raises(FedobpError, match=r"^the disk is full$"):
        Federation(Config(**TINY)).run("fedavg", callbacks=[Broken(FedobpError("the disk is full"))])


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(15)])
def test_an_interrupt_passes_and_ends_all_runs_that_have_started(stop):
    broken = Broken(stop)
    configs = [Config(**TINY, method=method) for method in ("local", "fedavg")]
    configs.append(Config(**TINY, method="fedper", batch_size=16))  # of another launch, which does not start
    with pytest.raises(type(stop)) as caught:
        sweep(configs, callbacks=[broken], failures="return")
    assert caught.value is stop
    assert broken.ends == {"local": stop, "fedavg": stop}


def test_a_run_that_diverges_ends_with_its_error_and_one_that_cannot_start_has_no_end(tmp_path):
    recorder = Recorder()
    (tmp_path / "config.toml").touch()
    configs = [Config(**TINY, lr=1e9), Config(**TINY, method="none"), Config(**{**TINY, "clients": 1000})]
    failed = sweep(configs, callbacks=[recorder], failures="return")
    [(config, end)] = recorder.ends
    assert (config.lr, end) == (1e9, failed[0].exception)
    with pytest.raises(FedobpError, match="already holds a run"):
        Federation(Config(**TINY)).run(out=tmp_path, callbacks=[recorder])
    assert len(recorder.ends) == 1


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        ([print], "<built-in function print>' in `callbacks` is no callback: derive its class"),
        ([Callback], "derive its class from fedobp.Callback, and give an object of that class"),
        (Callback(), "must be a list of callbacks"),
        ("tensorboard", "must be a list of callbacks, not 'tensorboard'"),
        (None, "must be a list of callbacks"),
    ],
)
def test_what_is_no_callback_is_refused_before_anything_runs(callbacks, sentence, tmp_path):
    for call in (
        lambda: Federation(Config(**TINY)).run(out=tmp_path / "run", callbacks=callbacks),
        lambda: sweep([Config(**TINY)], out=[tmp_path / "run"], callbacks=callbacks),
    ):
        with pytest.raises(FedobpError, match=sentence):
            call()
    assert not list(tmp_path.iterdir())


def test_a_callback_cannot_change_the_metrics_of_a_result():
    class Greedy(Callback):
        def on_end(self, config, result):
            result.accuracy.metrics.clear()

    result = Federation(Config(rounds=1, epochs=1, metrics="loss")).run("fedavg", callbacks=[Greedy()])
    assert list(result.accuracy.metrics) == ["loss"]


def test_a_callback_cannot_change_the_rows_of_clients_or_the_provenance_of_a_result():
    class Greedy(Callback):
        def on_end(self, config, result):
            result.clients[0]["served"] = None
            result.provenance["seed"] = None

    rows, origin = ({"client": 0, "served": 90.0},), {"seed": 1}
    given = replace(made(), clients=rows, provenance=origin)
    assert report_end([Greedy()], given.config, given) is given
    assert (rows, origin) == (({"client": 0, "served": 90.0},), {"seed": 1})


def test_an_interrupt_at_the_end_reaches_all_callbacks_first():
    heard = []

    class Stops(Callback):
        def on_end(self, config, result):
            raise KeyboardInterrupt

    class Hears(Callback):
        def on_end(self, config, result):
            heard.append(type(result).__name__)

    with pytest.raises(KeyboardInterrupt):
        Federation(Config(rounds=1, epochs=1)).run("fedavg", callbacks=[Stops(), Hears()])
    assert heard == ["Result"]
