"""Partition files: a saved partition loads unchanged, and only for its own dataset."""

import hashlib
import json
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedobp.data import Dataset, load_partition, partition, partition_hash, partition_settings, save_partition
from fedobp.data.client_changes import ClientChange
from fedobp.data.partition import Shard
from fedobp.errors import FedobpError
from fedobp.files import read_checked_json, write_checked_json

Y = np.arange(60) % 3
SETTINGS = {"clients": 4, "alpha": 0.5, "holdout_clients": 1}


def dataset(y=Y, shape=(4, 4), name="mine"):
    return Dataset(name, np.zeros((len(y), *shape), np.uint8), np.asarray(y), (0, 1, 2), 0)


@pytest.fixture
def shards():
    options = {"change": "noise", "noise": 0.3}
    return partition(Y, 4, kind="feature", options=options, val_ratio=0.2, holdout=1, seed=3)


@pytest.fixture
def saved(tmp_path, shards):
    save_partition(tmp_path / "four", dataset(), shards, SETTINGS)
    return tmp_path / "four"


def change_json(path, **changes):
    file = path.with_suffix(".json")
    write_checked_json(file, {**read_checked_json(file), **changes})


@pytest.mark.essential
def test_a_saved_partition_loads_unchanged(saved, shards):
    for found, shard in zip(load_partition(saved, dataset()), shards, strict=True):
        for part in ("train", "val", "test"):
            np.testing.assert_array_equal(getattr(found, part), getattr(shard, part))
        assert (found.change, found.held_out) == (shard.change, shard.held_out)
    assert partition_settings(saved) == SETTINGS


def test_two_files_are_written_and_the_json_describes_them(saved, shards):
    assert sorted(path.name for path in saved.parent.iterdir()) == ["four.json", "four.npz"]
    metadata = json.loads(saved.with_suffix(".json").read_text())
    assert metadata["hash"] == partition_hash(dataset(), shards)
    assert (metadata["dataset"]["name"], metadata["dataset"]["samples"]) == ("mine", 60)
    assert metadata["settings"] == SETTINGS


@pytest.mark.parametrize("suffix", ["", ".npz", ".json"])
def test_a_partition_is_named_by_either_of_its_files_or_by_neither(saved, suffix):
    assert len(load_partition(saved.with_name(f"four{suffix}"), dataset())) == 4


