"""What this machine has: versions, the card, whether the kernels are on and why, data, memory and disk."""

import os
import platform
import shutil
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fedobp._version import __version__
from fedobp.data import data_dir, list_datasets
from fedobp.data.free_memory import free_bytes
from fedobp.engine import memory_of
from fedobp.engine.kernels.cache import cache_folder
from fedobp.engine.kernels.cards import card_of, known_card
from fedobp.engine.kernels.diagnosis import diagnosis
from fedobp.engine.kernels.dispatch import card_problem, known_table, triton_problem
from fedobp.errors import FedobpError, first_line, short

_PACKAGES = ("torch", "triton", "numpy", "scipy", "scikit-learn", "safetensors", "pyarrow", "pandas", "datasets",
             "tensorboard", "wandb", "mlflow", "flwr")  # fmt: skip


def examine(card: str | None = None, precision: Any = "bf16", folder: str | None = None) -> dict[str, Any]:
    """Return what this machine has; with a `card`, such as 8.6, what the kernels would do on one that is not there."""
    device = _device() if torch.cuda.is_available() else None
    usable = device is not None and "problem" not in device
    chosen = known_card(card) if card else card_of(torch.device("cuda")) if usable else None
    data = _data(folder)
    folders = [str(Path.cwd()), *([data["folder"]] if data["folder"] else [])]
    return {
        "fedobp": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda_build": torch.version.cuda,
        "device": device,
        "kernels": diagnosis(chosen, precision, present=card is None) if chosen else None,
        "kernel_cache": None if cache_folder() is None else str(cache_folder()),
        "data": data,
        "threads": torch.get_num_threads(),
        "memory": {"total": memory_of(torch.device("cpu")), "free": free_bytes()},
        "disk": {path: _free_disk(Path(path)) for path in folders},
    }


def tune_card(precision: Any, seconds: float) -> dict[str, Any]:
    """Search for the tile shapes of this machine's card; return the table, and the time of a step."""
    from fedobp.engine.kernels.tuning import tune

    device = torch.device("cuda")
    card = card_of(device)
    if problem := card_problem(card) or triton_problem():
        raise FedobpError(problem)
    in_use = known_table(card, precision)
    found = tune(card, precision, device, seconds, in_use)
    return {
        "card": card.name,
        "capability": card.version,
        "precision": precision,
        "seconds": found.seconds,
        "table": {"source": found.table.source, "hash": found.table.hash, "entries": found.table.to_json()},
        "file": None if found.path is None else str(found.path),
        "timings": [asdict(one) for one in found.timings],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    """Return the card that torch uses, or why it cannot be used."""
    device = torch.device("cuda")
    try:
        free, total = torch.cuda.mem_get_info(device)
    except Exception as error:  # a process has taken it for itself, or it is broken: torch's classes are unrelated
        return {"problem": first_line(error)}
    return {**card_of(device)._asdict(), "count": torch.cuda.device_count(), "memory": {"total": total, "free": free}}


def _data(given: str | None) -> dict[str, Any]:
    """Return the data folder, and which datasets can be used."""
    folder = None
    try:
        folder = str(data_dir(given))
        there = [one.name for one in list_datasets(Path(folder)) if one.available]
    except FedobpError as error:
        return {"folder": folder, "problem": str(error), "datasets": []}
    is_file = Path(folder).exists() and not Path(folder).is_dir()
    problem = f"{short(folder, 200)} is a file: give another --data-dir or FEDOBP_DATA" if is_file else None
    return {"folder": folder, "problem": problem, "datasets": there}


def _free_disk(path: Path) -> int | None:
    """Return the free bytes where a path is, or would be made; None: that cannot be found out."""
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path).free if path.is_dir() and os.access(path, os.W_OK) else 0
    except OSError:
        return None
