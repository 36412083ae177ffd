"""What was found out on this machine about its cards: tuned tables and passed checks, one JSON file each.

A file is found by its key: what its content depends on. A file that is damaged or cannot be read counts as absent.
"""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedobp._version import __version__
from fedobp.engine.kernels.cards import Card
from fedobp.errors import FedobpError
from fedobp.files import read_checked_json, user_cache, write_checked_json

Key = Mapping[str, Any]
_kept: dict[str, Any] = {}  # by a file's name: what is not in a file


def cache_folder() -> Path | None:
    """Return the folder of these files, in the user's cache; None: the user has no home folder."""
    try:
        return user_cache().expanduser() / "kernels"
    except RuntimeError:
        return None


def ensure_triton_cache() -> None:
    """Give Triton a temporary folder if the user has no home: it would make one that is called `~`, anywhere."""
    if {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys():
        return
    try:
        Path.home()
    except RuntimeError:
        folder = os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="fedobp-triton-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def key_for(card: Card, precision: str, **more: Any) -> dict[str, Any]:
    """Return what depends on a card and on the versions of all that compiles for it."""
    import triton

    versions = {"fedobp": __version__, "torch": str(torch.__version__), "triton": triton.__version__}
    return {"card": card.name, "capability": card.version, "precision": precision, **versions, **more}


def load(kind: str, key: Key) -> Any:
    """Return the content that was saved under a key; None: there is none."""
    name = _name(kind, key)
    with suppress(OSError, FedobpError, ValueError, KeyError, TypeError, RecursionError):
        if folder := cache_folder():
            saved = read_checked_json(folder / name)
            if saved["key"] == dict(key):
                return saved["content"]
    return _kept.get(name)


def save(kind: str, key: Key, content: Any) -> Path | None:
    """Save content under a key; None: there is no folder for it, and this process alone keeps it."""
    folder, name = cache_folder(), _name(kind, key)
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            write_checked_json(folder / name, {"key": dict(key), "content": content})
            return folder / name
    except (OSError, FedobpError) as error:
        warnings.warn(f"{folder} cannot be written ({error}), so this is done again next time", stacklevel=2)
    keep(kind, key, content)
    return None


def keep(kind: str, key: Key, content: Any) -> None:
    """Keep content under a key in this process alone: what may be otherwise next time."""
    _kept[_name(kind, key)] = content


def _name(kind: str, key: Key) -> str:
    """Return the name of a key's file."""
    return f"{kind}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
