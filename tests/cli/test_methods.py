"""`fedobp methods`."""

from fedobp.algorithms import METHODS


def test_methods_lists_ideas_options_and_papers(command):
    found = {method["name"]: method for method in command("methods", "--json").json["methods"]}
    assert set(found) == set(METHODS)
    assert len(found) == 31
    assert [option["name"] for option in found["fedobp"]["options"]] == ["q", "score", "norm", "scope", "ema", "start"]
    assert all(set(method) == {"name", "summary", "options", "paper"} for method in found.values())
    text = command("methods")
    assert all(f"--set {name}" in text.out for name in ("q=0.999", "score=squared", "ema=0.0", "finetune=5"))
