"""Code of the user and of other packages: entry points, and references such as `package.module:function`."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from traceback import walk_tb
from typing import Any

from fedobp.errors import FedobpError, Stopped, described, out_of_memory, short

_OURS = __name__.partition(".")[0]


def declared(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group, by name."""
    found: dict[str, list[EntryPoint]] = {}
    for one in entry_points(group=group):
        found.setdefault(one.name, []).append(one)
    return found


def load_entry_point(
    kind: str, name: str, found: list[EntryPoint], problem: Callable[[Any], str | None], *, built_in: bool = False
) -> Any:
    """Return what an entry point names; one that cannot be loaded is a user error.

    `problem` returns what is wrong with the loaded object, or None.
    """
    values = list(dict.fromkeys(one.value for one in found))
    which = f"the entry point '{name}' ({' and '.join(values)})"
    if built_in:
        raise FedobpError(f"{which} has the name of a built-in {kind}: its package must give it another one")
    if len(values) > 1:
        raise FedobpError(f"{which} is declared more than once: uninstall all but one of its packages")
    with _loading(f"the {kind} '{name}' ({values[0]})"):
        loaded = found[0].load()
        wrong = problem(loaded)
    if wrong:
        raise FedobpError(f"{which} {wrong}")
    return loaded


def is_reference(name: str) -> bool:
    """Return whether a name is a reference, `package.module:function`, and not the name of something registered."""
    return ":" in name


def load_reference(kind: str, text: str) -> Any:
    """Return what `package.module:function` names; modules in the current folder are found too."""
    module, _, path = text.partition(":")
    parts = [*module.split("."), *path.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise FedobpError(f"the {kind} '{short(text)}' is no reference: write package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not look there
        sys.path.insert(0, here)
    with _loading(f"the {kind} '{short(text)}' (of an installed package, or of a file in this folder)"):
        return attrgetter(path)(import_module(module))


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Raise whatever the import of other code raises as a user error."""
    try:
        with redirect_stdout(sys.stderr):  # standard output is reserved for the command
            yield
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # also SystemExit
        raise FedobpError(f"{what} cannot be loaded: {described(error)}") from error


def label(given: Any) -> str:
    """Return what to call something that is given by name or as an object: its name, or a reference to it."""
    if isinstance(given, str):
        return given
    name = getattr(given, "__qualname__", type(given).__qualname__)
    return f"{getattr(given, '__module__', '?')}:{name}"


def is_importable(given: Any) -> bool:
    """Return whether the reference to an object leads back to it from another process."""
    module, _, path = label(given).partition(":")
    try:
        return module != "__main__" and bool(attrgetter(path)(sys.modules[module]) == given)
    except (KeyError, AttributeError):
        return False


def is_ours(given: Any) -> bool:
    """Return whether a class or function belongs to this package."""
    return str(getattr(given, "__module__", "")).partition(".")[0] == _OURS


@contextmanager
def attributing_errors(kind: str, name: str, owner: Any, *, inside: bool = False) -> Iterator[None]:
    """Raise an exception from code outside this package as a user error that names what it belongs to and the line.

    `owner` is the class or function. Exceptions from built-in code pass unchanged: unless it is a `FedobpError`, it is
    a bug of this package. So do, with `inside`, exceptions that no code of the owner's package was running for.
    """
    package = str(getattr(owner, "__module__", "")).partition(".")[0]
    try:
        yield
    except (FedobpError, KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # also SystemExit
        if is_ours(owner) or out_of_memory(error):
            raise
        places = [
            f"{frame.f_code.co_filename}:{line}"
            for frame, line in walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__", "").partition(".")[0] == package
        ]
        if inside and not places:
            raise
        where = places[-1] if places else _definition(owner)
        raise FedobpError(f"{described(error)} ({kind} '{name}', {where})") from error


def _definition(owner: Any) -> str:
    """Return the file and line of a class or function."""
    try:
        return f"{inspect.getsourcefile(owner)}:{inspect.getsourcelines(owner)[1]}"
    except (OSError, TypeError):  # no source
        return str(getattr(owner, "__module__", label(owner)))
