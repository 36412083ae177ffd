"""Everything that reads a file or a message: valid files, made by the library, and how they are read."""

import gzip
import io
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from official_files import official
from PIL import Image

from fedobp import Config, Federation, load_results
from fedobp.checkpoint import Checkpoints, PastRun, note_failure, usable_rounds
from fedobp.config import read_config
from fedobp.data import describe, import_dataset, load, load_partition, partition, partition_file, save_partition
from fedobp.data.sources import SOURCES
from fedobp.engine import Budget
from fedobp.errors import FedobpError
from fedobp.files import with_checksum
from fedobp.grouping import batch_size_for, engine_for
from fedobp.launch import StopTraining, simulate
from fedobp.records import Sparse
from fedobp.report.page import report_html
from fedobp.saved_runs import find_runs
from fedobp.storage import load_state_dict
from fedobp.storage.tensor_file import read_tensors
from fedobp.sweep_file import read_sweep_file
from fedobp.sweep_file import to_toml as sweep_toml
from fedobp.sweep_plan import read_failure
from fedobp.wire import decode, decode_expected, encode

from .mutators import sealed, tensors_of

Files = dict[str, bytes]  # by path in the reader's folder


@dataclass
class Subject:
    """What is fuzzed: valid files in a folder, and a function that reads them."""

    folder: Path
    files: Files
    read: Callable[[], object]
    reseal: Callable[[Files], Files] | None = None  # other files with checksums that fit to changed ones
    extra: tuple[bytes, ...] = ()  # more contents to begin with

    def write(self, files: Files) -> None:
        for name, content in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)


@dataclass(frozen=True)
class Reader:
    """A reader, and its share of all inputs: what is quick to read, or written by others, has more."""

    prepare: Callable[[Path], Subject]
    share: int


SMALL = {
    "clients": 3, "rounds": 4, "epochs": 1, "participation": 1.0, "model": "mlp", "eval_every": 2, "save_models": "all",
}  # fmt: skip


def small_data(folder: Path) -> Path:
    """A dataset of 40 rows with three features."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(3)
    np.savez(folder / "small.npz", x=random.random((40, 3)).astype(np.float32), y=np.arange(40) % 3)
    return folder


def small_config(folder: Path, **settings: Any) -> Config:
    return Config(**{**SMALL, "dataset": "small", "data_dir": str(small_data(folder / "data")), **settings})


def files_in(folder: Path, *names: str) -> Files:
    return {name: (folder / name).read_bytes() for name in names}


# Settings.


def config(folder: Path) -> Subject:
    text = Config(method="fedobp", options={"q": 0.5}, partition_options={}, metrics="f1,auc").to_toml()
    hand = 'dataset = "mnist"\nclients=10\nlr = 1e-2\n\n[options]\nmode = "published"\n"odd key" = 3 # comment\n'
    path = folder / "config.toml"
    return Subject(folder, {"config.toml": text.encode()}, lambda: Config(**read_config(path)), extra=(hand.encode(),))


def sweep(folder: Path) -> Subject:
    runs = {f"fedavg-seed{seed}": Config(seed=seed) for seed in (1, 2)}
    planned = sweep_toml(runs, [list(runs)], 1.5).encode()
    grid = b"""
