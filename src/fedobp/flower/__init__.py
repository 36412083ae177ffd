"""The same federation on real nodes, with Flower: a server app and a client app that run fedobp's own methods.

`task.py` has what both sides share, `client.py` one client on its node, `server.py` the rounds. A Flower project needs
two lines a side (`fedobp deploy init` writes it):

    app = client_app(Path(__file__).with_name("federation.toml"))
    app = server_app(Path(__file__).with_name("federation.toml"))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedobp.flower.client import client_app
    from fedobp.flower.server import server_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Load an app on first use: the client's must not pay for the server's imports."""
    from importlib import import_module

    modules = {"client_app": "client", "server_app": "server"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedobp.flower.{modules[name]}"), name)
