"""How inputs are scaled before a model sees them: (x / unit - mean) / std, by channel (images) or feature (tables).

`unit` brings stored values to [0, 1]. Mean and deviation are a known dataset's constants (`dataset`), those of the
clients' training parts (`train`), 0 and 1 (`none`), or what the authors' framework uses by mistake (`as-published`).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedobp.data.datasets import Dataset
from fedobp.data.registry import REGISTRY
from fedobp.errors import FedobpError, unknown

NORMALIZATIONS = ("dataset", "train", "none", "as-published")
_CHUNK_VALUES = 2**22  # looked at together: what a pass needs besides the data stays below 100 MB


class Normalization(NamedTuple):
    """An input is (x / unit - mean) / std; mean and std have one value for each channel or feature."""

    unit: float
    mean: NDArray[np.float64]
    std: NDArray[np.float64]


def normalization_for(name: str, given: str | None = None) -> str:
    """Return how a dataset is scaled: as given, or by its constants where it has some; refuse what it cannot be."""
    known = REGISTRY.get(name)
    constants = known is not None and bool(known.mean)
    if given is None:
        return "dataset" if constants else "train"
    if given not in NORMALIZATIONS:
        raise unknown("value of --normalize", given, NORMALIZATIONS)
    if given in ("dataset", "as-published") and not constants:
        raise FedobpError(
            f"--normalize {given} needs published constants, and '{name}' has none: use --normalize train"
        )
    if given == "as-published" and known and known.published_factor == 1:
        wrong = ", ".join(one for one, facts in REGISTRY.items() if facts.published_factor != 1)
        raise FedobpError(
            f"--normalize as-published shows the mistake in the constants of {wrong}, and those of '{name}' are right: "
            "use --normalize dataset"
        )
    return given


def normalization_constants(dataset: Dataset, train_ids: NDArray[np.int64], normalize: str) -> Normalization:
    """Return a dataset's scaling; `trained` are all clients' training samples, for the way `train`."""
    known = REGISTRY.get(dataset.name)
    stored_as_bytes = dataset.x.dtype == np.uint8
    unit = 255.0 if stored_as_bytes or (known and known.mean and dataset.x.max() > 1) else 1.0
    if normalize == "train":
        mean, std = _mean_and_std(dataset.x, np.sort(train_ids))
        return Normalization(unit, mean / unit, np.where(std > 0, std / unit, 1.0))
    if normalize == "none" or known is None:
        channels = dataset.x.shape[-1] if dataset.x.ndim != 3 else 1
        return Normalization(unit, np.zeros(channels), np.ones(channels))
    factor = known.published_factor if normalize == "as-published" else 1.0
    return Normalization(unit, np.array(known.mean) * factor, np.array(known.std) * factor)


def _mean_and_std(x: NDArray[Any], ids: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and deviation of some samples by their last axis, part by part: nothing is copied whole.

    Bytes are summed as integers, which is exact. Floats are gone through twice, because the difference of two large
    sums would lose a small deviation.
    """
    x = x[..., None] if x.ndim == 3 else x
    axes = tuple(range(x.ndim - 1))
    count = len(ids) * int(np.prod(x.shape[1:-1]))
    parts = np.array_split(ids, max(1, -(-len(ids) * int(np.prod(x.shape[1:])) // _CHUNK_VALUES)))
    if x.dtype == np.uint8:
        first = second = np.zeros(x.shape[-1], np.int64)
        for part in parts:
            values = x[part]
            first = first + values.sum(axis=axes, dtype=np.int64)
            second = second + np.square(values, dtype=np.uint16).sum(axis=axes, dtype=np.int64)
        # The variance is (n * sum of squares - square of the sum) / n^2; these products can exceed 64 bits.
        spread = [count * b - a * a for a, b in zip(first.tolist(), second.tolist(), strict=True)]
        return first / count, np.sqrt(np.array(spread, dtype=np.float64)) / count
    mean = sum((x[part].sum(axis=axes, dtype=np.float64) for part in parts), np.zeros(x.shape[-1])) / count
    squares = (np.square(x[part] - mean).sum(axis=axes) for part in parts)
    return mean, np.sqrt(sum(squares, np.zeros(x.shape[-1])) / count)
