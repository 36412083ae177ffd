"""How data falls on clients: seeded functions from labels to one set of indices per client, and its split.

Both partitions draw from a NumPy legacy generator of their own, seeded with the partition seed; the caller's global
generator is not touched.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from fedobp.errors import FedobpError, unknown

Indices = NDArray[np.int64]

TEST_SHARE = 0.25
SMALLEST = 10  # the published recipe redraws until every client has as many samples
TRIES = 1000


@dataclass(frozen=True)
class Shard:
    """One client's samples, as indices into the dataset."""

    train: Indices
    val: Indices
    test: Indices


def dirichlet(y: Indices, clients: int, alpha: float, random: RandomState) -> list[Indices]:
    """Share out each label by a Dirichlet(alpha) draw over the clients: the published recipe, bit for bit.

    Every client gets at least 10 samples: the whole draw is repeated until that holds, with the generator and the
    shuffled arrays going on from where they were. Gives up with an error after 1,000 tries.
    """
    if not alpha > 0:
        raise FedobpError(f"--alpha {alpha} is not above 0: the Dirichlet needs a positive concentration, such as 0.1")
    if len(y) < SMALLEST * clients:
        raise FedobpError(
            f"{len(y):,} samples are fewer than {SMALLEST} for each of {clients} clients: use fewer --clients"
        )
    by_label = [np.flatnonzero(y == label) for label in np.unique(y)]
    for _ in range(TRIES):
        pieces: list[list[Indices]] = [[] for _ in range(clients)]
        for indices in by_label:
            random.shuffle(indices)
            shares = random.dirichlet(np.full(clients, alpha))
            if not np.isfinite(shares).all():
                raise FedobpError(f"--alpha {alpha} is too small to draw shares with: use a larger --alpha")
            cuts = (np.cumsum(shares) * len(indices)).astype(np.int64)[:-1]
            for own, piece in zip(pieces, np.split(indices, cuts), strict=True):
                own.append(piece)
        if min(sum(map(len, own)) for own in pieces) >= SMALLEST:
            return [np.concatenate(own) for own in pieces]
    raise FedobpError(
        f"{len(y):,} samples could not be drawn so that each of {clients} clients has {SMALLEST} of them at alpha "
        f"{alpha} ({TRIES:,} tries): use fewer --clients, a larger --alpha, or --partition iid"
    )


def iid(y: Indices, clients: int, alpha: float, random: RandomState) -> list[Indices]:
    """Shuffle all samples and deal them out in equal parts (sizes differ by at most one); alpha plays no role."""
    if len(y) < 2 * clients:
        raise FedobpError(f"{len(y):,} samples do not give each of {clients} clients 2 of them: use fewer --clients")
    return np.array_split(random.permutation(len(y)), clients)


PARTITIONS: dict[str, Callable[[Indices, int, float, RandomState], list[Indices]]] = {
    "dirichlet": dirichlet,
    "iid": iid,
}


def partition(
    y: Indices, clients: int, *, kind: str = "dirichlet", alpha: float = 0.1, seed: int = 42, val_ratio: float = 0.0
) -> list[Shard]:
    """Return each client's shard: a quarter of its samples for test, the rest for training.

    Validation samples are cut off the training part, so the test part is the same at every `val_ratio`.
    """
    if kind not in PARTITIONS:
        raise unknown("partition", kind, PARTITIONS)
    random = RandomState(seed)
    shards = []
    for indices in PARTITIONS[kind](y, clients, alpha, random):
        random.shuffle(indices)
        tested = int(TEST_SHARE * len(indices))
        rest = indices[tested:]
        validated = int(val_ratio * len(rest))
        shards.append(Shard(train=rest[validated:], val=rest[:validated], test=indices[:tested]))
    return shards
