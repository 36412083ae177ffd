import json

import pytest

from engine.kernels.interpreted import WITHOUT_GPU
from fedobp.engine.kernels import cache
from fedobp.engine.kernels.cards import Card

pytestmark = WITHOUT_GPU
CARD = Card((8, 9), 99 * 1024, "NVIDIA L4")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedobp" / "kernels"


def test_content_is_found_by_its_key(place):
    key = cache.key_for(CARD, "bf16")
    assert {"card", "capability", "precision", "fedobp", "torch", "triton"} <= set(key)
    assert cache.load("tiles", key) is None
    path = cache.save("tiles", key, [1, 2])
    assert path.parent == place
    assert cache.load("tiles", key) == [1, 2]
    assert cache.load("checked", key) is None
    for other in (
        {"precision": "tf32"},
        {"torch": "2.99"},
        {"triton": "3.99"},
        {"fedobp": "99"},
        {"card": "NVIDIA L40"},
    ):
        assert cache.load("tiles", {**key, **other}) is None
    assert [one.name for one in place.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"key": 1}', b"[" * 100_000])
def test_a_damaged_file_counts_as_absent(content):
    key = cache.key_for(CARD, "bf16")
    cache.save("tiles", key, [1]).write_bytes(content)
    assert cache.load("tiles", key) is None


def test_a_file_of_another_key_counts_as_absent():
    key = cache.key_for(CARD, "bf16")
    path = cache.save("tiles", key, [1])
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "key": {**key, "card": "another"}}))
    assert cache.load("tiles", key) is None


def test_a_folder_that_cannot_be_written_is_a_warning(place):
    place.parent.mkdir(parents=True)
    place.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be written .* so this is done again next time"):
        assert cache.save("tiles", cache.key_for(CARD, "bf16"), [1]) is None
