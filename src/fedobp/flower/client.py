"""One client on its node: it trains and evaluates on its own data, and keeps its state in a file of its own.

A node trains with what the server sent and its own state, and writes the new state as *pending*. The next message says
which of its trainings the server has accepted: only then does the pending state replace the old one. So a node whose
answer was late, lost or refused goes on from the state that the server knows, as if it had not been asked.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedobp.data import Dataset, FederatedData, partition, read_source
from fedobp.engine import Budget, ClientPool, ClientSnapshot, PoolJob, Serial, dtype_of
from fedobp.errors import FedobpError, short
from fedobp.evaluation import Evaluator
from fedobp.files import user_cache
from fedobp.flower.task import NO_VISIT, FederationSettings, Visit, pack, read_settings, unpack, visit_of
from fedobp.method import RoundContext
from fedobp.records import Record, Sparse, stack
from fedobp.run import context_of, hparams_of
from fedobp.storage.tensor_file import read_tensors, write_tensors
from fedobp.wire import decode, encode


def node_data(settings: FederationSettings, dataset: Dataset, client: int, device: torch.device) -> FederatedData:
    """Return a node's own samples as those of its client; the others have none here.

    The samples for test are those that the data names, or a quarter, drawn by the federation's seed.
    """
    config, inputs = settings.config, settings.inputs
    if tuple(dataset.x.shape[1:]) != inputs.shape:
        raise FedobpError(
            f"the data has inputs of shape {dataset.x.shape[1:]}, and the federation's have {inputs.shape}: give a "
            "node data of the same kind"
        )
    known = {label: at for at, label in enumerate(inputs.labels)}
    if unknown := [label for label in dataset.labels if label not in known]:
        raise FedobpError(f"the data has the label '{short(unknown[0])}', which the federation has not: remove it")
    order = torch.tensor([known[label] for label in dataset.labels]).numpy()
    dataset = replace(dataset, y=order[dataset.y] if len(dataset.y) else dataset.y, labels=inputs.labels)
    natural = dataset.y.ravel()[: len(dataset.y)] * 0 if dataset.test is not None else None
    [own] = partition(
        dataset.y, 1, kind="iid" if natural is None else "natural", seed=config.partition_seed,
        val_ratio=config.val_ratio, natural=natural, test=dataset.test,
    )  # fmt: skip
    none = replace(own, train=own.train[:0], val=own.val[:0], test=own.test[:0])
    data = FederatedData(dataset, [*[none] * client, own], device, dtype_of(config.precision), "none")
    return data.scaled_by(inputs.unit, inputs.mean, inputs.std)


class Node:
    """A client with its data and its files, between messages."""

    def __init__(self, settings: FederationSettings, data: FederatedData, client: int, folder: Path) -> None:
        self._settings, self._client, config = settings, client, settings.config
        self._files = {name: folder / settings.id / f"client-{client}.{name}" for name in ("state", "pending")}
        theta, initial = settings.initial()
        self._state, self._theta, self._data = initial.state, theta.to(data.x.device), data
        self._engine = Serial(settings.model, config.batch_size, config.precision)

    def about(self) -> dict[str, Any]:
        """Return what the server is told of this client: numbers of samples, and how evenly labels occur."""
        return {**self._data.describe_clients()[self._client], "federation": self._settings.id}

    def train(self, values: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Train in a round, keep the new state as pending, and return the upload."""
        visit, pool = visit_of(values["visit"]), self._pool(values)
        if pool is None:
            return {"lost": True}, b""
        ctx, download = self._context(values), self._download(values, payload)
        hparams = hparams_of(self._settings.config, self._settings.method, self._settings.config.lr_at(ctx.round))
        job = PoolJob(ctx, tuple(self._settings.method.client_update(ctx)), hparams, stack([download]), clients=pool)
        [update] = self._engine.train([job])
        if not update.finite.all():
            raise FedobpError(f"client {self._client} diverged in round {ctx.round}: use a smaller --lr")
        self._write("pending", pool.dump(self._client), visit, str(values["session"]))
        [upload] = [_one(update.upload)]
        numbers = {"n": int(update.n[0]), "loss": _number(update.loss[0]), "processed": update.processed}
        return numbers, encode(upload)

    def evaluate(self, values: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Test this client's models on its own samples, and return counts."""
        pool = self._pool(values)
        if pool is None:
            return {"lost": True}, b""
        ctx, download, config = self._context(values), self._download(values, payload), self._settings.config
        hparams = hparams_of(config, self._settings.method, config.lr)
        evaluator = Evaluator(
            self._settings.method, self._settings.model, pool, self._engine, config.finetune_epochs, config.metric_names,
            clients=[self._client],
        )  # fmt: skip
        theta = download.pop("global", None)
        assert not isinstance(theta, Sparse)
        counts = evaluator.counts_of(ctx, stack([download]) if download else {}, hparams, theta)
        return {"counts": counts.to_json()}, b""

    def _context(self, values: Mapping[str, Any]) -> RoundContext:
        number, cohort = int(values["visit"][0]), torch.tensor([self._client])
        ctx = context_of(self._settings.config, self._settings.model, number, cohort)
        return replace(ctx, full_participation=bool(values["all"]))

    def _download(self, values: Mapping[str, Any], payload: bytes) -> Record:
        """Return what the server sent, on this node's device."""
        shapes = {str(name): tuple(map(int, shape)) for name, shape in values["shapes"].items()}
        if sum(torch.Size(shape).numel() for shape in shapes.values()) > 64 * (self._settings.model.layout.size + 64):
            raise FedobpError("a download is larger than any method's: both sides must use one federation.toml")
        device, record = self._theta.device, decode(payload, shapes)
        return {
            name: Sparse(*(part.to(device) for part in value)) if isinstance(value, Sparse) else value.to(device)
            for name, value in record.items()
        }

    def _pool(self, values: Mapping[str, Any]) -> ClientPool | None:
        """Return this client in the state that the server has accepted last; None: that state is lost here."""
        visit, accepted, session = visit_of(values["visit"]), visit_of(values["accepted"]), str(values["session"])
        pending = self._read("pending")
        if pending and pending[2] == session and visit < pending[1]:
            raise FedobpError(f"a message is of round {visit[0]}, and this node has trained in a later one")
        if pending and accepted == pending[1]:
            self._files["pending"].replace(self._files["state"])
        snapshot: ClientSnapshot | None = ClientSnapshot(self._state, None)
        if accepted != NO_VISIT:
            known = self._read("state")
            snapshot = known[0] if known and known[1] == accepted else None
        if snapshot is None:
            return None
        pool = ClientPool(
            self._data, self._state, self._theta, self._settings.config.seed, Budget(),
            keeps_last_model=self._settings.method.keeps_last_model,
        )  # fmt: skip
        pool.load(self._client, snapshot)
        return pool

    def _write(self, name: str, snapshot: ClientSnapshot, visit: Visit, session: str) -> None:
        tensors = {f"state.{key}": value for key, value in snapshot.state.items()}
        if snapshot.last is not None and not self._settings.method.keeps_last_model:
            tensors["last"] = snapshot.last
        about = {"federation": self._settings.id, "client": self._client, "visit": list(visit), "session": session}
        self._files[name].parent.mkdir(parents=True, exist_ok=True)
        write_tensors(self._files[name], tensors, about)

    def _read(self, name: str) -> tuple[ClientSnapshot, Visit, str] | None:
        """Return a state with its visit and session; None if there is none, or it is damaged: then it is lost."""
        with suppress(FedobpError, KeyError, ValueError):
            if self._files[name].exists():
                tensors, about = read_tensors(self._files[name])
                device = self._theta.device
                state = {key: tensors[f"state.{key}"].to(device) for key in self._state}
                last = state["theta"] if self._settings.method.keeps_last_model else tensors["last"].to(device)
                return ClientSnapshot(state, last), visit_of(about["visit"]), str(about["session"])
        return None


def _one(upload: Record) -> Record:
    """Return the upload of a cohort of one client."""
    return {name: value.at(0) if isinstance(value, Sparse) else value[0] for name, value in upload.items()}


def _number(value: Tensor) -> float | None:
    return float(value) if value.isfinite() else None


@cache
def _node(file: Path, client: int, data: Path, folder: Path, device: str) -> Node:
    """Return a node, which is made once a process."""
    settings = read_settings(file)
    if not 0 <= client < settings.config.clients:
        raise FedobpError(f"client={client} in the node's config: clients are 0 to {settings.config.clients - 1}")
    return Node(settings, node_data(settings, read_source(data), client, torch.device(device)), client, folder)


def node_for(file: Path, context: Context) -> Node:
    """Return the node that a Flower context describes: `client`, `data` and perhaps `state` and `device`."""
    given = context.node_config
    if missing := [name for name in ("client", "data") if name not in given]:
        raise FedobpError(f"the node's config has no '{missing[0]}': start it with --node-config 'client=0 data=\"...\"'")
    folder = Path(str(given.get("state", user_cache() / "nodes"))).expanduser()
    return _node(file, int(given["client"]), Path(str(given["data"])), folder, str(given.get("device", "cpu")))


def client_app(file: Path) -> ClientApp:
    """Return the Flower app of a node; `file` is the federation's `federation.toml`."""
    app = ClientApp()

    def answer(message: Message, context: Context, act: Callable[[Node], tuple[dict[str, Any], bytes]]) -> Message:
        """Return a node's answer; what is wrong goes back as one sentence."""
        try:
            values, payload = act(node_for(file, context))
        except FedobpError as error:
            values, payload = {"error": str(error)}, b""
        return Message(pack(values, payload), reply_to=message)

    def given(content: RecordDict) -> tuple[dict[str, Any], bytes]:
        return unpack(content, 1 << 40)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        client = context.node_config.get("client")
        return answer(message, context, lambda node: ({**node.about(), "client": client}, b""))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(message, context, lambda node: node.train(*given(message.content)))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, context, lambda node: node.evaluate(*given(message.content)))

    return app

