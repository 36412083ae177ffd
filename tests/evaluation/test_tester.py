"""Metrics of clients' models: on both engines, of every column, in parts that fit in memory."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lanes_cases import CLASSES, CLIENTS, Plan, federated, make_job, make_model, make_pool
from sklearn.metrics import f1_score, log_loss, roc_auc_score

from fedobp import Config, Federation, FedobpError
from fedobp.engine import Lanes, Serial
from fedobp.evaluation import merge
from fedobp.evaluation.tester import ClientTester

ALL = ("loss", "f1", "auc", "ece", "confusion", "perplexity")
SMALL = {
    "clients": 7, "rounds": 2, "epochs": 1, "model": "mlp", "precision": "fp64", "val_ratio": 0.2, "holdout_clients": 2,
    "finetune_epochs": 1, "participation": 0.6,
}  # fmt: skip
COLUMNS = {
    "served", "validation", "last", "finetuned", "new_clients_served", "new_clients_visited", "new_clients_last",
    "new_clients_visited_twice", "new_clients_unlabelled",
}  # fmt: skip


@pytest.mark.parametrize("method", ["fedobp", "apfl"])
def test_both_engines_report_the_same_metrics_of_every_column(method):
    """APFL's answers are those of two models, by a function of its own."""
    ours, theirs = (
        Federation(Config(**SMALL, metrics=ALL, engine=engine)).run(method) for engine in ("lanes", "serial")
    )
    columns = COLUMNS - ({"new_clients_unlabelled"} if method == "apfl" else set())
    assert set(ours.metrics) == set(theirs.metrics) == columns
    for column, found in ours.metrics.items():
        assert tuple(found) == ALL
        for name, metric in found.items():
            expected = theirs.metrics[column][name]
            if name == "confusion":
                assert metric == expected
                continue
            for key in ("pooled", "client_mean", "client_std"):
                assert getattr(metric, key) == pytest.approx(getattr(expected, key), abs=1e-9), (column, name, key)
            assert len(metric.per_client) == (2 if column.startswith("new") else 5)
            for mine, other in zip(metric.per_client, expected.per_client, strict=True):
                assert mine == (None if other is None else pytest.approx(other, abs=1e-9))
    assert len({found["loss"].pooled for found in ours.metrics.values()}) == len(columns)


def test_metrics_are_those_of_the_models_that_the_result_holds():
    federation = Federation(Config(**SMALL, metrics=ALL))
    result, data = federation.run("fedavg-last"), federation.data
    probabilities, targets = [], []
    for client in range(data.trainers):
        module = federation.model.module().double()
        module.load_state_dict(result.state_dict(client))
        with torch.no_grad():
            probabilities.append(module(data.inputs(client, "test")).softmax(dim=1).numpy())
        targets.append(data.targets(client, "test").numpy())
    found = result.metrics["served"]
    p, y = np.concatenate(probabilities), np.concatenate(targets)
    assert found["loss"].pooled == pytest.approx(log_loss(y, p))
    assert found["f1"].pooled == pytest.approx(f1_score(y, p.argmax(axis=1), average="macro"))
    assert found["auc"].pooled == pytest.approx(roc_auc_score(y, p, multi_class="ovr"))
    assert np.trace(found["confusion"].pooled) / len(y) == pytest.approx(result.accuracy.pooled / 100)
    losses = [log_loss(y, p, labels=range(10)) for y, p in zip(targets, probabilities, strict=True)]
    assert found["loss"].per_client == pytest.approx(losses)


def test_asking_for_metrics_changes_nothing_else():
    plain, more = (Federation(Config(**SMALL, metrics=names)).run("fedobp").to_json() for names in (None, ALL))
    assert set(more) - set(plain) == {"metrics", "labels"}
    differ = ("seconds", "provenance")  # it holds a hash of the settings
    assert {name: more[name] for name in plain if name not in differ} == {
        name: plain[name] for name in plain if name not in differ
    }


def count_all(model, engine, metrics=ALL):
    """Test all clients, whose answers come from a function of the job's own."""
    theta = model.initial(3).double()
    thetas = torch.stack([theta * (1 + client) for client in range(CLIENTS)])
    scratch = {"theta": thetas, "sign": torch.tensor([1.0, -1.0] * (CLIENTS // 2), dtype=torch.float64)}
    job = replace(make_job(Plan(cohort=(4, 2, 0, 5, 1, 3)), make_pool(model), theta), predict=signed)
    return ClientTester(engine, federated(), metrics)(job, thetas, "test", scratch)


def signed(model, scratch, x):
    return model.logits(scratch["theta"], x) * scratch["sign"]


@pytest.mark.parametrize(("most", "parts"), [(1 << 24, [6]), (1, [1] * 6), (9 * CLASSES, [1, 3, 2])])
def test_how_many_logits_are_held_at_once_does_not_matter(monkeypatch, most, parts):
    """The cohort's test sizes are 9, 1, 3, 0, 2, 0; a part is padded to its longest."""
    model, asked = make_model("mlp"), []
    engine = Serial(model, 4)
    expected = merge(count_all(model, engine))
    logits = engine.logits
    monkeypatch.setattr("fedobp.evaluation.tester._LOGITS", most)
    monkeypatch.setattr(engine, "logits", lambda job, *rest: asked.append(len(job.ctx.cohort)) or logits(job, *rest))
    assert merge(count_all(model, engine)) == expected
    assert asked == parts
    monkeypatch.setattr("fedobp.evaluation.scoring._AT_ONCE", 1)
    for name, metric in merge(count_all(model, engine)).metrics.items():
        same = expected.metrics[name].pooled
        assert metric.pooled == (same if name == "confusion" else pytest.approx(same))


@pytest.mark.parametrize("engine", [Serial, Lanes])
def test_logits_are_computed_where_a_metric_needs_them(engine, monkeypatch):
    model = make_model("mlp")
    one = engine(model, 4)
    whole = merge(count_all(model, one)).metrics
    monkeypatch.setattr(one, "logits", None)
    assert merge(count_all(model, one, ())).metrics == {}
    found = merge(count_all(model, one, ("f1", "confusion"))).metrics
    assert found == {name: whole[name] for name in ("f1", "confusion")}


def test_a_confusion_matrix_of_very_many_classes_is_refused():
    data = SimpleNamespace(classes=1001)
    with pytest.raises(FedobpError, match=r"a confusion matrix of 1,001 classes .* leave confusion out of --metrics"):
        ClientTester(None, data, ("confusion",))
    ClientTester(None, data, ("f1",))
    data.classes = 1000
    ClientTester(None, data, ("confusion",))


def test_scores_that_do_not_fit_in_memory_are_refused_before_training(tmp_path, monkeypatch):
    federation = Federation(Config(**SMALL, metrics="auc"))
    monkeypatch.setattr("fedobp.data.free_memory.free_bytes", lambda: 1000.0)
    with pytest.raises(FedobpError, match=r"--metrics auc, .* needs more memory than there is"):
        federation.run(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
