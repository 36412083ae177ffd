"""What happens at the first use of the kernels on a card: tables, checks, compilation.

Run with: PYTHONPATH=src python -m pytest tests/gpu/test_first_use_cuda.py
"""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device that torch can use", allow_module_level=True)

from fedobp import Config, Federation, doctor
from fedobp.engine.kernels import cache, dispatch, fused_for, tuning
from fedobp.engine.kernels.cards import OLDEST, card_of
from fedobp.engine.kernels.compilation import compile_all
from fedobp.engine.kernels.fused import Fused
from fedobp.engine.kernels.self_check import BOUNDS, disagreement
from fedobp.engine.kernels.specimens import specimens
from fedobp.engine.kernels.tiles import default_table
from fedobp.errors import FedobpError
from fedobp.models import Model

DEVICE = torch.device("cuda")
CARD = card_of(DEVICE)
CNN = Model("cnn", (3, 32, 32), 10)
pytestmark = pytest.mark.skipif(CARD.capability < OLDEST, reason="the kernels do not support this card")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dispatch._warn_once.cache_clear()


@pytest.fixture
def without_table(monkeypatch):
    """As on a card for which no table is shipped; a search of a few seconds."""
    for module in (dispatch, tuning):
        monkeypatch.setattr(module, "shipped_table", lambda *_: None)
    monkeypatch.setattr(dispatch, "FIRST_USE_SECONDS", 15.0)


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(
    ("side", "channels", "classes", "batch"), [(32, 3, 10, 32), (28, 1, 2, 64), (32, 3, 10, 16), (32, 4, 128, 50)]
)
@pytest.mark.parametrize("tuned", [True, False])
def test_the_self_check_passes(precision, side, channels, classes, batch, tuned):
    model = Model("cnn", (channels, side, side), classes)
    table = tuning.start_table(CARD, precision) if tuned else default_table(CARD.capability)
    assert disagreement(Fused(model, batch, precision, table.entries, DEVICE, CARD), model) is None


def test_the_self_check_finds_other_numbers(monkeypatch):
    """Weights that are a little wrong after each training."""

    class Wrong(Fused):
        def train(self, theta, *given):
            result = super().train(theta, *given)
            theta.add_(1e-2)
            return result

    table = tuning.start_table(CARD, "bf16")
    assert "differs from the reference by" in disagreement(Wrong(CNN, 32, "bf16", table.entries, DEVICE, CARD), CNN)


@pytest.mark.usefixtures("without_table")
def test_the_first_use_tunes_once_and_says_so():
    with (
        pytest.warns(UserWarning, match=f"tuning the kernels for {CARD.name} in bf16, once, for up to 15 s"),
        pytest.warns(UserWarning, match=rf"tuned for {CARD.name} in bf16 in \d+ s; the table is kept in"),
    ):
        first = fused_for(CNN, 32, "bf16", "auto", DEVICE)
    assert cache.load("tiles", cache.key_for(CARD, "bf16")) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused_for(CNN, 32, "bf16", "on", DEVICE).table_hash == first.table_hash
    assert dispatch.known_table(CARD, "bf16").source == "tuned"


def test_a_search_is_never_slower_than_its_start():
    found = tuning.tune(CARD, "bf16", DEVICE, 10.0, default_table(CARD.capability))
    assert found.seconds < 30
    assert all(one.step <= one.before for one in found.timings)
    assert found.path.exists()


def test_a_race_is_refused():
    if CARD.capability[0] not in (9, 10):
        pytest.skip("products read registers on this card")
    data = torch.zeros(8 * 64 * 64, dtype=torch.bfloat16, device=DEVICE)
    out = torch.zeros(64 * 64, device=DEVICE)
    launches = []
    for one in specimens(CARD.capability).values():
        tensors = tuple(out if value.dtype == torch.float32 else data for value in one.args)
        launches.append(replace(one, args=tensors))
    with pytest.raises(FedobpError, match="is overwritten while a product reads it"):
        compile_all(launches, DEVICE, CARD)


def test_runs_record_their_table_and_repeat_to_the_same_bytes(tmp_path):
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (400, 28, 28), dtype=np.uint8), np.arange(400) % 10
    config = Config(clients=4, participation=1.0, rounds=2, epochs=1, model="cnn", alpha=10.0)
    for name, kernels in (("a", "auto"), ("b", "on"), ("c", "off")):
        federation = Federation.from_data(x, y, config=replace(config, kernels=kernels))
        federation.run("fedobp", out=tmp_path / name)
    heads = {name: (tmp_path / name / "config.toml").read_text() for name in "abc"}
    assert f"tile table {dispatch.known_table(CARD, 'bf16').hash}" in heads["a"]
    assert "tile table" not in heads["c"]
    same, other = (
        [(tmp_path / name / "metrics.jsonl").read_bytes() == (tmp_path / "a" / "metrics.jsonl").read_bytes()]
        for name in "bc"
    )
    assert (same, other) == ([True], [False])
    models = [sorted((tmp_path / name / "models").iterdir()) for name in "ab"]
    assert [one.read_bytes() for one in models[0]] == [one.read_bytes() for one in models[1]]


def test_doctor_says_that_the_kernels_are_on():
    found = doctor.examine()["kernels"]
    assert found["on"], found["why"]
    assert "self-check has passed" in found["why"] or "the first run tunes" in found["why"]
