"""What rounds cost: bytes, samples processed and losses, as numbers that a device may still be computing."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedobp.engine import ClientJob, diverged
from fedobp.method import CohortUpdate, Method, RoundContext
from fedobp.records import Record
from fedobp.transfer import AsyncCopy
from fedobp.wire import Payload


@dataclass(frozen=True)
class Cost:
    """What one cohort's part of a round cost; the numbers of its tensors may still be on their way from a device."""

    ctx: RoundContext
    hparams: Mapping[str, float]
    loss: AsyncCopy
    finite: AsyncCopy
    down: Payload
    up: Payload
    processed: int  # samples that went through models
    samples: int  # training samples of the cohort


def cost_of(job: ClientJob, download: Record, update: CohortUpdate) -> Cost:
    """Return what a cohort cost, without waiting for a device."""
    copies = AsyncCopy(update.loss), AsyncCopy(update.finite)
    payloads = Payload(download), Payload(update.upload)
    return Cost(job.ctx, job.hparams, *copies, *payloads, update.processed, update.samples)


_TOTALS = ("bytes_down", "bytes_up", "processed", "samples")  # what a checkpoint holds


class Accounting:
    """The costs of a run; a round is settled when its numbers have arrived."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._pending: list[Sequence[Cost]] = []
        self.bytes_down = self.bytes_up = 0  # of the rounds that are settled
        self.processed = self.samples = 0  # samples that went through models, and training samples of the cohorts
        # How often each client has taken part in the rounds that are settled; None: an older checkpoint does not say.
        self.visits: Counter[int] | None = Counter()

    def add_round(self, costs: Sequence[Cost]) -> None:
        """Add a round, cohort by cohort."""
        self._pending.append(costs)
        self.processed += sum(cost.processed for cost in costs)
        self.samples += sum(cost.samples for cost in costs)

    def totals(self) -> dict[str, Any]:
        """Return the sums so far, which `restore` takes."""
        visits = None if self.visits is None else {str(client): count for client, count in self.visits.items()}
        return {**{name: getattr(self, name) for name in _TOTALS}, "visits": visits}

    def restore(self, totals: Mapping[str, Any]) -> None:
        """Go on from the sums of a checkpoint."""
        for name in _TOTALS:
            setattr(self, name, int(totals[name]))
        visits = totals.get("visits")
        self.visits = None if visits is None else Counter({int(one): int(count) for one, count in visits.items()})

    @property
    def pending(self) -> int:
        """How many rounds have ended and are not settled."""
        return len(self._pending)

    def settle(self) -> dict[str, Any]:
        """Wait for the numbers of the oldest pending round, and return them as a line of the log.

        A client whose weights or loss are no longer finite raises a user error.
        """
        costs = self._pending.pop(0)
        line = _line(costs, self._method)
        self.bytes_down += line["bytes_down"]
        self.bytes_up += line["bytes_up"]
        if self.visits is not None:
            self.visits.update(line["cohort"])
        return line


def _line(costs: Sequence[Cost], method: Method) -> dict[str, Any]:
    for cost in costs:
        finite = cost.finite.value()
        if not finite.all():
            raise diverged(cost.ctx, finite, cost.hparams, method)
    losses = [loss for cost in costs for loss in cost.loss.value().tolist() if not math.isnan(loss)]
    return {
        "round": costs[0].ctx.round,
        "cohort": [client for cost in costs for client in cost.ctx.cohort.tolist()],
        "loss": sum(losses) / len(losses) if losses else None,
        "bytes_down": sum(cost.down.bytes() for cost in costs),
        "bytes_up": sum(cost.up.bytes() for cost in costs),
    }
