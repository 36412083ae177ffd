"""Bringing your own data in: from a file or a folder to the one npz that every dataset is."""

from pathlib import Path

from fedobp.data.datasets import Dataset, read_npz, store, vacant


def bring(name: str, source: Path, folder: Path) -> Dataset:
    """Read data from a file or folder, check it, and keep it in the data folder under a name."""
    vacant(name, folder)
    return store(name, read_npz(source), folder)
