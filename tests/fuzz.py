"""Read mutants of files and messages, a million of them: each must give a value or one sentence.

    python tests/fuzz.py --inputs 1000000
    python tests/fuzz.py --reader csv --inputs 10000 --seed 3
    python tests/fuzz.py --reader csv --seed 3 --only 4711

Inputs are divided among processes. If one crashes, hangs or runs out of memory, its input is reported, and another
process goes on after it. Ctrl-C prints what was read so far.
"""

import argparse
import faulthandler
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded
sys.path.insert(0, str(Path(__file__).parent))

from fuzzing.campaign import Fault, Tally, campaign, shares
from fuzzing.readers import READERS

MOST_SECONDS = 20  # of CPU time, for one input
JOB = 25_000  # inputs of a process
SAID_AFTER = 100  # inputs


@dataclass
class Job:
    """Inputs of a reader by number, and the process that reads them."""

    name: str
    numbers: range
    process: ForkProcess | None = None
    place: Path = Path()  # of the number that is being read: the process may end at any moment
    done: Tally = field(default_factory=Tally)  # as the process told last
    slowest: float = 0.0


@dataclass
class Row:
    """What became of a reader's inputs, over all processes."""

    tally: Tally = field(default_factory=Tally)
    slowest: float = 0.0

    def add(self, tally: Tally, slowest: float) -> None:
        own = self.tally
        for name in ("inputs", "accepted", "memory"):
            setattr(own, name, getattr(own, name) + getattr(tally, name))
        own.peak, self.slowest = max(own.peak, tally.peak), max(self.slowest, slowest)

    def cells(self) -> tuple[str, ...]:
        tally = self.tally
        counts = (tally.inputs, tally.accepted, tally.inputs - tally.accepted, tally.memory)
        return (*(f"{count:,}" for count in counts), f"{self.slowest:.2f}", f"{tally.peak / 2**20:.0f}")


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)  # noqa: T201


def read_inputs(job: Job, seed: int, out: Connection) -> None:
    """Read a job's inputs, in a process of its own, and tell what became of them."""
    faulthandler.enable()
    place = os.open(job.place, os.O_RDWR | os.O_CREAT)
    with suppress(KeyboardInterrupt), campaign(job.name, seed) as one:
        slowest = 0.0
        for done, number in enumerate(job.numbers, 1):
            os.pwrite(place, b"%020d" % number, 0)
            changed = one.input(number)
            started = time.process_time()
            # The system ends a process that takes longer, also inside of a library.
            resource.setrlimit(resource.RLIMIT_CPU, (int(started) + MOST_SECONDS + 1, resource.RLIM_INFINITY))
            try:
                one.check(number, changed)
            except Fault as fault:
                causes = traceback.format_exception(fault.__cause__)[-6:] if fault.__cause__ else []
                out.send(("fault", f"{job.name} {number}: {fault}\n{''.join(causes)}"))
            slowest = max(slowest, time.process_time() - started)
            if done % SAID_AFTER == 0 or done == len(job.numbers):
                out.send(("done", one.tally, slowest))
        one.check_surroundings()


def run_all(counts: dict[str, int], seed: int, processes: int) -> int:
    """Read all inputs, some processes at a time; print a table, and return how many faults there were."""
    context = multiprocessing.get_context("fork")
    jobs = [Job(name, range(at, min(at + JOB, count))) for name, count in counts.items() for at in range(0, count, JOB)]
    jobs.sort(key=lambda job: job.numbers.start)
    rows, faults, total, done = {name: Row() for name in counts}, 0, sum(counts.values()), 0
    running: dict[Connection, Job] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as places, suppress(KeyboardInterrupt):
        while jobs or running:
            while jobs and len(running) < processes:
                job, (receive, send) = jobs.pop(0), context.Pipe(duplex=False)
                job.place = Path(places) / f"{job.name}-{job.numbers.start}"
                job.process = context.Process(target=read_inputs, args=(job, seed, send))
                job.process.start()
                send.close()
                running[receive] = job
            for receive in wait(list(running)):
                job = running[receive]
                try:
                    kind, *values = receive.recv()
                except EOFError:
                    del running[receive]
                    rows[job.name].add(job.done, job.slowest)
                    faults += _ended(job, jobs)
                    continue
                if kind == "fault":
                    faults += 1
                    say(f"\n{values[0]}")
                else:
                    done += values[0].inputs - job.done.inputs
                    job.done, job.slowest = values
                    say(f"\r{done:,} of {total:,}, {time.monotonic() - started:,.0f} s, {job.name}".ljust(60), end="")
    for job in running.values():  # interrupted: what was read so far counts
        rows[job.name].add(job.done, job.slowest)
        assert job.process is not None
        job.process.join()
    say("\n\n| reader | inputs | accepted | refused | for want of memory | slowest, s | most memory, MiB |")
    say(f"|---|{'---:|' * 6}")
    for name, row in rows.items():
        say(f"| {' | '.join((name, *row.cells()))} |")
    read = sum(row.tally.inputs for row in rows.values())
    say(f"\n{read:,} inputs, {faults} faults, {time.monotonic() - started:,.0f} s")
    return faults


def _ended(job: Job, jobs: list[Job]) -> int:
    """Return 1 if a process has not ended as it must; what it had left to read becomes another job."""
    assert job.process is not None
    job.process.join()
    if not job.process.exitcode:
        return 0
    number = int(job.place.read_text() or -1) if job.place.exists() else -1
    say(f"\n{job.name} {number}: its process ended with {job.process.exitcode} (-11: a crash, -24: it took too long)")
    if job.numbers.start <= number < job.numbers.stop - 1:
        jobs.insert(0, Job(job.name, range(number + 1, job.numbers.stop)))
    return 1


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20_000, help="how many, over all readers (default: 20,000)")
    parser.add_argument("--reader", choices=list(READERS), help="only this one")
    parser.add_argument("--seed", type=int, default=1, help="another seed makes other inputs (default: 1)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only this input of a reader, in this process")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="(default: one a processor)")
    given = parser.parse_args()
    names = [given.reader] if given.reader else list(READERS)
    if given.only is None:
        return 1 if run_all(shares(given.inputs, names), given.seed, given.processes) else 0
    if not given.reader:
        parser.error("--only needs --reader")
    with campaign(given.reader, given.seed) as one:
        one.run(given.only)
    say(f"As it must be: the input was {'accepted' if one.tally.accepted else 'refused'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
