"""`fedobp partition`: its JSON, its heat map and its picture."""

from pathlib import Path

import pytest


def test_partition_json_counts_every_sample_once(command):
    clients = command("partition", "--clients", 7, "--json").json["clients"]
    assert [client["id"] for client in clients] == list(range(7))
    assert sum(client["train"] + client["test"] for client in clients) == 1797
    for client in clients:
        assert sum(client["labels"].values()) == client["train"] + client["test"]
        assert client["test"] == int(0.25 * (client["train"] + client["test"]))


def test_partition_draws_a_heat_map_and_a_picture(command):
    said = command("partition", "--clients", 6, "--plot", "map.png")
    assert said.code == 0
    assert "1,797 samples on 6 clients" in said.out
    assert "█" in said.out
    assert Path("map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["map.jpg", "nowhere/map.png"])
def test_a_picture_that_cannot_be_written_is_refused(command, name):
    said = command("partition", "--plot", name)
    assert said.code == 2
    assert "--plot" in said.err


def test_a_picture_in_place_of_a_folder_is_refused(command):
    Path("map.png").mkdir()
    said = command("partition", "--plot", "map.png")
    assert (said.code, said.out) == (2, "")
    assert "cannot write map.png" in said.err