def test_a_name_with_a_dot_is_no_suffix(tmp_path, shards):
    save_partition(tmp_path / "dir0.5", dataset(), shards, SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir0.5.json", "dir0.5.npz"]
    assert len(load_partition(tmp_path / "dir0.5", dataset())) == 4


def test_equal_partitions_are_equal_files(saved, tmp_path, shards):
    save_partition(tmp_path / "again", dataset(), shards, SETTINGS)
    for suffix in (".npz", ".json"):
        assert saved.with_suffix(suffix).read_bytes() == (tmp_path / f"again{suffix}").read_bytes()


def test_the_hash_is_that_of_labels_and_content_by_hand():
    shard = Shard(np.array([2, 0]), np.array([], dtype=np.int64), np.array([1]))
    mine = Dataset("mine", np.zeros((3, 5), np.float32), np.array([0, 1, 1]), ("a", "b"), 0)

    def whole(*numbers):
        return b"".join(number.to_bytes(8, "little") for number in numbers)

    labels = hashlib.sha256(b"[3, 5, 2, [[3]]]" + whole(0, 1, 1)).hexdigest()
    shapes = b"[[3], [1, 3], [1], [1], [1], [1]]]"
    content = whole(2, 0, 1) + whole(2, 0, 1) + whole(0) + whole(0) + whole(0) + whole(0)
    assert (
        partition_hash(mine, [shard]) == hashlib.sha256(b'["' + labels.encode() + b'", ' + shapes + content).hexdigest()
    )


def test_the_hash_covers_all_content(shards):
    one, two, three = (np.array([n]) for n in (1, 2, 3))
    first = [Shard(one, two, three)]
    others = [
        [Shard(two, one, three)],
        [Shard(one, np.array([], dtype=np.int64), np.array([2, 3]))],
        [Shard(one, two, three, ClientChange(turns=1))],
        [Shard(one, two, three, ClientChange(noise=0.1))],
        [Shard(one, two, three, ClientChange(seed=1))],
        [Shard(one, two, three, ClientChange(blur=0.1))],
        [Shard(one, two, three, ClientChange(contrast=0.1))],
        [Shard(one, two, three, ClientChange(colour=0.1))],
        [Shard(one, two, three, ClientChange(labels=(1, 0, 2)))],
        [Shard(one, two, three, ClientChange(group=0))],
        [Shard(one, two, three, held_out=True)],
        [Shard(one, two, three), Shard(*[np.array([], dtype=np.int64)] * 3)],
    ]
    found = {partition_hash(dataset(), other) for other in [first, *others]}
    found |= {partition_hash(dataset(Y[::-1]), first), partition_hash(dataset(shape=(4, 5)), first)}
    assert len(found) == len(others) + 3
    assert partition_hash(dataset(name="yours"), first) == partition_hash(dataset(), first)


KINDS = {
    "permuted": ("concept", {"groups": 3, "labels": "dirichlet"}),
    "merged": ("concept", {"groups": 2, "change": "merge"}),
    "blurred": ("feature", {"change": "blur"}),
    "groups of contrast": ("feature", {"change": "contrast", "groups": 2}),
    "groups of noise": ("feature", {"change": "noise", "groups": 2, "labels": "dirichlet"}),
    "coloured": ("feature", {"change": "colour"}),
}


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_changes_and_groups_load_unchanged(tmp_path, kind, options):
    shards = partition(Y, 4, kind=kind, options=options, alpha=10.0, holdout=1)
    found = save_partition(tmp_path / "four", dataset(), shards, SETTINGS)
    loaded = load_partition(tmp_path / "four", dataset())
    assert [(one.change, one.group) for one in loaded] == [(one.change, one.group) for one in shards]
    assert partition_hash(dataset(), loaded) == found


def test_only_files_with_new_changes_have_the_new_format(saved, tmp_path):
    def version(path):
        return json.loads(path.with_suffix(".json").read_text())["format"]

    save_partition(tmp_path / "two", dataset(), partition(Y, 4, kind="concept", options={"groups": 2}), SETTINGS)
    assert (version(saved), version(tmp_path / "two")) == (1, 2)
    with np.load(saved.with_suffix(".npz"), allow_pickle=False) as arrays:
        assert set(arrays) == {"ids", "sizes", "held_out", "turns", "noise", "seeds"}


def test_a_rotations_groups_need_no_new_format(tmp_path):
    """So files that were saved before groups existed have them."""
    shards = partition(Y, 4, kind="feature", holdout=1)
    save_partition(tmp_path / "four", dataset(), shards, SETTINGS)
    loaded = load_partition(tmp_path / "four", dataset())
    assert sorted(one.group for one in loaded) == [0, 1, 2, 3]
    assert [one.group for one in loaded] == [one.change.turns for one in shards]


# User errors.


@pytest.mark.parametrize("other", [dataset(Y[::-1]), dataset(Y[:59]), dataset(shape=(4, 5))], ids=["y", "n", "shape"])
def test_a_partition_of_another_dataset_is_refused(saved, other):
    sentence = (
        r"four.npz is a partition of 'mine' \(60 samples\), and 'mine' \(\d\d samples\) has other labels or shapes"
    )
    with pytest.raises(FedobpError, match=sentence):
        load_partition(saved, other)


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_a_changed_bit_of_the_json_is_refused(saved, at, bit):
    file = saved.with_suffix(".json")
    content = file.read_bytes()
    changed = bytearray(content)
    changed[int(at * len(content))] ^= 1 << bit
    file.write_bytes(changed)
    try:
        found = read_checked_json(file)
    except (FedobpError, ValueError):
        with pytest.raises(FedobpError, match=r"four.json"):
            load_partition(saved, dataset())
    else:  # white space, or an escape of the same character
        file.write_bytes(content)
        assert found == read_checked_json(file)
    finally:
        file.write_bytes(content)


def test_a_newer_format_is_named(saved):
    change = json.loads(saved.with_suffix(".json").read_text())
    saved.with_suffix(".json").write_text(json.dumps({**change, "format": 3}))
    with pytest.raises(FedobpError, match=r"four.json has format 3, and this fedobp reads 1 to 2: use a newer fedobp"):
        load_partition(saved, dataset())


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_nothing_is_overwritten(tmp_path, shards, suffix):
    (tmp_path / f"four{suffix}").write_text("precious")
    with pytest.raises(FedobpError, match=rf"four\{suffix} exists already: save the partition under another name"):
        save_partition(tmp_path / "four", dataset(), shards, SETTINGS)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_an_unwritable_path_is_refused(tmp_path, shards):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedobpError, match=r"cannot write .*file"):
        save_partition(tmp_path / "file" / "four", dataset(), shards, SETTINGS)


