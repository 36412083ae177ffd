"""The bar of rounds, with a clock of the test's own."""

import io

from rich import progress as bars

from fedobp.cli import progress
from fedobp.launch import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_rounds_that_end_together_do_not_look_fast(monkeypatch):
    """Four runs whose rounds take 40 seconds are a tenth of a round a second, and never hundreds."""
    time, told, update = [0.0], [], bars.Progress.update

    def updated(self, task, **more):
        update(self, task, **more)
        told.append((more.get("speed"), self.tasks[0].completed))

    monkeypatch.setattr(progress, "monotonic", lambda: time[0])
    monkeypatch.setattr(progress, "_bars_disabled", lambda: False)
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr(bars.Progress, "update", updated)
    with progress.round_progress(4) as advance:
        for round in range(1, 11):
            time[0] += 40.0
            for _ in range(4):
                time[0] += 0.001
                advance("4 runs", Progress("fedavg", round, 10, None))
    assert {speed for speed, _ in told[:-1]} == {"", "0.1 rounds/s"}
    assert told[-1] == (None, 40)
