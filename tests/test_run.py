"""One run: what a round plans, sends, aggregates, evaluates and logs, and what the result reports."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from lanes_cases import metrics, vector
from relay import Relay
from resolved import resolved

from fedobp import Config, Federation, FedobpError, Model, sweep
from fedobp.algorithms import METHODS
from fedobp.algorithms.fedavg import FedAvg
from fedobp.data import Shard
from fedobp.engine import Budget, ClientPool, PoolJob, Serial
from fedobp.evaluation import Accuracy, Metric, Personal, Report
from fedobp.method import CohortUpdate, RoundContext
from fedobp.run import Run
from fedobp.sampling import cohorts

TINY = {"clients": 6, "rounds": 4, "participation": 0.5, "epochs": 1, "model": "mlp", "precision": "fp64"}


@pytest.fixture(scope="module", params=["serial", "lanes"])
def tiny(request):
    return Federation(Config(**TINY, engine=request.param))


@pytest.mark.parametrize(("method", "options"), [("fedavg", {}), ("floco", {"tau": 2}), ("seqfededt", {})])
def test_rows_of_clients_say_how_often_they_took_part(method, options):
    """FLOCO trains all clients once more, in the round of its projection."""
    federation = Federation(Config(**TINY))
    visits = Counter(client for cohort in cohorts(federation.config) for client in cohort.tolist())
    extra = 1 if method == "floco" else 0
    assert len(set(visits.values())) > 1, "or this shows nothing"
    rows = federation.run(method, **options).clients
    assert [row["visits"] for row in rows] == [visits[client] + extra for client in range(6)]


# The server's side alone: no clients, no data, no engine.


class Evaluation:
    """An evaluator that tests no model, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, view, *, everything, keep=None):
        ctx = view.context(torch.tensor([1]))
        self.asked.append((ctx.round, ctx.cohort.tolist(), view.server["theta"], everything, keep is not None))
        accuracy = Accuracy(10.0 * ctx.round, 1.0, 2.0, 3.0, 4.0, 5.0)
        return Report(ctx.round, accuracy, None, accuracy, None, Personal(0.0, 0, 0, 0.0), {}, 0.0)


def server_side(config, method=None, evaluate=None, **more):
    """A run without clients."""
    method, model = method or METHODS[config.method](), Model(config.model, (1, 8, 8), 10)
    initial = method.init(model, model.initial(config.seed).double(), config.seed)
    return Run(config, method, model, initial, evaluate or Evaluation(), Budget(), **more)


def test_a_run_is_driven_through_rounds_without_any_client_data(tmp_path):
    config, evaluate = resolved(**{**TINY, "rounds": 2, "eval_every": 2, "method": "fedavg"}), Evaluation()
    run = server_side(config, evaluate=evaluate, out=tmp_path / "run", partition="a hash")
    theta, plans = run.server["theta"].clone(), [run.plan(1), run.plan(2)]

    round = run.round(plans[0])
    job = next(round)
    assert torch.equal(job.ctx.cohort, next(cohorts(config)))
    assert torch.equal(job.download["theta"], theta.expand(3, -1))
    uploads = torch.stack([theta + 1, theta + 2, theta + 5])
    # Means of the loss leave out the client without a batch.
    loss, finite = torch.tensor([0.5, 1.5, torch.nan]), torch.tensor([True] * 3)
    update = CohortUpdate({"theta": uploads}, torch.tensor([3, 1, 0]), 4, loss, finite, processed=20)
    with pytest.raises(StopIteration):
        round.send(update)
    torch.testing.assert_close(run.server["theta"], theta + 1.25, rtol=0, atol=1e-12)
    assert evaluate.asked == []

    round = run.round(plans[1])
    after = run.server["theta"]
    assert torch.equal(next(round).download["theta"], after.expand(3, -1))
    with pytest.raises(StopIteration):
        round.send(update._replace(n=torch.zeros(3, dtype=torch.int64), samples=0, processed=0))
    assert run.server["theta"] is after, "a cohort without training samples skips aggregation"
    assert evaluate.asked == [(2, [1], after, True, True)]

    result, lines = run.result(), metrics(tmp_path / "run")
    size = 3 * 8 * len(theta)
    assert [(line["round"], line["loss"], line["bytes_up"], line["bytes_down"]) for line in lines] == [
        (1, 1.0, size, size),
        (2, 1.0, size, size),
    ]
    assert ["accuracy" in line for line in lines] == [False, True]
    assert (result.accuracy.pooled, result.history) == (20.0, [(2, 20.0, 1.0)])
    assert (result.bytes.up_total, result.compute.visit, result.partition) == (2 * size, 5.0, "a hash")
    assert torch.equal(vector(result), after)
    assert (tmp_path / "run/result.json").exists()


