"""The client app of a node: it hands each message to the node's worker.

Flower starts a new process for every message. Loading torch and the data takes longer there than a short training, so a
worker beside the node keeps them (`worker.py`); this module loads neither.
"""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedobp.errors import FedobpError
from fedobp.files import user_cache
from fedobp.flower.messages import pack, unpack
from fedobp.flower.worker import ask_worker


def client_app(file: Path) -> ClientApp:
    """Return the Flower app of a node; `file` is the federation's `federation.toml`.

    The node's config says which `client` it is, and perhaps where its `data` is and its `state` is kept, and which
    `device` computes.
    """
    app = ClientApp()

    def answer(message: Message, context: Context, kind: str) -> Message:
        try:
            values, payload = ask_worker(_arguments(file, context), kind, *unpack(message.content))
        except FedobpError as error:
            values, payload = {"error": str(error)}, b""
        return Message(pack(values, payload), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return answer(message, context, "query")

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(message, context, "train")

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, context, "evaluate")

    return app


def _arguments(file: Path, context: Context) -> tuple[str, ...]:
    """Return what a worker is started with: the settings, the client, its data, its state, its device."""
    given = context.node_config
    if not isinstance(given.get("client"), int):
        raise FedobpError("the node's config does not say which client it is: start it with --node-config 'client=0'")
    folder = Path(str(given.get("state", user_cache() / "nodes"))).expanduser().absolute()
    return str(file), str(given["client"]), str(given.get("data", "")), str(folder), str(given.get("device", "cpu"))
