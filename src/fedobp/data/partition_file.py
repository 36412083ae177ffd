"""A saved partition: NAME.npz holds the sample ids of each client, NAME.json the settings and the hash of the content.

NAME.json has a checksum of itself, too. The hash depends only on the labels and the partition, so equal arguments give
equal hashes on every machine.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.data.client_changes import ClientChange
from fedobp.data.dataset import Dataset
from fedobp.data.free_memory import memory_guard
from fedobp.data.npz import read_npz
from fedobp.data.partition import Shard
from fedobp.errors import FedobpError, short
from fedobp.files import JSON_FORMAT, atomic_write, read_checked_json, unwritable, write_checked_json

# The arrays in NAME.npz. `ids` holds each client's train, val and test ids, client after client; the others hold one
# entry per client.
_TYPES = {"ids": "<i8", "sizes": "<i8", "held_out": "<i8", "turns": "<i8", "noise": "<f8", "seeds": "<i8"}
# Those that are there only if a client has such a change, so that files and hashes of other partitions stay as they
# were. `labels` has a row per client: what each label becomes.
_CHANGES = {"blur": "<f8", "contrast": "<f8", "colour": "<f8", "labels": "<i8", "groups": "<i8"}
_FIELDS = {"turns": "turns", "noise": "noise", "seeds": "seed", **{name: name for name in _CHANGES}, "groups": "group"}
_FORMAT = 2  # of NAME.json where NAME.npz has one of them


def partition_hash(dataset: Dataset, shards: Sequence[Shard]) -> str:
    """Return the SHA-256 hash of the dataset's labels and of the partition's content."""
    return _content_hash(_fingerprint(dataset), _to_arrays(shards, _labels(dataset)))


def save_partition(name: Path, dataset: Dataset, shards: Sequence[Shard], settings: Mapping[str, Any]) -> str:
    """Write NAME.npz and NAME.json, and return the hash; existing files are never overwritten.

    `settings` are the settings that produced the partition, by their names in `Config`.
    """
    files = _files(name)
    for path in files:
        if os.path.lexists(path):
            raise FedobpError(f"{short(path, 200)} exists already: save the partition under another name")
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(files[0].parent, error) from error
    arrays: dict[str, Any] = _to_arrays(shards, _labels(dataset))
    fingerprint = _fingerprint(dataset)
    found = _content_hash(fingerprint, arrays)
    with atomic_write(files[0]) as file:
        np.savez(file, **arrays)
    metadata = {"name": dataset.name, "samples": len(dataset.y), "fingerprint": fingerprint}
    try:
        version = _FORMAT if _CHANGES.keys() & arrays.keys() else JSON_FORMAT
        write_checked_json(files[1], {"hash": found, "dataset": metadata, "settings": dict(settings)}, version)
    except FedobpError:
        files[0].unlink()
        raise
    return found


def partition_settings(name: Path) -> dict[str, Any]:
    """Return the settings that produced a saved partition; a run that loads the partition uses them."""
    settings = _read_metadata(name)["settings"]
    assert isinstance(settings, dict)
    return settings


def load_partition(name: Path, dataset: Dataset) -> list[Shard]:
    """Load a saved partition of this dataset; a partition of another dataset or a damaged file is a user error."""
    metadata, (path, _) = _read_metadata(name), _files(name)
    if metadata["dataset"]["fingerprint"] != _fingerprint(dataset):
        raise FedobpError(
            f"{short(path, 200)} is a partition of '{short(metadata['dataset']['name'])}' "
            f"({short(format(metadata['dataset']['samples'], ','))} samples), and '{short(dataset.name)}' "
            f"({len(dataset.y):,} samples) has other labels or shapes: use it with the --dataset it was made of"
        )
    if not path.exists():
        raise FedobpError(
            f"there is no {short(path, 200)} beside its json file: put it there, or save the partition anew"
        )
    with memory_guard(f"the partition {short(path, 200)}"):
        return _read_shards(path, metadata, dataset)


def _read_shards(path: Path, metadata: Mapping[str, Any], dataset: Dataset) -> list[Shard]:
    """Return the shards in a partition's npz file, after checking them against its json file."""
    arrays = read_npz(path)
    made = [metadata["settings"].get(name) for name in ("clients", "holdout_clients")]
    valid = _is_valid(arrays, dataset) and made == [len(arrays["sizes"]), int(arrays["held_out"].sum())]
    shards = _from_arrays(arrays) if valid else []
    clients, labels = len(shards), _labels(dataset)
    valid = valid and all(shard.change.is_valid(clients, labels) for shard in shards)
    if not valid or metadata["hash"] != _content_hash(_fingerprint(dataset), arrays):
        raise FedobpError(
            f"{short(path, 200)} does not have the content that its json file names: save the partition anew"
        )
    return shards


