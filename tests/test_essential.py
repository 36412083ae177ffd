"""`make check` stays quick by what it runs, and not by a clock."""

import pytest

MOST = 100


@pytest.mark.essential
def test_the_essential_tests_are_few_and_start_no_process(request):
    essential = [item for item in request.session.items if item.get_closest_marker("essential")]
    assert len(essential) <= MOST, "take one out for each that comes in"
    assert [item.nodeid for item in essential if "start" in item.fixturenames] == []
