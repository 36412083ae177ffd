"""The evaluator: what it tests, what it counts, and that it changes no state."""

from functools import partial

import numpy as np
import pytest
import torch

from fedobp import Config, Federation, FedobpError
from fedobp.algorithms import METHODS
from fedobp.data import FederatedData, data_dir, load, partition
from fedobp.engine import Budget, ClientPool, Lanes, PoolJob, Serial, Store
from fedobp.evaluation import Evaluator, ServerView, report
from fedobp.method import RoundContext
from fedobp.models import Model

CLIENTS = 6


class Small:
    """FedOBP with a moving average on six clients, two of which have trained in two rounds."""

    def __init__(self, val_ratio=0.0, finetune_epochs=0, engine=Serial, metrics=()):
        digits = load("digits", data_dir())
        shards = partition(digits.y, CLIENTS, seed=3, val_ratio=val_ratio)
        self.data = FederatedData(digits, shards, torch.device("cpu"), torch.float64)
        self.model = Model("mlp", self.data.shape, 10)
        self.method = METHODS["fedobp"].configure({"q": 0.9, "ema": 0.5})
        theta = self.model.initial(1).double()
        server, record, state = self.method.init(self.model, theta, 0)
        self.server, self.records = server, Store(record, CLIENTS, Budget())
        self.hparams = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
        self.clients = ClientPool(self.data, state, theta, 1, Budget())
        self.engine = engine(self.model, 32)
        self.finetune_epochs, self.metrics = finetune_epochs, metrics
        self.evaluator = self.new_evaluator()
        for round in (1, 2):
            self.train(round)

    def new_evaluator(self):
        return Evaluator(self.method, self.model, self.clients, self.engine, self.finetune_epochs, self.metrics)

    def context(self, round, clients):
        return RoundContext(self.model, round, 3, CLIENTS, 1, clients)

    def train(self, round):
        ctx, cohort = self.context(round, torch.tensor([4, 1])), [4, 1]
        download, records = self.method.download(ctx, self.server, self.records.gather(cohort))
        program = self.method.client_update(ctx)
        [update] = self.engine.train([PoolJob(ctx, program, self.hparams, download, clients=self.clients)])
        self.server, records = self.method.aggregate(ctx, self.server, records, update)
        self.records.scatter(cohort, records)

    def view(self):
        return ServerView(partial(self.context, 2), self.server, self.records, self.hparams)

    def evaluate(self, everything=True, keep=None, evaluator=None):
        return (evaluator or self.evaluator)(self.view(), everything=everything, keep=keep)

    def counts(self, *clients):
        return self.evaluator.counts(self.view(), torch.tensor(clients), everything=True)

    def last_models(self):
        return self.clients.last_models(torch.arange(CLIENTS), self.server["theta"])


@pytest.fixture(scope="module", params=[Serial, Lanes])
def small(request):
    metrics = ("loss", "f1", "auc", "ece", "confusion", "perplexity")
    return Small(val_ratio=0.25, finetune_epochs=1, engine=request.param, metrics=metrics)


def agree(report, other, rel=0.0):
    """Two reports are the same, but for the last bits of metrics: logits depend on how many lanes share a stack."""
    found, expected = report.to_json(), other.to_json()
    metrics, of_other = found.pop("metrics"), expected.pop("metrics")
    assert (report.round, report.passes, found.keys()) == (other.round, other.passes, expected.keys())
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=rel, abs=0), name
    assert metrics.keys() == of_other.keys()
    for column in of_other:
        for name in of_other[column]:
            assert metrics[column][name] == pytest.approx(of_other[column][name], abs=1e-12), (column, name)


@pytest.mark.parametrize(("entries", "chunks"), [(1, 6), (2 * 9610, 3), (4 * 9610 + 5, 2), (6 * 9610, 1)])
def test_how_many_clients_are_tested_at_once_does_not_matter(small, monkeypatch, entries, chunks):
    monkeypatch.setattr("fedobp.evaluation.evaluator._CHUNK", {"cpu": entries})
    evaluator, asked = small.new_evaluator(), []
    monkeypatch.setattr(evaluator, "counts", lambda *given: asked.append(1) or Evaluator.counts(evaluator, *given))
    agree(small.evaluate(evaluator=evaluator), small.evaluate())
    assert len(asked) == chunks


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3, 4, 5]], [[0], [1, 2], [3, 4, 5]], [[0, 1, 2], [3], [4], [5]]])
def test_counts_of_disjoint_groups_add_up_to_the_report_of_all(small, groups):
    first, *more = (small.counts(*group) for group in groups)
    agree(report(2, sum(more, first), small.model.layout), small.evaluate())


def test_counts_may_be_added_in_any_order(small):
    added = small.counts(4, 1) + (small.counts(5) + small.counts(0, 3)) + small.counts(2)
    agree(report(2, added, small.model.layout), small.evaluate(), rel=1e-12)


