"""Checkpoints of a run: all that its next round depends on, in files that are checked when they are read.

A checkpoint of round R in a run's folder is `checkpoint/server-R.safetensors`: the server's tensors, and as metadata
the sums and evaluations so far, and which file holds each client. What clients and their records hold is in
`checkpoint/clients-R.safetensors`: only clients that changed since the checkpoint before. The server's file is written
last, so a checkpoint exists whole or not at all. The newest two are kept, with the files of clients that they name.

A thread writes a checkpoint while the next rounds train. That is safe because no tensor of a record or client is ever
written in place: stores copy what they are given, and replace it. The server's tensors are the method's, and are copied
first. On CUDA the thread copies all to the host on a stream of its own.
"""

import json
import math
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedobp.config import Config
from fedobp.engine import Store
from fedobp.errors import FedobpError, TryAgain, described, out_of_memory, short
from fedobp.files import unwritable, write_json
from fedobp.records import Tensors
from fedobp.result import Result
from fedobp.run import Run
from fedobp.saved_runs import read_run
from fedobp.storage import versions
from fedobp.storage.tensor_file import read_tensors, write_tensors
from fedobp.transfer import AsyncCopy

FOLDER = "checkpoint"
_KEPT = 2  # checkpoints of a run
_SPACING = 10.0  # a checkpoint that took w seconds to write is followed by the next one after 10 w at the earliest


class Clients(NamedTuple):
    """The files of a checkpoint that hold clients: which one has each client, and their checksums, by round."""

    rounds: dict[int, int]
    checksums: dict[int, str]


