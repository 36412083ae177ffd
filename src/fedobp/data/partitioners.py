"""Partitioners: each assigns samples to clients from the labels and a seed.

The published recipe and `iid` draw from NumPy's legacy generator, whose stream never changes; all others draw from the
modern one. Each partitioner creates its own generator from the partition seed; the global generator is not used.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator, RandomState, default_rng
from numpy.typing import NDArray

from fedobp.data.client_changes import UNCHANGED, ClientChange
from fedobp.errors import FedobpError
from fedobp.options import Options, option

Indices = NDArray[np.int64]

MIN_SAMPLES = 10  # per client, in the published recipe and in `quantity`
MAX_DRAWS = 1000
_PROBE_DRAWS = 10  # draws after which the published recipe's chance of success is estimated
_MIN_SUCCESS_PROBABILITY = 1e-6  # of all draws together; below it the recipe stops early


@dataclass(frozen=True)
class PartitionTask:
    """The labels to partition, the number of clients, and the settings that several partitioners share."""

    y: Indices  # each sample's label
    clients: int
    alpha: float = 0.1
    seed: int = 42
    natural: Indices | None = None  # each sample's natural client, if the dataset has them


@dataclass(frozen=True)
class Partitioner(Options):
    """Base class of all partitioners; dataclass fields are options."""

    kind: ClassVar[str] = "partition"
    by_label: ClassVar[bool] = False  # whether it needs one label a sample

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Return each client's samples, in random order."""
        raise NotImplementedError

    def client_changes(self, task: PartitionTask) -> list[ClientChange]:
        """Return what changes in each client's samples, and its group."""
        return [UNCHANGED] * task.clients

    @classmethod
    def changes_samples(cls) -> bool:
        """Return whether clients' inputs or labels may change, so that partitions cannot share samples."""
        return cls.client_changes is not Partitioner.client_changes


@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Split each label over the clients by a Dirichlet(alpha) draw: the published recipe, bit for bit.

    Every client gets at least 10 samples: the draw is repeated until that holds, continuing with the state of the
    generator and the shuffled arrays. It is a user error after 1,000 draws, or after 10 if success is too unlikely.
    """

    name: ClassVar[str] = "dirichlet"
    by_label: ClassVar[bool] = True

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Draw until every client has enough samples."""
        y, clients, alpha = task.y, task.clients, _check_alpha(task.alpha)
        _check_enough_samples(y, clients, MIN_SAMPLES)
        random = RandomState(task.seed)
        by_label = [np.flatnonzero(y == label) for label in np.unique(y)]
        short_clients = 0
        for draw in range(1, MAX_DRAWS + 1):
            pieces: list[list[Indices]] = [[] for _ in range(clients)]
            for indices in by_label:
                random.shuffle(indices)
                shares = _check_finite(random.dirichlet(np.full(clients, alpha)), alpha)
                cuts = (np.cumsum(shares) * len(indices)).astype(np.int64)[:-1]
                for client_pieces, piece in zip(pieces, np.split(indices, cuts), strict=True):
                    client_pieces.append(piece)
            short = sum(sum(map(len, client_pieces)) < MIN_SAMPLES for client_pieces in pieces)
            if not short:
                return _shuffled([np.concatenate(client_pieces) for client_pieces in pieces], random)
            short_clients += short
            if draw == _PROBE_DRAWS:
                _check_feasible(task, short_clients / (draw * clients))
        raise FedobpError(
            f"{len(y):,} samples could not be drawn so that each of {clients} clients has {MIN_SAMPLES} of them at "
            f"alpha {alpha} ({MAX_DRAWS:,} tries): use fewer --clients, a larger --alpha, or --partition "
            "dirichlet-equal"
        )


def _check_feasible(task: PartitionTask, short: float) -> None:
    """Raise a user error if success is too unlikely; `short` is the probability that a client has too few samples."""
    exponent = math.inf if short == 1 else -task.clients * math.log10(1 - short)
    if exponent > math.log10(MAX_DRAWS / _MIN_SUCCESS_PROBABILITY):
        needed = "more draws than can be counted" if exponent > 300 else f"about 10^{exponent:.0f} draws"
        raise FedobpError(
            f"the published recipe would need {needed} until each of {task.clients} clients has {MIN_SAMPLES} of "
            f"{len(task.y):,} samples at alpha {task.alpha}: use fewer --clients, a larger --alpha, or --partition "
            "dirichlet-equal"
        )


