"""One client on its node: it trains and evaluates on its own data, and keeps its state in a file of its own.

A node trains with what the server sent and its own state, and writes the new state as *pending*. The next message says
which of its trainings the server has accepted: only then does the pending state replace the old one, which is kept as
the *earlier* one. So a node whose answer was late, lost or refused, or whose server died and went on from a checkpoint,
goes on from the state that the server knows, as if it had not been asked.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedobp.data import Dataset, FederatedData, Shard, partition, read_own
from fedobp.data.partition import split_parts
from fedobp.engine import Budget, ClientPool, ClientSnapshot, PoolJob, Serial, dtype_of
from fedobp.errors import FedobpError
from fedobp.evaluation import Evaluator
from fedobp.flower.task import (
    NO_VISIT,
    FederationSettings,
    Visit,
    read_settings,
    visit_of,
)
from fedobp.method import RoundContext, dense
from fedobp.records import Record, Sparse, stack, take
from fedobp.run import context_of, hparams_of
from fedobp.storage.tensor_file import read_tensors, write_tensors
from fedobp.wire import decode_expected, encode

Answer = tuple[dict[str, Any], bytes]


def node_data(settings: FederationSettings, dataset: Dataset, client: int, device: torch.device) -> FederatedData:
    """Return a node's own samples as those of its client.

    The samples for test are those that the data names, or a quarter, drawn by the federation's seed.
    """
    config, inputs = settings.config, settings.inputs
    if tuple(dataset.x.shape[1:]) != inputs.shape:
        raise FedobpError(
            f"the data has inputs of shape {dataset.x.shape[1:]}, and the federation's have {inputs.shape}: give a "
            "node data of the same kind"
        )
    if (dataset.vocabulary, dataset.every_position) != (inputs.vocabulary, inputs.every_position):
        raise FedobpError("the data and the federation differ in what tokens are: give a node data of the same kind")
    none = np.empty(0, np.int64)
    own = _shard(settings, dataset) if len(dataset.y) else Shard(none, none, none)
    data = FederatedData(dataset, [own], device, dtype_of(config.precision), "none", clients=[client])
    data.clients = data.trainers = config.clients  # of which this one has its samples here
    return data.scaled_by(inputs.unit, inputs.mean, inputs.std)


def _shard(settings: FederationSettings, dataset: Dataset) -> Shard:
    config = settings.config
    if dataset.test is not None:
        return split_parts(np.arange(len(dataset.y)), config.val_ratio, dataset.test)
    [own] = partition(dataset.y, 1, kind="iid", seed=config.partition_seed, val_ratio=config.val_ratio)
    return own


class Node:
    """A client with its data and its files, between messages."""

    def __init__(self, settings: FederationSettings, data: FederatedData, client: int, folder: Path) -> None:
        self._settings, self._data, self._client = settings, data, client
        names = ("state", "pending", "earlier")
        self._files = {name: folder / settings.id / f"client-{client}.{name}" for name in names}
        theta, initial = settings.initial
        self._theta = theta.to(data.x.device)
        self._state = {name: value.to(data.x.device) for name, value in initial.state.items()}
        self._engine = Serial(settings.model, settings.config.batch_size, settings.config.precision)

    def about(self) -> dict[str, Any]:
        """Return what the server is told of this client: numbers of samples, and how evenly labels occur."""
        [about] = self._data.describe_clients(torch.tensor([self._client]))
        return {**about, "federation": self._settings.id}

    def answer(self, kind: str, values: Mapping[str, Any], payload: bytes) -> Answer:
        """Return the answer to a message; what is wrong with it goes back as one sentence."""
        began = time.perf_counter()
        try:
            if kind == "query":
                return self.about(), b""
            answer, upload = self.train(values, payload) if kind == "train" else self.evaluate(values, payload)
            return {**answer, "seconds": time.perf_counter() - began}, upload
        except FedobpError as error:
            return {"error": str(error)}, b""

    def train(self, values: Mapping[str, Any], payload: bytes) -> Answer:
        """Train in a round, keep the new state as pending, and return the upload."""
        visit, session, pending = visit_of(values["visit"]), str(values["session"]), self._read("pending")
        if pending and pending[2] == session and visit < pending[1]:
            raise FedobpError(f"a message is of round {visit[0]}, and this node has trained in a later one")
        pool = self._pool(values)
        if pool is None:
            return {"lost": True}, b""
        ctx, config, method = self._context(values), self._settings.config, self._settings.method
        download = stack([self._download(ctx, payload)])
        hparams = hparams_of(config, method, config.lr_at(ctx.round))
        [update] = self._engine.train([PoolJob(ctx, method.client_update(ctx), hparams, download, clients=pool)])
        if not update.finite.all():
            raise FedobpError(
                f"the training of client {self._client} diverged in round {ctx.round}: use a smaller --lr"
            )
        self._write("pending", pool.dump(self._client), visit, session)
        loss = float(update.loss[0]) if update.loss[0].isfinite() else None
        numbers = {"n": int(update.n[0]), "loss": loss, "processed": update.processed}
        return numbers, encode(take(update.upload, 0))

    def evaluate(self, values: Mapping[str, Any], payload: bytes) -> Answer:
        """Test this client's models on its own samples, and return counts."""
        pool = self._pool(values)
        if pool is None:
            return {"lost": True}, b""
        config, method = self._settings.config, self._settings.method
        ctx = replace(self._context(values), serving=True)
        download = self._download(ctx, payload, bool(values["everything"]))
        theta = dense(download, "global") if values["everything"] else None
        download.pop("global", None)
        epochs, metrics = config.finetune_epochs, config.metric_names
        evaluator = Evaluator(method, self._settings.model, pool, self._engine, epochs, metrics, ctx.cohort)
        counts = evaluator.counts_of(ctx, stack([download]), hparams_of(config, method, config.lr), theta)
        return {"counts": counts.to_json()}, b""

    def _context(self, values: Mapping[str, Any]) -> RoundContext:
        number, _ = visit_of(values["visit"])
        ctx = context_of(self._settings.config, self._settings.model, number, torch.tensor([self._client]))
        return replace(ctx, full_participation=bool(values["all"]))

    def _download(self, ctx: RoundContext, payload: bytes, with_global: bool = False) -> Record:
        """Return what the server sent, on this node's device; its shapes are those that the method would send."""
        _, initial = self._settings.initial
        records = {name: value[None] for name, value in initial.record.items()}
        expected = take(self._settings.method.download(ctx, initial.server, records)[0], 0)
        if with_global:
            expected["global"] = self._theta
        device = self._theta.device
        return {
            name: Sparse(*(part.to(device) for part in value)) if isinstance(value, Sparse) else value.to(device)
            for name, value in decode_expected(payload, expected).items()
        }

    def _pool(self, values: Mapping[str, Any]) -> ClientPool | None:
        """Return this client in the state that the server has accepted last; None: that state is lost here."""
        accepted = visit_of(values["accepted"])
        snapshot = ClientSnapshot(self._state, None) if accepted == NO_VISIT else self._accepted(accepted)
        if snapshot is None:
            return None
        keeps = self._settings.method.keeps_last_model
        pool = ClientPool(
            self._data, self._state, self._theta, self._settings.config.seed, Budget(), keeps_last_model=keeps
        )
        pool.load(self._client, snapshot)
        return pool

    def _accepted(self, accepted: Visit) -> ClientSnapshot | None:
        """Return the state that the server took last, and make it the current one; None: it is not here.

        It is the current or the pending one; or the earlier one, if the server died before it had written a checkpoint
        of a round, although this node had heard that its training was taken.
        """
        state = self._read("state")
        if state and state[1] == accepted:
            return state[0]
        for name in ("pending", "earlier"):
            found = self._read(name)
            if found and found[1] == accepted:
                if name == "pending" and state and state[1][0] < accepted[0]:
                    self._files["state"].replace(self._files["earlier"])
                self._files[name].replace(self._files["state"])
                return found[0]
        return None

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


def make_node(file: Path, client: int, data: str, folder: Path, device: str = "cpu") -> Node:
    """Return the node of a client of the federation in `file`; `data` is a file or folder, or empty for none."""
    settings = read_settings(file)
    if not 0 <= client < settings.config.clients:
        raise FedobpError(f"client={client} in the node's config: clients are 0 to {settings.config.clients - 1}")
    inputs = settings.inputs
    own = read_own(Path(data).expanduser(), inputs.names, inputs.vocabulary) if data else None
    dataset = own or inputs.no_samples("none")
    return Node(settings, node_data(settings, dataset, client, torch.device(device)), client, folder)
