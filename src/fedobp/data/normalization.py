"""Normalization of model inputs: (x / unit - mean) / std, per channel (images) or per feature (tables).

`unit` maps stored values to [0, 1]. Mean and standard deviation are the published constants of a registered dataset
(`dataset`), those of all clients' training splits (`train`), 0 and 1 (`none`), or the constants with the scale mistake
of the authors' framework (`as-published`).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedobp.data.dataset import Dataset
from fedobp.data.registry import REGISTRY
from fedobp.errors import FedobpError, unknown

NORMALIZATIONS = ("dataset", "train", "none", "as-published")
_CHUNK_VALUES = 2**22  # processed at once: keeps the extra memory of a pass below 100 MB


class Normalization(NamedTuple):
    """The constants of (x / unit - mean) / std; mean and std have one value per channel or feature."""

    unit: float
    mean: NDArray[np.float64]
    std: NDArray[np.float64]


def normalization_for(name: str, given: str | None = None, *, tokens: bool = False) -> str:
    """Return the normalization of a dataset: the given one, else `dataset` if it has constants, else `train`.

    Tokens are never scaled: `none`.
    """
    facts = REGISTRY.get(name)
    constants = facts is not None and bool(facts.mean)
    if tokens:
        if given not in (None, "none"):
            raise FedobpError(f"--normalize {given} scales inputs, and those of '{name}' are tokens: leave it out")
        return "none"
    if given is None:
        return "dataset" if constants else "train"
    if given not in NORMALIZATIONS:
        raise unknown("value of --normalize", given, NORMALIZATIONS)
    if given in ("dataset", "as-published") and not constants:
        raise FedobpError(
            f"--normalize {given} needs published constants, and '{name}' has none: use --normalize train"
        )
    if given == "as-published" and facts and facts.published_factor == 1:
        wrong = ", ".join(other for other, its_facts in REGISTRY.items() if its_facts.published_factor != 1)
        raise FedobpError(
            f"--normalize as-published shows the mistake in the constants of {wrong}, and those of '{name}' are right: "
            "use --normalize dataset"
        )
    return given


def normalization_constants(dataset: Dataset, train_ids: NDArray[np.int64], normalize: str) -> Normalization:
    """Return the constants of a normalization; `train_ids` are all clients' training samples, used by `train`."""
    facts = REGISTRY.get(dataset.name)
    stored_as_bytes = dataset.x.dtype == np.uint8 and not dataset.vocabulary
    unit = 255.0 if stored_as_bytes or (facts and facts.mean and dataset.x.max() > 1) else 1.0
    if normalize == "train":
        mean, std = _mean_and_std(dataset.x, np.sort(train_ids))
        return Normalization(unit, mean / unit, np.where(std > 0, std / unit, 1.0))
    if normalize == "none" or facts is None:
        channels = 1 if dataset.vocabulary or dataset.x.ndim == 3 else dataset.x.shape[-1]
        return Normalization(unit, np.zeros(channels), np.ones(channels))
    factor = facts.published_factor if normalize == "as-published" else 1.0
    return Normalization(unit, np.array(facts.mean) * factor, np.array(facts.std) * factor)


def _mean_and_std(x: NDArray[Any], ids: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and standard deviation of samples over the last axis, in chunks to save memory.

    Bytes are summed as integers, which is exact. Floats take two passes, because the difference of two large sums
    would lose a small deviation.
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
