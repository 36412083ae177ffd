"""Long runs: memory and open files stay as they are, and the metrics can be read at any moment."""

import gc
import json
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import fedobp
from fedobp import Config, Federation

CLIENTS = 12
Y = np.arange(240) % 3
X = np.random.default_rng(0).standard_normal((240, 8)).astype(np.float32) + Y[:, None]


def small(rounds, **settings):
    config = Config(rounds=rounds, participation=0.25, epochs=1, model="mlp", **settings)
    return Federation.from_data(X, Y, client=np.arange(240) % CLIENTS, config=config)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def traced_bytes():
    """Memory that fedobp's own lines have allocated and not freed."""
    ours = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, str(Path(fedobp.__file__).parent / "*"))]
    )
    return sum(trace.size for trace in ours.traces)


class Lines:
    """The whole lines of a run's metrics so far: each is JSON, and the rounds follow one another."""

    def __init__(self, path: Path):
        self.path, self.read, self.count = path, 0, 0

    def look(self) -> int:
        """Check the lines that are new, and return how many there are in all."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.read)
                new = file.read()
            for line in new.splitlines()[: new.count(b"\n")]:  # the last one may be under way
                self.count += 1
                assert json.loads(line)["round"] == self.count
            self.read += new.rfind(b"\n") + 1
        return self.count


READING = threading.Lock()  # held where open files are counted: the reader's own is none of the run's


class Reader(threading.Thread):
    """Reads the metrics of a run over and over, as another program would."""

    def __init__(self, path: Path):
        super().__init__()
        self.lines, self.over, self.looks, self.error = Lines(path), threading.Event(), 0, None

    def run(self):
        try:
            while not self.over.wait(0.01):
                with READING:
                    self.lines.look()
                self.looks += 1
        except BaseException as error:
            self.error = error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()
        assert self.error is None, self.error


class Soak:
    """Looks at a run after some rounds; `look` returns a number that is compared between them."""

    def __init__(self, folder: Path, rounds, look):
        self.folder, self.rounds, self.look, self.lines = folder, rounds, look, Lines(folder / "metrics.jsonl")
        self.found, self.files, self.checkpoints, self.metadata = {}, {}, {}, {}

    def __call__(self, at):
        if at.round in self.rounds:
            assert self.lines.look() == at.round
            gc.collect()
            with READING:
                self.files[at.round] = open_files()
            sizes = {path.name: path.stat().st_size for path in (self.folder / "checkpoint").glob("*")}
            self.checkpoints[at.round] = len(sizes)
            self.metadata[at.round] = max(size for name, size in sizes.items() if name.startswith("server"))
            self.found[at.round] = self.look()

    def check(self):
        """Open files and checkpoints are bounded; a checkpoint grows by three numbers an evaluation, and no more."""
        first, *_, last = self.rounds
        assert set(self.files.values()) == {self.files[first]}
        # Two checkpoints, a file of clients for each client at most, and what is being written.
        assert max(self.checkpoints.values()) <= 2 + 2 * CLIENTS + 2
        assert self.metadata[last] - self.metadata[first] <= 64 * (last - first)


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_hundreds_of_rounds_leave_nothing_behind(engine, tmp_path):
    """Every round is evaluated: what is kept of an evaluation must not grow with clients."""
    soak = Soak(tmp_path / "run", (45, 75, 105, 135, 165), lambda: (len(gc.get_objects()), traced_bytes()))
    federation = small(170, eval_every=1, engine=engine, sampling="published")
    tracemalloc.start()
    try:
        with Reader(tmp_path / "run" / "metrics.jsonl"):
            federation.run("fedobp", out=tmp_path / "run", progress=soak, checkpoint_every=20)
    finally:
        tracemalloc.stop()
    soak.check()
    # What stays of each round shows between any two looks; what is loaded or kept for reuse, only between some.
    objects, size = (min(np.diff(numbers)) for numbers in zip(*soak.found.values(), strict=True))
    assert objects < 15  # fewer than one in two rounds
    assert size < 30 * 500  # bytes: of each round three numbers stay
    assert Lines(tmp_path / "run" / "metrics.jsonl").look() == 170


def test_many_runs_in_one_process_leave_nothing_open(tmp_path):
    """Locks of folders, temporary files of clients' state, checkpoints."""
    federation, found = small(3, store_memory=1e-9), []
    for number in range(12):
        federation.run("fedobp", out=tmp_path / str(number), checkpoint_every=1)
        gc.collect()
        found.append((open_files(), threading.active_count(), len(gc.get_objects())))
    files, threads, objects = zip(*found[2:], strict=True)
    assert len(set(files)) == len(set(threads)) == 1
    assert objects[-1] - objects[0] < 100


@pytest.mark.slow
def test_ten_thousand_rounds(tmp_path):
    """After 1,000 rounds of warm-up, memory grows by less than 2 MiB in 9,000 rounds."""
    soak = Soak(tmp_path / "run", range(1000, 10_001, 500), resident_mib)
    with Reader(tmp_path / "run" / "metrics.jsonl") as reader:
        small(10_000, eval_every=10).run("fedobp", out=tmp_path / "run", progress=soak, checkpoint_every=100)
    soak.check()
    print(f"MiB {soak.found}, open files {soak.files[1000]}, looks at the metrics {reader.looks}")  # noqa: T201
    assert max(soak.found.values()) - soak.found[1000] < 2
