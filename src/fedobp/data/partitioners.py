"""The kinds of partitions: each says whose a sample is, from labels and a seed, and what it guarantees.

The published recipe and `iid` draw from NumPy's legacy generator, whose stream never changes; all others from the
modern one. Everybody's generator is its own, seeded with the partition seed: the caller's is not touched.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator, RandomState, default_rng
from numpy.typing import NDArray

from fedobp.errors import FedobpError
from fedobp.options import Options, option

Indices = NDArray[np.int64]

MIN_SAMPLES = 10  # samples of a client, in the published recipe and in `quantity`
MAX_DRAWS = 1000
_PROBE_DRAWS = 10  # tries after which the published recipe's odds are reckoned
_MIN_SUCCESS_PROBABILITY = 1e-6  # chance of success in all tries below which there is no point in going on


@dataclass(frozen=True)
class PartitionTask:
    """What is dealt out, to how many, and with which numbers that are no partition's own."""

    y: Indices  # each sample's label
    clients: int
    alpha: float = 0.1
    seed: int = 42
    natural: Indices | None = None  # each sample's natural client, where that is known


@dataclass(frozen=True)
class InputChange:
    """What a client's inputs went through; by default nothing."""

    turns: int = 0  # by 90 degrees, counter-clockwise
    noise: float = 0.0  # its deviation, in shares of the largest byte, or of a float feature's own deviation
    seed: int = 0  # of the noise


UNCHANGED = InputChange()


@dataclass(frozen=True)
class Partitioner(Options):
    """Base of all kinds: fields are options."""

    kind: ClassVar[str] = "partition"

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Return each client's samples, in random order."""
        raise NotImplementedError

    def input_changes(self, task: PartitionTask) -> list[InputChange]:
        """Return what happens to each client's inputs."""
        return [UNCHANGED] * task.clients


@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Share out each label by a Dirichlet(alpha) draw over the clients: the published recipe, bit for bit.

    Every client gets at least 10 samples: the whole draw is repeated until that holds, with the generator and the
    shuffled arrays going on from where they were. Gives up with an error after 1,000 tries, or after 10 if those show
    that 1,000 would not do.
    """

    name: ClassVar[str] = "dirichlet"

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Draw until everyone has enough."""
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
                for mine, piece in zip(pieces, np.split(indices, cuts), strict=True):
                    mine.append(piece)
            short = sum(sum(map(len, mine)) < MIN_SAMPLES for mine in pieces)
            if not short:
                return _shuffled([np.concatenate(mine) for mine in pieces], random)
            short_clients += short
            if draw == _PROBE_DRAWS:
                _check_feasible(task, short_clients / (draw * clients))
        raise FedobpError(
            f"{len(y):,} samples could not be drawn so that each of {clients} clients has {MIN_SAMPLES} of them at "
            f"alpha {alpha} ({MAX_DRAWS:,} tries): use fewer --clients, a larger --alpha, or --partition "
            "dirichlet-equal"
        )


def _check_feasible(task: PartitionTask, short: float) -> None:
    """Refuse at once what can hardly succeed: clients are short of samples with this probability, each for itself."""
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
    """Draw each client's mix of labels from Dirichlet(alpha), and give all clients equally many samples.

    Every sample is somebody's, sizes differ by at most one, and it always ends: where clients ask for more of a label
    than there is, lots decide, and the losers ask again by their mixes for what is left. Each time uses up a label.
    """

    name: ClassVar[str] = "dirichlet-equal"

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Draw mixes, then samples by them until nothing is left."""
        y, clients, alpha = task.y, task.clients, _check_alpha(task.alpha)
        _check_enough_samples(y, clients, 2)
        random = default_rng(task.seed)
        labels, left = np.unique(y, return_counts=True)
        mixes = _check_finite(random.dirichlet(np.full(len(labels), alpha), size=clients), alpha)
        wanted = _equal_sizes(len(y), clients)
        counts = np.zeros((clients, len(labels)), dtype=np.int64)
        while wanted.any():
            mix = np.where(left > 0, mixes, 0.0)
            # Whoever wants only labels that are gone takes from what there is.
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
    """Shuffle all samples and deal them out in equal parts; sizes differ by at most one."""

    name: ClassVar[str] = "iid"

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Shuffle and cut."""
        _check_enough_samples(task.y, task.clients, 2)
        random = RandomState(task.seed)
        return _shuffled(np.array_split(random.permutation(len(task.y)), task.clients), random)


