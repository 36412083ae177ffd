"""The exception for user errors, and the suggestion in its message."""

from itertools import count

import pytest

from fedobp.errors import FedobpError, short, unknown


def test_unknown_suggests_the_nearest_name_and_lists_all():
    error = unknown("method", "fedobq", ["fedavg", "fedobp"])
    assert isinstance(error, FedobpError)
    assert str(error) == "unknown method 'fedobq': did you mean 'fedobp'? choose from fedavg, fedobp"


def test_unknown_without_a_similar_name_only_lists():
    assert str(unknown("model", "zzz", ["cnn", "mlp"])) == "unknown model 'zzz': choose from cnn, mlp"


@pytest.mark.parametrize(("name", "suggested"), [("ab__", True), ("a___", False)])
def test_half_of_the_letters_make_a_similar_name(name, suggested):
    assert ("did you mean 'abcd'?" in str(unknown("thing", name, ["wxyz", "abcd"]))) is suggested


def test_unknown_forgives_capitals():
    assert "did you mean 'cnn'?" in str(unknown("model", "CNN", ["mlp", "cnn"]))


def test_unknown_accepts_any_iterable_of_names():
    error = unknown("thing", "betta", (name for name in ("alpha", "beta")))
    assert str(error) == "unknown thing 'betta': did you mean 'beta'? choose from alpha, beta"


def test_the_exception_is_not_one_that_python_raises_itself():
    assert FedobpError.__mro__ == (FedobpError, Exception, BaseException, object)
    with pytest.raises(FedobpError, match="what is wrong: what to do"):
        raise FedobpError("what is wrong: what to do")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("fedobp", "fedobp"),
        (0.5, "0.5"),
        ("two\nlines\t\x1b[1m\udcff", r"two\nlines\t\x1b[1m\udcff"),
        ("ü", "ü"),
        ("", ""),
        ("a" * 60, "a" * 60),
        ("a" * 50 + "b" * 50, "a" * 30 + "…" + "b" * 29),
        ("\n" * 31, r"\n" * 15 + "…n" + r"\n" * 14),
        (2**20000, "0x1" + "0" * 27 + "…" + "0" * 29),
        ("a" * 10**7, "a" * 30 + "…" + "a" * 29),
    ],
    ids=map(str, count()),
)
def test_a_quoted_value_is_one_short_line(value, text):
    assert short(value) == text
    assert len(text) <= 60


@pytest.mark.parametrize("limit", [1, 2, 7, 60])
def test_a_quoted_value_has_the_length_that_it_may_have(limit):
    assert len(short("\0" * 500, limit)) == limit
    assert short("ab", 2) == "ab"


def test_unknown_lists_no_more_than_fits_into_a_sentence():
    said = str(unknown("column", "z", [f"{at:060}" for at in range(40)]))
    assert said.endswith("and 33 more")
    assert len(said) < 600
    assert str(unknown("column", "z", ["a"] * 60)).endswith("a, a and 10 more")


def test_unknown_shortens_the_name_and_the_choices():
    said = str(unknown("column", "z" * 10**6, ["a" * 500, "line\nbreak"]))
    assert said == f"unknown column '{short('z' * 100)}': choose from {short('a' * 500)}, line\\nbreak"
