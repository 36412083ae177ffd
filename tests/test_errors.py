"""The one exception, and the near miss in its sentence."""

import pytest

from fedobp.errors import FedobpError, unknown


def test_unknown_suggests_the_nearest_name_and_lists_all():
    error = unknown("method", "fedobq", ["fedavg", "fedobp"])
    assert isinstance(error, FedobpError)
    assert str(error) == "unknown method 'fedobq': did you mean 'fedobp'? known are fedavg, fedobp"


def test_unknown_without_a_near_miss_only_lists():
    assert str(unknown("model", "zzz", ["cnn", "mlp"])) == "unknown model 'zzz': known are cnn, mlp"


@pytest.mark.parametrize(("name", "suggested"), [("ab__", True), ("a___", False)])
def test_half_of_the_letters_make_a_near_miss(name, suggested):
    assert ("did you mean 'abcd'?" in str(unknown("thing", name, ["wxyz", "abcd"]))) is suggested


def test_unknown_forgives_capitals():
    assert "did you mean 'cnn'?" in str(unknown("model", "CNN", ["mlp", "cnn"]))


def test_unknown_accepts_any_iterable_of_names():
    error = unknown("thing", "betta", (name for name in ("alpha", "beta")))
    assert str(error) == "unknown thing 'betta': did you mean 'beta'? known are alpha, beta"


def test_the_exception_is_not_one_that_python_raises_itself():
    assert FedobpError.__mro__ == (FedobpError, Exception, BaseException, object)
    with pytest.raises(FedobpError, match="what is wrong: what to do"):
        raise FedobpError("what is wrong: what to do")
