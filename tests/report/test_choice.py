"""Which values are compared with each other, and chosen."""

from types import SimpleNamespace

import pytest

from fedobp.config import Config
from fedobp.report.choice import chosen_values


def result(validation, **settings):
    accuracy = SimpleNamespace(pooled=validation)
    return SimpleNamespace(config=Config(val_ratio=0.2, **settings), validation=accuracy, accuracy=accuracy)


def test_the_best_value_is_that_of_the_best_mean_over_seeds():
    found = [result(80.0, lr=0.1), result(60.0, lr=0.1, seed=43), result(71.0), result(71.0, seed=43)]
    [choice] = chosen_values(found)
    assert (choice["chosen"], choice["validation"], choice["values"]) == ("fedobp, lr=0.01", 71.0, 2)


@pytest.mark.parametrize(("name", "values"), [("eval_clients", (3, 20)), ("partition_file", ("a.json", "b.json"))])
def test_runs_on_other_clients_are_no_values_to_choose_from(name, values):
    assert chosen_values([result(70.0 + at, **{name: value}) for at, value in enumerate(values)]) == []