@dataclass(frozen=True)
class DirichletEqual(Partitioner):
    """Draw each client's label distribution from Dirichlet(alpha), and give all clients equally many samples.

    Every sample is assigned, and sizes differ by at most one. If clients request more samples of a label than are left,
    the label is divided at random, and the remaining requests are drawn again from the labels that are left. Each pass
    uses up a label, so it always terminates.
    """

    name: ClassVar[str] = "dirichlet-equal"
    by_label: ClassVar[bool] = True

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Draw label distributions, then samples from them until all are assigned."""
        y, clients, alpha = task.y, task.clients, _check_alpha(task.alpha)
        _check_enough_samples(y, clients, 2)
        random = default_rng(task.seed)
        labels, left = np.unique(y, return_counts=True)
        mixes = _check_finite(random.dirichlet(np.full(len(labels), alpha), size=clients), alpha)
        wanted = _equal_sizes(len(y), clients)
        counts = np.zeros((clients, len(labels)), dtype=np.int64)
        while wanted.any():
            mix = np.where(left > 0, mixes, 0.0)
            # A client whose labels are used up draws from all samples that are left.
            mix = np.where(mix.sum(axis=1, keepdims=True) > 1e-9, mix, left / left.sum())
            asked = random.multinomial(wanted, mix / mix.sum(axis=1, keepdims=True))
            for label in np.flatnonzero(asked.sum(axis=0) > left):
                asked[:, label] = random.multivariate_hypergeometric(asked[:, label], left[label], method="marginals")
            counts += asked
            wanted, left = wanted - asked.sum(axis=1), left - asked.sum(axis=0)
        owner = np.empty(len(y), dtype=np.int64)
        for label, column in zip(labels, counts.T, strict=True):
            owner[random.permutation(np.flatnonzero(y == label))] = np.repeat(np.arange(clients), column)
        return _shuffled(_indices_by_client(owner, clients), random)


@dataclass(frozen=True)
class Iid(Partitioner):
    """Shuffle all samples and split them into equal parts; sizes differ by at most one."""

    name: ClassVar[str] = "iid"

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Shuffle and cut."""
        _check_enough_samples(task.y, task.clients, 2)
        random = RandomState(task.seed)
        return _shuffled(np.array_split(random.permutation(len(task.y)), task.clients), random)


@dataclass(frozen=True)
class Shards(Partitioner):
    """Sort by label, cut into equal shards, and assign random shards to each client (McMahan et al., 2017).

    Every sample is assigned, and sizes differ by at most `per_client`. If no shard is longer than the rarest label, a
    shard has at most two labels.
    """

    name: ClassVar[str] = "shards"
    by_label: ClassVar[bool] = True

    per_client: int = option(2, "shards per client; 2 is McMahan et al.'s", low=1, high=10**6)

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Sort, cut and draw shards."""
        y, clients = task.y, task.clients
        _check_enough_samples(
            y, clients, max(2, self.per_client), "use fewer --clients, or a smaller --partition-set per_client=..."
        )
        random = default_rng(task.seed)
        mixed = random.permutation(len(y))
        pieces = np.array_split(mixed[np.argsort(y[mixed], kind="stable")], clients * self.per_client)
        order = random.permutation(len(pieces)).reshape(clients, self.per_client)
        return _shuffled([np.concatenate([pieces[shard] for shard in chosen]) for chosen in order], random)


@dataclass(frozen=True)
class Classes(Partitioner):
    """Give each client exactly k labels, and split each label evenly over its clients.

    Every sample is assigned, and the numbers of clients of any two labels differ by at most one.
    """

    name: ClassVar[str] = "classes"
    by_label: ClassVar[bool] = True

    k: int = option(2, "labels per client", low=1, high=10**6)

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Give each client in turn the labels with the fewest clients so far; ties are broken at random."""
        y, clients, k = task.y, task.clients, self.k
        labels = np.unique(y)
        if k > len(labels):
            raise FedobpError(f"--partition-set k={k} is more than the {len(labels)} labels there are: use a smaller k")
        if clients * k < len(labels):
            raise FedobpError(
                f"{clients} clients with {k} labels each do not take all {len(labels)} labels: use more --clients, or "
                f"a larger k with --partition-set k={-(-len(labels) // clients)}"
            )
        random = default_rng(task.seed)
        holders: list[list[int]] = [[] for _ in labels]
        for client in range(clients):
            taken = np.array([len(clients_of_label) for clients_of_label in holders])
            fewest = np.lexsort((random.random(len(labels)), taken))[:k]
            for label in fewest:
                holders[label].append(client)
        owner = np.empty(len(y), dtype=np.int64)
        for label, who in zip(labels, holders, strict=True):
            indices = random.permutation(np.flatnonzero(y == label))
            if len(indices) < len(who):
                raise FedobpError(
                    f"a label has {len(indices)} samples and would be on {len(who)} clients: use fewer --clients, or "
                    "a smaller k with --partition-set k=..."
                )
            owner[indices] = np.repeat(random.permutation(who), _equal_sizes(len(indices), len(who)))
        return _shuffled(_indices_by_client(owner, clients), random)


