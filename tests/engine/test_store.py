"""Client records: lazy, stacked on demand, copied when written."""

import torch

from fedobp.engine import Store

START = {"theta": torch.tensor([1.0, 2.0]), "seen": torch.tensor(False)}


def written():
    return {"theta": torch.tensor([[5.0, 6.0], [7.0, 8.0]]), "seen": torch.tensor([True, True])}


def test_a_client_that_was_never_written_has_the_start_record():
    store = Store(START)
    assert torch.equal(store[10**9]["theta"], START["theta"])
    assert store[3]["theta"] is store[4]["theta"], "it must cost no memory"


def test_gather_stacks_records_in_the_order_asked_for():
    store = Store(START)
    store.scatter([4, 2], written())
    rows = store.gather([2, 9, 4])
    assert rows["theta"].tolist() == [[7, 8], [1, 2], [5, 6]]
    assert rows["seen"].tolist() == [True, False, True]


def test_gather_of_records_without_entries_is_empty():
    assert Store({}).gather([0, 1]) == {}


def test_scatter_changes_only_the_clients_named():
    store = Store(START)
    store.scatter([4, 2], written())
    store.scatter([2], {"theta": torch.tensor([[0.0, 0.0]]), "seen": torch.tensor([False])})
    assert store.gather([2, 3, 4])["theta"].tolist() == [[0, 0], [1, 2], [5, 6]]


def test_scatter_copies():
    store, rows = Store(START), written()
    store.scatter([0, 1], rows)
    rows["theta"].zero_()
    assert store[0]["theta"].tolist() == [5, 6]
    assert store[0]["theta"].untyped_storage().nbytes() == 2 * 4, "a record must not hold the whole stack"


def test_what_was_gathered_can_be_changed_freely():
    store = Store(START)
    store.gather([0, 1])["theta"].zero_()
    assert store[0]["theta"].tolist() == [1, 2]
    assert START["theta"].tolist() == [1, 2]


def test_a_record_can_be_set_by_itself():
    store = Store(START)
    store[5] = {"theta": torch.tensor([3.0, 3.0]), "seen": torch.tensor(True)}
    assert store.gather([5, 6])["theta"].tolist() == [[3, 3], [1, 2]]