[settings]
dataset = "digits"
seed = [1, 2, 3]
alpha = [0.1, 0.5]
[methods.fedavg]
[methods.fedobp]
q = [0.1, 0.9]
[[runs]]
name = "mine"
method = "local"
seed = 4
alpha = 0.3
[[runs]]
method = "fedper"
"""
    path = folder / "sweep.toml"

    def read() -> object:
        found = read_sweep_file(path)
        return [Config(**settings) for settings in list(found.runs.values())[:3]]

    return Subject(folder, {"sweep.toml": grid}, read, extra=(planned,))


# What runs write.


def run_folder(folder: Path) -> Subject:
    made = small_config(folder, metrics="f1,confusion", val_ratio=0.2)
    Federation(made).run(out=folder / "run", checkpoint_every=0)
    names = [f"run/{name}" for name in ("result.json", "config.toml", "clients.csv", "metrics.jsonl", "timings.jsonl")]

    def read() -> object:
        [run] = find_runs([folder / "run"])
        return run.history, run.metrics(), run.timings(), run.clients(), load_results(folder / "run")

    files = files_in(folder, *names)

    def reseal(changed: Files) -> Files:
        """Name the checksums of changed files in result.json, and its own."""
        contents = {**files, **changed}
        result = json.loads(contents["run/result.json"])
        result["files"] = {name: sha256(contents[f"run/{name}"]).hexdigest() for name in result["files"]}
        del result["sha256"]
        return {"run/result.json": json.dumps(with_checksum(result)).encode()}

    return Subject(folder, files, read, reseal)


def report(folder: Path) -> Subject:
    """The HTML report of a run, from the same files."""
    made = run_folder(folder)
    return Subject(folder, made.files, lambda: report_html(find_runs([folder / "run"])), made.reseal)


def models(folder: Path) -> Subject:
    Federation(small_config(folder, method="fedper")).run(out=folder / "run", checkpoint_every=0)
    names = [f"run/models/{name}.safetensors" for name in ("global", "clients")]

    def read() -> object:
        return load_state_dict(folder / "run"), load_state_dict(folder / "run", 1), read_tensors(folder / names[1])

    def reseal(changed: Files) -> Files:
        """Name the checksum of a changed global model in the file of clients."""
        if names[0] not in changed:
            return {}
        tensors, about = tensors_of(clients)
        return {
            names[1]: sealed(
                tensors, {**json.loads(about), "global": json.loads(tensors_of(changed[names[0]])[1])["sha256"]}
            )
        }

    files = files_in(folder, *names)
    clients = files[names[1]]
    return Subject(folder, files, read, reseal)


def checkpoint(folder: Path) -> Subject:
    made = Federation(small_config(folder, method="fedobp"))

    def stop(at: Any) -> None:
        if at.round == 3:
            raise StopTraining

    with suppress(StopTraining):
        made.run(out=folder / "run", progress=stop, checkpoint_every=1)
    shutil.rmtree(folder / "run" / "models", ignore_errors=True)
    plan = made.plan(made.config, made.method)
    engine = engine_for(plan.config, plan.model, batch_size_for(plan.config, [plan.data]))
    simulation = simulate(plan, engine, Budget())
    launch, writer = [plan.name], ThreadPoolExecutor(max_workers=1)  # which writes nothing here
    numbers = sorted(int(path.stem[7:]) for path in (folder / "run" / "checkpoint").glob("server-*"))
    names = [f"run/checkpoint/{path.name}" for path in sorted((folder / "run" / "checkpoint").iterdir())]
    files = files_in(folder, *names)
    server = f"run/checkpoint/server-{numbers[-1]}.safetensors"

    def read() -> object:
        subject.write(files if not (folder / server).exists() else {})
        rounds = usable_rounds(folder / "run", plan.config, plan.partition, launch)
        saved = Checkpoints(folder / "run", simulation.run, simulation.clients.stores, launch, writer)
        if rounds:
            saved.restore(rounds[0])
        return rounds

    def reseal(changed: Files) -> Files:
        """Name the checksum of a changed file of clients in the server's file."""
        [name] = changed
        if "clients-" not in name:
            return {}
        tensors, text = tensors_of(files[server])
        about = json.loads(text)
        about["files"][name.rpartition("-")[2].partition(".")[0]] = json.loads(tensors_of(changed[name])[1])["sha256"]
        return {server: sealed(tensors, about)}

    subject = Subject(folder, files, read, reseal)
    return subject


def failure(folder: Path) -> Subject:
    """Why a run failed, as checkpoints note it and as sweeps do."""
    made, sentence = Config(), "the loss of client 3 is not finite: use a smaller --lr"
    (folder / "run" / "checkpoint").mkdir(parents=True)
    note_failure(folder / "run", 3, FedobpError(sentence))
    noted = (folder / "run" / "checkpoint" / "failed.json").read_bytes()
    written = json.dumps({"method": "fedavg", "seed": 1, "error": sentence}).encode()

    def read() -> object:
        past = PastRun(folder / "run", made, "", [])
        for text in (str(past.outcome()) if past.is_over(3) else "", read_failure(folder / "failed.json", made).error):
            if not (len(text) <= 1000 and text.isprintable()):
                raise ValueError(f"no sentence: {text[:100]!r}")
        return past

    return Subject(folder, {"run/checkpoint/failed.json": noted, "failed.json": written}, read)


def partition_files(folder: Path) -> Subject:
    dataset = load("small", small_data(folder / "data"))
    shards = partition(dataset.y, 2, kind="concept", options={"groups": 2})
    shards[0] = replace(shards[0], change=replace(shards[0].change, blur=0.5, contrast=0.25, colour=1.0))
    save_partition(folder / "mine", dataset, shards, {"clients": 2, "holdout_clients": 0})

    def reseal(changed: Files) -> Files:
        """Name the hash of changed arrays in the json file."""
        metadata = json.loads({**files, **changed}["mine.json"])
        if "mine.npz" in changed:
            with np.load(io.BytesIO(changed["mine.npz"]), allow_pickle=False) as found:
                arrays = dict(found)
            metadata["hash"] = partition_file._content_hash(partition_file._fingerprint(dataset), arrays)
        del metadata["sha256"]
        return {"mine.json": json.dumps(with_checksum(metadata)).encode()}

    files = files_in(folder, "mine.npz", "mine.json")
    return Subject(folder, files, lambda: load_partition(folder / "mine", dataset), reseal)


