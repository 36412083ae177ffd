"""A Flower project for a federation: its settings, the two apps, and what starts them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp._version import __version__
from fedobp.federation import Federation, assign
from fedobp.files import unwritable, write_new
from fedobp.flower.task import FederationSettings, write_settings

PACKAGE = "federation"

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
    name = f"federation-{settings.id}"
    files = {
        "pyproject.toml": _PYPROJECT.format(name=name, package=PACKAGE),
        f"{PACKAGE}/__init__.py": '"""A federation of fedobp."""\n',
        f"{PACKAGE}/server_app.py": _APP.format(whose="the server", side="server"),
        f"{PACKAGE}/client_app.py": _APP.format(whose="a node", side="client"),
        f"{PACKAGE}/federation.toml": f"# Made by fedobp {__version__}: all nodes and the server have this file.\n"
        + write_settings(settings),
    }
    for path, text in files.items():
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error) from error
        write_new(folder / path, text.encode())


def node_arrays(federation: Federation) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield each client's samples in a simulation as the arrays of its npz file, in the order of its parts."""
    dataset, shards = assign(federation.config, federation.source)
    for shard in shards:
        ids = np.concatenate([shard.test, shard.val, shard.train])
        test, client = np.arange(len(ids)) < len(shard.test), np.zeros(len(ids), np.int64)
        yield {"x": dataset.x[ids], "y": np.array(dataset.labels)[dataset.y[ids]], "test": test, "client": client}