@pytest.mark.usefixtures("relay")
@pytest.mark.parametrize("method", ["fedprox", "relay"])
@pytest.mark.parametrize("sampling", ["keyed", "published"])
def test_a_plan_is_a_pure_function_of_the_round(sampling, method):
    """The same cohorts and numbers whenever it is asked for, in any order of rounds, and after rounds have run."""
    config = resolved(**TINY, sampling=sampling, method=method, lr_schedule="cosine")

    def planned(run, number):
        return [(job.ctx.round, job.ctx.cohort.tolist(), job.hparams, job.download) for job in run.plan(number)]

    run = server_side(config)
    forwards = [planned(run, number) for number in (1, 2, 3, 4)]
    assert [planned(run, number) for number in (4, 2, 3, 1)] == [forwards[at] for at in (3, 1, 2, 0)]
    assert [planned(server_side(config), number) for number in (4, 1)] == [forwards[3], forwards[0]]
    sampled = [cohort.tolist() for cohort in cohorts(config)]
    if method == "relay":
        assert [[cohort for _, cohort, _, _ in jobs] for jobs in forwards] == [
            [[client] for client in ([*range(6), *cohort] if number == 2 else cohort)]
            for number, cohort in enumerate(sampled, start=1)
        ]
    else:
        assert [jobs[0][1] for jobs in forwards] == sampled
    assert [jobs[0][2]["lr"] for jobs in forwards] == [config.lr_at(number) for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("kinds", [(), ("everyone",), ("sampled", "none")])
def test_cohorts_that_do_not_exist_are_refused(kinds):
    class Wrong(FedAvg):
        def cohorts(self, round, rounds):
            return kinds

    with pytest.raises(FedobpError, match="`cohorts` of fedavg must return 'sampled', 'all' or both, not "):
        server_side(resolved(**TINY, method="fedavg"), Wrong()).plan(1)


# How often a method is called.


@dataclass(frozen=True)
class Counting(FedAvg):
    """FedAvg that counts calls: of `configure`, and of the others by round."""

    name: ClassVar[str] = "counting"
    summary: ClassVar[str] = "counts"
    paper: ClassVar[str] = "none"
    calls: ClassVar[Counter] = Counter()

    @classmethod
    def configure(cls, given):
        cls.calls["configure"] += 1
        return super().configure(given)

    def cohorts(self, round, rounds):
        return ("all", "sampled") if round == 2 else ("sampled",)

    def client_update(self, ctx):
        self.calls["client_update", ctx.round, len(ctx.cohort)] += 1
        return super().client_update(ctx)

    def aggregate(self, ctx, server, records, update):
        self.calls["aggregate", ctx.round, len(ctx.cohort)] += 1
        return super().aggregate(ctx, server, records, update)


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setitem(METHODS, "counting", Counting)
    Counting.calls.clear()
    return Counting.calls


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_a_method_is_configured_once_a_run_and_asked_once_a_cohort(counting, engine):
    given = {**TINY, "rounds": 3, "engine": engine, "method": "counting", "eval_every": 1, "finetune_epochs": 1}
    cohorts_of_rounds = [(1, 3), (2, 6), (2, 3), (3, 3)]
    expected = {(name, *cohort): 1 for name in ("client_update", "aggregate") for cohort in cohorts_of_rounds}
    federation = Federation(Config(**given))
    federation.run()
    assert counting == {"configure": 1, **expected}
    federation.run()  # the federation's own method is configured already
    assert counting["configure"] == 1
    counting.clear()
    sweep([Config(**given, seed=seed) for seed in (1, 2)])
    # Once more in planning, which asks how a method trains.
    assert counting == {"configure": 2, **dict.fromkeys(expected, 2), ("client_update", 1, 2): 2}


# Evaluation and results.


def test_clients_that_never_trained_are_served_the_global_model():
    federation = Federation(Config(**{**TINY, "rounds": 1, "participation": 0.1}))
    (trained,) = next(cohorts(federation.config)).tolist()
    for method in ("fedobp", "fedavg-last"):
        result = federation.run(method)
        assert all(torch.equal(vector(result, c), vector(result)) for c in range(6) if c != trained)
        assert result.personal.min == 0


def test_last_is_a_clients_last_model_and_the_global_one_if_it_never_trained(tiny):
    served, averaged = tiny.run("fedavg-last"), tiny.run("fedavg")
    assert served.accuracy == served.last == averaged.last
    assert averaged.accuracy != averaged.last


def test_history_holds_every_evaluation_and_the_last_round():
    federation = Federation(Config(**{**TINY, "rounds": 5, "eval_every": 2}))
    result = federation.run("fedavg")
    assert [point[0] for point in result.history] == [2, 4, 5]
    assert result.history[-1][1:] == (result.accuracy.pooled, result.accuracy.client_mean)


def test_evaluating_more_often_changes_no_result(tiny):
    often = Federation(Config(**{**TINY, "eval_every": 1})).run("fedobp", ema=0.5, q=0.9)
    rarely = Federation(Config(**{**TINY, "eval_every": 4})).run("fedobp", ema=0.5, q=0.9)
    assert often.accuracy == rarely.accuracy
    assert torch.equal(vector(often), vector(rarely))


def test_fine_tuning_is_reported_beside_and_not_stored(tiny):
    tuned = Federation(Config(**TINY, finetune_epochs=5)).run("fedavg")
    plain = tiny.run("fedavg")
    assert plain.finetuned is None
    assert tuned.accuracy == plain.accuracy
    assert tuned.finetuned.pooled > tuned.accuracy.pooled
    served = tiny.run("fedavg-ft", finetune=5)
    assert served.accuracy == tuned.finetuned


def test_fine_tuning_under_a_cosine_takes_the_full_learning_rate():
    tuned = Federation(Config(**{**TINY, "lr_schedule": "cosine", "rounds": 20, "finetune_epochs": 5})).run("fedavg")
    assert tuned.finetuned.pooled > tuned.accuracy.pooled + 10


def test_validation_comes_from_training_data_only(tiny):
    result = Federation(Config(**TINY, val_ratio=0.2)).run("fedavg")
    assert result.validation is not None
    assert set(result.to_json()["validation"]) == set(result.to_json()["accuracy"])
    assert tiny.run("fedavg").validation is None
    assert result.accuracy.majority_class == pytest.approx(tiny.run("fedavg").accuracy.majority_class, abs=5)


def test_the_paper_protocol_reports_the_best_of_its_rounds():
    federation = Federation(
        Config(clients=4, participation=0.25, rounds=200, epochs=1, model="mlp", protocol="paper", eval_every=100)
    )
    result = federation.run("fedavg")
    assert result.protocol.rounds == (100, 200)
    assert result.accuracy.pooled == max(point[1] for point in result.history)


def test_metrics_are_of_the_round_whose_accuracy_is_reported(tmp_path):
    """Under the paper's protocol round 100 has the best served models here, and round 200 the best last ones."""

    def evaluate(view, *, everything, keep=None):
        round = view.context(torch.tensor([0])).round
        metrics = {"loss": Metric(float(round), 1.0, 0.0, (1.0, None))}
        served, last = (Accuracy(pooled, 1.0, 2.0, 3.0, 4.0, 5.0, metrics) for pooled in (-round, round))
        return Report(round, served, None, last, None, Personal(0.0, 0, 0, 0.0), {}, 0.0)

    config = resolved(**{**TINY, "rounds": 200, "protocol": "paper", "metrics": "loss", "method": "fedavg"})
    run = server_side(config, evaluate=evaluate, out=tmp_path / "run")
    for number in (100, 200):
        round = run.round(run.plan(number))
        download, ones = next(round).download, torch.ones(3)
        with pytest.raises(StopIteration):
            round.send(CohortUpdate({"theta": download["theta"]}, ones.long(), 3, ones, ones.bool()))
    result = run.result()
    assert {column: found["loss"].pooled for column, found in result.metrics.items()} == {"served": 100, "last": 200}
    assert result.to_json()["metrics"]["served"]["loss"]["per_client"] == [1.0, None]
    assert [line["metrics"]["served"] for line in metrics(tmp_path / "run")] == [
        {"loss": {"pooled": number, "client_mean": 1.0, "client_std": 0.0}} for number in (100, 200)
    ]


def test_momentum_weight_decay_and_schedule_change_the_result(tiny):
    plain = vector(tiny.run("fedavg"))
    for change in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"lr_schedule": "cosine"}, {"lr": 0.02}, {"seed": 1}):
        assert not torch.equal(plain, vector(Federation(Config(**{**TINY, **change})).run("fedavg")))


