import pytest


@pytest.fixture(autouse=True)
def _large_blocks(monkeypatch):
    monkeypatch.setattr("fedobp.engine.kernels.fused._BLOCK", 1 << 16)


@pytest.fixture
def padded(monkeypatch):
    """Round numbers of lanes up to three, as beyond 16: some lanes are idle, some are padding."""
    monkeypatch.setattr("fedobp.engine.kernels.fused.EXACT", 1)
    monkeypatch.setattr("fedobp.engine.kernels.fused._LANE_MULTIPLE", 3)


@pytest.fixture
def small_tests(monkeypatch):
    """Evaluate 16 samples at a time instead of 64: the interpreter is slow."""
    monkeypatch.setattr("fedobp.engine.kernels.fused._TEST_BATCH", 16)
