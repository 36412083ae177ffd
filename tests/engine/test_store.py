"""Client records: stacked on demand, copied when written, and in a file where they do not fit in memory."""

import errno
import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

from fedobp import FedobpError
from fedobp.engine import Budget, Store

CLIENTS = 10**9
START = {"theta": torch.tensor([1.0, 2.0]), "seen": torch.tensor(False)}


def written():
    return {"theta": torch.tensor([[5.0, 6.0], [7.0, 8.0]]), "seen": torch.tensor([True, True])}


def test_a_client_that_was_never_written_has_the_start_record():
    store = Store(START, CLIENTS, Budget())
    assert torch.equal(store[10**9 - 1]["theta"], START["theta"])
    assert store[3]["theta"] is store[4]["theta"], "it must cost no memory"


def test_gather_stacks_records_in_the_order_asked_for():
    store = Store(START, CLIENTS, Budget())
    store.scatter([4, 2], written())
    records = store.gather([2, 9, 4])
    assert records["theta"].tolist() == [[7, 8], [1, 2], [5, 6]]
    assert records["seen"].tolist() == [True, False, True]


def test_gather_of_records_without_entries_is_empty():
    assert Store({}, 2, Budget()).gather([0, 1]) == {}


@pytest.mark.essential
def test_scatter_changes_only_the_clients_named():
    store = Store(START, CLIENTS, Budget())
    store.scatter([4, 2], written())
    store.scatter([2], {"theta": torch.tensor([[0.0, 0.0]]), "seen": torch.tensor([False])})
    assert store.gather([2, 3, 4])["theta"].tolist() == [[0, 0], [1, 2], [5, 6]]


def test_scatter_copies():
    store, records = Store(START, CLIENTS, Budget()), written()
    store.scatter([0, 1], records)
    records["theta"].zero_()
    assert store[0]["theta"].tolist() == [5, 6]
    assert store[0]["theta"].untyped_storage().nbytes() == 2 * 4, "a record must not hold the whole stack"


def test_what_was_gathered_can_be_changed_freely():
    store = Store(START, CLIENTS, Budget())
    store.gather([0, 1])["theta"].zero_()
    assert store[0]["theta"].tolist() == [1, 2]
    assert START["theta"].tolist() == [1, 2]


def test_a_record_can_be_set_by_itself():
    store = Store(START, CLIENTS, Budget())
    store[5] = {"theta": torch.tensor([3.0, 3.0]), "seen": torch.tensor(True)}
    assert store.gather([5, 6])["theta"].tolist() == [[3, 3], [1, 2]]


def test_a_client_is_in_the_store_once_it_was_written():
    store = Store(START, CLIENTS, Budget())
    assert 4 not in store
    store.scatter([4, 2], written())
    assert 4 in store
    assert 2 in store
    assert 3 not in store


# Budgets.


def test_a_budget_is_shared_out_until_it_is_spent():
    budget = Budget(10)
    assert [budget.take(size) for size in (4, 7, 6, 1, 0)] == [True, False, True, False, True]


def test_a_budget_without_a_number_has_no_end():
    budget = Budget()
    assert all(budget.take(10**15) for _ in range(100))


# Beyond the budget.

RECORD = {
    "flag": torch.tensor(True),
    "count": torch.tensor(3),
    "counts": torch.tensor([1, -2, 2**62]),
    "float": torch.tensor([1.5, -0.0, float("nan"), float("inf")]),
    "double": torch.tensor([[0.1, 1e-300], [1e300, -1.0]], dtype=torch.float64),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0),
}
SIZE = 1 + 8 + 24 + 16 + 32 + 3  # bytes


def start_record():
    return {name: torch.zeros_like(value) for name, value in RECORD.items()}


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name].nan_to_num(7.0), value.nan_to_num(7.0)), name


def other(record):
    return {name: ~value if value.dtype == torch.bool else value * 2 for name, value in record.items()}


@pytest.mark.parametrize("memory", [0, 2 * SIZE, float("inf")], ids=["file", "both", "memory"])
def test_records_are_the_same_wherever_they_are_stored(memory):
    store = Store(start_record(), 6, Budget(memory))
    for client in (5, 0, 3):
        store[client] = RECORD
    store[0] = other(RECORD)
    for client in range(6):
        equal(store[client], {0: other(RECORD), 3: RECORD, 5: RECORD}.get(client, start_record()))
    records = store.gather([3, 1, 0])
    for name, value in RECORD.items():
        equal({name: records[name][0]}, {name: value})
        equal({name: records[name][2]}, {name: other(RECORD)[name]})
    assert [client in store for client in range(6)] == [True, False, False, True, False, True]


