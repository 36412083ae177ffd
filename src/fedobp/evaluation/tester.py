"""Tests clients' models on their samples, and counts what accuracies and other metrics come from."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from torch import Tensor

from fedobp.data import FederatedData, Split
from fedobp.data.free_memory import require_free_memory
from fedobp.engine import Engine, PoolJob
from fedobp.errors import FedobpError
from fedobp.evaluation.metrics import ClientCounts, count
from fedobp.evaluation.scoring import needs_logits
from fedobp.options import MetricName
from fedobp.records import Tensors, take

_LOGITS = 1 << 24  # of all clients, that are held at once
_MOST_CLASSES = 1_000  # of a confusion matrix
_MODELS = 3  # of a client that trains, whose scores are held at once: served, last and fine-tuned
_MODELS_OF_NEW = 5  # served, unlabelled, visited once and twice, last


class ClientTester:
    """Counts what clients' models get right; with `metrics`, also the sums of other metrics."""

    def __init__(
        self, engine: Engine, data: FederatedData, metrics: Sequence[MetricName] = (), tested: Sequence[int] = ()
    ) -> None:
        """Test clients of a federation; `tested` are all that an evaluation tests."""
        self._engine, self._data, self._metrics = engine, data, metrics
        if "confusion" in metrics and data.classes > _MOST_CLASSES:
            raise FedobpError(
                f"a confusion matrix of {data.classes:,} classes is too large, at most {_MOST_CLASSES:,} are shown: "
                "leave confusion out of --metrics"
            )
        if "auc" in metrics:  # in float64
            models = {client: _MODELS if client < data.trainers else _MODELS_OF_NEW for client in tested}
            rows = sum(models[client] * data.size(client, "test") + data.size(client, "val") for client in tested)
            size = 8 * data.classes * rows * prod(data.y.shape[1:])
            require_free_memory("--metrics auc, which compares the scores of all clients,", size)

    def __call__(
        self, job: PoolJob, theta: Tensor, split: Split = "test", scratch: Tensors | None = None
    ) -> list[ClientCounts]:
        """Test a cohort's models, each on its client's samples."""
        labels, ids = self._engine.predict(job, theta, split, scratch), job.ctx.cohort.tolist()
        targets, label_counts = job.data.targets_of(ids, split), job.data.counts_of(job.ctx.cohort).cpu()
        if not needs_logits(self._metrics):
            return [count(*one, self._metrics) for one in zip(labels, targets, label_counts, strict=True)]
        given = zip(labels, targets, label_counts, self.logits(job, theta, split, scratch), strict=True)
        return [count(predicted, y, known, self._metrics, rows) for predicted, y, known, rows in given]

    def logits(self, job: PoolJob, theta: Tensor, split: Split, scratch: Tensors | None = None) -> Iterator[Tensor]:
        """Yield the logits of each client's samples on the CPU; those of a few clients are computed at once."""
        for part in self._parts([job.data.size(client, split) for client in job.ctx.cohort.tolist()]):
            some = replace(job, ctx=replace(job.ctx, cohort=job.ctx.cohort[part]))
            yield from self._engine.logits(some, theta[part], split, take(scratch, part) if scratch else None)

    def _parts(self, sizes: Sequence[int]) -> Iterator[slice]:
        """Divide a cohort, so that the logits of a part fit; an engine pads them to the longest client's."""
        start = longest = 0
        logits = self._data.classes * prod(self._data.y.shape[1:])  # of a sample
        for at, size in enumerate(sizes):
            longest = max(longest, size)
            if at > start and (at + 1 - start) * longest * logits > _LOGITS:
                yield slice(start, at)
                start, longest = at, size
        yield slice(start, len(sizes))
