"""`fedobp data`, and runs on imported datasets."""

import json
import tomllib
from pathlib import Path

import pytest

from cli.cases import TINY, write_npz


def test_data_import_list_and_show(command):
    write_npz("mine.npz", labels=4, n_train=40)
    row = command("data", "import", "mine", "mine.npz", "--json").json
    assert row == {"name": "mine", "samples": 60, "shape": [8, 8], "classes": 4, "available": True, "clients": 0}
    assert command("data", "show", "mine", "--json").json == row
    listed = {entry["name"]: entry for entry in command("data", "list", "--json").json["datasets"]}
    assert listed["mine"] == row
    assert listed["digits"] == {
        "name": "digits", "samples": 1797, "shape": [8, 8], "classes": 10, "available": True, "clients": 0,
    }  # fmt: skip
    assert listed["cifar10"]["available"] is False
    assert {"mnist", "fmnist", "emnist", "cifar10", "cifar100", "svhn", "organamnist", "organcmnist"} <= set(listed)


def test_a_damaged_file_is_listed_as_not_available(command):
    Path("data").mkdir()
    Path("data/broken.npz").write_bytes(b"PK\x03\x04 not a zip file")
    listed = {entry["name"]: entry for entry in command("data", "list", "--json").json["datasets"]}
    assert listed["broken"]["available"] is False
    assert listed["digits"]["available"] is True
    assert command("data", "list").code == 0
    assert "cannot be read" in command("data", "show", "broken").err


def test_an_imported_set_trains(command):
    write_npz("mine.npz", n=120)
    command("data", "import", "mine", "mine.npz")
    said = command("run", "--dataset", "mine", *TINY, "--json")
    assert said.code == 0
    assert said.json["dataset"] == "mine"


def test_an_imported_table_trains_with_the_mlp(command):
    write_npz("table.npz", n=120, shape=(6,))
    command("data", "import", "table", "table.npz")
    said = command("run", "--dataset", "table", "--clients", 5, "--rounds", 1, "--out", "here")
    assert said.code == 0
    assert tomllib.loads(Path("here/config.toml").read_text())["model"] == "mlp"


def test_a_named_set_is_that_set(command):
    write_npz("f.npz", n=300, shape=(28, 28), labels=10)
    command("data", "import", "fmnist", "f.npz")
    said = command(
        "run", "--dataset", "fmnist", "--clients", 4, "--rounds", 1, "--epochs", 1, "--out", "here", "--json"
    )
    assert said.code == 0
    config = tomllib.loads(Path("here/config.toml").read_text())
    assert (config["model"], config["options"]["q"]) == ("cnn", 0.99993)
    about = json.loads(_metadata("here/models/global.safetensors"))
    assert about["scaling"] == {"unit": 255.0, "mean": [pytest.approx(0.286)], "std": [pytest.approx(0.3205)]}


def _metadata(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata()["fedobp"]