def test_a_missing_partition_is_refused(tmp_path):
    with pytest.raises(FedobpError, match=r"cannot read the partition .*none.json .* `fedobp partition --save NAME`"):
        partition_settings(tmp_path / "none")


def test_a_missing_npz_file_is_refused(saved):
    saved.with_suffix(".npz").unlink()
    with pytest.raises(FedobpError, match=r"there is no .*four.npz beside its json file"):
        load_partition(saved, dataset())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{}",
        '{"hash": 3}',
        '{"hash": "a", "dataset": {"name": 1}}',
        pytest.param("[" * 100_000, id="deep"),
        "\x00",
    ],
)
def test_json_of_something_else_is_refused(saved, text):
    saved.with_suffix(".json").write_text(text)
    with pytest.raises(FedobpError, match=r"four.json does not describe a partition: make it with"):
        load_partition(saved, dataset())


def test_settings_that_are_no_table_are_refused(saved):
    change_json(saved, settings=[1])
    with pytest.raises(FedobpError, match="does not describe a partition"):
        partition_settings(saved)


@pytest.mark.parametrize("settings", [{}, {**SETTINGS, "clients": 5}, {**SETTINGS, "holdout_clients": 0}])
def test_settings_that_do_not_fit_the_arrays_are_refused(saved, settings):
    change_json(saved, settings=settings)
    with pytest.raises(FedobpError, match="does not have the content that its json file names"):
        load_partition(saved, dataset())


def test_another_hash_is_refused(saved):
    change_json(saved, hash="0" * 64)
    with pytest.raises(
        FedobpError, match="does not have the content that its json file names: save the partition anew"
    ):
        load_partition(saved, dataset())


