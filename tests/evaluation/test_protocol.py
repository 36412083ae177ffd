"""Protocols: which rounds are reported, and which of them is chosen."""

import pytest

from fedobp import Config, Federation, FedobpError
from fedobp.evaluation import Accuracy, make_protocol


def test_the_default_protocol_reports_the_last_round():
    found = make_protocol("default", 60)
    assert (found.rounds, found.pick, found.clients, found.split) == ((60,), "last", "all", "test")


@pytest.mark.parametrize(
    ("rounds", "reported"), [(100, (100,)), (150, (100,)), (399, (100, 200, 300)), (1000, (100, 200, 300, 400))]
)
def test_the_papers_protocol_reports_the_best_of_its_rounds(rounds, reported):
    found = make_protocol("paper", rounds)
    assert (found.rounds, found.pick, found.average) == (reported, "best", "pooled")


@pytest.mark.parametrize("rounds", [1, 20, 99])
def test_the_papers_protocol_needs_100_rounds(rounds):
    with pytest.raises(FedobpError, match=rf"--rounds {rounds} reaches none of them: use at least 100 rounds, or"):
        make_protocol("paper", rounds)


def test_a_protocol_is_printed_as_plain_values():
    found = make_protocol("paper", 250).to_json()
    assert found["rounds"] == [100, 200]
    assert found["model"] == "as served, before local training"
    assert set(found) == {"name", "average", "rounds", "pick", "model", "clients", "split"}


def reported(pooled, mean):
    return Accuracy(pooled, mean, 0.0, 0.0, 0.0, 0.0)


def test_best_is_by_pooled_accuracy_and_the_first_of_equals():
    columns = [reported(50, 90), reported(70, 1), reported(70, 2), reported(60, 99)]
    assert make_protocol("paper", 400).choose(columns) is columns[1]


def test_last_is_the_last_even_if_it_is_not_the_best():
    columns = [reported(70, 0), reported(50, 0)]
    assert make_protocol("default", 2).choose(columns) is columns[1]


@pytest.mark.parametrize("name", ["default", "paper"])
def test_nothing_is_chosen_out_of_nothing(name):
    assert make_protocol(name, 400).choose([]) is None


def test_a_run_under_the_papers_protocol_reports_its_best_round(monkeypatch):
    monkeypatch.setattr("fedobp.evaluation.protocol.PAPER_ROUNDS", (1, 2, 4, 8))
    # A rate at which accuracy goes up and down.
    config = Config(clients=5, rounds=5, epochs=1, model="mlp", lr=0.5, protocol="paper", eval_every=5)
    result = Federation(config).run("fedavg")
    assert result.protocol.rounds == (1, 2, 4)
    pooled = {round: value for round, value, _ in result.history}
    assert list(pooled) == [1, 2, 4, 5]
    assert result.accuracy.pooled == max(pooled[round] for round in (1, 2, 4))
