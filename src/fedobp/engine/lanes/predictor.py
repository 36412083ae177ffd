"""Predictions of many clients' models at once, stack by stack."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

from fedobp.data import Split
from fedobp.engine.client_pool import PoolJob
from fedobp.engine.lanes.vectorised import Vectorised
from fedobp.engine.lanes.workers import Workers
from fedobp.engine.precision import autocast
from fedobp.engine.stack import Forward
from fedobp.models import Model
from fedobp.options import Precision
from fedobp.records import Tensors
from fedobp.transfer import to_device

if TYPE_CHECKING:
    from fedobp.engine.kernels.fused import Fused

_TEST_BATCH = 256


class Predictor:
    """Predicts the labels of clients' samples, and their logits, each client's with its own model."""

    def __init__(
        self,
        model: Model,
        precision: Precision,
        workers: Workers,
        forms: Mapping[str, Forward],
        functions: Vectorised,
        kernels: "Callable[[torch.device], Fused | None]",
    ) -> None:
        self._model, self._precision, self._workers = model, precision, workers
        self._forms, self._functions, self._kernels = forms, functions, kernels

    def predict(self, job: PoolJob, theta: Tensor, split: Split, scratch: Tensors | None = None) -> list[Tensor]:
        """Return the labels that each client's model predicts for its samples, on the CPU."""
        return self._test(job, theta, split, scratch, labels=True)

    def logits(self, job: PoolJob, theta: Tensor, split: Split, scratch: Tensors | None = None) -> list[Tensor]:
        """Return the logits of each client's samples, on the CPU; the fused kernels return labels alone."""
        return self._test(job, theta, split, scratch, labels=False)

    def _test(
        self, job: PoolJob, theta: Tensor, split: Split, scratch: Tensors | None, *, labels: bool
    ) -> list[Tensor]:
        """Return the labels or the logits of each client's samples."""
        data, clients, device = job.data, job.ctx.cohort, theta.device
        forward = self._forms[device.type]
        special = partial(job.predict, self._functions.model_on(device)) if job.predict and scratch else None
        plain = labels and special is None  # what the fused kernels do
        sizes = [data.size(client, split) for client in clients.tolist()]
        # Of every sample one label, or one of each position in it.
        shape, dtype = ((), torch.int64) if labels else ((self._model.classes,), theta.dtype)
        found = torch.zeros(len(sizes), max(sizes), *data.y.shape[1:], *shape, dtype=dtype, device=device)

        @torch.no_grad()
        def test(rows: Sequence[int]) -> None:
            chosen = torch.tensor(rows)
            fused, longest = self._kernels(device) if plain else None, sizes[rows[0]]
            if fused and longest:
                positions = torch.arange(longest, device=device).expand(len(rows), -1)
                ids = data.ids(clients[chosen], positions, split)
                there = to_device(chosen, device)
                found[there, :longest] = fused.labels(theta[there], ids, [sizes[row] for row in rows], data)
                return
            there = chosen.to(device)
            mine = {name: values[there] for name, values in (scratch or {}).items()}
            tensors = self._model.layout.views(theta[there])
            for start in range(0, longest, _TEST_BATCH):
                width = min(_TEST_BATCH, longest - start)
                lanes = sum(sizes[row] > start for row in rows)
                positions = torch.arange(start, start + width, device=device).expand(lanes, -1)
                ids = data.ids(clients[chosen[:lanes]], positions, split)
                x = data.samples(ids.flatten()).unflatten(0, ids.shape)
                if special:
                    with autocast(self._precision, x):
                        logits = vmap(special)({name: values[:lanes] for name, values in mine.items()}, x)
                else:
                    logits = forward({name: tensor[:lanes] for name, tensor in tensors.items()}, x)
                found[there[:lanes], start : start + width] = logits.argmax(dim=-1) if labels else logits.to(dtype)

        longest_first = sorted(range(len(sizes)), key=lambda row: -sizes[row])
        stacks = self._workers.stacks(longest_first, theta, _TEST_BATCH, plain=plain)
        self._workers.map(test, stacks, device)
        host = found.cpu()
        return [host[row, :size] for row, size in enumerate(sizes)]
