"""Defaults for imported data: a number of clients and an alpha for which the published partition recipe terminates."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from fedobp.data.dataset import Dataset
from fedobp.data.partition import TEST_SHARE
from fedobp.data.partitioners import MIN_SAMPLES
from fedobp.data.registry import REGISTRY

_MAX_CLIENTS = 100  # the paper's number
_SAMPLES_PER_CLIENT = 50  # on average
_ALPHAS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)  # the first one is the paper's
_TRIAL_DRAWS, _MIN_SUCCESSES = 30, 3  # at least 3 of 30 draws must succeed; the recipe draws up to 1,000 times
_MAX_EXPONENT = 4.0  # of the expected draws; the recipe stops after ten draws if it expects more than 10^9
_MAX_LABELS = 1000  # the largest labels are simulated; further labels only add samples
_LABEL_CHUNK = 100  # labels simulated at once


def default_clients_and_alpha(
    sizes: Sequence[int], clients: int | None = None, alpha: float | None = None
) -> tuple[int, float]:
    """Return a number of clients and an alpha for labels of these sizes; a given value is kept.

    The number of clients gives 50 samples per client on average, and is between 2 and 100. Alpha is the smallest
    listed value at which one draw in ten of the published recipe gives every client 10 samples. If there is none, the
    number of clients is reduced, down to one.
    """
    samples = sum(sizes)
    # The recipe rounds the boundaries down, so the last client gets at least one sample of each label.
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
    """Return the flags that `fedobp run` needs besides the dataset's name; None if no run is possible.

    Natural clients are kept if at least one of them has enough samples for a test split.
    """
    samples, least = len(dataset.y), math.ceil(1 / TEST_SHARE)
    if dataset.clients is not None and np.bincount(dataset.clients).max() >= least:
        return {"--partition": "natural"}
    if dataset.every_position:
        return {"--partition": "iid"} if dataset.client_names else {}
    if samples < MIN_SAMPLES:
        return {"--partition": "iid", "--clients": "1"} if samples >= least else None
    sizes = np.bincount(dataset.y)
    if dataset.name in REGISTRY and not _recipe_succeeds(sizes[sizes > 0], _MAX_CLIENTS, _ALPHAS[0]):
        clients, alpha = default_clients_and_alpha([int(size) for size in sizes if size])
        return {"--clients": str(clients), "--alpha": str(alpha)}
    return {}


def _recipe_succeeds(sizes: NDArray[np.int64], clients: int, alpha: float) -> bool:
    """Return whether the published recipe terminates, estimated from trial draws of the clients' sizes."""
    random, successes, short_clients = default_rng(0), 0, 0
    for draw in range(1, _TRIAL_DRAWS + 1):
        missing = _count_short_clients(sizes, clients, alpha, random)
        successes, short_clients = successes + (not missing), short_clients + missing
        share_served = 1 - short_clients / (clients * draw)
        if draw >= _MIN_SUCCESSES and (not share_served or -clients * math.log10(share_served) > _MAX_EXPONENT):
            return False
    return successes >= _MIN_SUCCESSES


def _count_short_clients(sizes: NDArray[np.int64], clients: int, alpha: float, random: Generator) -> int:
    """Return the number of clients with too few samples in one draw."""
    found = np.zeros(clients, np.int64)
    for at in range(0, len(sizes), _LABEL_CHUNK):
        some = sizes[at : at + _LABEL_CHUNK]
        ends = np.cumsum(random.dirichlet(np.full(clients, alpha), size=len(some)), axis=1) * some[:, None]
        cuts = np.concatenate([np.zeros((len(some), 1)), np.floor(ends[:, :-1]), some[:, None]], axis=1)
        found += np.diff(cuts, axis=1).sum(axis=0).astype(np.int64)
        if found.min() >= MIN_SAMPLES:
            break
    return int((found < MIN_SAMPLES).sum())
