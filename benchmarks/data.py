"""Time and memory of data: opening CIFAR10, partitioning 60,000 samples over 1,000 clients, and EMNIST's peak memory.

    python benchmarks/data.py

All data is synthetic, in the official formats and sizes, so nothing is downloaded; it needs 2 GB of disk.
"""

import gzip
import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from serial import median_seconds

from fedobp import Config, Federation
from fedobp.data import REGISTRY, fetch, load, partition
from fedobp.data.sources import SOURCES

EMNIST_TRAIN = 697_932
EMNIST_BYTES = REGISTRY["emnist"].samples * 28 * 28


def time_opening(folder: Path) -> None:
    """Time the opening of CIFAR10 from its npz file."""
    images = np.random.default_rng(0).integers(0, 256, (60_000, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "cifar10.npz", x=images, y=np.arange(60_000) % 10, n_train=50_000)
    del images
    taken = median_seconds(lambda: load("cifar10", folder), repeats=20)
    print(f"open CIFAR10: {taken * 1e3:.1f} ms (aim: below 50)")


def time_partitioning() -> None:
    """Time the partition of 60,000 samples over 1,000 clients."""
    y = np.arange(60_000) % 10
    for kind in ("iid", "dirichlet-equal"):
        taken = median_seconds(lambda kind=kind: partition(y, 1_000, kind=kind))  # type: ignore[misc]
        print(f"partition 60,000 samples over 1,000 clients, {kind}: {taken:.2f} s (aim: below 1)")


def make_emnist(path: Path) -> None:
    """Write a file like EMNIST's, with as many samples and as many non-zero pixels."""
    random = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for part, count in (("train", EMNIST_TRAIN), ("test", REGISTRY["emnist"].samples - EMNIST_TRAIN)):
            name = f"gzip/emnist-byclass-{part}"
            with archive.open(f"{name}-images-idx3-ubyte.gz", "w") as member, gzip.open(member, "wb", 1) as images:
                images.write(bytes((0, 0, 8, 3)) + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28)))
                for begun in range(0, count, 10_000):
                    strokes = np.zeros((min(10_000, count - begun), 28, 28), np.uint8)
                    strokes[:, 6:22, 8:20] = random.integers(0, 256, (len(strokes), 16, 12), dtype=np.uint8)
                    images.write(strokes.tobytes())
            with archive.open(f"{name}-labels-idx1-ubyte.gz", "w") as member, gzip.open(member, "wb", 1) as labels:
                labels.write(bytes((0, 0, 8, 1)) + count.to_bytes(4, "big"))
                labels.write(random.integers(0, 62, count, dtype=np.uint8).tobytes())


def peak(step: str, folder: Path) -> int:
    """Run a step in a new process, and return its peak resident memory in bytes."""
    found = subprocess.run([sys.executable, __file__, step, str(folder)], check=True, capture_output=True, text=True)
    return int(found.stdout)


def emnist_step(step: str, folder: Path) -> None:
    """Run a step in this process and print its peak memory: nothing, fetch EMNIST, or partition it over 100 clients."""
    if step == "fetch":
        content = folder / "downloads" / "emnist" / "gzip.zip"
        with content.open("rb") as file:
            digest = hashlib.file_digest(file, "md5").hexdigest()
        official = replace(SOURCES["emnist"].files[0], checksum=f"md5:{digest}", size=content.stat().st_size)
        SOURCES["emnist"] = replace(SOURCES["emnist"], files=(official,))
        fetch(["emnist"], folder)
    elif step == "partition":
        data = Federation(Config(dataset="emnist", data_dir=str(folder), clients=100, alpha=0.1, device="cpu")).data
        assert sum(len(data.inputs(client, "train")) for client in range(100)) > 600_000  # every image has been read
    status = Path("/proc/self/status").read_text()
    print(1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")))


def emnist(folder: Path) -> None:
    """Measure fetching EMNIST from a local file, and partitioning it."""
    (folder / "downloads" / "emnist").mkdir(parents=True)
    make_emnist(folder / "downloads" / "emnist" / "gzip.zip")
    print(f"a process with fedobp loaded: {peak('nothing', folder) / 1e6:,.0f} MB")
    for step, words in (
        ("fetch", "fetch EMNIST"),
        ("partition", "partition EMNIST over 100 clients and read every image"),
    ):
        begun = time.perf_counter()
        most = peak(step, folder)
        took = time.perf_counter() - begun
        share = f"{most / EMNIST_BYTES:.2f} times its {EMNIST_BYTES / 1e6:,.0f} MB (aim: below 2)"
        print(f"{words}: {took:.0f} s, peak {most / 1e6:,.0f} MB, {share}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        emnist_step(sys.argv[1], Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as name:
            time_partitioning()
            time_opening(Path(name))
            emnist(Path(name))