@dataclass(frozen=True)
class Shards(Partitioner):
    """Sort by label, cut into equal shards, and give each client as many of them, by lot (McMahan et al., 2017).

    Every sample is somebody's, and sizes differ by at most the number of shards. Where no shard is longer than the
    rarest label, a shard has at most two labels.
    """

    name: ClassVar[str] = "shards"

    per_client: int = option(2, "shards of a client; 2 is McMahan et al.'s", low=1, high=10**6)

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Sort, cut and draw lots."""
        y, clients = task.y, task.clients
        _check_enough_samples(
            y, clients, max(2, self.per_client), "use fewer --clients, or a smaller --partition-set per_client=..."
        )
        random = default_rng(task.seed)
        mixed = random.permutation(len(y))
        pieces = np.array_split(mixed[np.argsort(y[mixed], kind="stable")], clients * self.per_client)
        lots = random.permutation(len(pieces)).reshape(clients, self.per_client)
        return _shuffled([np.concatenate([pieces[lot] for lot in mine]) for mine in lots], random)


@dataclass(frozen=True)
class Classes(Partitioner):
    """Give each client exactly k labels, and share each label out evenly among those who have it.

    Every sample is somebody's, and the numbers of clients that two labels have differ by at most one.
    """

    name: ClassVar[str] = "classes"

    k: int = option(2, "labels of a client", low=1, high=10**6)

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Give each client in turn the labels that have fewest clients so far; lots decide between equals."""
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
    """Give every client 10 samples, and share out the rest by one Dirichlet(beta) draw; labels fall as they come.

    Every sample is somebody's, and nobody has fewer than 10.
    """

    name: ClassVar[str] = "quantity"

    beta: float = option(
        0.5, "the Dirichlet's concentration: the smaller, the more the sizes differ", low=0.01, high=1000.0
    )

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Draw the sizes, shuffle and cut; what rounding leaves goes to the largest remainders."""
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
class Feature(Partitioner):
    """Deal out as `iid` does, and change each client's inputs: labels fall alike, and what they look like differs.

    With rotation, equally many clients (to one) have each of 0, 90, 180 and 270 degrees. With noise, clients'
    deviations are spread evenly from 0 to `noise`. Which client has which is drawn.
    """

    name: ClassVar[str] = "feature"

    change: str = option("rotation", "rotation by 90-degree steps, or noise", choices=("rotation", "noise"))
    noise: float = option(
        0.1,
        "the largest deviation: of bytes as a share of the largest, of floats in each feature's own",
        low=0.0,
        high=10.0,
    )

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Deal evenly."""
        return Iid().assign(task)

    def input_changes(self, task: PartitionTask) -> list[InputChange]:
        """Draw who has which."""
        random = default_rng(task.seed)
        ranks = random.permutation(task.clients).tolist()
        if self.change == "rotation":
            return [InputChange(turns=rank % 4) for rank in ranks]
        seeds = random.integers(2**32, size=task.clients).tolist()
        steps = max(1, task.clients - 1)
        return [
            InputChange(noise=self.noise * rank / steps, seed=seed) for rank, seed in zip(ranks, seeds, strict=True)
        ]


@dataclass(frozen=True)
class Natural(Partitioner):
    """Leave samples with those they came from: a user, a hospital, a device.

    With fewer clients than there are in the data, it is drawn who takes part; clients keep the order of their names.
    """

    name: ClassVar[str] = "natural"

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Take everyone's samples, or those of a draw."""
        if task.natural is None:
            raise FedobpError(
                "--partition natural needs to know whose each sample is: import the data with --client COLUMN, or "
                "choose another --partition"
            )
        natural_clients = int(task.natural.max()) + 1
        if task.clients > natural_clients:
            raise FedobpError(f"the data comes from {natural_clients} clients, not {task.clients}: use fewer --clients")
        random = default_rng(task.seed)
        pieces = _indices_by_client(task.natural, natural_clients)
        return _shuffled(
            [pieces[client] for client in np.sort(random.permutation(natural_clients)[: task.clients])], random
        )


PARTITIONERS: dict[str, type[Partitioner]] = {
    cls.name: cls for cls in (Dirichlet, DirichletEqual, Iid, Shards, Classes, Quantity, Feature, Natural)
}


def _check_alpha(alpha: float) -> float:
    if not alpha > 0:
        raise FedobpError(f"--alpha {alpha} is not above 0: the Dirichlet needs a positive concentration, such as 0.1")
    return alpha


def _check_finite(shares: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    if not np.isfinite(shares).all():
        raise FedobpError(f"--alpha {alpha} gives no shares that are numbers: use one nearer to 1")
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
