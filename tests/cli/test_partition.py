"""`fedobp partition`: its JSON, its heat map, its picture, its options and what it saves."""

import re
from pathlib import Path

import pytest

from fedobp.config import settings
from fedobp.data import PARTITIONERS


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


def test_partition_json_has_exactly_the_documented_shape(command, wards):
    found = command("partition", "--dataset", "wards", "--partition", "natural", "--holdout-clients", 1, "--json").json
    assert set(found) == {"clients", "entropy", "entropy_of_all", "emd", "hash"}
    assert [set(client) for client in found["clients"]] == [
        {"id", "train", "val", "test", "labels", "entropy", "emd", "held_out", "group", "turns", "noise", "blur",
         "contrast", "colour", "name"}
    ] * 7  # fmt: skip
    assert sorted(client["name"] for client in found["clients"]) == [f"ward {n}" for n in range(7)]
    assert [client["held_out"] for client in found["clients"]] == [False] * 6 + [True]
    first = command("partition", "--partition", "feature", "--json").json["clients"][0]
    assert "name" not in first


def test_partition_says_what_changes_in_which_group(command):
    concept = ("partition", "--partition", "concept", "--clients", 6, "--partition-set", "groups=2")
    said = command(*concept).out
    assert "Group 0, 3 clients: unchanged.\nGroup 1, 3 clients: 10 of 10 labels changed.\n" in said
    clients = command(*concept, "--json").json["clients"]
    for client in clients:
        assert ("new_labels" in client) == (client["group"] == 1)
    new = next(client["new_labels"] for client in clients if client["group"] == 1)
    assert sorted(map(str, new.values())) == sorted(new) == [str(label) for label in range(10)]
    feature = ("partition", "--partition", "feature", "--clients", 6)
    assert "Group 3, 1 client: rotated by 270 degrees." in command(*feature).out
    blur = command(*feature, "--partition-set", "change=blur").out
    assert "Clients' samples are changed: blur 0 to 0.8." in blur
    assert "Group" not in blur
    many = command(*feature, "--clients", 30, "--partition-set", "change=noise", "--partition-set", "groups=12").out
    assert "Group 9, 2 clients: noise 0.0818.\n... and 2 more groups: see all with --json" in many
    assert "changed" not in command("partition", "--clients", 6).out


def test_counts_are_those_of_the_new_labels(command):
    merged = ("partition", "--partition", "concept", "--partition-set", "change=merge", "--json")
    clients = command(*merged).json["clients"]
    assert {len(client["labels"]) for client in clients if client["group"]} == {5}
    assert all(len(client["labels"]) > 5 for client in clients if not client["group"])


def test_the_help_and_the_docs_name_every_partition_and_option(command):
    said = " ".join(command("partition", "--help").out.replace("│", " ").split())
    docs = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for name, partitioner in PARTITIONERS.items():
        assert re.search(rf"[ ,]{name}[ ,]", said), name
        [row] = [line for line in docs.splitlines() if line.startswith(f"| `{name}` |")]
        for option in partitioner.options():
            named = rf"[ ,]{option.name}( and \w+)? of (\w+ and of )?{name}[ ,.;]"
            assert re.search(named, said), option.name
            assert re.search(rf"`{option.name}[`=]", row), option.name


def test_the_help_of_the_setting_lists_every_partition():
    [text] = [spec.metadata["help"] for spec in settings() if spec.name == "partition"]
    listed = text.partition(": ")[2].partition(", or ")[0].split(", ")
    assert sorted(listed) == sorted(PARTITIONERS)


def test_a_partition_option_is_refused_with_the_nearest_or_with_its_form(command):
    classes = ("partition", "--partition", "classes")
    assert "such as --partition-set k=3" in command(*classes, "--partition-set", "k").err
    assert (
        "option 'k' of classes must be a whole number, not 'many'" in command(*classes, "--partition-set", "k=many").err
    )
    assert "has no options" in command("partition", "--partition-set", "k=2").err


def test_saving_twice_under_one_name_is_refused(command):
    assert command("partition", "--clients", 6, "--save", "six").code == 0
    said = command("partition", "--clients", 6, "--save", "six")
    assert said.code == 2
    assert "exists already" in said.err


def test_the_next_command_is_printed_with_a_saved_partition(command):
    said = command("partition", "--clients", 6, "--save", "six")
    assert "fedobp run --dataset digits --partition-file six" in said.out
    said = command("partition", "--clients", 6, "--save", "again", "--data-dir", "here")
    assert "fedobp run --dataset digits --data-dir here --partition-file again" in said.out
