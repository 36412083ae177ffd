"""The seam: what is kept of clients, what is counted, and what is said when weights are no longer numbers."""

from pathlib import Path

import pytest
import torch
from lanes_cases import CLIENTS, federated

from fedobp import FedobpError
from fedobp.algorithms import METHODS
from fedobp.engine import Budget, ClientPool, Counters, diverged, memory_of
from fedobp.engine.precision import deterministic, serial_threads
from fedobp.method import RoundContext
from fedobp.models import Model
from fedobp.transfer import to_device

THETA = torch.tensor([1.0, 2.0, 3.0])


def people(own):
    return ClientPool(federated(), own, THETA, 5, Budget())


def test_a_client_that_never_trained_has_no_last_model():
    assert clients({}).last(0) is None


def test_guests_are_the_same_clients_before_their_first_visit_and_leave_no_trace():
    one = clients({"head": torch.zeros(3)})
    one.keep([1], {"head": torch.ones(1, 3)}, 2 * THETA[None])
    guests = one.untouched_copy()
    assert (guests.data, guests.seed, guests.last(1)) == (one.data, one.seed, None)
    assert guests.state[1]["head"].tolist() == [0, 0, 0]
    guests.keep([1, 2], {"head": torch.full((2, 3), 7.0)}, torch.stack([THETA, THETA]))
    assert (one.last(1).tolist(), one.last(2)) == ([2, 4, 6], None)
    assert one.state.gather([1, 2])["head"].tolist() == [[1] * 3, [0] * 3]


@pytest.mark.parametrize("name", ["theta", "head"])
def test_the_last_model_is_the_one_trained_last(name):
    one = clients({name: torch.zeros(3)})
    one.keep([4, 1], {name: torch.ones(2, 3)}, torch.stack([THETA, 2 * THETA]))
    one.keep([1], {name: torch.full((1, 3), 7.0)}, 5 * THETA[None])
    assert [None if (last := one.last(client)) is None else last.tolist() for client in range(CLIENTS)] == [
        None, [5, 10, 15], None, None, [1, 2, 3], None,
    ]  # fmt: skip
    assert one.state.gather([1, 4, 0])[name].tolist() == [[7] * 3, [1] * 3, [0] * 3]


def test_a_model_that_is_remembered_is_kept_once_and_is_the_last_one_until_another_is():
    budget = Budget(3 * 4)  # one vector
    one = ClientPool(federated(), {"theta": torch.zeros(3)}, THETA, 5, budget)
    trained = torch.stack([THETA])
    one.keep([2], {"theta": trained}, trained)
    assert one.last(2).tolist() == [1, 2, 3]
    assert not budget.take(1)
    one.keep([2], {"theta": torch.zeros(1, 3)}, 2 * trained)
    assert one.last(2).tolist() == [2, 4, 6]
    one.keep([2], {"theta": trained}, trained)
    assert one.last(2).tolist() == [1, 2, 3]


def test_a_part_of_the_model_that_is_remembered_under_its_name_is_not_taken_for_it():
    one, trained = clients({"theta": torch.zeros(2)}), THETA[None].clone()
    one.keep([2], {"theta": trained[:, :2]}, trained)
    assert one.last(2).tolist() == [1, 2, 3]


def test_counters_add_up_and_know_how_full_batches_were():
    first, second = Counters(1, 10, 5), Counters(2, 20, 20)
    assert first + second == Counters(3, 30, 25)
    assert first + second - second == first
    assert (first + second).occupancy == 25 / 30
    assert Counters().occupancy == 1.0


def said_of(method, **hparams):
    ctx = RoundContext(model=None, round=3, rounds=9, clients=8, epochs=1, cohort=torch.tensor([6, 2, 5]))
    one = METHODS[method]()
    numbers = {"lr": 0.25, "momentum": 0.0, "weight_decay": 0.0, **one.hparams(), **hparams}
    return diverged(ctx, torch.tensor([True, False, False]), numbers, one)


def test_the_first_client_that_is_not_finite_is_named():
    said = said_of("fedavg")
    assert isinstance(said, FedobpError)
    assert str(said).startswith("round 3, client 2: ")


@pytest.mark.parametrize(
    ("method", "hp", "blamed"),
    [
        ("fedavg", {}, "--lr (it is 0.25)"),
        ("fedavg", {"weight_decay": 8.0}, "--lr (it is 0.25)"),
        ("fedavg", {"weight_decay": 8.1}, "--weight-decay (it is 8.1)"),
        ("fedavg", {"weight_decay": 1e30, "lr": 0.01}, "--weight-decay (it is 1e+30)"),
        ("fedavg", {"weight_decay": 8.1, "momentum": 0.9}, "--lr (it is 0.25) or --momentum (it is 0.9)"),
        ("fedavg", {"weight_decay": 5e-4, "lr": 1e9}, "--lr (it is 1e+09)"),
        ("fedobp", {"q": 0.99999}, "--lr (it is 0.25)"),
        ("fedprox", {"mu": 1e3}, "--set mu (it is 1000)"),
        ("ditto", {"lam": 9.0}, "--set lam (it is 9)"),
        ("ditto", {"lam": 9.0, "weight_decay": 10.0}, "--weight-decay (it is 10) or --set lam (it is 9)"),
        ("pfedme", {"eta_p": 0.5, "lr": 0.01}, "--lr (it is 0.01) or --set eta_p (it is 0.5)"),
    ],
)
def test_what_is_large_enough_to_diverge_is_blamed_and_the_learning_rate_otherwise(method, hparams, blamed):
    assert str(said_of(method, **hparams)).endswith(f"; use a smaller {blamed}")


def test_numbers_arrive_as_they_were_sent():
    cpu = torch.device("cpu")
    assert to_device([1, 2], cpu).dtype == torch.int64
    assert to_device([0.1], cpu, torch.float64).tolist() == [0.1]
    assert to_device([], cpu, torch.int64).shape == (0,)
    assert torch.equal(to_device(THETA, cpu), THETA)


def test_memory_is_what_the_container_may_use(monkeypatch):
    whole = memory_of(torch.device("cpu"))
    assert 2**28 < whole < 2**50
    monkeypatch.setattr(Path, "read_text", lambda path: "1000000\n")
    assert memory_of(torch.device("cpu")) == 1e6
    monkeypatch.setattr(Path, "read_text", lambda path: "max\n")
    assert memory_of(torch.device("cpu")) >= whole


@pytest.mark.parametrize("precision", ["fp32", "fp64", "tf32", "bf16"])
def test_settings_of_the_arithmetic_are_put_back_even_after_an_error(precision):
    def settings():
        cudnn = torch.backends.cudnn
        return (
            torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark,
            cudnn.deterministic,
        )  # fmt: skip

    def fail():
        with deterministic(precision, threads=1):
            tf32 = precision in ("tf32", "bf16")
            assert settings() == (1, tf32, tf32, False, True)
            raise ZeroDivisionError

    before = settings()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert settings() == before


def test_small_models_are_trained_on_one_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert serial_threads(Model("mlp", (4,), 2)) == 1
    assert serial_threads(Model("cnn", (1, 28, 28), 10)) == 7
