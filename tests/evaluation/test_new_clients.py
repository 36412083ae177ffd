"""Clients that are held out: training is the same without them, and they are served as new clients."""

import io
import json
from collections import OrderedDict
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from lanes_cases import metrics
from torch import nn
from torch.nn import functional

from fedobp import Config, Federation, FedobpError, sweep
from fedobp.algorithms import METHODS
from fedobp.data import Shard, data_dir, load, partition
from fedobp.engine import Lanes, Serial
from fedobp.engine.batch_order import batches
from fedobp.evaluation import Personal, Report, accuracy, report_from_json
from fedobp.keys import Purpose, fold
from fedobp.report.tables import compare_table, run_table, summarise

TINY = {
    "clients": 8, "holdout_clients": 2, "rounds": 3, "participation": 0.5, "epochs": 2, "model": "mlp", "lr": 0.1,
    "precision": "fp64", "partition": "dirichlet-equal", "batch_size": 16, "device": "cpu",
}  # fmt: skip
HELD_OUT = (6, 7)


@pytest.fixture(scope="module", params=["serial", "lanes"])
def federation(request):
    return Federation(Config(**TINY, engine=request.param))


def trained_once(federation, theta, client, round=3):
    """Training in a round from a model, by hand."""
    config, data = federation.config, federation.data
    module = federation.model.module().double()
    module.load_state_dict(theta)
    optimizer = torch.optim.SGD(module.parameters(), config.lr)
    x, y = data.inputs(client, "train"), data.targets(client, "train")
    key = fold(fold(config.seed, round, client, Purpose.TRAIN), 1)  # the program's second item
    for epoch in range(config.epochs):
        for picked in batches(fold(key, epoch), len(y), config.batch_size, y.device):
            optimizer.zero_grad()
            functional.cross_entropy(module(x[picked]), y[picked]).backward()
            optimizer.step()
    return module


def accuracy_with(federation, modules):
    """The accuracies of held-out clients with these models, by hand."""
    data, clients = federation.data, HELD_OUT
    with torch.no_grad():
        labels = [
            module(data.inputs(client, "test")).argmax(dim=1) for client, module in zip(clients, modules, strict=True)
        ]
    return accuracy(labels, [data.targets(c, "test") for c in clients], [data.counts(c) for c in clients])


def test_a_new_client_of_fedavg_is_served_the_global_model_and_trains_one_of_its_own(federation):
    result = federation.run("fedavg")
    module = federation.model.module().double()
    module.load_state_dict(result.state_dict())
    assert result.new_clients.served == result.new_clients.visited == accuracy_with(federation, [module, module])
    assert result.new_clients.visited_twice == result.new_clients.served
    trained = [trained_once(federation, result.state_dict(), client) for client in HELD_OUT]
    assert result.new_clients.last == accuracy_with(federation, trained)
    assert result.new_clients.last.pooled > result.new_clients.served.pooled + 10


def test_after_a_round_fedavg_last_serves_the_clients_own_model(federation):
    result, plain = federation.run("fedavg-last"), federation.run("fedavg")
    assert result.new_clients.served == plain.new_clients.served
    assert result.new_clients.visited == result.new_clients.last == plain.new_clients.last
    # The second visit starts from the global model again, in the round after.
    trained = [trained_once(federation, plain.state_dict(), client, round=4) for client in HELD_OUT]
    assert result.new_clients.visited_twice == accuracy_with(federation, trained)


def test_the_second_visit_goes_on_from_what_a_client_kept(federation):
    result, models = federation.run("local"), []
    for client in HELD_OUT:
        first = trained_once(federation, result.state_dict(), client)
        models.append((first, trained_once(federation, first.state_dict(), client, round=4)))
    once, twice = (accuracy_with(federation, column) for column in zip(*models, strict=True))
    assert (result.new_clients.visited, result.new_clients.visited_twice) == (once, twice)
    assert once != twice


