"""The published numbers: `published.json`, with the source of each part. None of them was measured with this code."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

NAMES = {
    "local": "Local-Only",
    "fedavg": "FedAvg",
    "fedper": "FedPer",
    "apfl": "APFL",
    "lg-fedavg": "LG-FedAvg",
    "fedrep": "FedRep",
    "pfedfda": "pFedFDA",
    "flute": "FLUTE",
    "feddpa": "FedDPA",
    "floco": "FLOCO",
    "fedala": "FedALA",
    "fedselect": "FedSelect",
    "fedobp": "FedOBP",
}  # the 13 methods of the paper's tables, in their order
TABLE1 = ("cifar10", "cifar100", "emnist", "svhn")
TABLE2 = ("mnist", "fmnist", "organamnist", "organcmnist")
TITLES = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "emnist": "EMNIST",
    "svhn": "SVHN",
    "mnist": "MNIST",
    "fmnist": "FMNIST",
    "organamnist": "OrganA",
    "organcmnist": "OrganC",
    "digits": "Digits",
}
# The paper's grid of quantiles, and 12 points of it.
GRID = (
    0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 0.991, 0.992, 0.993, 0.994, 0.995, 0.996, 0.997, 0.998,
    0.999, 0.9991, 0.9993, 0.9995, 0.9997, 0.9999, 0.99991, 0.99993, 0.99995, 0.99997, 0.99999, 0.999999, 1.0,
)  # fmt: skip
SHORT_GRID = (0.0, 0.1, 0.4, 0.7, 0.9, 0.99, 0.997, 0.999, 0.9997, 0.9999, 0.99997, 1.0)


@cache
def published() -> dict[str, Any]:
    """Return all published numbers."""
    found: dict[str, Any] = json.loads((files("fedobp.paper") / "published.json").read_text())
    return found


def title(dataset: str) -> str:
    """Return a dataset's name in tables."""
    return TITLES.get(dataset, dataset)


def accuracy(dataset: str, method: str, alpha: float) -> tuple[float, float] | None:
    """Return mean and standard deviation of the paper's tables, if there are any."""
    found = published()["accuracy"].get(dataset, {}).get(method, {}).get(f"{alpha:g}")
    return tuple(found) if found else None


def momentum_0(dataset: str, method: str, alpha: float) -> float | None:
    """Return the accuracy in the authors' logs at momentum 0, which exist for alpha 0.1."""
    found: float | None = published()["momentum_0"].get(dataset, {}).get(method)
    return found if alpha == 0.1 else None
