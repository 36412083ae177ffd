"""Accuracies, protocols and the evaluator, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from contexts import with_model

from fedobp import Config, Federation, FedobpError, evaluation
from fedobp.algorithms import METHODS
from fedobp.data import FederatedData, data_dir, load, partition
from fedobp.engine import Budget, ClientPool, Lanes, PoolJob, Serial, Store
from fedobp.evaluation import Accuracy, Evaluator, accuracy, protocol
from fedobp.method import CohortUpdate, RoundContext
from fedobp.models import Model


# Accuracy.


def test_a_federation_without_test_samples_is_refused_before_it_trains(tmp_path):
    np.savez(tmp_path / "few.npz", x=np.zeros((12, 3), np.uint8), y=np.arange(12) % 2)
    config = Config(dataset="few", data_dir=str(tmp_path), clients=6, partition="iid")
    with pytest.raises(FedobpError, match="no client has a sample to evaluate on: use fewer --clients or more data"):
        Federation(config).run(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Protocol.


# Evaluator.

CLIENTS = 6


class Small:
    """FedOBP with a moving average on six clients, two of which have trained once."""

    def __init__(self, val_ratio=0.0, finetune_epochs=0, engine=Serial):
        digits = load("digits", data_dir())
        shards = partition(digits.y, CLIENTS, seed=3, val_ratio=val_ratio)
        self.data = FederatedData(digits, shards, torch.device("cpu"), torch.float64)
        self.model = Model("mlp", self.data.shape, 10)
        self.method = METHODS["fedobp"].configure({"q": 0.9, "ema": 0.5})
        theta = self.model.initial(1).double()
        server, row, own = self.method.init(self.model, theta, 0)
        self.server, self.rows = server, Store(row, CLIENTS, Budget())
        self.hparams = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
        self.clients = ClientPool(self.data, own, theta, 1, Budget())
        self.engine = engine(self.model, 32)
        self.evaluator = Evaluator(self.method, self.model, self.clients, self.engine, finetune_epochs)
        for round in (1, 2):
            self.train(round)

    def moment(self, round, clients):
        return RoundContext(None, round, 3, CLIENTS, 1, clients)

    def train(self, round):
        ctx, cohort = self.moment(round, torch.tensor([4, 1])), [4, 1]
        download, records = self.method.download(with_model(self.model, ctx), self.server, self.rows.gather(cohort))
        [answer] = self.engine.train(
            [
                PoolJob(
                    ctx,
                    self.method.client_update(with_model(self.model, ctx)),
                    self.hparams,
                    download,
                    clients=self.clients,
                )
            ]
        )
        self.server, records = self.method.aggregate(
            with_model(self.model, ctx), self.server, records, CohortUpdate(answer.upload, answer.n)
        )
        self.rows.scatter(cohort, records)

    def evaluate(self, everything=True, keep=None):
        def at_two(clients):
            return self.moment(2, clients)

        return self.evaluator(at_two, self.server, self.rows, self.hparams, everything=everything, keep=keep)

    def own(self):
        def take_own(model, client):
            return client.set(theta=client.state["theta"])

        return self.engine.personalize(self.task(take_own))["theta"]

    def task(self, *program):
        return PoolJob(self.moment(2, torch.arange(CLIENTS)), program, self.hparams, {}, clients=self.clients)


@pytest.fixture(scope="module", params=[Serial, Lanes])
def small(request):
    return Small(val_ratio=0.25, finetune_epochs=1, engine=request.param)


@pytest.mark.parametrize("entries", [1, 2 * 9610, 4 * 9610 + 5])
def test_how_many_clients_are_tested_at_once_does_not_matter(small, monkeypatch, entries):
    whole = small.evaluate()
    monkeypatch.setattr(evaluation, "_CHUNK", {"cpu": entries})
    assert small.evaluate() == whole


def test_evaluating_changes_nobodys_state(small):
    records, own, server = small.rows.gather(range(CLIENTS)), small.state(), small.server["theta"].clone()
    last = small.engine.last(small.task(), server)
    first, second = small.evaluate(), small.evaluate()
    assert first == second
    for name, values in small.rows.gather(range(CLIENTS)).items():
        assert torch.equal(values, records[name]), name
    assert {"score", "scored"} <= set(records), "the moving average must be in the rows, or this shows nothing"
    assert records["scored"].tolist() == [False, True, False, False, True, False]
    assert torch.equal(small.state(), own)
    assert torch.equal(small.server["theta"], server)
    assert torch.equal(small.engine.last(small.task(), server), last)


def test_a_round_after_an_evaluation_is_the_round_without_it():
    quiet, tested = Small(), Small()
    tested.evaluate()
    for one in (quiet, tested):
        one.train(3)
    assert torch.equal(quiet.server["theta"], tested.server["theta"])
    assert torch.equal(quiet.rows.gather([1, 4])["score"], tested.rows.gather([1, 4])["score"])


def test_personal_entries_are_counted_per_client_and_per_tensor(small):
    report = small.evaluate()
    size = 64 * 128 + 128 + 128 * 10 + 10
    assert small.model.layout.size == size == 9610
    # Two clients have a model of their own; theirs are the entries above the one at position floor(0.9 * 9609).
    counts = []
    for client in (1, 4):
        row = small.rows[client]
        score = 0.5 * (row["theta"] - small.server["theta"]) ** 2 + 0.5 * row["score"]
        counts.append(int((score > score.sort().values[8648]).sum()))
    assert max(counts) == 9609 - 8648  # fewer where entries tie
    assert (report.personal.min, report.personal.max) == (0, max(counts))
    assert report.personal.mean == pytest.approx(sum(counts) / 6)
    assert report.personal.share == pytest.approx(sum(counts) / 6 / 9610)
    assert sum(report.personal_by_tensor.values()) == pytest.approx(report.personal.mean)
    assert list(report.personal_by_tensor) == ["fc1.weight", "fc1.bias", "classifier.weight", "classifier.bias"]


def test_each_served_model_is_handed_over_once_and_is_what_the_accuracy_is_of(small):
    kept = {}
    report = small.evaluate(keep=lambda client, theta, mine: kept.setdefault(client, (theta, mine)))
    assert list(kept) == list(range(CLIENTS))
    right = total = 0
    for client, (theta, mine) in kept.items():
        assert torch.equal(theta[~mine], small.server["theta"][~mine])
        module = small.model.module(theta)
        with torch.no_grad():
            found = module(small.data.inputs(client, "test")).argmax(dim=1)
        right += int((found == small.data.targets(client, "test")).sum())
        total += len(found)
    assert report.served.pooled == pytest.approx(100 * right / total)


def test_only_what_was_asked_for_is_reported(small):
    everything, little = small.evaluate(), small.evaluate(everything=False)
    assert everything.served == little.served
    assert everything.validation == little.validation
    assert None not in (everything.validation, everything.last, everything.finetuned)
    assert (little.last, little.finetuned) == (None, None)
    assert {"validation", "last", "finetuned"} & set(little.to_json()) == {"validation"}
    assert little.round == 2


def test_without_validation_parts_or_fine_tuning_there_are_no_such_columns():
    report = Small().evaluate()
    assert (report.validation, report.finetuned) == (None, None)
    assert report.last is not None


def test_last_is_the_local_model_of_those_who_trained_and_the_global_one_elsewhere(small):
    models = [small.server["theta"]] * CLIENTS
    for client in (1, 4):
        models[client] = small.rows[client]["theta"]  # what it uploaded
    right = total = 0
    for client, theta in enumerate(models):
        with torch.no_grad():
            found = small.model.module(theta)(small.data.inputs(client, "test")).argmax(dim=1)
        right += int((found == small.data.targets(client, "test")).sum())
        total += len(found)
    assert small.evaluate().last.pooled == pytest.approx(100 * right / total)
