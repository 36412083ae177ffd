"""Defaults for one's own data: as many clients as it can feed, and an alpha that the published recipe ends with."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from fedobp.data.datasets import Dataset
from fedobp.data.partition import TEST_SHARE
from fedobp.data.partitioners import MIN_SAMPLES
from fedobp.data.registry import REGISTRY

_MAX_CLIENTS = 100  # the paper's number, and the most that is chosen
_SAMPLES_PER_CLIENT = 50  # for a client, on average
_ALPHAS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)  # the first one is the paper's
_TRIAL_DRAWS, _MIN_SUCCESSES = 30, 3  # so many of these draws must succeed: the recipe draws up to 1,000 times
_MAX_EXPONENT = 4.0  # the recipe gives up after ten draws that make it expect more than 10^9
_MAX_LABELS = 1000  # looked at, the largest: what others add can only help
_LABEL_CHUNK = 100  # of them


def default_clients_and_alpha(
    sizes: Sequence[int], clients: int | None = None, alpha: float | None = None
) -> tuple[int, float]:
    """Return a number of clients and an alpha for labels of these sizes; what is given stays.

    That is as many clients as have 50 samples on average, at least 2 and at most 100, and for them the smallest alpha
    from 0.1 on with which one draw of the published recipe in ten gives everyone 10 samples; where there is no such
    alpha, fewer clients. What suits nobody is left to one client, or to what was given.
    """
    samples = sum(sizes)
    # Of each label at least one sample falls on the last client: that is how the recipe rounds.
    upper = min(
        _MAX_CLIENTS,
        max(2, samples // _SAMPLES_PER_CLIENT),
        samples // MIN_SAMPLES,
        1 + (samples - len(sizes)) // MIN_SAMPLES,
    )
    alphas = _ALPHAS if alpha is None else (alpha,)
    count = max(1, upper) if clients is None else clients
    largest = np.sort(sizes)[::-1][:_MAX_LABELS]
    while count > 1:
        for one in alphas:
            if _recipe_succeeds(largest, count, one):
                return count, one
        if clients is not None:
            break
        count -= max(1, count // 8)
    return count, alphas[0]


def flags_to_run(dataset: Dataset) -> dict[str, str] | None:
    """Return the flags that `fedobp run` needs besides a dataset's name for a run that works; None: there is none.

    Where it is known whose samples are, they stay there, unless everybody has too few for one of them to be for test.
    """
    samples, least = len(dataset.y), math.ceil(1 / TEST_SHARE)
    if dataset.clients is not None and np.bincount(dataset.clients).max() >= least:
        return {"--partition": "natural"}
    if samples < MIN_SAMPLES:
        return {"--partition": "iid", "--clients": "1"} if samples >= least else None
    sizes = np.bincount(dataset.y)
    if dataset.name in REGISTRY and not _recipe_succeeds(sizes[sizes > 0], _MAX_CLIENTS, _ALPHAS[0]):
        clients, alpha = default_clients_and_alpha([int(size) for size in sizes if size])
        return {"--clients": str(clients), "--alpha": str(alpha)}
    return {}


def _recipe_succeeds(sizes: NDArray[np.int64], clients: int, alpha: float) -> bool:
    """Say whether the published recipe surely ends, from some draws of how many samples everyone gets."""
    random, successes, short_clients = default_rng(0), 0, 0
    for draw in range(1, _TRIAL_DRAWS + 1):
        missing = _count_short_clients(sizes, clients, alpha, random)
        successes, short_clients = successes + (not missing), short_clients + missing
        share_served = 1 - short_clients / (clients * draw)
        if draw >= _MIN_SUCCESSES and (not share_served or -clients * math.log10(share_served) > _MAX_EXPONENT):
            return False
    return successes >= _MIN_SUCCESSES


def _count_short_clients(sizes: NDArray[np.int64], clients: int, alpha: float, random: Generator) -> int:
    """Return how many clients have too few samples in one draw."""
    found = np.zeros(clients, np.int64)
    for at in range(0, len(sizes), _LABEL_CHUNK):
        some = sizes[at : at + _LABEL_CHUNK]
        ends = np.cumsum(random.dirichlet(np.full(clients, alpha), size=len(some)), axis=1) * some[:, None]
        cuts = np.concatenate([np.zeros((len(some), 1)), np.floor(ends[:, :-1]), some[:, None]], axis=1)
        found += np.diff(cuts, axis=1).sum(axis=0).astype(np.int64)
        if found.min() >= MIN_SAMPLES:
            break
    return int((found < MIN_SAMPLES).sum())
