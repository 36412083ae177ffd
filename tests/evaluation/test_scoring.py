"""Metrics beyond accuracy, against numbers computed by hand and against their definitions."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, log_loss

from fedobp.evaluation import Confusion, count, merge, metrics_to_json
from fedobp.evaluation.scoring import Ranking

ALL = ("loss", "f1", "auc", "ece", "confusion", "perplexity")


def counted(probabilities, targets, metrics=ALL, classes=3):
    """Count a client whose model answers with these probabilities."""
    logits = torch.tensor(probabilities, dtype=torch.float64).reshape(-1, classes).log()
    return count(logits.argmax(dim=1), torch.tensor(targets, dtype=torch.int64), torch.ones(classes), metrics, logits)


# The first client has a tie between samples 2 and 4, and never sees label 2; the second has one sample, the third none,
# the fourth one label. Top probabilities lie inside the bins (0.4, 0.467], (0.467, 0.533], ... of width 1/15.
FOUR = [
    counted([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.05, 0.9, 0.05], [0.5, 0.3, 0.2]], [0, 1, 1, 0]),
    counted([[0.15, 0.2, 0.65]], [2]),
    counted([], []),
    counted([[0.35, 0.45, 0.2], [0.52, 0.28, 0.2]], [1, 1]),
]
LOSSES = [-math.log(0.7 * 0.3 * 0.9 * 0.5) / 4, -math.log(0.65), None, -math.log(0.45 * 0.28) / 2]
POOLED_LOSS = -math.log(0.7 * 0.3 * 0.9 * 0.5 * 0.65 * 0.45 * 0.28) / 7

# Right answers less top probabilities, by bin: 1 - 0.7, 1 - (0.5 + 0.5), 1 - 0.9; 1 - 0.65; 1 - 0.45, 0 - 0.52. In the
# pool the two bins at 0.5 are one.
EXPECTED = {
    "loss": (POOLED_LOSS, LOSSES),
    "f1": (7 / 9, [(4 / 5 + 2 / 3) / 2, 1, None, (0 + 2 / 3) / 2]),
    # One label has no other to be compared with. Of the first client's four pairs one is a tie, for both labels; in the
    # pool 8.5 of 10 pairs are in order for label 0, 10.5 of 12 for label 1, all for label 2.
    "auc": ((0.85 + 10.5 / 12 + 1) / 3, [3.5 / 4, None, None, None]),
    "ece": ((0.3 + 0.52 + 0.1 + 0.35 + 0.55) / 7, [(0.3 + 0 + 0.1) / 4, 0.35, None, (0.55 + 0.52) / 2]),
    "perplexity": (math.exp(POOLED_LOSS), [None if loss is None else math.exp(loss) for loss in LOSSES]),
}


@pytest.mark.essential
@pytest.mark.parametrize("name", EXPECTED)
def test_metrics_of_a_small_federation(name):
    found, (pooled, per_client) = merge(FOUR).metrics[name], EXPECTED[name]
    assert found.pooled == pytest.approx(pooled)
    assert list(found.per_client) == [None if value is None else pytest.approx(value) for value in per_client]
    defined = [value for value in per_client if value is not None]
    assert found.client_mean == pytest.approx(np.mean(defined))
    assert found.client_std == pytest.approx(np.std(defined))


def test_the_confusion_matrix_has_true_labels_in_rows():
    found = merge(FOUR).metrics["confusion"]
    assert found == Confusion(
        [[2, 0, 0], [2, 2, 0], [0, 0, 1]],
        (
            [[2, 0, 0], [1, 1, 0], [0, 0, 0]],
            [[0, 0, 0], [0, 0, 0], [0, 0, 1]],
            None,
            [[0, 0, 0], [1, 1, 0], [0, 0, 0]],
        ),
    )


def test_only_what_was_asked_for_is_counted_and_accuracies_are_the_same():
    plain, some = counted([[0.7, 0.2, 0.1]], [0], ()), counted([[0.7, 0.2, 0.1]], [0], ("ece", "f1"))
    assert (plain.metrics, list(some.metrics)) == ({}, ["ece", "f1"])
    assert merge([plain]).metrics == {}
    assert merge([plain]).to_json() == merge([some]).to_json()
    assert "metrics" not in merge([some]).to_json()


def test_labels_are_enough_for_f1_and_confusion():
    y = torch.tensor([0, 1, 1])
    found = merge([count(y, y, torch.ones(2), ("f1", "confusion"))]).metrics
    assert (found["f1"].pooled, found["confusion"].pooled) == (1, [[1, 0], [0, 2]])


def test_without_the_scores_of_all_clients_there_is_no_pooled_auc():
    apart = [one._replace(metrics={**one.metrics, "auc": Ranking(one.metrics["auc"].auc)}) for one in FOUR]
    found, whole = merge(apart).metrics, merge(FOUR).metrics
    assert found["auc"].pooled is None
    assert found["auc"].per_client == whole["auc"].per_client
    assert {name: one for name, one in found.items() if name != "auc"} == {
        name: one for name, one in whole.items() if name != "auc"
    }


def test_a_bin_of_the_calibration_error_has_its_upper_end():
    """Equal logits of three labels are 1/3 each, which ends a bin: 0.35 is in the next one. 1 is in the last bin."""
    equal, next_bin = [0.0, 0.0, 0.0], [math.log(0.35), math.log(0.325), math.log(0.325)]
    certain, last_bin = [1000.0, 0.0, 0.0], [math.log(0.95), math.log(0.025), math.log(0.025)]
    for rows, error in (((equal, next_bin), (1 - 1 / 3) + 0.35), ((last_bin, certain), abs((1 - 0.95) - 1))):
        found = count(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.ones(3), ("ece",), torch.tensor(rows).double())
        assert merge([found]).metrics["ece"].pooled == pytest.approx(error / 2)


def test_what_is_not_finite_is_null_in_json():
    y = torch.tensor([0, 1])
    nan = torch.tensor([[math.nan, 0.0], [0.0, 1.0]])
    huge = torch.tensor([[0.0, 1e6], [1e6, 0.0]])  # every answer wrong with certainty: exp(1e6) is no number
    for logits, defined in ((nan, {"f1"}), (huge, {"loss", "f1", "auc", "ece"})):
        metrics = merge([count(logits.argmax(dim=1), y, torch.ones(2), ALL, logits)]).metrics
        for per_client in (True, False):
            shown = metrics_to_json({"served": metrics}, per_client=per_client)["served"]
            json.dumps(shown, allow_nan=False)
            numbers = {name: one for name, one in shown.items() if name != "confusion"}
            for key in ("pooled", "client_mean", "client_std"):
                assert {name for name, one in numbers.items() if one[key] is not None} == defined


def test_json_of_a_round_has_no_lists_of_clients_and_no_matrix():
    columns = {"served": merge(FOUR).metrics}
    long, line = (metrics_to_json(columns, per_client=whole)["served"] for whole in (True, False))
    assert list(long) == list(ALL)
    assert list(line) == [name for name in ALL if name != "confusion"]
    assert long["loss"] == {**line["loss"], "per_client": list(merge(FOUR).metrics["loss"].per_client)}
    assert long["confusion"]["per_client"][2] is None
    assert metrics_to_json({"served": {}}, per_client=True) == {}


def test_every_position_of_a_sample_counts():
    """Labels [samples, positions] and logits [samples, positions, classes] are those of their rows."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, 3, generator=generator)
    targets, frequencies = torch.randint(3, (5, 4), generator=generator), torch.tensor([3, 1, 1])
    deep = count(logits.argmax(dim=-1), targets, frequencies, ALL, logits)
    flat = logits.reshape(20, 3)
    assert merge([deep]) == merge([count(flat.argmax(dim=-1), targets.flatten(), frequencies, ALL, flat)])


