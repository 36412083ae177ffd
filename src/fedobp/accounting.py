"""What rounds cost: bytes, samples processed and losses, as numbers that a device may still be computing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedobp.engine import ClientJob, diverged
from fedobp.method import CohortUpdate, Method, RoundContext
from fedobp.records import Record
from fedobp.transfer import AsyncCopy
from fedobp.wire import Payload


@dataclass(frozen=True)
class _Cost:
    """What one cohort cost."""

    ctx: RoundContext
    hparams: Mapping[str, float]
    loss: AsyncCopy
    finite: AsyncCopy
    down: Payload
    up: Payload


class Accounting:
    """The costs of a run, cohort by cohort; a round is settled when its numbers have arrived."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._round: list[_Cost] = []
        self._pending: list[list[_Cost]] = []
        self.bytes_down = self.bytes_up = 0  # of the rounds that are settled
        self.processed = self.samples = 0  # that went through models, and that there were

    def add(self, job: ClientJob, download: Record, update: CohortUpdate) -> None:
        """Add what a cohort cost; this does not wait for a device."""
        arriving = AsyncCopy(update.loss), AsyncCopy(update.finite)
        self._round.append(_Cost(job.ctx, job.hparams, *arriving, Payload(download), Payload(update.upload)))
        self.processed += update.processed
        self.samples += update.samples

    def end_round(self) -> None:
        """Close the round: what is added next belongs to another one."""
        self._pending.append(self._round)
        self._round = []

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
        return line


def _line(costs: Sequence[_Cost], method: Method) -> dict[str, Any]:
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
