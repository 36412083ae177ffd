"""Methods by name, and what all of them declare."""

import pytest
import torch

from fedobp.algorithms import METHODS, method_class
from fedobp.errors import FedobpError
from fedobp.models import Model


def test_methods_are_found_by_their_names():
    assert set(METHODS) == {
        "fedobp", "fedavg", "fedavg-ft", "fedavg-last", "local", "fedper", "fedrep", "fedbabu", "ditto", "fedprox",
        "fedpac", "pfedfda", "scaffold", "lg-fedavg", "pspfl", "floco", "fedrod", "apfl", "pfedme", "fedala", "fedbn",
        "pfedsim", "seqfededt", "decoupled", "flute", "feddpa", "fedselect", "group-oracle",
        "fedobp-auto", "fedacg", "counterdrift",
    }  # fmt: skip
    assert all(method_class(name) is cls and cls.name == name for name, cls in METHODS.items())


def test_an_unknown_method_is_refused_with_its_near_miss():
    with pytest.raises(FedobpError, match=r"unknown method 'fedopb': did you mean 'fedobp'\?"):
        method_class("fedopb")


@pytest.mark.parametrize("cls", METHODS.values(), ids=METHODS.keys())
def test_every_method_and_option_is_described(cls):
    assert cls.summary
    assert cls.paper
    assert cls.__doc__
    for spec in cls.options():
        assert spec.metadata["doc"].strip()
        assert spec.type in (int, float, str)
        assert isinstance(spec.default, spec.type)
        assert (spec.type is str) == bool(spec.metadata["choices"])


@pytest.mark.parametrize("cls", METHODS.values(), ids=METHODS.keys())
def test_defaults_are_valid_values(cls):
    defaults = {spec.name: spec.default for spec in cls.options()}
    assert cls.configure({}) == cls.configure(defaults) == cls()


@pytest.mark.parametrize("cls", METHODS.values(), ids=METHODS.keys())
def test_every_method_starts_from_theta_0_and_keeps_it_on_the_server(cls):
    model = Model("mlp", (4,), 2)
    theta = model.initial(0)
    # FLOCO draws its classifiers itself, and the model has their mean.
    drawn = model.layout.mask(lambda name: cls.name == "floco" and name == "classifier.weight")
    assert torch.equal(cls().init(model, theta, 0).server["theta"][~drawn], theta[~drawn])