def test_evaluating_changes_no_state(small):
    everyone = range(CLIENTS)
    records, state = small.records.gather(everyone), small.clients.state.gather(everyone)
    server, last = small.server["theta"].clone(), small.last_models()
    first, second = small.evaluate(), small.evaluate()
    assert first == second
    for name, values in small.records.gather(everyone).items():
        assert torch.equal(values, records[name]), name
    assert {"score", "scored"} <= set(records), "the moving average must be in the records, or this shows nothing"
    assert records["scored"].tolist() == [False, True, False, False, True, False]
    for name, values in small.clients.state.gather(everyone).items():
        assert torch.equal(values, state[name]), name
    assert "theta" in state
    assert torch.equal(small.server["theta"], server)
    assert torch.equal(small.last_models(), last)


def test_a_round_after_an_evaluation_is_the_round_without_it():
    quiet, tested = Small(), Small()
    tested.evaluate()
    for one in (quiet, tested):
        one.train(3)
    assert torch.equal(quiet.server["theta"], tested.server["theta"])
    assert torch.equal(quiet.records.gather([1, 4])["score"], tested.records.gather([1, 4])["score"])


def test_personal_entries_are_counted_per_client_and_per_tensor(small):
    found = small.evaluate()
    size = 64 * 128 + 128 + 128 * 10 + 10
    assert small.model.layout.size == size == 9610
    # Two clients have trained; their personal entries are the entries above the one at position floor(0.9 * 9609).
    counts = []
    for client in (1, 4):
        record = small.records[client]
        score = 0.5 * (record["theta"] - small.server["theta"]) ** 2 + 0.5 * record["score"]
        counts.append(int((score > score.sort().values[8648]).sum()))
    assert max(counts) == 9609 - 8648  # fewer where entries tie
    assert (found.personal.min, found.personal.max) == (0, max(counts))
    assert found.personal.mean == pytest.approx(sum(counts) / 6)
    assert found.personal.share == pytest.approx(sum(counts) / 6 / 9610)
    assert sum(found.personal_by_tensor.values()) == pytest.approx(found.personal.mean)
    assert list(found.personal_by_tensor) == ["fc1.weight", "fc1.bias", "classifier.weight", "classifier.bias"]


def test_each_served_model_is_handed_over_once_and_is_what_the_accuracy_is_of(small):
    kept = {}
    found = small.evaluate(keep=lambda client, theta, mine: kept.setdefault(client, (theta, mine)))
    assert list(kept) == list(range(CLIENTS))
    right = total = 0
    for client, (theta, mine) in kept.items():
        assert torch.equal(theta[~mine], small.server["theta"][~mine])
        module = small.model.module(theta)
        with torch.no_grad():
            predicted = module(small.data.inputs(client, "test")).argmax(dim=1)
        right += int((predicted == small.data.targets(client, "test")).sum())
        total += len(predicted)
    assert found.served.pooled == pytest.approx(100 * right / total)


def test_only_what_was_asked_for_is_reported(small):
    everything, little = small.evaluate(), small.evaluate(everything=False)
    assert everything.served == little.served
    assert everything.validation == little.validation
    assert None not in (everything.validation, everything.last, everything.finetuned)
    assert (little.last, little.finetuned) == (None, None)
    assert {"validation", "last", "finetuned"} & set(little.to_json()) == {"validation"}
    assert set(little.to_json()["metrics"]) == {"served", "validation"}
    assert set(everything.to_json()["metrics"]) == {"served", "validation", "last", "finetuned"}
    assert little.round == 2


def test_without_validation_parts_or_fine_tuning_there_are_no_such_columns():
    found = Small().evaluate()
    assert (found.validation, found.finetuned) == (None, None)
    assert found.last is not None


def test_last_is_the_local_model_of_clients_that_trained_and_the_global_one_of_others(small):
    models = [small.server["theta"]] * CLIENTS
    for client in (1, 4):
        models[client] = small.records[client]["theta"]  # what it uploaded
    right = total = 0
    for client, theta in enumerate(models):
        with torch.no_grad():
            found = small.model.module(theta)(small.data.inputs(client, "test")).argmax(dim=1)
        right += int((found == small.data.targets(client, "test")).sum())
        total += len(found)
    assert small.evaluate().last.pooled == pytest.approx(100 * right / total)


def test_a_federation_without_test_samples_is_refused_before_it_trains(tmp_path):
    np.savez(tmp_path / "few.npz", x=np.zeros((12, 3), np.uint8), y=np.arange(12) % 2)
    config = Config(dataset="few", data_dir=str(tmp_path), clients=6, partition="iid")
    with pytest.raises(FedobpError, match="no client has a sample to evaluate on: use fewer --clients or more data"):
        Federation(config).run(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
