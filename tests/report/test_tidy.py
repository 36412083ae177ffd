"""Numbers of tidy rows that come from the rows of single clients, and settings that are not the default."""

import pytest
from saved import accuracy, clients_of, write_result, write_run

from fedobp import Config
from fedobp.files import read_checked_json
from fedobp.report.tidy import smallest_quarter, tidy_rows
from fedobp.saved_runs import read_run


def rows(*clients):
    return [{"train": size, "served": accuracy} for size, accuracy in clients]


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        ([(9, 10.0)], 10.0),  # at least one
        ([(9, 10.0), (3, 50.0), (8, 20.0)], 50.0),
        ([(5, 10.0), (1, 20.0), (2, 40.0), (7, 0.0), (9, 0.0), (8, 0.0), (6, 0.0), (4, 0.0)], 30.0),  # two of eight
        ([(5, 10.0), (1, 20.0), (1, 40.0), (7, 0.0)], 30.0),  # as small as the smallest
        ([(5, 10.0), (5, 20.0), (5, 60.0)], 30.0),  # none is smaller than another
        ([(0, None), (3, 50.0), (8, 20.0), (9, 30.0), (10, 40.0)], 50.0),  # without test samples
        ([(None, 70.0), (3, 50.0)], 50.0),  # a node that did not say
        ([(1, None)], None),
        ([], None),
    ],
)
def test_the_quarter_of_clients_with_the_fewest_samples(clients, expected):
    assert smallest_quarter(rows(*clients), "served") == expected
    assert smallest_quarter(list(reversed(rows(*clients))), "served") == expected


def test_rows_have_it_for_each_model(tmp_path):
    found = tidy_rows(read_run(write_run(tmp_path, clients=clients_of(8, lambda i: 70.0 + 10 * i))))
    assert {row["model"]: row["smallest_quarter"] for row in found} == {"served": 75.0, "last": 50.0}
    [row, _] = tidy_rows(read_run(write_run(tmp_path, "local")))  # without clients.csv
    assert row["smallest_quarter"] is None


def test_the_row_of_the_served_model_has_its_accuracy_on_validation_parts(tmp_path):
    folder = write_run(tmp_path)
    assert [row["validation"] for row in tidy_rows(read_run(folder))] == [None, None]
    write_result(folder, {**read_checked_json(folder / "result.json"), "validation": accuracy(70.5)})
    found = {row["model"]: row["validation"] for row in tidy_rows(read_run(folder))}
    assert found == {"served": 70.5, "last": None}


def test_rows_name_training_settings_that_are_not_the_default(tmp_path):
    settings = {"lr": 0.1, "weight_decay": 0.01, "epochs": Config.epochs, "prior": "train"}
    folders = write_run(tmp_path, **settings), write_run(tmp_path, "local", epochs=Config.epochs)
    [changed, *_], [usual, *_] = (tidy_rows(read_run(folder)) for folder in folders)
    assert (changed["parts"], changed["training"]) == ("prior=train", "lr=0.1;weight_decay=0.01")
    assert (usual["parts"], usual["training"]) == (None, None)