def prior_by_hand(posteriors):
    """EM of Saerens et al. for one client in plain Python, from a uniform prior with half a sample of each class."""
    classes = len(posteriors[0])
    prior = [1 / classes] * classes
    for _ in range(100):
        total = [0.5] * classes
        for row in posteriors:
            products = [share * p * classes for share, p in zip(row, prior, strict=True)]
            total = [one + product / sum(products) for one, product in zip(total, products, strict=True)]
        prior = [one / (len(posteriors) + classes / 2) for one in total]
    return prior


def test_without_labels_the_global_model_gets_a_prior_from_training_inputs(federation):
    result, modules = federation.run("fedavg"), []
    for client in HELD_OUT:
        module = federation.model.module().double()
        module.load_state_dict(result.state_dict())
        with torch.no_grad():
            posteriors = module(federation.data.inputs(client, "train")).softmax(dim=1)
            prior = torch.tensor(prior_by_hand(posteriors.tolist()), dtype=torch.float64)
            assert 0.2 < prior.max() < 0.99, "or this shows nothing"
            module.classifier.bias += (10 * prior).log()
        modules.append(module)
    assert result.new_clients.unlabelled == accuracy_with(federation, modules)
    assert result.new_clients.unlabelled != result.new_clients.served
    # It is the same for every method with that global model, whatever clients make of their labels.
    assert federation.run("fedavg-last").new_clients.unlabelled == result.new_clients.unlabelled
    assert federation.run("fedavg-ft").new_clients.unlabelled == result.new_clients.unlabelled


def deep_head(shape, classes):
    head = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), classifier=head))


def no_bias(shape, classes):
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), classifier=nn.Linear(64, classes, bias=False)))


def changed_after(shape, classes):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 5 * super().forward(x)

    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), classifier=Scaled(64, classes)))


@pytest.mark.parametrize(
    ("method", "model"), [("apfl", "mlp"), ("fedavg", deep_head), ("fedavg", no_bias), ("fedavg", changed_after)]
)
def test_there_is_no_such_column_without_a_bias_to_put_it_in(method, model):
    """APFL predicts with two models."""
    result = Federation(Config(**{**TINY, "rounds": 1, "method": method, "model": model})).run()
    assert result.new_clients.unlabelled is None
    assert set(result.to_json()["new_clients"]) == {"served", "visited", "last", "visited_twice"}


def test_there_is_no_such_column_where_every_token_has_a_label():
    windows, owner = np.random.default_rng(0).integers(0, 5, (40, 6)), np.arange(40) % 4
    given = {"rounds": 1, "holdout_clients": 1, "model": "lstm", "model_options": {"width": 4}}
    result = Federation.from_data(windows, tokens=True, client=owner, config=Config(**given)).run("fedavg")
    assert result.new_clients.unlabelled is None
    assert result.new_clients.visited_twice is not None


def test_evaluations_of_older_versions_are_read(federation):
    """A checkpoint holds them as JSON: neither column was there."""
    result = federation.run("fedavg")
    personal = Personal(0.0, 0, 0, 0.0)
    whole = Report(3, result.accuracy, None, result.last, None, personal, {}, 0.0, result.new_clients)
    values = json.loads(json.dumps(asdict(whole)))
    assert report_from_json(values) == whole
    for column in ("visited_twice", "unlabelled"):
        del values["new_clients"][column]
    old = replace(result.new_clients, visited_twice=None, unlabelled=None)
    assert report_from_json(values) == replace(whole, new_clients=old)
    assert report_from_json(json.loads(json.dumps(asdict(replace(whole, new_clients=old))))).new_clients == old


def test_after_a_round_fedobp_has_found_the_clients_personal_entries(federation):
    all_shared, nearly_none = federation.run("fedobp", q=1.0), federation.run("fedobp", q=0.0)
    assert all_shared.new_clients.visited == all_shared.new_clients.served
    # At q = 0 only the entries that moved least are shared, and those did not move at all.
    assert nearly_none.new_clients.visited == nearly_none.new_clients.last != nearly_none.new_clients.served


@pytest.mark.parametrize("method", METHODS)
def test_both_engines_agree_on_new_clients_of_every_method(method):
    # Large batches: FedALA learns its weights until the losses of batches agree.
    small = {**TINY, "epochs": 1, "rounds": 2, "method": method, "batch_size": 200}
    lanes, serial = (Federation(Config(**small, engine=engine)).run() for engine in ("lanes", "serial"))
    assert lanes.new_clients == serial.new_clients
    assert lanes.accuracy == serial.accuracy


