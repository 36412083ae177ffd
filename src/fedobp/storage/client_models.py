"""Final models: the global model, and for each client its personal entries only.

On disk (safetensors, no pickle): `global.safetensors` holds the global model as an ordinary state dict;
`clients.safetensors` holds for client i the arrays `i.index` and `i.value`, or `i.vector` if more than half of the
entries are personal.
"""

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedobp.errors import FedobpError, described, short
from fedobp.files import unwritable
from fedobp.models import Layout
from fedobp.storage.tensor_file import read_tensors, write_tensors


class ClientModels:
    """The models that clients use; a client takes the memory of its personal entries.

    With `rounded`, shared entries arrive rounded at clients: those that differ from the global model's are kept, too.
    """

    def __init__(self, layout: Layout, shared: Tensor, *, rounded: bool = False) -> None:
        self._layout, self._shared, self._rounded = layout, shared.cpu(), rounded
        self._clients: dict[int, dict[str, Tensor]] = {}

    def add(self, client: int, theta: Tensor, personal: Tensor) -> None:
        """Add a client's model; the mask `personal` marks its personal entries."""
        theta, personal = theta.cpu(), personal.cpu()
        if self._rounded:
            personal = personal | (theta != self._shared)
        # Not by indexing with a mask, which starts threads: that takes longer than all else where clients are many.
        others = torch.where(personal, self._shared, theta)
        assert torch.equal(others, self._shared), "entries outside `personal` must be the global model's"
        index = personal.nonzero()[:, 0]
        if 2 * len(index) > len(theta):
            self._clients[client] = {"vector": theta.clone()}
        else:
            self._clients[client] = {"index": index, "value": theta[index]}

    def __repr__(self) -> str:
        clients = f"{len(self._clients):,} clients' models" if self._clients else "the global model"
        return f"ClientModels({clients}, {self.size:,} parameters each)"

    @property
    def size(self) -> int:
        """Parameters of one model."""
        return self._layout.size

    def without_clients(self) -> "ClientModels":
        """Return the global model without the clients'."""
        return ClientModels(self._layout, self._shared)

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return a client's model, or the global one, as an ordinary state dict."""
        if client is None:
            return _state_dict(self._layout, self._shared, {})
        client = _whole(client)
        if client not in self._clients:
            raise _no_client(client, self._clients)
        return _state_dict(self._layout, self._shared, self._clients[client])

    def save(self, folder: Path, *, clients: bool, about: Mapping[str, Any]) -> None:
        """Write the global model with the metadata `about`, and, with `clients`, all clients' entries."""
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise unwritable(folder, error) from error
        about = {**about, "names": list(self._layout.names), "clients": sorted(self._clients) if clients else []}
        checksum = write_tensors(folder / "global.safetensors", self.state_dict(), about)
        if clients:
            entries = {f"{i}.{name}": value for i, record in self._clients.items() for name, value in record.items()}
            write_tensors(folder / "clients.safetensors", entries, {"global": checksum})


def load_state_dict(run: str | Path, client: int | None = None) -> dict[str, Tensor]:
    """Return a saved model as an ordinary state dict: client `client`'s, or the global one.

    `run` is a run's folder, the one that holds `models/`.
    """
    client = None if client is None else _whole(client)
    folder = Path(run) / "models"
    where = short(folder, 200)
    if not (folder / "global.safetensors").exists():
        raise FedobpError(f"{where} holds no models: give the folder of a run that saved them (--save-models all)")
    found, about = read_tensors(folder / "global.safetensors")
    try:
        tensors = {name: found[name] for name in about["names"]}
        if client is None:
            return tensors
        if client not in about["clients"]:
            raise _no_client(client, about["clients"])
        entries, of_clients = read_tensors(folder / "clients.safetensors")
        if of_clients.get("global") != about["sha256"]:
            raise FedobpError(f"the files in {where} are not of one run: take another copy of both")
        record = {name.partition(".")[2]: value for name, value in entries.items() if name.startswith(f"{client}.")}
        if not record:
            raise ValueError(f"client {client} is missing")
        layout = Layout(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))
        return _state_dict(layout, layout.flatten(tensors), record)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise FedobpError(
            f"the models in {where} are damaged ({short(described(error), 200)}): take another copy"
        ) from error


def _state_dict(layout: Layout, shared: Tensor, record: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if "vector" in record:
        theta = record["vector"]
    elif "index" in record:
        theta = shared.index_copy(0, record["index"], record["value"])
    else:
        theta = shared
    return {name: tensor.clone() for name, tensor in layout.views(theta).items()}


def _whole(client: object) -> int:
    """Return a client's id as an integer of Python, which names its entries in a file."""
    try:
        return int(operator.index(client))  # type: ignore[arg-type]
    except TypeError as error:
        raise FedobpError(f"`client` must be a whole number, a client's id, not {short(repr(client))}") from error


def _no_client(client: int, clients: Any) -> FedobpError:
    if not clients:
        return FedobpError(f"there is no model of client {client}: none were saved (use --save-models all)")
    if min(clients) <= client <= max(clients):
        return FedobpError(
            f"there is no model of client {client}: those of the {len(clients):,} evaluated clients were kept "
            "(--eval-clients)"
        )
    return FedobpError(
        f"there is no model of client {client}: clients are {short(min(clients))} to {short(max(clients))}"
    )