def test_scatter_writes_to_memory_and_file_alike():
    store = Store(START, 100, Budget(9))  # one record: two floats and a flag
    store.scatter([40, 20], written())
    assert store.gather([20, 30, 40])["theta"].tolist() == [[7, 8], [1, 2], [5, 6]]
    assert store.gather([20, 30, 40])["seen"].tolist() == [True, False, True]


@pytest.fixture
def writes(monkeypatch):
    """Return the (bytes, offset) of everything that is written to a file."""
    seen, write = [], os.pwrite

    def watched(file, data, offset):
        seen.append((len(data), offset))
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", watched)
    return seen


def test_a_client_in_memory_stays_in_memory(writes):
    store = Store({"theta": torch.zeros(4)}, 10, Budget(16))
    store[7] = {"theta": torch.ones(4)}
    store[2] = {"theta": torch.full((4,), 2.0)}
    assert writes == [(16, 2 * 16)]
    store[7] = {"theta": torch.full((4,), 3.0)}
    store[2] = {"theta": torch.full((4,), 4.0)}
    assert writes == [(16, 2 * 16)] * 2
    assert store.gather([7, 2])["theta"][:, 0].tolist() == [3, 4]


def test_two_stores_share_a_budget_and_not_a_file(writes):
    budget = Budget(16)
    first, second = (Store({"theta": torch.zeros(2)}, 3, budget) for _ in range(2))
    for client in range(2):
        first[client] = {"theta": torch.full((2,), 1.0 + client)}
        second[client] = {"theta": torch.full((2,), 10.0 + client)}
    assert len(writes) == 2
    assert first.gather([0, 1, 2])["theta"][:, 0].tolist() == [1, 2, 0]
    assert second.gather([0, 1, 2])["theta"][:, 0].tolist() == [10, 11, 0]


def test_clients_that_were_never_written_cost_neither_memory_nor_disk(monkeypatch):
    files, make = [], tempfile.TemporaryFile

    def watched(*given, **named):
        files.append(make(*given, **named))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", watched)
    store = Store({"theta": torch.zeros(1000)}, 10**6, Budget(0))
    assert torch.equal(store[999_999]["theta"], torch.zeros(1000))
    assert not files
    store[999_999] = {"theta": torch.ones(1000)}
    (file,) = files
    found = os.fstat(file.fileno())
    assert found.st_size == 4 * 10**9
    assert found.st_blocks * 512 < 10**6
    assert torch.equal(store[999_999]["theta"], torch.ones(1000))
    assert torch.equal(store[999_998]["theta"], torch.zeros(1000))


def test_what_is_read_from_the_file_can_be_changed_freely():
    store = Store({"theta": torch.zeros(2)}, 3, Budget(0))
    store[1] = {"theta": torch.tensor([1.0, 2.0])}
    store[1]["theta"].zero_()
    assert store[1]["theta"].tolist() == [1, 2]


def test_a_record_without_fields_fits_into_any_budget():
    store = Store({}, 3, Budget(0))
    store[1] = {}
    assert 1 in store
    assert store.gather([0, 1]) == {}


def test_part_of_a_stack_is_written_as_it_is():
    stack = torch.arange(12.0).reshape(2, 3, 2).transpose(1, 2)
    store = Store({"theta": torch.zeros(2, 3)}, 2, Budget(0))
    store.scatter([1, 0], {"theta": stack})
    assert torch.equal(store.gather([1, 0])["theta"], stack)


def test_a_full_disk_is_an_error_that_says_what_to_do(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    store = Store(START, 10, Budget(0))
    with pytest.raises(FedobpError, match=r"client 4's state .*\(No space left on device\): .*TMPDIR.*--store-memory"):
        store[4] = {"theta": torch.zeros(2), "seen": torch.tensor(True)}


def test_a_write_that_falls_short_is_finished(monkeypatch):
    """As it does on a nearly full disk, and above 2 GiB."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:3], offset))
    store = Store({"theta": torch.zeros(4)}, 3, Budget(0))
    store[1] = {"theta": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    assert store[1]["theta"].tolist() == [1, 2, 3, 4]


def test_a_temporary_folder_that_cannot_be_used_is_an_error_that_says_what_to_do(monkeypatch):
    def refused(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(FedobpError, match=r"No usable temporary directory found.*TMPDIR"):
        Store(START, 10, Budget(0))[4] = {"theta": torch.zeros(2), "seen": torch.tensor(True)}


def test_the_file_goes_with_the_store():
    """And without a warning that it was left open."""
    before = set(Path(tempfile.gettempdir()).iterdir())
    store = Store(START, 10, Budget(0))
    store[4] = {"theta": torch.zeros(2), "seen": torch.tensor(True)}
    del store
    gc.collect()
    assert not {path for path in set(Path(tempfile.gettempdir()).iterdir()) - before if "fedobp" in path.name}
