import pytest
from plain_loops import narrow

from fedobp.models import NETS


@pytest.fixture(scope="module", autouse=True)
def plain_network():
    """The network that plain loops train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETS, "narrow", narrow)
        yield