# Metrics.


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("eval_every", [1, 50])
def test_a_diverging_run_names_round_and_client_and_keeps_its_metrics(tmp_path, engine, eval_every):
    # Each step multiplies the weights by 1 - 0.01 * 400 = -3: float32 overflows after a dozen rounds.
    wild = {"weight_decay": 400.0, "rounds": 50, "precision": "fp32", "eval_every": eval_every}
    federation = Federation(Config(**{**TINY, **wild, "engine": engine}))
    with pytest.raises(FedobpError, match=r"round \d+, client \d: .* smaller --weight-decay") as caught:
        federation.run("fedavg", out=tmp_path / "run")
    reached = int(str(caught.value).split()[1].rstrip(","))
    assert [line["round"] for line in metrics(tmp_path / "run")] == list(range(1, reached))
    assert reached > 2


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_a_run_whose_fine_tuning_diverges_keeps_its_metrics(tmp_path, engine):
    settings = {"weight_decay": 400.0, "rounds": 2, "precision": "fp32", "finetune_epochs": 30, "engine": engine}
    with pytest.raises(FedobpError, match=r"round 2, client 0: .* smaller --weight-decay"):
        Federation(Config(**{**TINY, **settings})).run("fedavg", out=tmp_path / "run")
    assert [line["round"] for line in metrics(tmp_path / "run")] == [1, 2]