ARRAYS = {"sizes": np.array([[2, 0, 1]]), "held_out": [0], "turns": [0], "noise": [0.0], "seeds": [0]}
INVALID = {
    "a sample twice": {"ids": np.array([1, 1, 2])},
    "a sample that is not there": {"ids": np.array([1, 2, 60])},
    "a negative sample": {"ids": np.array([1, 2, -1])},
    "sizes that do not add up": {"ids": np.array([1, 2])},
    "negative sizes": {"ids": np.array([1, 2, 3]), "sizes": np.array([[4, -2, 1]])},
    "sizes of two parts": {"ids": np.array([1, 2, 3]), "sizes": np.array([[2, 1]])},
    "no clients": {"ids": np.array([], dtype=np.int64), "sizes": np.zeros((0, 3), dtype=np.int64)},
    "a held-out client that is not last": {
        "ids": np.array([1, 2, 3]),
        "sizes": np.array([[1, 0, 0], [1, 0, 1]]),
        **{name: np.array([1, 0]) for name in ("held_out", "turns", "seeds")},
        "noise": np.zeros(2),
    },
    "sizes whose sum overflows": {"ids": np.array([1, 2, 3]), "sizes": np.array([[2**63 - 1, 2**63 - 1, 5]])},
    "another type": {"ids": np.array([1.0, 2.0, 3.0])},
    "a record too few": {"ids": np.array([1, 2, 3]), "turns": np.array([], dtype=np.int64)},
    "five turns": {"ids": np.array([1, 2, 3]), "turns": np.array([5])},
    "infinite noise": {"ids": np.array([1, 2, 3]), "noise": np.array([np.inf])},
    "a large blur": {"ids": np.array([1, 2, 3]), "blur": np.array([1e9])},
    "contrast of another type": {"ids": np.array([1, 2, 3]), "contrast": np.array([1])},
    "two colours": {"ids": np.array([1, 2, 3]), "colour": np.array([0.1, 0.1])},
    "a new label that is not there": {"ids": np.array([1, 2, 3]), "labels": np.array([[0, 1, 3]])},
    "too few new labels": {"ids": np.array([1, 2, 3]), "labels": np.array([[0, 1]])},
    "labels without clients": {"ids": np.array([1, 2, 3]), "labels": np.array([0, 1, 2])},
    "more groups than clients": {"ids": np.array([1, 2, 3]), "groups": np.array([1])},
}


@pytest.mark.parametrize("arrays", INVALID.values(), ids=INVALID)
def test_arrays_that_are_no_partition_are_refused_whatever_their_hash(saved, arrays, monkeypatch):
    np.savez(saved.with_suffix(".npz"), **{**ARRAYS, **arrays})
    metadata = json.loads(saved.with_suffix(".json").read_text())
    sizes, held_out = {**ARRAYS, **arrays}["sizes"], {**ARRAYS, **arrays}["held_out"]
    change_json(saved, settings={"clients": len(sizes), "holdout_clients": int(np.sum(held_out))})
    monkeypatch.setattr("fedobp.data.partition_file._content_hash", lambda *_: metadata["hash"])
    with pytest.raises(FedobpError, match="does not have the content"):
        load_partition(saved, dataset())


def test_valid_arrays_with_the_right_hash_are_loaded(saved, monkeypatch):
    np.savez(saved.with_suffix(".npz"), ids=np.array([1, 2, 3]), **ARRAYS)
    metadata = json.loads(saved.with_suffix(".json").read_text())
    change_json(saved, settings={"clients": 1, "holdout_clients": 0})
    monkeypatch.setattr("fedobp.data.partition_file._content_hash", lambda *_: metadata["hash"])
    [shard] = load_partition(saved, dataset())
    assert (shard.train.tolist(), shard.test.tolist()) == ([1, 2], [3])


@pytest.mark.parametrize("held", [[0, 1], {"a": 0}, None, 0.5])
def test_settings_that_are_no_numbers_are_refused(saved, held):
    change_json(saved, settings={"clients": 2, "holdout_clients": held})
    with pytest.raises(FedobpError, match="does not have the content that its json file names"):
        load_partition(saved, dataset())


def test_a_damaged_file_is_refused(saved):
    content = saved.with_suffix(".npz").read_bytes()
    saved.with_suffix(".npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(FedobpError, match=r"cannot be read as an npz file .*: save it again$"):
        load_partition(saved, dataset())


def test_a_file_with_something_else_for_its_samples_is_refused(saved):
    np.savez(saved.with_suffix(".npz"), **ARRAYS)
    with zipfile.ZipFile(saved.with_suffix(".npz"), "a") as archive:
        archive.writestr("ids.npy", b"something else")
    with pytest.raises(FedobpError, match="ids is no array"):
        load_partition(saved, dataset())