def message(folder: Path) -> Subject:
    keep = torch.tensor([True, False, False, True, False] * 8)
    record = {
        "theta": torch.arange(6.0).reshape(2, 3),
        "few": Sparse(torch.where(keep, torch.arange(40.0), float("nan")), keep),
        "count": torch.tensor([3, 4]),
        "mask": torch.tensor([True, False]),
    }
    shapes = {
        name: tuple((value.values if isinstance(value, Sparse) else value).shape) for name, value in record.items()
    }
    wide = {"few": Sparse(record["few"].values, ~keep | keep.roll(1))}
    wide["few"].values.nan_to_num_(nan=1.0)
    path = folder / "message"
    return Subject(
        folder,
        {"message": encode(record)},
        lambda: decode(path.read_bytes(), shapes),
        extra=(encode({**record, **wide}),),
    )


def codes(folder: Path) -> Subject:
    """A compressed message: codes with their scales, in a zstd frame, sent in part and whole."""
    random = np.random.default_rng(5)
    values = torch.from_numpy(random.integers(-127, 128, 400).astype(np.int8)) * (torch.arange(400) % 3 == 0)
    keep = torch.arange(400) % 7 != 0
    record = {"theta": Sparse(values * keep, keep), "theta.scale": torch.ones(4), "base": values}
    whole = {**record, "base": torch.zeros(400, dtype=torch.int8)}
    path = folder / "message"
    read = lambda: decode_expected(path.read_bytes(), record)  # noqa: E731
    return Subject(folder, {"message": encode(record)}, read, extra=(encode(whole),))


def federation(folder: Path) -> Subject:
    """The settings of a federation on nodes."""
    from fedobp.flower.task import Inputs, Rules, make_settings, read_settings, write_settings

    tables = Inputs((3,), ("a", "b"), 1.0, (0.5, 1.0, 2.0), (1.0, 1.0, 3.0))
    images = Inputs((8, 8), (0, 1, 2), 255.0, (0.1,), (0.3,))
    made = [
        write_settings(make_settings(Config(**{**SMALL, "dataset": "mine", "alpha": 1.0}), inputs, Rules()))
        for inputs in (tables, images)
    ]
    path = folder / "federation.toml"
    return Subject(folder, {path.name: made[0].encode()}, lambda: read_settings(path), extra=(made[1].encode(),))


# Data that users import.


def _dataset(folder: Path, name: str) -> object:
    """Return what is read of a dataset; its texts can be written."""
    found = load(name, folder)
    describe(name, folder)
    "".join(map(str, (*found.labels[:100], *found.client_names))).encode()
    return found


def npz(folder: Path) -> Subject:
    random = np.random.default_rng(4)
    labels = np.array(["cat", "dog"])[np.arange(12) % 2]
    images = {"x": random.integers(0, 255, (12, 4, 4, 3), dtype=np.uint8), "y": labels, "client": np.arange(12) % 3}
    tokens = {"tokens": random.integers(0, 9, (8, 5)), "vocabulary": np.int64(9)}
    table = {"x": random.random((12, 2)), "y": np.arange(12)[:, None] % 4, "n_train": np.int64(8)}
    contents = []
    for arrays in ({**images, "test": np.arange(12) > 8}, tokens, table):
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        contents.append(buffer.getvalue())
    return Subject(folder, {"mine.npz": contents[0]}, lambda: _dataset(folder, "mine"), extra=tuple(contents[1:]))


def _importing(folder: Path, source: str, **options: Any) -> Callable[[], object]:
    target = folder / "imported"

    def read() -> object:
        (target / "new.npz").unlink(missing_ok=True)
        import_dataset("new", folder / source, target, **options)
        return _dataset(target, "new")

    return read