def test_every_round_is_logged_before_the_next_one_on_the_cpu(tmp_path):
    seen = []

    def look(at):
        seen.append((at.round, len(metrics(tmp_path / "run"))))

    Federation(Config(rounds=4, eval_every=4, clients=8, model="mlp")).run(out=tmp_path / "run", progress=look)
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path):
    class Broken(FedAvg):
        def init(self, model, theta, seed):
            return super().init(model, theta, seed)._replace(record={"theta": "no tensor"})

    with pytest.raises(AttributeError):
        server_side(resolved(**TINY, method="fedavg"), Broken(), out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


# Sequential clients, and rounds of all clients.


def relayed(config):
    """The model of `relay`, written as plain loops over clients of the serial engine."""
    federation, relay = Federation(config), Relay()
    config, model = federation.config, federation.model
    theta, engine = model.initial(config.seed).double(), Serial(model, config.batch_size)
    clients = ClientPool(federation.data, {}, theta, config.seed, Budget())
    hparams = {"lr": config.lr, "momentum": 0.0, "weight_decay": 0.0}
    for round, cohort in enumerate(cohorts(config), start=1):
        for client in [*(range(config.clients) if round == 2 else []), *cohort.tolist()]:
            ctx = RoundContext(model, round, config.rounds, config.clients, config.epochs, torch.tensor([client]))
            job = PoolJob(ctx, relay.client_update(ctx), hparams, {"theta": theta[None]}, clients=clients)
            [update] = engine.train([job])
            theta = update.upload["theta"][0]
    return theta


@pytest.mark.usefixtures("relay")
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_clients_may_train_one_after_the_other(engine, tmp_path):
    config = Config(clients=5, participation=0.6, rounds=3, epochs=1, precision="fp64", engine=engine, model="mlp")
    result = Federation(config).run("relay", out=tmp_path / "run")
    found = vector(result)
    torch.testing.assert_close(found, relayed(config), rtol=0, atol=1e-10)
    lines = metrics(tmp_path / "run")
    assert [len(line["cohort"]) for line in lines] == [3, 8, 3]
    assert lines[1]["cohort"][:5] == [0, 1, 2, 3, 4]
    size = 8 * len(found)
    assert [line["bytes_up"] for line in lines] == [3 * size, 8 * size, 3 * size]
    assert all(line["loss"] > 0 for line in lines)
    assert result.compute.visit == pytest.approx(1, abs=0.01)  # one epoch in each of the 14 visits


@pytest.mark.usefixtures("relay")
def test_a_sequential_client_that_diverges_is_named():
    config = resolved(clients=5, participation=0.6, rounds=3, epochs=1, model="mlp", lr=1e9)
    first = next(cohorts(config)).tolist()[0]
    with pytest.raises(FedobpError, match=f"round 1, client {first}: "):
        Federation(config).run("relay")


# Clients without samples.


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedbn"])
def test_a_round_of_clients_without_samples_changes_nothing(method, engine, monkeypatch):
    """One client a round, and the first has nothing to train on: the model stays what it was."""
    given = {"clients": 4, "rounds": 3, "participation": 0.25, "epochs": 1, "model": "mlp", "precision": "fp64"}
    config = resolved(**given, engine=engine)
    sampled = [int(cohort) for cohort in cohorts(config)]
    assert len(set(sampled)) > 1

    def assigned(y, clients, **_):
        order = np.random.RandomState(0).permutation(len(y))[:200]
        parts = [order[50 * at : 50 * at + 50] for at in range(clients)]
        none = np.array([], dtype=int)
        return [Shard(none if at == sampled[0] else part[:30], none, part[30:]) for at, part in enumerate(parts)]

    monkeypatch.setattr("fedobp.federation.partition", assigned)
    federation = Federation(config)
    first = Federation(replace(config, rounds=1)).run(method)
    whole = federation.run(method)
    start = federation.model.initial(config.seed).double()
    if method != "floco":  # whose first model is not theta^0
        assert torch.equal(vector(first), start)
    assert vector(whole).isfinite().all()
    assert vector(whole, sampled[-1]).isfinite().all()
    assert not torch.equal(vector(whole, sampled[-1]), start)
