"""Options of methods: types, ranges, choices, and what is refused."""

import math
from dataclasses import dataclass, make_dataclass

import pytest

from fedobp.algorithms import METHODS
from fedobp.errors import FedobpError
from fedobp.method import Method, option


def configure(name: str, **given):
    return METHODS[name].configure(given)


def test_the_choices_of_fedobp():
    assert {spec.name: spec.metadata["choices"] for spec in METHODS["fedobp"].options() if spec.type is str} == {
        "score": ("squared", "product"),
        "norm": ("none", "layer", "global"),
        "scope": ("all", "classifier"),
        "start": ("global", "literal"),
    }


def test_configure_sets_what_is_given_and_leaves_the_rest():
    method = configure("fedobp", q=0.9, score="product")
    assert (method.q, method.score, method.norm, method.scope, method.ema, method.start) == (
        0.9, "product", "none", "all", 0.0, "global",
    )  # fmt: skip
    assert configure("fedobp").score == "squared"
    assert configure("fedavg-ft").finetune == 5


@pytest.mark.parametrize(
    ("method", "name", "given", "value"),
    [
        ("fedobp", "q", 1, 1.0),
        ("fedobp", "q", 0, 0.0),
        ("fedobp", "q", "0.25", 0.25),
        ("fedobp", "ema", 1.0, 1.0),
        ("fedavg-ft", "finetune", 3.0, 3),
        ("fedavg-ft", "finetune", "7", 7),
        ("fedavg-ft", "finetune", 0, 0),
        ("fedavg-ft", "finetune", 1000, 1000),
    ],
)
def test_numbers_are_converted_to_the_type_of_their_option(method, name, given, value):
    found = getattr(configure(method, **{name: given}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("typo", "near"), [("scores", "score"), ("Q", "q"), ("nrom", "norm"), ("stat", "start")])
def test_an_unknown_option_is_refused_with_its_near_miss(typo, near):
    with pytest.raises(FedobpError, match=rf"unknown option of fedobp '{typo}': did you mean '{near}'\?"):
        configure("fedobp", **{typo: 1})


@pytest.mark.parametrize("name", ["fedavg", "fedavg-last", "local", "scaffold"])
def test_a_method_without_options_takes_none(name):
    with pytest.raises(FedobpError, match=f"method '{name}' has no options, so 'q' cannot be set"):
        configure(name, q=0.5)


@pytest.mark.parametrize("value", ["many", "", True, math.nan, "nan"])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(FedobpError, match=f"option 'q' of fedobp must be a number, not '{value}'"):
        configure("fedobp", q=value)


@pytest.mark.parametrize("value", [[0.5], None, {"a": 1}, math.inf])
def test_values_of_other_types_are_refused(value):
    with pytest.raises(FedobpError, match="option 'q' of fedobp must be a number"):
        configure("fedobp", q=value)


@pytest.mark.parametrize("value", [2.5, "2.5", "many", True, math.nan, math.inf])
def test_what_is_not_a_whole_number_is_refused(value):
    with pytest.raises(FedobpError, match=f"option 'finetune' of fedavg-ft must be a whole number, not '{value}'"):
        configure("fedavg-ft", finetune=value)


@pytest.mark.parametrize("name", ["q", "ema"])
@pytest.mark.parametrize("value", [-0.001, 1.001, -1, 2])
def test_a_number_out_of_range_is_refused(name, value):
    with pytest.raises(FedobpError, match=f"option '{name}' of fedobp must be between 0.0 and 1.0, not {value}"):
        configure("fedobp", **{name: value})


def test_a_number_below_an_open_range_is_refused():
    with pytest.raises(FedobpError, match="option 'finetune' of fedavg-ft must be at least 0, not -1"):
        configure("fedavg-ft", finetune=-1)


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("score", "square", "squared"),
        ("norm", "layers", "layer"),
        ("scope", "classifer", "classifier"),
        ("start", "literally", "literal"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_its_near_miss(name, value, near):
    with pytest.raises(
        FedobpError, match=rf"unknown value of option '{name}' of fedobp '{value}': did you mean '{near}'\?"
    ):
        configure("fedobp", **{name: value})


def test_an_option_may_be_open_on_either_side():
    @dataclass(frozen=True)
    class MadeUp(Method):
        name = "made-up"
        free: float = option(0.0, "any number")
        capped: float = option(0.0, "up to 2", low=-1.0, high=2.0)

    assert MadeUp.configure({"free": -1e9, "capped": 2}) == MadeUp(free=-1e9, capped=2.0)
    assert MadeUp.configure({"free": 1e9, "capped": -1}) == MadeUp(free=1e9, capped=-1.0)
    with pytest.raises(FedobpError, match=r"'capped' of made-up must be between -1\.0 and 2\.0, not 3"):
        MadeUp.configure({"capped": 3})


def test_annotations_may_be_text():
    """As in a module with `from __future__ import annotations`."""

    declared = [
        ("steps", "int", option(3, "")),
        ("start", "str", option("here", "")),
        ("share", "float", option(0, "")),
    ]
    made = make_dataclass("MadeUp", declared, bases=(Method,), namespace={"name": "made-up"}, frozen=True)
    given = made.configure({"steps": 4.0, "start": "there", "share": 1})
    assert given == made(steps=4, start="there", share=1.0)
    assert (type(given.steps), type(given.share)) == (int, float)
    with pytest.raises(FedobpError, match=r"'steps' of made-up must be a whole number, not '1\.5'"):
        made.configure({"steps": 1.5})
    with pytest.raises(FedobpError, match="'start' of made-up must be a text, not '1'"):
        made.configure({"start": 1})


def test_a_choice_of_another_type_is_refused():
    with pytest.raises(FedobpError, match="choose from squared, product"):
        configure("fedobp", score=1)