@pytest.mark.parametrize("method", ["fedavg", "fedobp", "scaffold", "pfedsim", "floco", "fedpac", "decoupled"])
def test_training_is_the_same_without_them(method, monkeypatch, tmp_path):
    """Six of eight clients train as six alone do: the same cohorts, scaling, models and accounting."""
    assigned = partition(load("digits", data_dir()).y, 8, kind="dirichlet-equal", holdout=2)
    options = {"score": "taylor"} if method == "decoupled" else {}
    runs = []
    for clients, holdout in ((8, 2), (6, 0)):
        monkeypatch.setattr("fedobp.federation.partition", lambda *_, clients=clients, **__: assigned[:clients])
        given = {**TINY, "clients": clients, "holdout_clients": holdout, "method": method, "options": options}
        runs.append(Federation(Config(**given)).run(out=tmp_path / str(clients)))
    with_them, alone = runs
    for client in (None, *range(6)):
        for name, tensor in alone.state_dict(client).items():
            assert torch.equal(with_them.state_dict(client)[name], tensor)
    lines = [metrics(tmp_path / name) for name in ("8", "6")]
    assert lines[0][-1].pop("new_clients")
    assert lines[0] == lines[1]
    assert alone.new_clients is None
    for name in ("accuracy", "last", "history", "personal", "bytes", "compute"):
        assert getattr(with_them, name) == getattr(alone, name)


@pytest.mark.parametrize("sampling", ["keyed", "published"])
@pytest.mark.parametrize("method", ["fedavg", "floco"])
def test_they_are_in_no_cohort(tmp_path, method, sampling):
    given = {**TINY, "rounds": 6, "method": method, "sampling": sampling, "epochs": 1}
    Federation(Config(**given)).run(out=tmp_path)
    seen = {client for line in metrics(tmp_path) for client in line["cohort"]}
    assert seen == set(range(6))


def test_they_have_no_models_in_the_run(federation):
    with pytest.raises(FedobpError, match="there is no model of client 6: clients are 0 to 5"):
        federation.run("fedavg").state_dict(6)


def test_how_many_are_tested_at_once_does_not_matter(federation, monkeypatch):
    whole = federation.run("fedper").new_clients
    monkeypatch.setattr("fedobp.evaluation.evaluator._CHUNK", {"cpu": 1})
    assert federation.run("fedper").new_clients == whole


def test_each_column_is_the_best_of_the_papers_rounds_by_itself(monkeypatch, tmp_path):
    monkeypatch.setattr("fedobp.evaluation.protocol.PAPER_ROUNDS", (1, 2, 3, 4, 5))
    config = Config(**{**TINY, "rounds": 5, "eval_every": 5, "protocol": "paper", "lr": 1.0, "method": "fedavg-last"})
    result = Federation(config).run(out=tmp_path)
    lines = [line["new_clients"] for line in metrics(tmp_path)]
    for name in ("served", "visited", "last", "visited_twice", "unlabelled"):
        pooled = [line[name]["pooled"] for line in lines]
        assert len(set(pooled)) > 1, "rounds must differ, or this shows nothing"
        assert getattr(result.new_clients, name).pooled == max(pooled)


@pytest.mark.parametrize("method", ["fedavg-last", "fedobp"])
def test_they_are_new_at_every_evaluation(monkeypatch, tmp_path, method):
    for name, rounds in (("often", (1, 2, 3)), ("once", (3,))):
        monkeypatch.setattr("fedobp.evaluation.protocol.PAPER_ROUNDS", rounds)
        Federation(Config(**{**TINY, "protocol": "paper", "method": method})).run(out=tmp_path / name)
    assert metrics(tmp_path / "often")[-1]["new_clients"] == metrics(tmp_path / "once")[-1]["new_clients"]