@dataclass(frozen=True)
class Interval:
    """When checkpoints are taken: after so many rounds, or so many seconds of training."""

    rounds: int | None = None  # 0: never
    seconds: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what is no number of rounds."""
        if self.rounds is not None and (not isinstance(self.rounds, int | np.integer) or self.rounds < 0):
            raise FedobpError(
                "`checkpoint_every` must be a number of rounds, a whole number from 0 on, or None, not "
                f"{short(repr(self.rounds))}"
            )

    def is_due(self, number: int, seconds: float, writing: float = 0.0) -> bool:
        """Say whether a checkpoint is due after a round; `seconds` have passed since the last one.

        That one was written in `writing` seconds. Rounds that train meanwhile are slower (with 16 runs on an H200, by a
        quarter), so at most a tenth of the time is spent on writing.
        """
        if self.rounds is not None:
            return self.rounds > 0 and number % self.rounds == 0
        return seconds >= max(self.seconds, _SPACING * writing)


NEVER = Interval(rounds=0)


def identity(config: Config, partition: str) -> dict[str, Any]:
    """Return what a run must have in common with a checkpoint to go on from it."""
    return {"settings": config.hash, "partition": partition, **versions()}


class Snapshot(NamedTuple):
    """All that a checkpoint holds, as it was after a round."""

    round: int
    server: dict[str, Tensor]
    run: dict[str, Any]  # plain values
    stores: dict[str, dict[int, Tensors]]  # of clients that changed since the checkpoint before
    changed: list[int]
    ready: torch.cuda.Event | None  # when a device has computed it

    def on_host(self) -> "Snapshot":
        """Return it with its tensors on the CPU.

        Each is copied once, and only this copy is waited for: a synchronisation with the device would be an error while
        the training thread finds out whether a step synchronises. One after another, because that thread's own copies
        to the host have to wait for those that are queued.
        """
        copies: dict[int, Tensor] = {}

        def copied(record: Tensors) -> Tensors:
            for tensor in record.values():
                if id(tensor) not in copies:
                    copies[id(tensor)] = AsyncCopy(tensor.detach()).value()
            return {name: copies[id(tensor)] for name, tensor in record.items()}

        stores = {name: {one: copied(record) for one, record in store.items()} for name, store in self.stores.items()}
        return self._replace(server=copied(self.server), stores=stores)


class Checkpoints:
    """The checkpoints of one run, in its folder; `writer` is the thread that writes those of its launch, in turn."""

    def __init__(
        self,
        folder: Path,
        run: Run,
        stores: Mapping[str, Store],
        launch: Sequence[str],
        writer: Executor,
        data_hash: Callable[[], str] | None = None,
    ) -> None:
        """Take `stores` of clients that are simulated here, beside the server's records, and the hash of their data."""
        self._folder, self._run, self._writer, self._data_hash = folder / FOLDER, run, writer, data_hash
        self._stores = {"records": run.records, **stores}
        self._writing: Future[None] | None = None
        self._about = {**identity(run.config, run.partition), "launch": list(launch)}
        self._known = Clients({}, {})
        self._before: set[int] = set()  # files of clients that the checkpoint before names
        self.writing_time = 0.0  # seconds that the last checkpoint took to write; infinite until it is written

    def save(self, number: int) -> None:
        """Take a checkpoint after a round: what it holds is fixed now, and written while the next rounds train."""
        self.wait()
        self._run.settle()
        stores = self._stores
        changed = sorted(set[int]().union(*(store.changed for store in stores.values())))
        server = {name: tensor.clone() for name, tensor in self._run.server.items()}
        device, ready = self._run.server["theta"].device, None
        if device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        held = {name: {one: store[one] for one in changed if one in store} for name, store in stores.items()}
        snapshot = Snapshot(number, server, self._run.snapshot(), held, changed, ready)
        for store in stores.values():
            store.changed.clear()
        self.writing_time = math.inf
        self._writing = self._writer.submit(self._write, snapshot)

    def wait(self) -> None:
        """Wait until the last checkpoint is written; if it could not be, this raises why."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, and remove what neither of the newest two needs."""
        started = time.monotonic()
        try:
            if snapshot.ready:
                with torch.cuda.stream(torch.cuda.Stream(snapshot.server["theta"].device)):
                    snapshot.ready.wait()
                    snapshot = snapshot.on_host()
            self._write_files(snapshot)
            self._remove_old()
        finally:
            self.writing_time = time.monotonic() - started

    def _write_files(self, snapshot: Snapshot) -> None:
        number, changed = snapshot.round, snapshot.changed
        _make(self._folder)
        known = Clients({**self._known.rounds, **dict.fromkeys(changed, number)}, {**self._known.checksums})
        if changed:
            members = {name: list(records) for name, records in snapshot.stores.items()}
            tensors, same = _client_tensors(snapshot.stores, changed)
            path = _clients_file(self._folder, number)
            known.checksums[number] = write_tensors(path, tensors, {"members": members, "same": same})
        in_use = set(known.rounds.values())
        files = {at: checksum for at, checksum in known.checksums.items() if at in in_use}
        data = {"data": self._data_hash()} if self._data_hash else {}  # here, because it may take seconds
        about = {
            **self._about,
            **data,
            "round": number,
            "run": snapshot.run,
            "clients": {str(client): at for client, at in known.rounds.items()},
            "files": {str(at): checksum for at, checksum in files.items()},
        }
        write_tensors(_server_file(self._folder, number), snapshot.server, about)
        self._before, self._known = set(self._known.checksums), Clients(known.rounds, files)

    def _remove_old(self) -> None:
        """Remove checkpoints but the newest two, and files of clients that neither of them names."""
        for number in sorted(rounds_in(self._folder), reverse=True)[_KEPT:]:
            _server_file(self._folder, number).unlink(missing_ok=True)
        needed = {*self._known.checksums, *self._before}
        for path in self._folder.glob("clients-*.safetensors"):
            if _number(path) not in needed:
                path.unlink(missing_ok=True)

    def restore(self, number: int) -> None:
        """Take the run and its clients to the state of a checkpoint."""
        with _reading(_server_file(self._folder, number)):
            self._restore(number)
        for later in rounds_in(self._folder):  # of a round that is trained again
            if later > number:
                _server_file(self._folder, later).unlink()
        (self._folder / "failed.json").unlink(missing_ok=True)  # likewise

    def _restore(self, number: int) -> None:
        server, about = read_tensors(_server_file(self._folder, number))
        stores, device = self._stores, self._run.server["theta"].device
        for at, checksum in about["files"].items():
            tensors, of_clients = read_tensors(_clients_file(self._folder, int(at)))
            if of_clients["sha256"] != checksum:
                raise FedobpError(f"{short(_clients_file(self._folder, int(at)), 200)} is of another run: start anew")
            records: dict[tuple[str, str], dict[str, Tensor]] = {
                (name, str(client)): {} for name, ids in of_clients["members"].items() for client in ids
            }
            for key in (*tensors, *of_clients["same"]):
                name, client, inner = key.split(".", 2)
                records[name, client][inner] = tensors[of_clients["same"].get(key, key)].to(device)
            for (name, client), record in records.items():
                if about["clients"][client] == int(at):
                    stores[name][int(client)] = record
        self._run.restore(server, about["run"])
        self._known = Clients(
            {int(client): at for client, at in about["clients"].items()},
            {int(at): checksum for at, checksum in about["files"].items()},
        )
        for store in stores.values():
            store.changed.clear()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong into a user error: a checkpoint may have a right checksum, and not what this run needs.

    The run has not failed: when the files are as they were, it goes on.
    """
    try:
        yield
    except FedobpError as error:
        raise TryAgain(str(error)) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise TryAgain(
            f"{short(path, 200)} is no checkpoint of this run ({short(described(error), 120)}): remove it, and resume"
        ) from error


def _client_tensors(
    stores: Mapping[str, Mapping[int, Tensors]], clients: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what stores hold of clients by key, and keys whose tensors equal another one of the same client.

    A client's last model is often in its state or in the server's record, too: it is written once.
    """
    tensors: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    for client in clients:
        own: dict[str, Tensor] = {}
        for name, store in stores.items():
            for key, value in store.get(client, {}).items():
                place = f"{name}.{client}.{key}"
                equal = next((other for other, known in own.items() if _is_equal(known, value)), None)
                if equal is None:
                    own[place] = value
                else:
                    same[place] = equal
        tensors |= own
    return tensors, same


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors on the CPU have the same bits; NaN equals NaN, and 0.0 is not -0.0.

    By NumPy, on this core alone: `torch.equal` would occupy those that train.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one is other:
        return True
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(one.element_size(), torch.int64)
    first, second = (tensor.contiguous().view(-1).view(bits).numpy() for tensor in (one, other))
    return np.array_equal(first, second)


