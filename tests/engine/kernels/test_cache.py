import os
from pathlib import Path

import pytest

from engine.kernels.interpreted import WITHOUT_GPU
from fedobp.engine.kernels import cache
from fedobp.engine.kernels.cards import Card
from fedobp.files import write_checked_json

pytestmark = WITHOUT_GPU
CARD = Card((8, 9), 99 * 1024, "NVIDIA L4")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_kept", {})
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


def test_a_file_with_another_number_counts_as_absent():
    key = cache.key_for(CARD, "bf16")
    path = cache.save("tiles", key, [64, 32])
    path.write_text(path.read_text().replace("64", "0"))
    assert cache.load("tiles", key) is None


def test_a_file_of_another_key_counts_as_absent():
    key = cache.key_for(CARD, "bf16")
    path = cache.save("tiles", key, [1])
    write_checked_json(path, {"key": {**key, "card": "another"}, "content": [1]})
    assert cache.load("tiles", key) is None


def test_a_folder_that_cannot_be_written_is_a_warning_and_the_process_remembers(place):
    place.parent.mkdir(parents=True)
    place.write_text("a file where the folder should be")
    key = cache.key_for(CARD, "bf16")
    with pytest.warns(UserWarning, match=r"cannot be written .* so this is done again next time"):
        assert cache.save("tiles", key, [1]) is None
    assert cache.load("tiles", key) == [1]
    assert cache.load("tiles", {**key, "card": "another"}) is None


def test_what_is_kept_is_in_no_file(place):
    key = cache.key_for(CARD, "bf16")
    cache.keep("self-check", key, "a step differs")
    assert cache.load("self-check", key) == "a step differs"
    assert not place.exists()


def test_without_a_home_folder_triton_has_a_temporary_one(monkeypatch, tmp_path):
    """It takes the name `~` literally."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    removed = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("atexit.register", lambda *call, **more: removed.append((call, more)))
    cache.ensure_triton_cache()
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    cache.ensure_triton_cache()
    [folder] = tmp_path.iterdir()
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)
    [((remove, *arguments), more)] = removed
    remove(*arguments, **more)
    assert not folder.exists()
    cache.ensure_triton_cache()  # a folder that is given is kept
    assert not folder.exists()


def test_a_user_without_a_home_folder_has_no_files(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache.cache_folder() is None
    key = cache.key_for(CARD, "bf16")
    assert cache.load("tiles", key) is None
    assert cache.save("tiles", key, [1]) is None
    assert cache.load("tiles", key) == [1]