@pytest.mark.parametrize("engine", [Serial, Lanes])
def test_a_new_client_that_diverges_is_named(monkeypatch, engine):
    train = engine.train

    def one_diverges(self, jobs, prepared=None):
        updates = train(self, jobs, prepared)
        held_out = jobs[0].ctx.cohort.tolist() == list(HELD_OUT)
        return [update._replace(finite=torch.tensor([True, False])) if held_out else update for update in updates]

    monkeypatch.setattr(engine, "train", one_diverges)
    config = Config(**{**TINY, "method": "fedavg", "rounds": 1, "engine": engine.__name__.lower()})
    with pytest.raises(FedobpError, match="client 7: the loss or the weights are no longer finite; use a smaller --lr"):
        Federation(config).run()


def test_clients_without_test_samples_cannot_be_held_out_alone(monkeypatch):
    nothing = np.array([], dtype=np.int64)
    assigned = [
        Shard(np.arange(9), nothing, np.arange(9, 12)),
        Shard(np.arange(12, 20), nothing, nothing, held_out=True),
    ]
    monkeypatch.setattr("fedobp.federation.partition", lambda *_, **__: assigned)
    with pytest.raises(FedobpError, match="no client that is held out has a sample to evaluate on"):
        Federation(Config(clients=2, holdout_clients=1, rounds=1)).run()


def test_new_clients_are_in_json_and_in_tables(federation):
    from rich.console import Console

    result = federation.run("fedavg-last")
    found = json.loads(json.dumps(result.to_json()))["new_clients"]
    assert set(found) == {"served", "visited", "last", "visited_twice", "unlabelled"}
    assert found["served"]["pooled"] == result.new_clients.served.pooled

    def shown(table):
        console = Console(width=160, file=io.StringIO())
        console.print(table)
        return console.file.getvalue()

    lines = [line.split() for line in shown(run_table(result)).splitlines()]
    pooled = {" ".join(words[:-6]): float(words[-6]) for words in lines if words[:2] == ["new", "client,"]}
    assert pooled == {
        "new client, as served": pytest.approx(result.new_clients.served.pooled, abs=0.01),
        "new client, without labels": pytest.approx(result.new_clients.unlabelled.pooled, abs=0.01),
        "new client, after one round": pytest.approx(result.new_clients.visited.pooled, abs=0.01),
        "new client, after two rounds": pytest.approx(result.new_clients.visited_twice.pooled, abs=0.01),
        "new client, own model": pytest.approx(result.new_clients.last.pooled, abs=0.01),
    }
    text = shown(compare_table([result]))
    assert "new client" in text
    for name in ("visited", "visited_twice", "unlabelled"):
        assert f"{getattr(result.new_clients, name).pooled:.2f}" in text
    assert "New clients: 2, held out" in text
    [row] = summarise([result])
    assert row["new_clients_served"] == {"mean": result.new_clients.served.pooled, "std": None}
    assert row["new_clients_visited_twice"] == {"mean": result.new_clients.visited_twice.pooled, "std": None}
    old = replace(result, new_clients=replace(result.new_clients, visited_twice=None, unlabelled=None))
    [row] = summarise([old])
    assert {name for name in row if name.startswith("new")} == {"new_clients_served", "new_clients_visited"}
    assert "after two rounds" not in shown(compare_table([old])) + shown(run_table(old))
    assert "after two rounds" in shown(compare_table([old, result]))


def test_without_them_no_output_mentions_new_clients():
    result = Federation(Config(**{**TINY, "holdout_clients": 0, "rounds": 1})).run()
    assert result.new_clients is None
    assert "new_clients" not in result.to_json()
    [row] = summarise([result])
    assert set(row) == {"method", "pooled", "client_mean", "seeds"}


def test_runs_with_and_without_them_share_a_launch(tmp_path):
    configs = [Config(**{**TINY, "holdout_clients": holdout, "method": "fedavg"}) for holdout in (0, 2, 5)]
    results = sweep(configs)
    for config, result in zip(configs, results, strict=True):
        alone = Federation(config).run()
        assert (alone.new_clients, alone.accuracy, alone.partition) == (
            result.new_clients,
            result.accuracy,
            result.partition,
        )
    assert len({result.partition for result in results}) == 3
