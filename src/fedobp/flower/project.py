"""A project for a federation on nodes: its settings, the two Flower apps, scripts that start them, and how to."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp._version import __version__
from fedobp.errors import FedobpError, short
from fedobp.federation import Federation, assign
from fedobp.files import unwritable, write_new
from fedobp.flower.task import FederationSettings, Inputs, write_settings

PACKAGE = "federation"
_TEMPLATES = Path(__file__).with_name("template")
Arrays = Mapping[str, NDArray[Any]]

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation of fedobp"
license = "Apache-2.0"
dependencies = ["fedobp[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

# What `flwr run` sends to the superlink, and the superlink to the nodes: neither data nor keys.
[tool.flwr.app]
publisher = "fedobp"
fab-include = ["{package}/*.py", "{package}/federation.toml"]

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
folder = ""   # of the server's run; empty: in the user's cache, under the federation's id
"""

_APP = '''\
"""The Flower app of {whose}."""

from pathlib import Path

from fedobp.flower import {side}_app

app = {side}_app(Path(__file__).with_name("federation.toml"))
'''


def write_app(folder: Path, settings: FederationSettings) -> None:
    """Write the Flower app of a federation; existing files are not overwritten."""
    _write(folder, _app_files(settings))


def write_project(folder: Path, settings: FederationSettings, data: Iterable[Arrays] | None) -> list[str]:
    """Write the app of a federation and all that starts it, and return the names of the files.

    `data` are the samples of each node, if they are here; elsewhere, nodes bring their own.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    config = settings.config
    about = {"nodes": config.clients, "version": __version__, "demo": data is not None, "config": config}
    files: dict[str, str | Arrays] = dict(_app_files(settings))
    for path in sorted(one for one in _TEMPLATES.rglob("*") if one.is_file() and one.name != "node.toml"):
        name = str(path.relative_to(_TEMPLATES))
        files[name] = pages.get_template(name).render(about)
    for node in range(config.clients):
        files[f"nodes/node-{node}.toml"] = pages.get_template("node.toml").render(about, node=node)
    for node, arrays in enumerate(data or ()):
        files[f"data/node-{node}.npz"] = arrays
    _write(folder, files)
    return list(files)


def _app_files(settings: FederationSettings) -> dict[str, str]:
    head = f"# Made by fedobp {__version__}: the server and all nodes run with these settings.\n"
    return {
        "pyproject.toml": _PYPROJECT.format(name=f"federation-{settings.id}", package=PACKAGE),
        f"{PACKAGE}/__init__.py": '"""A federation of fedobp."""\n',
        f"{PACKAGE}/server_app.py": _APP.format(whose="the server", side="server"),
        f"{PACKAGE}/client_app.py": _APP.format(whose="a node", side="client"),
        f"{PACKAGE}/federation.toml": head + write_settings(settings),
    }


def _write(folder: Path, files: Mapping[str, str | Arrays]) -> None:
    """Write files that do not exist; if one does, none is written. Scripts may be executed."""
    for name in files:
        if os.path.lexists(folder / name):
            raise FedobpError(f"{short(folder / name, 200)} exists: choose another folder, nothing was overwritten")
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise unwritable(folder, error) from error
        write_new(path, content.encode() if isinstance(content, str) else _npz(content))
        if path.suffix == ".sh":
            path.chmod(0o755)


def _npz(arrays: Arrays) -> bytes:
    file = BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def write_data(folder: Path, data: Iterable[Arrays]) -> list[Path]:
    """Write each node's samples to an npz file, and return the files."""
    files = {f"node-{node}.npz": arrays for node, arrays in enumerate(data)}
    _write(folder, files)
    return [folder / name for name in files]


def node_arrays(federation: Federation) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield each client's samples in a simulation as the arrays of its npz file, in the order of its parts."""
    dataset, shards = assign(federation.config, federation.source)
    for shard in shards:
        ids = np.concatenate([shard.test, shard.val, shard.train])
        test, client = np.arange(len(ids)) < len(shard.test), np.zeros(len(ids), np.int64)
        arrays = {"x": dataset.x[ids], "test": test, "client": client}
        if dataset.vocabulary:
            arrays |= {"tokens": arrays.pop("x"), "vocabulary": np.array(dataset.vocabulary)}
        if dataset.every_position:  # each position's label is its next token
            arrays["tokens"] = np.concatenate([arrays["tokens"], dataset.y[ids][:, -1:]], axis=1)
        else:
            arrays["y"] = np.array(dataset.labels)[dataset.y[ids]]
        yield arrays


def described_inputs(shape: str, labels: str, unit: float = 1.0, mean: str = "0", std: str = "1") -> Inputs:
    """Return what samples look like that are not here, from texts: lists are separated by commas.

    `labels` is how many there are, 0 to N - 1, or their names; `mean` and `std` have one value, or one for each channel
    or feature.
    """
    sizes = _numbers("--shape", shape, int)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise FedobpError(f"--shape {short(shape)} must be features, height,width or height,width,channels")
    channels = 1 if len(sizes) == 2 else int(sizes[-1])
    texts = [name.strip() for name in labels.split(",")]
    names: Sequence[str | int] = texts
    if all(name.isdecimal() for name in texts):  # numbers, as they are read from data
        names = range(int(labels)) if len(texts) == 1 else [int(name) for name in texts]
    if len(names) < 2 or len(set(names)) < len(names) or "" in names:
        raise FedobpError(f"--labels {short(labels)} must be how many there are, at least 2, or their names")
    constants = []
    for flag, given in (("--mean", mean), ("--std", std)):
        values = _numbers(flag, given, float)
        if len(values) not in (1, channels):
            raise FedobpError(f"{flag} has {len(values)} values: give one, or one for each of {channels} channels")
        constants.append(tuple(values * channels if len(values) == 1 else values))
    return Inputs(tuple(map(int, sizes)), tuple(names), unit, constants[0], constants[1])


def _numbers(flag: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise FedobpError(f"{flag} must be numbers separated by commas, not '{short(text)}'") from None
