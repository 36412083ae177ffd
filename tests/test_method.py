"""What every method stands on: the server's mean, clients and contexts, phases, and the base class."""

import math
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedobp.algorithms import METHODS
from fedobp.method import (
    Batch,
    Client,
    CohortUpdate,
    Method,
    RoundContext,
    Sparse,
    Train,
    average,
    broadcast,
    dense,
    last_model,
    mode_option,
)
from fedobp.models import Model
from fedobp.records import shapes_of

checked = settings(deadline=None, max_examples=100)


def context(*cohort: int, model: Model | None = None) -> RoundContext:
    return RoundContext(model, round=1, rounds=1, clients=9, epochs=1, cohort=torch.tensor(cohort))


# The mean


@pytest.mark.essential
def test_average_weighs_by_samples_without_a_further_factor():
    uploads = torch.tensor([[1.0, 2.0, -4.0], [5.0, 6.0, 0.0]])
    assert average(uploads, torch.tensor([1, 3])).tolist() == [4, 5, -1]


@checked
@given(n=st.lists(st.integers(1, 5000), min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_equal_models_average_to_that_model_bit_for_bit(n, seed):
    model = torch.randn(300, generator=torch.Generator().manual_seed(seed))
    assert average(model.repeat(len(n), 1), torch.tensor(n)).equal(model)


@pytest.mark.parametrize("n", [[7, 0, 0], [0, 7, 0], [0, 0, 7]])
def test_the_only_client_with_samples_is_the_mean_bit_for_bit(n):
    uploads = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    assert average(uploads, torch.tensor(n)).equal(uploads[n.index(7)])


def test_an_entry_that_no_client_changed_keeps_its_bits():
    before = torch.randn(100, generator=torch.Generator().manual_seed(1))
    uploads = before.repeat(10, 1)
    uploads[:, ::2] += torch.arange(10.0)[:, None]
    mean = average(uploads, torch.arange(1, 11))
    assert mean[1::2].equal(before[1::2])
    assert torch.allclose(mean[::2], before[::2] + 6)  # sum of (k + 1) k over 55 is 330 / 55


@checked
@given(n=st.lists(st.integers(1, 5000), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_average_is_the_weighted_mean_in_any_order_of_clients(n, seed):
    draw = torch.Generator().manual_seed(seed)
    uploads = torch.randn(len(n), 20, generator=draw, dtype=torch.float64)
    mean = average(uploads, torch.tensor(n))
    expected = sum(weight * upload for weight, upload in zip(n, uploads, strict=True)) / sum(n)
    assert torch.allclose(mean, expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(average(uploads.flip(0), torch.tensor(n[::-1])), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_average_keeps_the_dtype(dtype):
    assert average(torch.ones(3, 2, dtype=dtype), torch.tensor([1, 2, 3])).dtype == dtype


# Records


def test_fill_takes_sent_entries_and_other_values_elsewhere():
    sparse = Sparse(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([True, False, True]))
    assert sparse.fill(torch.tensor([7.0, 8.0, 9.0])).tolist() == [1, 8, 3]


@checked
@given(pairs=st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.booleans()), min_size=1, max_size=30))
def test_a_mask_and_its_complement_are_all_entries(pairs):
    one, other = (torch.tensor([pair[side] for pair in pairs], dtype=torch.float32) for side in (0, 1))
    keep = torch.tensor([pair[2] for pair in pairs])
    merged = Sparse(one, keep).fill(other)
    assert merged.equal(Sparse(other, ~keep).fill(one))
    assert merged[keep].equal(one[keep])
    assert merged[~keep].equal(other[~keep])
    assert Sparse(one, keep | ~keep).fill(other).equal(one)
    assert Sparse(one, keep & ~keep).fill(other).equal(other)


def test_dense_refuses_a_sparse_value():
    assert dense({"theta": torch.ones(2)}, "theta").tolist() == [1, 1]
    with pytest.raises(AssertionError):
        dense({"theta": Sparse(torch.ones(2), torch.ones(2, dtype=torch.bool))}, "theta")


def test_broadcast_repeats_without_copying():
    vector = torch.arange(3.0)
    sent = broadcast(vector, context(4, 0))
    assert sent.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert sent.data_ptr() == vector.data_ptr()
    assert sent.stride(0) == 0


def test_a_clients_functions_return_changed_copies():
    empty = Client(state={}, download={}, scratch={}, upload={}, hparams={})
    a, b = torch.tensor(1.0), torch.tensor(2.0)
    changed = empty.set(theta=a).remember(theta=b, kept=a).send(theta=a).set(mine=b).remember(kept=b).send(more=b)
    assert (changed.scratch, changed.state, changed.upload) == (
        {"theta": a, "mine": b},
        {"theta": b, "kept": b},
        {"theta": a, "more": b},
    )
    assert changed.theta is a
    assert (empty.scratch, empty.state, empty.upload) == ({}, {}, {})


@pytest.mark.parametrize(
    ("thing", "field"),
    [(Client({}, {}, {}, {}, {}), "state"), (Train(1), "epochs"), (context(0), "round"), (METHODS["fedobp"](), "q")],
)
def test_clients_phases_contexts_and_methods_are_immutable(thing, field):
    with pytest.raises(FrozenInstanceError):
        setattr(thing, field, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clients_first_state_is_theta_0_untrained(dtype):
    state = last_model(torch.arange(3, dtype=dtype))
    assert (state["theta"].tolist(), state["seen"].tolist()) == ([0, 1, 2], False)
    assert (state["theta"].dtype, state["seen"].dtype) == (dtype, torch.bool)


def test_a_cohorts_mean_is_the_average_of_a_dense_upload():
    uploads, n = torch.tensor([[1.0, 2.0], [5.0, 6.0]]), torch.tensor([1, 3])
    update = CohortUpdate({"theta": uploads, "part": Sparse(uploads, uploads > 2)}, n)
    assert update.dense("theta") is uploads
    assert update.mean("theta").equal(average(uploads, n))
    with pytest.raises(AssertionError):
        update.mean("part")


def test_means_over_a_batch_leave_out_its_padding():
    zero, weight = torch.tensor(0), torch.tensor([1.0, 1.0, 0.0])
    batch = Batch(torch.zeros(3, 1), torch.tensor([0, 1, 1]), weight, zero, zero, zero)
    assert batch.mean(torch.tensor([1.0, 4.0, 100.0])).item() == 2.5
    logits = torch.tensor([[1.0, 0.0], [0.0, 3.0], [50.0, -50.0]])
    expected = torch.nn.functional.cross_entropy(logits[:2], batch.y[:2])
    torch.testing.assert_close(batch.cross_entropy(logits), expected)


# Methods and phases


def test_the_functions_of_the_base_class_are_abstract():
    method, model, empty = Method(), Model("mlp", (4,), 2), {}
    ctx = context(0, model=model)
    for call in (
        lambda: method.init(model, torch.zeros(1), 0),
        lambda: method.download(ctx, empty, empty),
        lambda: method.client_update(ctx),
        lambda: method.aggregate(ctx, empty, empty, CohortUpdate(empty, torch.ones(1))),
        lambda: method.personalize(ctx),
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_float_options_reach_clients_as_hyper_parameters():
    assert METHODS["fedobp"](q=0.5, ema=0.25).hparams() == {"q": 0.5, "ema": 0.25}
    assert METHODS["fedavg-ft"]().hparams() == {}


def test_a_phase_without_a_loss_trains_one_vector():
    with pytest.raises(ValueError, match="one vector"):
        Train(1, learn=("theta", "other"))
    Train(1, learn=("theta", "other"), loss=lambda model, client, batch: client.theta.sum())


def test_the_mode_option_has_two_choices_and_is_faithful_by_default():
    @dataclass(frozen=True)
    class MadeUp(Method):
        name = "made-up"
        mode: str = mode_option("what differs")

    [spec] = MadeUp.options()
    assert (MadeUp().mode, spec.metadata["choices"]) == ("faithful", ("faithful", "as-published"))
    assert spec.metadata["doc"] == "what differs"


def test_by_default_a_method_trains_the_sampled_cohort_at_once():
    method = Method()
    assert (method.cohorts(1, 9), method.sequential, method.keeps_last_model) == (("sampled",), False, False)
    assert method.predict is None


def test_the_expected_upload_is_found_on_the_device_of_the_download():
    """FedPAC's clients have no state; without data, shapes are all that there is."""
    model, method = Model("mlp", (1, 8, 8), 10), METHODS["fedpac"]()
    initial = method.init(model, model.initial(0).to("meta"), 0)
    ctx = context(0, model=model)
    download, _ = method.download(ctx, initial.server, {"head": initial.record["head"][None]})
    found = method.expected_upload(ctx, {name: value[0] for name, value in download.items()}, initial.state)
    features, size = 10 * 128, model.layout.size
    assert shapes_of(found) == {
        "h": (features,),
        "variance": (),
        "theta": (size,),
        "prototypes": (features,),
        "counts": (10,),
    }