@dataclass(frozen=True)
class Quantity(Partitioner):
    """Give every client 10 samples, and split the rest by one Dirichlet(beta) draw; labels are mixed.

    Every sample is assigned, and every client has at least 10.
    """

    name: ClassVar[str] = "quantity"

    beta: float = option(
        0.5, "the Dirichlet's concentration: the smaller, the more the sizes differ", low=0.01, high=1000.0
    )

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Draw the sizes, shuffle and cut; samples left by rounding go to the largest remainders."""
        _check_enough_samples(task.y, task.clients, MIN_SAMPLES)
        random = default_rng(task.seed)
        rest = len(task.y) - MIN_SAMPLES * task.clients
        shares = random.dirichlet(np.full(task.clients, self.beta)) * rest
        sizes = np.floor(shares).astype(np.int64)
        last = np.argsort(sizes - shares, kind="stable")
        sizes[last[: max(0, rest - int(sizes.sum()))]] += 1
        ends = np.cumsum(sizes + MIN_SAMPLES)
        return np.split(random.permutation(len(task.y)), ends[:-1])


@dataclass(frozen=True)
class Natural(Partitioner):
    """Keep the natural clients of the data: users, hospitals, devices.

    If fewer clients are asked for than the data has, they are drawn at random; clients stay in the order of names.
    """

    name: ClassVar[str] = "natural"

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Take all natural clients, or a random selection of them."""
        if task.natural is None:
            raise FedobpError(
                "--partition natural needs the client of each sample: import the data with --client COLUMN, or choose "
                "another --partition"
            )
        natural_clients = int(task.natural.max()) + 1
        if task.clients > natural_clients:
            raise FedobpError(f"the data comes from {natural_clients} clients, not {task.clients}: use fewer --clients")
        random = default_rng(task.seed)
        pieces = _indices_by_client(task.natural, natural_clients)
        return _shuffled(
            [pieces[client] for client in np.sort(random.permutation(natural_clients)[: task.clients])], random
        )


def _check_alpha(alpha: float) -> float:
    if not alpha > 0:
        raise FedobpError(f"--alpha {alpha} is not above 0: the Dirichlet needs a positive concentration, such as 0.1")
    return alpha


def _check_finite(shares: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    if not np.isfinite(shares).all():
        raise FedobpError(f"--alpha {alpha} gives shares that are not finite: use a value nearer to 1")
    return shares


def _check_enough_samples(y: Indices, clients: int, each: int, instead: str = "use fewer --clients") -> None:
    if len(y) < each * clients:
        if clients == 1 and each == MIN_SAMPLES:
            instead = "choose another --partition, such as iid, or get more samples"
        raise FedobpError(f"{len(y):,} samples are fewer than {each} for each of {clients} clients: {instead}")


def _equal_sizes(total: int, parts: int) -> Indices:
    """Return sizes of equal parts, the larger ones first."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _indices_by_client(owner: Indices, clients: int) -> list[Indices]:
    """Return each client's samples in ascending order."""
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])


def _shuffled(pieces: list[Indices], random: RandomState | Generator) -> list[Indices]:
    for piece in pieces:
        random.shuffle(piece)
    return pieces
