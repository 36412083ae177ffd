"""The serial engine: one client after another, an ordinary module and `torch.optim.SGD`. Slow, obvious, the oracle."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedobp.algorithms import Client, Moment, Program, Record, Sparse, Tensors, Train
from fedobp.data import FederatedData, Split
from fedobp.engine.interface import Trained
from fedobp.engine.schedule import batches
from fedobp.engine.store import Store
from fedobp.errors import FedobpError
from fedobp.keys import Purpose, fold
from fedobp.models import Model

_TEST_BATCH = 1024
_SMALL = 200_000  # parameters


@contextmanager
def steady(model: Model) -> Iterator[None]:
    """Compute so that the same input gives the same bits, and so that small models do not wait for threads.

    A small model's step is over before a second thread is awake: alone on the machine that thread gains next to
    nothing, and beside other programs it costs several times the step.
    """
    threads = torch.get_num_threads()
    if model.layout.size < _SMALL:
        torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_num_threads(threads)


class Serial:
    """Runs a cohort in its sampled order; holds every client's data and own state."""

    def __init__(self, model: Model, data: FederatedData, own: Tensors, theta: Tensor, seed: int, batch: int) -> None:
        self._model, self._data, self._seed, self._batch = model, data, seed, batch
        self._module = model.module(theta)
        self._own = Store(own)
        self._last: dict[int, Tensor] = {}

    def train(self, now: Moment, program: Program, down: Record, hp: Tensors) -> Trained:
        """Run a local program on every client of the cohort, and keep what each remembers."""
        uploads: list[Record] = []
        losses: list[float | None] = []
        cohort = now.cohort.tolist()
        for position, client in enumerate(cohort):
            done, loss = self._run(now, client, Purpose.TRAIN, program, _at(down, position), hp)
            self._own[client] = done.own
            self._last[client] = done.theta
            uploads.append(done.up)
            losses.append(loss)
        n = torch.tensor([self._data.size(client, "train") for client in cohort], device=hp["lr"].device)
        return Trained(_stack(uploads), n, losses)

    def serve(self, now: Moment, program: Program, down: Record, hp: Tensors) -> Tensors:
        """Run a serving program on every client of the cohort; what it remembers is dropped."""
        work = [
            self._run(now, client, Purpose.SERVE, program, _at(down, position), hp)[0].work
            for position, client in enumerate(now.cohort.tolist())
        ]
        nothing = torch.zeros_like(work[0]["theta"], dtype=torch.bool)
        return {
            "theta": torch.stack([one["theta"] for one in work]),
            "mine": torch.stack([one.get("mine", nothing) for one in work]),
        }

    def last(self, now: Moment, otherwise: Tensor) -> Tensor:
        """Return each client's last local model, and `otherwise` for a client that has never trained."""
        return torch.stack([self._last.get(client, otherwise) for client in now.cohort.tolist()])

    def predict(self, now: Moment, theta: Tensor, split: Split) -> list[Tensor]:
        """Return the labels that each client's model gives to its samples."""
        found = []
        self._module.eval()
        with torch.no_grad(), steady(self._model):
            for client, vector in zip(now.cohort.tolist(), theta, strict=True):
                self._model.load(self._module, vector)
                parts = self._data.inputs(client, split).split(_TEST_BATCH)
                found.append(torch.cat([self._module(part).argmax(dim=1) for part in parts]))
        return found

    def _run(
        self, now: Moment, client: int, purpose: Purpose, program: Program, down: Record, hp: Tensors
    ) -> tuple[Client, float | None]:
        """Run one client's program: this is also all that a remote node does."""
        state = Client(own=self._own[client], down=down, work={}, up={}, hp=hp)
        key = fold(self._seed, now.round, client, purpose)
        loss = None
        for phase, item in enumerate(program):
            if isinstance(item, Train):
                x, y = self._data.inputs(client, "train"), self._data.targets(client, "train")
                theta, loss = sgd(self._model, self._module, state, item, x, y, fold(key, phase), self._batch)
                if not (math.isfinite(loss or 0.0) and bool(theta.isfinite().all())):
                    raise FedobpError(
                        f"round {now.round}, client {client}: the loss or the weights are no longer finite; use a "
                        f"smaller --lr (it is {float(hp['lr']):g})"
                    )
                state = state.set(theta=theta)
            else:
                state = item(self._model, state)
        return state, loss


def sgd(
    model: Model, module: nn.Module, client: Client, phase: Train, x: Tensor, y: Tensor, key: Tensor, batch: int
) -> tuple[Tensor, float | None]:
    """Eq. 10: train the client's theta in an ordinary module; return it with the mean loss over its batches."""
    model.load(module, client.theta)
    module.train()
    lr, momentum, weight_decay = (float(client.hp[name]) for name in ("lr", "momentum", "weight_decay"))
    optimizer = torch.optim.SGD(module.parameters(), lr, momentum, weight_decay=weight_decay)
    losses = []
    with steady(model):
        for epoch in range(phase.epochs):
            for picked in batches(fold(key, epoch), len(y), batch, y.device):
                optimizer.zero_grad()
                loss = functional.cross_entropy(module(x[picked]), y[picked])
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
    return model.read(module), float(torch.stack(losses).mean()) if losses else None


def _at(record: Record, position: int) -> Record:
    """Return one client's part of a cohort's record, with NaN in what does not cross the wire."""
    return {
        name: _poisoned(Sparse(value.values[position], value.keep[position]))
        if isinstance(value, Sparse)
        else value[position]
        for name, value in record.items()
    }


def _poisoned(value: Sparse) -> Sparse:
    return Sparse(value.values.masked_fill(~value.keep, math.nan), value.keep)


def _stack(records: list[Record]) -> Record:
    """Return clients' records as the cohort's, with NaN in what does not cross the wire."""
    stacked: Record = {}
    for name, first in records[0].items():
        values = [record[name] for record in records]
        if isinstance(first, Sparse):
            pairs = [_poisoned(value) for value in values if isinstance(value, Sparse)]
            stacked[name] = Sparse(torch.stack([p.values for p in pairs]), torch.stack([p.keep for p in pairs]))
        else:
            stacked[name] = torch.stack([value for value in values if isinstance(value, Tensor)])
    return stacked
