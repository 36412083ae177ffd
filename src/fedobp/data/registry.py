"""The registry of datasets: published facts about the paper's eight datasets and the embedded digits.

Means and standard deviations are on the [0, 1] scale, as the authors' framework has them; its OrganMNIST constants
(118.7546/62.3489 and 124.424/58.8092) are on the 0-255 scale by mistake and are divided by 255 here. `q` is the
paper's quantile for FedOBP at a given Dirichlet alpha, tuned for its CNN. `samples` counts all official splits of a
dataset; a file may hold another number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DatasetFacts:
    """Facts about a dataset that its file does not hold."""

    shape: tuple[int, ...]
    classes: int
    samples: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    q: Mapping[float, float] = field(default_factory=dict)
    published_factor: float = 1.0  # the authors' framework multiplies the constants by this


REGISTRY: dict[str, DatasetFacts] = {
    "digits": DatasetFacts((8, 8), 10, 1_797),
    "mnist": DatasetFacts((28, 28), 10, 70_000, (0.1307,), (0.3015,), {0.1: 0.9998, 0.5: 0.99993}),
    "fmnist": DatasetFacts((28, 28), 10, 70_000, (0.286,), (0.3205,), {0.1: 0.99993, 0.5: 0.9999}),
    "emnist": DatasetFacts((28, 28), 62, 814_255, (0.1736,), (0.3248,), {0.1: 0.995, 0.5: 0.9991}),
    "cifar10": DatasetFacts(
        (32, 32, 3), 10, 60_000, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.201), {0.1: 0.99998, 0.5: 0.99979}
    ),
    "cifar100": DatasetFacts(
        (32, 32, 3), 100, 60_000, (0.5071, 0.4865, 0.4409), (0.2009, 0.1984, 0.2023), {0.1: 0.9998, 0.5: 0.99992}
    ),
    "svhn": DatasetFacts(
        (32, 32, 3), 10, 99_289, (0.4377, 0.4438, 0.4728), (0.1201, 0.1231, 0.1052), {0.1: 0.99997, 0.5: 0.9998}
    ),
    "organamnist": DatasetFacts(
        (28, 28), 11, 58_850, (118.7546 / 255,), (62.3489 / 255,), {0.1: 0.9999, 0.5: 0.99995}, 255
    ),
    "organcmnist": DatasetFacts(
        (28, 28), 11, 23_660, (124.424 / 255,), (58.8092 / 255,), {0.1: 0.9997, 0.5: 0.99995}, 255
    ),
}
