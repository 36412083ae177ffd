"""Methods by name: the built-in ones, and those that other packages declare as entry points."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint

from fedobp import plugins
from fedobp.algorithms.apfl import APFL
from fedobp.algorithms.counterdrift import CounterDrift
from fedobp.algorithms.decoupled import Decoupled
from fedobp.algorithms.ditto import Ditto
from fedobp.algorithms.fedacg import FedACG
from fedobp.algorithms.fedala import FedALA
from fedobp.algorithms.fedavg import FedAvg, FedAvgFT, FedAvgLast
from fedobp.algorithms.fedbabu import FedBABU
from fedobp.algorithms.fedbn import FedBN
from fedobp.algorithms.feddpa import FedDPA
from fedobp.algorithms.fedobp import FedOBP
from fedobp.algorithms.fedobp_auto import FedOBPAuto
from fedobp.algorithms.fedpac import FedPAC
from fedobp.algorithms.fedper import FedPer
from fedobp.algorithms.fedprox import FedProx
from fedobp.algorithms.fedrep import FedRep
from fedobp.algorithms.fedrod import FedRoD
from fedobp.algorithms.fedselect import FedSelect
from fedobp.algorithms.floco import Floco
from fedobp.algorithms.flute import Flute
from fedobp.algorithms.group_oracle import GroupOracle
from fedobp.algorithms.lg_fedavg import LGFedAvg
from fedobp.algorithms.local import LocalOnly
from fedobp.algorithms.pfedfda import PFedFDA
from fedobp.algorithms.pfedme import PFedMe
from fedobp.algorithms.pfedsim import PFedSim
from fedobp.algorithms.pspfl import PSPFL
from fedobp.algorithms.scaffold import Scaffold
from fedobp.algorithms.seqfededt import SeqFedEDT
from fedobp.errors import FedobpError, short, unknown
from fedobp.method import Method

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
        FedACG,
        CounterDrift,
        FedOBPAuto,
        GroupOracle,
    )
}


_GIVEN: dict[str, type[Method]] = {}  # classes of the user, by name


class GivenName(str):
    """The name of a class of the user, with the class: settings keep it when another class takes the name."""

    method: type[Method]


def method_class(name: str) -> type[Method]:
    """Return a method's class by its name: a built-in one, one that the user gave, or one of another package."""
    if isinstance(name, GivenName):
        return name.method
    if name in METHODS:
        return METHODS[name]
    if name in _GIVEN:
        return _GIVEN[name]
    found = _entry_points()
    if name not in found:
        raise unknown("method", name, names())
    return _loaded(name, found[name])


def register_method(method: type[Method]) -> str:
    """Make a class of the user available under its name, instead of one given before, and return the name with it."""
    name = str(getattr(method, "name", method))
    if problem := _problem(method, name):
        raise FedobpError(f"the method {short(method)} {problem}")
    if METHODS.get(name, method) is not method:
        raise FedobpError(f"'{name}' is the name of a built-in method: give yours another `name`")
    if name in METHODS:
        return name
    _GIVEN[name] = method
    given = GivenName(name)
    given.method = method
    return given


def is_declared(name: str) -> bool:
    """Return whether an installed package declares a method."""
    return name in _entry_points()


def names() -> list[str]:
    """Return the names of all methods, also of those in other packages, which are not loaded here."""
    return list(dict.fromkeys([*METHODS, *_GIVEN, *_entry_points()]))


def available() -> tuple[dict[str, type[Method]], dict[str, FedobpError]]:
    """Return all methods by name, and the errors of entry points that cannot be loaded."""
    methods, failed = dict(METHODS), {}
    for name, found in _entry_points().items():
        try:
            methods[name] = _loaded(name, found)
        except FedobpError as error:
            failed[name] = error
    return methods, failed


@contextmanager
def attributing_errors(method: type[Method]) -> Iterator[None]:
    """Raise an exception from a method of another package as a user error that names the method and the line."""
    with plugins.attributing_errors("method", method.name, method):
        yield


def _entry_points() -> dict[str, list[EntryPoint]]:
    return plugins.declared("fedobp.methods")


def _loaded(name: str, found: list[EntryPoint]) -> type[Method]:
    """Return another package's method, or raise a `FedobpError` with the reason why it cannot be loaded."""
    method: type[Method] = plugins.load_entry_point(
        "method", name, found, lambda loaded: _problem(loaded, name), built_in=name in METHODS
    )
    return method


def _problem(method: object, name: str) -> str | None:
    """Return why a class is not a valid method of that name; None if it is."""
    if not (isinstance(method, type) and issubclass(method, Method) and getattr(method, "name", None) == name):
        return "is no subclass of `Method` of that name"
    if not re.fullmatch("[A-Za-z0-9_.-]+", name):
        return "has a name that is not only letters, digits, `-`, `_` and `.`"
    for text in ("summary", "paper"):
        if not isinstance(getattr(method, text, None), str):
            return f"has no text `{text}`"
    for spec in method.options():
        if "doc" not in spec.metadata:
            return f"has a field '{spec.name}' that is not declared with `option`"
        if type(spec.default) not in (int, float, str):
            return f"has an option '{spec.name}' whose default is no number or text: a switch has choices=('off', 'on')"
    return None
