from collections import OrderedDict

import pytest
from torch import nn

from fedobp.models import NETS, register


@pytest.fixture(autouse=True)
def _registry():
    before = dict(NETS)
    yield
    NETS.clear()
    NETS.update(before)


@pytest.fixture
def registered():
    """Return a function that registers a sequence of named layers and returns the model's name."""

    def build(**layers: nn.Module) -> str:
        register("made-up")(lambda shape, classes: nn.Sequential(OrderedDict(layers)))
        return "made-up"

    return build
