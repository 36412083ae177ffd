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
_MODELS = 3  # of a client, whose scores are held at once: served, last and fine-tuned


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
            rows = sum(_MODELS * data.size(client, "test") + data.size(client, "val") for client in tested)
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
        found: list[ClientCounts] = []
        for part in self._parts(targets):
            some = replace(job, ctx=replace(job.ctx, cohort=job.ctx.cohort[part]))
            logits = self._engine.logits(some, theta[part], split, take(scratch, part) if scratch else None)
            given = zip(labels[part], targets[part], label_counts[part], logits, strict=True)
            found += [count(predicted, y, known, self._metrics, rows) for predicted, y, known, rows in given]
        return found

    def _parts(self, targets: Sequence[Tensor]) -> Iterator[slice]:
        """Divide a cohort, so that the logits of a part fit; an engine pads them to the longest client's."""
        start = longest = 0
        for at, one in enumerate(targets):
            longest = max(longest, one.numel())
            if at > start and (at + 1 - start) * longest * self._data.classes > _LOGITS:
                yield slice(start, at)
                start, longest = at, one.numel()
        yield slice(start, len(targets))
