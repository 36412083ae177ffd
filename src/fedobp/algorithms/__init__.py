"""The methods, one file each, and the registry that names them."""

from fedobp.algorithms.base import (
    Batch,
    Client,
    Method,
    Moment,
    Option,
    Predict,
    Program,
    Record,
    Sparse,
    Start,
    Sweep,
    Tensors,
    Train,
)
from fedobp.algorithms.ditto import Ditto
from fedobp.algorithms.fedavg import FedAvg, FedAvgFT, FedAvgLast
from fedobp.algorithms.fedbabu import FedBABU
from fedobp.algorithms.fedobp import FedOBP
from fedobp.algorithms.fedper import FedPer
from fedobp.algorithms.fedprox import FedProx
from fedobp.algorithms.fedrep import FedRep
from fedobp.algorithms.lg_fedavg import LGFedAvg
from fedobp.algorithms.local import LocalOnly
from fedobp.algorithms.pspfl import PSPFL
from fedobp.algorithms.scaffold import Scaffold
from fedobp.errors import unknown

__all__ = [
    "METHODS", "Batch", "Client", "Method", "Moment", "Option", "Predict", "Program", "Record", "Sparse", "Start",
    "Sweep", "Tensors", "Train", "method_class",
]  # fmt: skip

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        FedOBP,
        FedAvg,
        FedAvgFT,
        FedAvgLast,
        LocalOnly,
        FedPer,
        FedRep,
        LGFedAvg,
        FedBABU,
        Ditto,
        FedProx,
        Scaffold,
        PSPFL,
    )
}


def method_class(name: str) -> type[Method]:
    """Return a method's class by its name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
