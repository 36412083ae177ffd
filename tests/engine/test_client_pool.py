"""The clients of a run: their state, their last local models, and their way into another pool."""

import pytest
import torch
from lanes_cases import CLIENTS, federated

from fedobp.engine import Budget, ClientJob, ClientPool
from fedobp.method import RoundContext
from fedobp.models import Model

THETA = torch.tensor([1.0, 2.0, 3.0])


def make_pool(state, keeps_last_model=False, budget=None):
    return ClientPool(federated(), state, THETA, 5, budget or Budget(), keeps_last_model=keeps_last_model)


def test_a_client_that_never_trained_has_no_last_model():
    assert make_pool({}).last(0) is None


@pytest.mark.parametrize("name", ["theta", "head"])
def test_the_last_model_is_the_one_trained_last(name):
    pool = make_pool({name: torch.zeros(3)})
    pool.keep([4, 1], {name: torch.ones(2, 3)}, torch.stack([THETA, 2 * THETA]))
    pool.keep([1], {name: torch.full((1, 3), 7.0)}, 5 * THETA[None])
    assert [None if (last := pool.last(client)) is None else last.tolist() for client in range(CLIENTS)] == [
        None, [5, 10, 15], None, None, [1, 2, 3], None,
    ]  # fmt: skip
    assert pool.state.gather([1, 4, 0])[name].tolist() == [[7] * 3, [1] * 3, [0] * 3]


def test_the_last_models_of_a_cohort_are_in_its_order():
    pool = make_pool({})
    pool.keep([4, 1], {}, torch.stack([THETA, 2 * THETA]))
    found = pool.last_models(torch.tensor([1, 0, 4]), torch.zeros(3))
    assert found.tolist() == [[2, 4, 6], [0, 0, 0], [1, 2, 3]]


def test_a_last_model_that_a_method_keeps_in_its_state_is_not_stored_a_second_time():
    budget = Budget(3 * 4)  # one vector
    pool = make_pool({"theta": torch.zeros(3)}, True, budget)
    assert pool.last(2) is None
    pool.keep([2], {"theta": THETA[None]}, THETA[None])
    assert pool.last(2).tolist() == [1, 2, 3]
    assert not budget.take(1)
    pool.keep([2], {"theta": 2 * THETA[None]}, 2 * THETA[None])
    assert pool.last(2).tolist() == [2, 4, 6]
    assert pool.last(1) is None


def test_otherwise_a_state_with_that_name_is_not_the_last_model():
    pool, trained = make_pool({"theta": torch.zeros(2)}), THETA[None].clone()
    pool.keep([2], {"theta": trained[:, :2]}, trained)
    assert pool.last(2).tolist() == [1, 2, 3]


@pytest.mark.parametrize("keeps", [False, True])
def test_an_untouched_copy_has_the_same_clients_before_their_first_round(keeps):
    pool = make_pool({"theta": torch.zeros(3)}, keeps)
    pool.keep([1], {"theta": 2 * THETA[None]}, 2 * THETA[None])
    copy = pool.untouched_copy()
    assert (copy.data, copy.seed, copy.last(1)) == (pool.data, pool.seed, None)
    assert copy.state[1]["theta"].tolist() == [0, 0, 0]
    copy.keep([1, 2], {"theta": torch.full((2, 3), 7.0)}, torch.full((2, 3), 7.0))
    assert copy.last(1).tolist() == copy.last(2).tolist() == [7, 7, 7]
    assert (pool.last(1).tolist(), pool.last(2)) == ([2, 4, 6], None)
    assert pool.state.gather([1, 2])["theta"].tolist() == [[2, 4, 6], [0, 0, 0]]


def test_a_job_is_assigned_with_all_its_fields():
    pool = make_pool({})
    ctx = RoundContext(Model("mlp", (4,), 2), 1, 3, CLIENTS, 1, torch.tensor([0, 2]))
    job = ClientJob(ctx, (lambda model, client: client,), {"lr": 0.1}).with_download({"theta": torch.ones(2, 3)})
    assigned = pool.assign(job)
    assert vars(assigned) == {**vars(job), "clients": pool}


# Moving a client to another pool.

STATE = {"theta": torch.zeros(3), "count": torch.tensor(0), "mask": torch.zeros(2, dtype=torch.bool)}
TRAINED = {
    "theta": torch.tensor([[float("nan"), -0.0, 1e-45]]),
    "count": torch.tensor([2**62 + 1]),
    "mask": torch.tensor([[True, False]]),
}


def bits(record):
    """Return names, types, shapes and bytes of tensors: NaN and the sign of zero count."""
    return {name: (value.dtype, value.shape, value.numpy().tobytes()) for name, value in record.items()}


@pytest.mark.parametrize("memory", [float("inf"), 0.0], ids=["memory", "file"])
@pytest.mark.parametrize("keeps", [False, True], ids=["stored", "kept in the state"])
def test_a_snapshot_moves_a_client_to_another_pool_bit_by_bit(keeps, memory):
    one, other = (make_pool(STATE, keeps, Budget(memory)) for _ in range(2))
    last = TRAINED["theta"] if keeps else 3 * THETA[None]
    one.keep([4], TRAINED, last)
    other.load(2, one.dump(4))
    assert bits(other.state[2]) == bits(one.state[4]) == bits({name: value[0] for name, value in TRAINED.items()})
    assert bits({"last": other.last(2)}) == bits({"last": last[0]})
    assert other.last(4) is None
    assert bits(other.state[4]) == bits(STATE)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_snapshot_of_a_client_that_never_trained_is_its_initial_state(keeps):
    one, other = (make_pool(STATE, keeps) for _ in range(2))
    snapshot = one.dump(3)
    assert snapshot.last is None
    other.load(3, snapshot)
    assert other.last(3) is None
    assert bits(other.state[3]) == bits(STATE)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_client_that_was_moved_goes_on_by_itself(keeps):
    one, other = (make_pool(STATE, keeps) for _ in range(2))
    one.keep([4], TRAINED, TRAINED["theta"])
    other.load(4, one.dump(4))
    other.keep([4], {**TRAINED, "theta": THETA[None]}, THETA[None])
    assert other.last(4).tolist() == [1, 2, 3]
    assert bits({"last": one.last(4)}) == bits({"last": TRAINED["theta"][0]})
