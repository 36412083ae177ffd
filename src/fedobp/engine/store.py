"""One record per client: in memory, and beyond a budget in a temporary file.

A client that was never written has the common start record and takes no memory: only clients that were sampled do,
however large the federation is.
"""

import os
import tempfile
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from fedobp.errors import FedobpError, TryAgain
from fedobp.records import Tensors


class Budget:
    """Bytes of memory that several stores share; unlimited by default."""

    def __init__(self, size: float = float("inf")) -> None:
        self._left = size

    def take(self, size: int) -> bool:
        """Reserve memory; return False if there is too little left."""
        if size > self._left:
            return False
        self._left -= size
        return True


class _InFile:
    """One field of the clients that do not fit in memory: a temporary file, which is deleted with the process."""

    def __init__(self, like: Tensor, clients: int) -> None:
        self._like = like
        self._bytes = like.numel() * like.element_size()
        try:
            self._file = tempfile.TemporaryFile(prefix="fedobp-clients-")  # noqa: SIM115 (open as long as this lives)
            weakref.finalize(self, self._file.close)
            self._file.truncate(clients * self._bytes)  # a sparse file: only written clients take disk space
        except OSError as error:
            raise _no_space("clients' state", error) from error

    def read(self, client: int) -> Tensor:
        # Not from a mapping of the file: its pages would count as memory of the process, all that were ever read.
        if not self._bytes:
            return self._like
        data, done = bytearray(self._bytes), 0
        while done < len(data):  # a read of more than 2 GiB is partial
            read = os.preadv(self._file.fileno(), [memoryview(data)[done:]], client * self._bytes + done)
            if not read:
                raise FedobpError(
                    f"the temporary file of client {client}'s state was cut: leave it alone, and run again"
                )
            done += read
        return torch.frombuffer(data, dtype=self._like.dtype).reshape(self._like.shape).to(self._like.device)

    def write(self, client: int, value: Tensor) -> None:
        data = memoryview(value.detach().cpu().contiguous().numpy().tobytes())
        done = 0
        try:
            while done < len(data):  # a write to a nearly full disk, or of more than 2 GiB, may be partial
                done += os.pwrite(self._file.fileno(), data[done:], client * self._bytes + done)
        except OSError as error:
            raise _no_space(f"client {client}'s state", error) from error


def _no_space(what: str, error: OSError) -> TryAgain:
    return TryAgain(
        f"cannot keep {what} in a temporary file ({error.strerror or error}): free some space, set TMPDIR to a folder "
        f"on a larger disk, or allow more memory with --store-memory"
    )


class Store:
    """Client records by id. Every record has the fields, shapes and types of the start record."""

    def __init__(self, start: Tensors, clients: int, budget: Budget) -> None:
        self._start, self._clients, self._budget = start, clients, budget
        self._kept: dict[int, Tensors] = {}
        self._spilled: set[int] = set()
        self._fields: dict[str, _InFile] = {}
        self._size = sum(value.numel() * value.element_size() for value in start.values())
        self.changed: set[int] = set()  # clients that were written since a checkpoint emptied this

    def __contains__(self, client: int) -> bool:
        return client in self._kept or client in self._spilled

    def __getitem__(self, client: int) -> Tensors:
        if client in self._spilled:
            return {name: field.read(client) for name, field in self._fields.items()}
        return self._kept.get(client, self._start)

    def __setitem__(self, client: int, record: Tensors) -> None:
        """Write one record, which comes from a file."""
        alike = all(
            record[name].shape == value.shape and record[name].dtype == value.dtype
            for name, value in self._start.items()
        )
        if not alike or not 0 <= client < self._clients:
            raise ValueError(f"client {client} has a record of another form")
        self.scatter([client], {name: record[name][None] for name in self._start})

    def gather(self, clients: Iterable[int]) -> Tensors:
        """Return the records of several clients, stacked."""
        records = [self[client] for client in clients]
        return {name: torch.stack([record[name] for record in records]) for name in self._start}

    def scatter(self, clients: Iterable[int], records: Tensors) -> None:
        """Write stacked records back. They are copied: a view of a stack would keep the whole stack in memory."""
        here, clients = [], list(clients)
        self.changed.update(clients)
        for position, client in enumerate(clients):
            if client in self._kept or (client not in self._spilled and self._budget.take(self._size)):
                here.append((position, client))
            else:
                self._spill(client, {name: records[name][position] for name in self._start})
        if not here:
            return
        copies: dict[int, Tensors] = {client: {} for _, client in here}
        for name in self._start:
            values = [records[name][position] for position, _ in here]
            fresh = [torch.empty_like(value) for value in values]
            torch._foreach_copy_(fresh, values)  # one kernel launch, instead of one for each `clone`
            for (_, client), value in zip(here, fresh, strict=True):
                copies[client][name] = value
        self._kept |= copies

    def reset(self, clients: Iterable[int]) -> None:
        """Give clients the start record again."""
        for client in clients:
            self._kept.pop(client, None)
            self._spilled.discard(client)
            self.changed.add(client)

    def _spill(self, client: int, record: Tensors) -> None:
        """Write the record of a client that does not fit in memory."""
        self._spilled.add(client)
        if not self._fields:
            self._fields = {name: _InFile(value, self._clients) for name, value in self._start.items()}
        for name, field in self._fields.items():
            field.write(client, record[name])