def csv(folder: Path) -> Subject:
    plain = "age,sex,site,label\n" + "".join(f"{at * 1.5},{'mf'[at % 2]},s{at % 3},{at % 2}\n" for at in range(12))
    german = 'wert;"name; lang";label\n' + "".join(
        f'{at},5;"a""{at % 3}";{"janein"[at % 2 * 2 :]}\n' for at in range(8)
    )
    gaps = "a\tdate\tlabel\n1\t2020-01-02\tx\n?\t\ty\nnan\t10:30\tx\n"
    extra = (german.encode("utf-16"), german.encode("latin-1"), gaps.encode())
    return Subject(folder, {"t.csv": plain.encode()}, _importing(folder, "t.csv", missing="drop"), extra=extra)


def parquet(folder: Path) -> Subject:
    import pyarrow
    from pyarrow import parquet as files

    picture = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(picture, "png")
    numbers = {"a": list(range(20)), "b": ["x", "y", None, "x"] * 5, "c": [0.5] * 20, "label": ["u", "v"] * 10}
    images = {"image": [{"bytes": picture.getvalue(), "path": None}] * 4, "label": [0, 1] * 2}
    odd = {
        "when": pyarrow.array([1, 2, 3, 4], pyarrow.timestamp("ms")),
        "kind": pyarrow.array(["a", "b", "a", None]).dictionary_encode(),
        "list": pyarrow.array([[1], [2], [], None]),
        "money": pyarrow.array([Decimal("1.50"), None, Decimal(3), Decimal(4)]),
        "big": pyarrow.array(["a", "b", "c", "d"], pyarrow.large_string()),
        "label": [1, 2, 1, 2],
    }
    contents = []
    for columns, codec in ((numbers, "none"), (numbers, "snappy"), (images, "none"), (odd, "none"), (numbers, "gzip")):
        buffer = io.BytesIO()
        files.write_table(pyarrow.table(columns), buffer, compression=codec)
        contents.append(buffer.getvalue())
    return Subject(
        folder, {"t.parquet": contents[0]}, _importing(folder, "t.parquet", missing="drop"), extra=tuple(contents[1:])
    )


def hugging_face(folder: Path) -> Subject:
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"a": [1.0, 2.0, 3.0], "t": ["p", "q", "p"], "label": [0, 1, 0]})
    made = made.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    made.save_to_disk(folder / "saved")
    names = [f"saved/{path.name}" for path in sorted((folder / "saved").iterdir())]
    return Subject(folder, files_in(folder, *names), _importing(folder, "saved"))


def images(folder: Path) -> Subject:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    made = {}
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"):
        buffer = io.BytesIO()
        Image.fromarray(grey if kind != "webp" else np.stack([grey] * 3, -1)).save(buffer, kind)
        made[kind] = buffer.getvalue()
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(marker) (w) file closefile\n%%EOF\n"
    files = {"pets/a/1.png": made["png"], "pets/b/1.png": made["png"]}
    return Subject(folder, files, _importing(folder, "pets"), extra=(*made.values(), script))


# Official files of registered datasets.


def _registered(name: str) -> Callable[[Path], Subject]:
    def prepare(folder: Path) -> Subject:
        files = {f"{name}/{file}": _without_times(content) for file, content in official(name).files.items()}
        source = SOURCES[name]

        def read() -> object:
            SOURCES[name] = replace(source, installed=folder / name)  # as if a system package had installed them
            try:
                return load(name, folder / "data")
            finally:
                SOURCES[name] = source

        return Subject(folder, files, read)

    return prepare


def _without_times(content: bytes) -> bytes:
    """Remove the time of writing, so that the same numbers make the same mutants."""
    if content[:2] == b"\x1f\x8b":
        return gzip.compress(gzip.decompress(content), mtime=0)
    if content[:6] == b"MATLAB":
        return b"MATLAB 5.0 MAT-file".ljust(124) + content[124:]
    return content


READERS: dict[str, Reader] = {
    "message": Reader(message, 120),
    "codes": Reader(codes, 40),
    "federation": Reader(federation, 20),
    "config": Reader(config, 110),
    "sweep": Reader(sweep, 80),
    "run": Reader(run_folder, 70),
    "report": Reader(report, 2),
    "models": Reader(models, 90),
    "checkpoint": Reader(checkpoint, 50),
    "failure": Reader(failure, 20),
    "partition": Reader(partition_files, 70),
    "npz": Reader(npz, 90),
    "csv": Reader(csv, 80),
    "parquet": Reader(parquet, 60),
    "arrow": Reader(hugging_face, 10),
    "images": Reader(images, 60),
    "idx": Reader(_registered("mnist"), 40),
    "emnist": Reader(_registered("emnist"), 20),
    "cifar": Reader(_registered("cifar100"), 25),
    "mat": Reader(_registered("svhn"), 35),
    "medmnist": Reader(_registered("organcmnist"), 10),
}