def _from_arrays(arrays: Mapping[str, NDArray[Any]]) -> list[Shard]:
    shards = []
    for client, ids in enumerate(np.split(arrays["ids"], np.cumsum(arrays["sizes"].sum(axis=1))[:-1])):
        train, val, test = np.split(ids, np.cumsum(arrays["sizes"][client])[:-1])
        found = {_FIELDS[key]: arrays[key][client].tolist() for key in _FIELDS if key in arrays}
        labels = tuple(found.pop("labels", ()))
        change = ClientChange(**found, labels=() if labels == tuple(range(len(labels))) else labels)
        shards.append(Shard(train, val, test, change, bool(arrays["held_out"][client])))
    return shards


def _labels(dataset: Dataset) -> int:
    """Return one more than the largest label that occurs: a change of labels has an entry for each of them."""
    return int(dataset.y.max(initial=-1)) + 1


def _files(name: Path) -> tuple[Path, Path]:
    """Return the paths of a partition's npz and json file; `name` may have either suffix or none."""
    if name.name in ("", ".."):
        raise FedobpError(f"'{short(name)}' names no partition: give the name of its files, such as mine")
    stem = str(name.with_suffix("") if name.suffix in (".npz", ".json") else name)
    return Path(f"{stem}.npz"), Path(f"{stem}.json")


def _read_metadata(name: Path) -> dict[str, Any]:
    path = _files(name)[1]
    try:
        with memory_guard(f"the partition {short(path, 200)}", path.stat().st_size):
            metadata = read_checked_json(path, _FORMAT)
        texts = metadata["hash"], metadata["dataset"]["name"], metadata["dataset"]["fingerprint"]
        if not all(isinstance(text, str) for text in texts) or not isinstance(metadata["dataset"]["samples"], int):
            raise TypeError
        if not isinstance(metadata["settings"], dict):
            raise TypeError
    except OSError as error:
        raise FedobpError(
            f"cannot read the partition {short(path, 200)} ({error.strerror or error}): make it with "
            "`fedobp partition --save NAME`"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FedobpError(
            f"{short(path, 200)} does not describe a partition: make it with `fedobp partition --save NAME`"
        ) from error
    return metadata


def _to_arrays(shards: Sequence[Shard], labels: int) -> dict[str, NDArray[Any]]:
    changes = [shard.change for shard in shards]
    values: dict[str, Any] = {
        "ids": np.concatenate([shard.samples for shard in shards]),
        "sizes": [[len(shard.train), len(shard.val), len(shard.test)] for shard in shards],
        "held_out": [shard.held_out for shard in shards],
        "turns": [change.turns for change in changes],
        "noise": [change.noise for change in changes],
        "seeds": [change.seed for change in changes],
    }
    for name in ("blur", "contrast", "colour"):
        if any(strengths := [getattr(change, name) for change in changes]):
            values[name] = strengths
    if any(change.labels for change in changes):
        values["labels"] = [change.labels or range(labels) for change in changes]
    if any(change.group is not None for change in changes):
        values["groups"] = [shard.group for shard in shards]
    return {name: np.asarray(value).astype({**_TYPES, **_CHANGES}[name]) for name, value in values.items()}


def _is_valid(arrays: Mapping[str, NDArray[Any]], dataset: Dataset) -> bool:
    """Return whether arrays form a partition: types and lengths match, and every id is valid and occurs once."""
    samples = len(dataset.y)
    if any(name not in arrays or arrays[name].dtype != kind for name, kind in _TYPES.items()):
        return False
    if any(name in arrays and arrays[name].dtype != kind for name, kind in _CHANGES.items()):
        return False
    ids, sizes = arrays["ids"], arrays["sizes"]
    if ids.ndim != 1 or sizes.ndim != 2 or sizes.shape[1] != 3 or any(sizes.min(axis=0, initial=0) < 0):
        return False
    if sizes.max(initial=0) > samples:  # so that sums of sizes cannot overflow
        return False
    if "labels" in arrays and arrays["labels"].shape != (len(sizes), _labels(dataset)):
        return False
    lengths = {arrays[name].shape for name in ("held_out", *_FIELDS) if name in arrays and name != "labels"}
    return (
        lengths == {sizes.shape[:1]} != {(0,)}
        and sizes.sum() == len(ids) == len(np.unique(ids))
        and bool(((ids >= 0) & (ids < samples)).all())
        and arrays["held_out"].tolist() == sorted(arrays["held_out"] > 0)
        and sizes[arrays["held_out"] == 0, 0].sum() > 0
    )


def _content_hash(fingerprint: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    more = [name for name in _CHANGES if name in arrays]
    return _hash([fingerprint, *more], [arrays[name] for name in (*_TYPES, *more)])


def _fingerprint(dataset: Dataset) -> str:
    """Return a hash that identifies a dataset without reading its inputs: of its shape, classes and labels in order."""
    return _hash([*dataset.x.shape, dataset.classes], [dataset.y.astype("<i8")])


def _hash(words: Sequence[str | int], arrays: Sequence[NDArray[Any]]) -> str:
    # The shapes are hashed first: they delimit the arrays, so that different contents never give the same bytes.
    made = hashlib.sha256(json.dumps([*words, [list(array.shape) for array in arrays]]).encode())
    for array in arrays:
        made.update(array.tobytes())
    return made.hexdigest()
