"""Import of user data: a file or a folder becomes NAME.npz in the data folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedobp.data.columns import numbers_or_texts
from fedobp.data.dataset import Dataset
from fedobp.data.datasets import new_dataset_path, store
from fedobp.data.free_memory import memory_guard
from fedobp.data.images import read_images
from fedobp.data.npz import read_npz
from fedobp.data.tables import read_csv, read_huggingface, read_parquet
from fedobp.errors import FedobpError, first_line, short, unknown
from fedobp.files import regular


def import_dataset(
    name: str,
    source: Path,
    folder: Path,
    *,
    label: str | None = None,
    client: str | None = None,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Dataset:
    """Read data from a file or folder, check it, and store it in the data folder under a name.

    The source is an npz, CSV or Parquet file, a folder of images by class, or a Hugging Face dataset that was saved to
    disk. `label` and `client` name the columns (in an npz, the arrays) with a sample's label and its client; without
    `client`, samples have no natural client. `progress` is called with the current step and the share that is done.
    """
    new_dataset_path(name, folder)
    with memory_guard(f"importing {short(source, 200)}"):
        try:
            arrays = _read(name, source, label, client, progress)
        except OSError as error:
            raise FedobpError(
                f"{short(source, 200)} cannot be imported ({first_line(error)}): make all of it readable"
            ) from error
        progress("checking and writing", 1.0)
        return store(name, arrays, folder)


def _read(
    name: str, source: Path, label: str | None, client: str | None, progress: Callable[[str, float], None]
) -> dict[str, NDArray[Any]]:
    shown = short(source, 200)
    if any((source / file).is_file() for file in ("state.json", "dataset_dict.json")):
        return read_huggingface(name, source, label or "label", client, progress)
    if source.is_dir():
        if label or client:
            raise FedobpError(
                f"{shown} is a folder of images, which has no columns: leave out --label (the folders' names are the "
                "labels) and --client"
            )
        x, classes = read_images(source, progress)
        return {"x": x, "y": numbers_or_texts(classes)}
    if not source.exists():
        raise FedobpError(f"there is no file or folder {shown}: give the path of what to import")
    suffix = regular(source).suffix.lower()
    if suffix not in (".npz", ".csv", ".parquet"):
        raise FedobpError(
            f"{shown} cannot be imported: give a file that ends in .npz, .csv or .parquet, a folder of images by "
            "class, or the folder of a Hugging Face dataset"
        )
    if suffix == ".npz":
        return _select_arrays(source, read_npz(source), label, client)
    read = read_csv if suffix == ".csv" else read_parquet
    return read(source, label or "label", client, progress)


def _select_arrays(
    source: Path, arrays: dict[str, NDArray[Any]], label: str | None, client: str | None
) -> dict[str, NDArray[Any]]:
    """Return an npz file's arrays, with the arrays that `label` and `client` name stored as `y` and `client`."""
    for key, given in (("y", label), ("client", client)):
        if given is not None:
            if given not in arrays:
                raise unknown(f"array in {short(source, 200)}", given, arrays)
            arrays[key] = arrays[given]
    return arrays