def usable_rounds(
    folder: Path, config: Config, partition: str, launch: Sequence[str], data_hash: Callable[[], str] | None = None
) -> list[int]:
    """Return the rounds of a run's checkpoints that are whole, the newest first.

    One of other settings, data or versions is a user error; a damaged one is left out, with a warning.
    """
    wanted = {**identity(config, partition), "launch": list(launch)}
    found = []
    for number in sorted(rounds_in(folder / FOLDER), reverse=True):
        try:
            with _reading(_server_file(folder / FOLDER, number)):
                _, about = read_tensors(_server_file(folder / FOLDER, number))
                for at, checksum in about["files"].items():
                    _, of_clients = read_tensors(_clients_file(folder / FOLDER, int(at)))
                    if of_clients["sha256"] != checksum:
                        raise FedobpError("a file of its clients is of another checkpoint")
        except FedobpError as error:
            warnings.warn(f"the checkpoint of round {number} is not used: {error}", stacklevel=2)
            continue
        if data_hash and "data" in about:  # older ones do not say
            wanted["data"] = data_hash()
        for name, value in wanted.items():
            if about.get(name) != value:
                raise FedobpError(
                    f"{short(folder, 200)} was trained with {_WORDS.get(name, name)} {short(about.get(name))}, and now "
                    f"it is {short(value)}: use what it was trained with, or start anew in another folder"
                )
        found.append(number)
    return found


_WORDS = {
    "settings": "the settings", "partition": "the partition", "data": "the data", "launch": "the runs",
    "python": "Python",
}  # fmt: skip


def rounds_in(folder: Path) -> Iterator[int]:
    """Yield the rounds that a folder has checkpoints of."""
    return (_number(path) for path in folder.glob("server-*.safetensors") if re.search(r"-\d+$", path.stem))


class PastRun:
    """What a run's folder holds of an earlier process: a result, or checkpoints, and perhaps how it failed."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        partition: str,
        launch: Sequence[str],
        data_hash: Callable[[], str] | None = None,
    ) -> None:
        self.folder, self.config = folder, config
        self.is_finished = (folder / "result.json").exists()
        self.rounds = usable_rounds(folder, config, partition, launch, data_hash)
        self._failure = _read_failure(folder / FOLDER / "failed.json")

    def is_over(self, number: int) -> bool:
        """Say whether the run had ended by a round."""
        failed = self._failure is not None and self._failure[0] <= number
        return failed or (self.is_finished and self.config.rounds <= number)

    def outcome(self) -> Result | FedobpError:
        """Return how a run ended that is over."""
        if self._failure is not None and not self.is_finished:
            return FedobpError(self._failure[1])
        return read_run(self.folder).to_result()


def common_round(runs: Sequence[PastRun | None]) -> int:
    """Return the newest round from which all runs of a launch can go on; 0: they start anew."""
    known = [run for run in runs if run is not None]
    if len(known) < len(runs):
        return 0
    for number in sorted({number for run in known for number in run.rounds}, reverse=True):
        if all(number in run.rounds or run.is_over(number) for run in known):
            return number
    return 0


def note_failure(folder: Path, number: int, error: BaseException) -> None:
    """Note that a run failed in a round, so that the others go on without it."""
    _make(folder / FOLDER)
    write_json(folder / FOLDER / "failed.json", {"round": number, "error": str(error)})


def _read_failure(path: Path) -> tuple[int, str] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return int(found["round"]), short(found["error"], 1000)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None  # then the run is trained again, and fails again


def remove(folder: Path) -> None:
    """Remove the checkpoints of a run."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def _server_file(folder: Path, number: int) -> Path:
    return folder / f"server-{number}.safetensors"


def _clients_file(folder: Path, number: int) -> Path:
    return folder / f"clients-{number}.safetensors"


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
