"""Networks by name: built-in ones, those of other packages, and functions of the user.

A network is a function of (input shape, number of classes) that returns a new module. Its keyword-only parameters with
a number or a text as default are its options. A network for tokens takes `vocabulary` and `every_position` by keyword.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fedobp.errors import FedobpError, unknown
from fedobp.options import Options, options_of
from fedobp.plugins import declared, is_reference, label, load_entry_point, load_reference

Network = Callable[..., nn.Module]

NETS: dict[str, Network] = {}
_TOKENS = ("vocabulary", "every_position")  # what a network for tokens is told by keyword


def register(name: str) -> Callable[[Network], Network]:
    """Register a network under a name."""

    def add(build: Network) -> Network:
        NETS[name] = build
        return build

    return add


def network(given: str | Network) -> Network:
    """Return a network: a function as it is, or one by its name or by a reference, `package.module:function`."""
    if not isinstance(given, str):
        return _checked(given, given)
    if given in NETS:
        return NETS[given]
    if is_reference(given):
        return _checked(given, load_reference("model", given))
    found = declared("fedobp.models")
    if given not in found:
        raise unknown("model", given, network_names())
    return _checked(given, load_entry_point("model", given, found[given], _problem))


def network_names() -> list[str]:
    """Return the names of all networks, also of those in other packages, which are not loaded here."""
    return list(dict.fromkeys([*NETS, *declared("fedobp.models")]))


def network_options(given: str | Network) -> type[Options]:
    """Return the options of a network."""
    return options_of("model", label(given), network(given))


def token_arguments(given: str | Network, vocabulary: int, every_position: bool) -> dict[str, Any]:
    """Return what a network is told about tokens; one for tokens refuses other inputs, and the other way round."""
    wanted = [name for name in _TOKENS if name in inspect.signature(network(given)).parameters]
    if bool(wanted) != bool(vocabulary):
        takes, has, instead = ("only", "no", "mlp") if wanted else ("no", "only", "lstm")
        raise FedobpError(
            f"model '{label(given)}' takes {takes} tokens, and the data has {has} tokens: choose another --model, such "
            f"as {instead}"
        )
    told = {"vocabulary": vocabulary, "every_position": every_position}
    if every_position and "every_position" not in wanted:
        raise FedobpError(
            f"model '{label(given)}' has no parameter `every_position`, so it cannot predict each next token: add it"
        )
    return {name: told[name] for name in wanted}


def _problem(build: object) -> str | None:
    """Return why an object is no network; None if it is."""
    if not callable(build):
        return "is no function of (shape, classes) that returns a torch module"
    if isinstance(build, nn.Module):
        return "is a module: give a function of (shape, classes) that returns a new one"
    try:
        parameters = inspect.signature(build).parameters
    except (ValueError, TypeError):  # of a function in C
        return "has no signature: give a Python function of (shape, classes)"
    for name, one in parameters.items():
        if one.kind is one.KEYWORD_ONLY and one.default is one.empty and name not in _TOKENS:
            return f"needs '{name}', which no run passes: give it a default"
    return None


def _checked(given: str | Network, build: Any) -> Network:
    if problem := _problem(build):
        raise FedobpError(f"the model '{label(given)}' {problem}")
    checked: Network = build
    return checked
