"""`fedobp models`."""

from fedobp.models import NETS


def test_models_lists_networks_and_options(command):
    found = {model["name"]: model for model in command("models", "--json").json["models"]}
    assert set(found) == set(NETS)
    assert found["conv"]["options"] == [{"name": "depth", "default": 4}, {"name": "width", "default": 32}]
    assert found["cnn"]["summary"].startswith("the paper's CNN")
    assert all(model["summary"] for model in found.values())
    text = command("models").out
    assert "--model-set depth=4 --model-set width=32" in text
    assert "resnet18-bn" in text


def test_a_broken_package_is_named_and_all_other_networks_are_listed(command, install):
    install("broken", "", "fedobp.models", {"broken": "nowhere:net"})
    said = command("models", "--json")
    assert said.code == 2
    assert [one["model"] for one in said.json["failed"]] == ["broken"]
    assert len(said.json["models"]) == len(NETS)
    assert "ModuleNotFoundError" in said.err
