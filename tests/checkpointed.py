"""Runs that are stopped and go on, and the files that are compared between them."""

from pathlib import Path

import pytest

from fedobp import Config, Federation
from fedobp.launch import StopTraining

SMALL = {"clients": 6, "rounds": 6, "epochs": 1, "participation": 0.5, "model": "mlp", "eval_every": 2}
NAMES = ("config.toml", "metrics.jsonl", "clients.csv", "models/global.safetensors", "models/clients.safetensors")


def contents(*folders: Path) -> dict[str, bytes]:
    """The files that must be the same, interrupted or not."""
    return {f"{at}/{name}": (folder / name).read_bytes() for at, folder in enumerate(folders) for name in NAMES}


def stop_at(*rounds: int):
    def progress(at):
        if at.round in rounds:
            raise StopTraining

    return progress


def begin(config: Config, folder: Path, stop: int = 3, every: int = 2) -> None:
    """Start a run, and stop it after a round."""
    with pytest.raises(StopTraining):
        Federation(config).run(out=folder, progress=stop_at(stop), checkpoint_every=every)


def go_on(config: Config, folder: Path, **more) -> list[int]:
    """Go on with a run; return the rounds that it trained."""
    seen = []
    Federation(config).run(out=folder, resume=True, progress=lambda at: seen.append(at.round), **more)
    return seen


def contents_of(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
