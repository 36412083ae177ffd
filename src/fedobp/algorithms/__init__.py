"""The methods, one file each, and the registry that names them."""

from importlib.metadata import EntryPoint, entry_points

from fedobp.algorithms.apfl import APFL
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
    Turn,
)
from fedobp.algorithms.decoupled import Decoupled
from fedobp.algorithms.ditto import Ditto
from fedobp.algorithms.fedala import FedALA
from fedobp.algorithms.fedavg import FedAvg, FedAvgFT, FedAvgLast
from fedobp.algorithms.fedbabu import FedBABU
from fedobp.algorithms.fedbn import FedBN
from fedobp.algorithms.feddpa import FedDPA
from fedobp.algorithms.fedobp import FedOBP
from fedobp.algorithms.fedpac import FedPAC
from fedobp.algorithms.fedper import FedPer
from fedobp.algorithms.fedprox import FedProx
from fedobp.algorithms.fedrep import FedRep
from fedobp.algorithms.fedrod import FedRoD
from fedobp.algorithms.fedselect import FedSelect
from fedobp.algorithms.floco import Floco
from fedobp.algorithms.flute import Flute
from fedobp.algorithms.lg_fedavg import LGFedAvg
from fedobp.algorithms.local import LocalOnly
from fedobp.algorithms.pfedfda import PFedFDA
from fedobp.algorithms.pfedme import PFedMe
from fedobp.algorithms.pfedsim import PFedSim
from fedobp.algorithms.pspfl import PSPFL
from fedobp.algorithms.scaffold import Scaffold
from fedobp.algorithms.seqfededt import SeqFedEDT
from fedobp.errors import FedobpError, unknown

__all__ = [
    "METHODS", "Batch", "Client", "Method", "Moment", "Option", "Predict", "Program", "Record", "Sparse", "Start",
    "Sweep", "Tensors", "Train", "Turn", "loaded", "method_class", "plugins",
]  # fmt: skip

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        FedOBP,
        Decoupled,
        LocalOnly,
        FedAvg,
        FedAvgFT,
        FedAvgLast,
        FedPer,
        APFL,
        LGFedAvg,
        FedRep,
        PFedFDA,
        Flute,
        FedDPA,
        Floco,
        FedALA,
        FedSelect,
        Ditto,
        PFedMe,
        FedRoD,
        FedBABU,
        PFedSim,
        FedPAC,
        PSPFL,
        SeqFedEDT,
        FedProx,
        Scaffold,
        FedBN,
    )
}


def method_class(name: str) -> type[Method]:
    """Return a method's class by its name: one of the library's, or of another package (see `plugins`)."""
    if name in METHODS:
        return METHODS[name]
    found = plugins()
    if name not in found:
        raise unknown("method", name, [*METHODS, *found])
    return loaded(found[name])


def plugins() -> dict[str, EntryPoint]:
    """Return the methods that installed packages declare as entry points of the group `fedobp.methods`."""
    return {one.name: one for one in entry_points(group="fedobp.methods") if one.name not in METHODS}


def loaded(plugin: EntryPoint) -> type[Method]:
    """Load another package's method, or say why it is none."""
    try:
        method = plugin.load()
    except Exception as error:
        raise FedobpError(f"the method '{plugin.name}' ({plugin.value}) cannot be loaded: {error!r}") from error
    if not (isinstance(method, type) and issubclass(method, Method) and method.name == plugin.name):
        raise FedobpError(f"the entry point '{plugin.name}' ({plugin.value}) is no subclass of `Method` of that name")
    return method