CLASSES = 4
SAMPLES = st.lists(
    st.tuples(
        st.lists(st.floats(-5, 5).map(lambda value: round(value, 1)), min_size=CLASSES, max_size=CLASSES),
        st.integers(0, CLASSES - 1),
    ),
    min_size=1,
    max_size=12,
)


def client(samples):
    logits = torch.tensor([row for row, _ in samples], dtype=torch.float64)
    targets = torch.tensor([y for _, y in samples])
    return count(logits.argmax(dim=1), targets, torch.ones(CLASSES), ALL, logits)


@given(st.lists(SAMPLES, min_size=1, max_size=4))
def test_pooled_metrics_are_the_definitions_on_all_samples(clients):
    """Also: what is counted apart is what is counted together."""
    everything = [sample for one in clients for sample in one]
    logits, y = np.array([row for row, _ in everything]), np.array([label for _, label in everything])
    p = torch.tensor(logits).softmax(dim=1).numpy()
    answers = torch.tensor(logits).argmax(dim=1).numpy()
    found, alone = merge([client(one) for one in clients]).metrics, merge([client(everything)]).metrics
    for name in ALL:
        expected = alone[name].pooled
        assert found[name].pooled == (pytest.approx(expected) if isinstance(expected, float) else expected)
    assert found["loss"].pooled == pytest.approx(log_loss(y, p, labels=range(CLASSES)))
    assert found["perplexity"].pooled == pytest.approx(math.exp(found["loss"].pooled))
    assert found["confusion"].pooled == confusion_matrix(y, answers, labels=range(CLASSES)).tolist()
    scores = [
        2 * np.sum((y == k) & (answers == k)) / (np.sum(y == k) + np.sum(answers == k)) for k in set(y) | set(answers)
    ]
    assert found["f1"].pooled == pytest.approx(np.mean(scores))
    areas = []
    for k in set(y):
        here, others = p[y == k, k], p[y != k, k]
        if len(others):
            areas.append(np.mean(np.sign(here[:, None] - others) / 2 + 0.5))
    assert found["auc"].pooled == (pytest.approx(np.mean(areas)) if areas else None)
    top, gaps = p.max(axis=1), np.zeros(15)
    for at, share in enumerate(top):
        gaps[math.ceil(share * 15) - 1] += float(answers[at] == y[at]) - share
    assert found["ece"].pooled == pytest.approx(np.abs(gaps).sum() / len(y))
