"""Stop signals that are kept until a round ends."""

import pytest

from fedobp import interrupts
from fedobp.errors import Stopped


def test_a_signal_that_nothing_asked_for_is_raised_where_the_block_ends():
    steps = []

    def block():
        with interrupts.deferred():
            assert interrupts.defer(15)
            assert not interrupts.defer(2)  # the second one is not kept: it ends the process
            assert interrupts.received() == 15
            steps.append("to the end")

    with pytest.raises(Stopped) as stopped:
        block()
    assert (steps, stopped.value.code) == (["to the end"], 143)
    assert interrupts.received() is None
    assert not interrupts.defer(2)
    with interrupts.deferred():
        assert interrupts.received() is None


def test_a_signal_is_raised_although_the_block_fails():
    """Otherwise a sweep would begin its next launch."""

    @interrupts.deferred()
    def block():
        interrupts.defer(15)
        raise MemoryError

    with pytest.raises(Stopped):
        block()
