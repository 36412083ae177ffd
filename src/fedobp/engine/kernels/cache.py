"""What was found out on this machine about its cards: tuned tables and passed checks, one JSON file each.

A file is found by its key: what its content depends on. A file that cannot be read counts as absent.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedobp._version import __version__
from fedobp.engine.kernels.cards import Card
from fedobp.errors import FedobpError
from fedobp.files import write_json

Key = Mapping[str, Any]


def cache_folder() -> Path:
    """Return the folder of these files, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedobp" / "kernels"


def key_for(card: Card, precision: str, **more: Any) -> dict[str, Any]:
    """Return what depends on a card and on the versions of all that compiles for it."""
    import triton

    versions = {"fedobp": __version__, "torch": str(torch.__version__), "triton": triton.__version__}
    return {"card": card.name, "capability": card.version, "precision": precision, **versions, **more}


def path_of(kind: str, key: Key) -> Path:
    """Return the file of a key."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"{kind}-{name}.json"


def load(kind: str, key: Key) -> Any:
    """Return the content that was saved under a key; None: there is none."""
    try:
        saved = json.loads(path_of(kind, key).read_text(encoding="utf-8"))
        return saved["content"] if saved["key"] == dict(key) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def save(kind: str, key: Key, content: Any) -> Path | None:
    """Save content under a key; None: the folder cannot be written, and a warning says so."""
    path = path_of(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": dict(key), "content": content})
    except (OSError, FedobpError) as error:
        warnings.warn(f"{path.parent} cannot be written ({error}), so this is done again next time", stacklevel=2)
        return None
    return path
