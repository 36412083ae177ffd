"""Options, records and the server's mean: what every method stands on."""

import math
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from contexts import with_model
from hypothesis import given, settings
from hypothesis import strategies as st

from fedobp.algorithms import METHODS, method_class
from fedobp.errors import FedobpError
from fedobp.method import Client, CohortUpdate, Method, RoundContext, Sparse, Train, average, broadcast, dense, option
from fedobp.models import Model

checked = settings(deadline=None, max_examples=100)


def now(*cohort: int) -> RoundContext:
    return RoundContext(model=None, round=1, rounds=1, clients=9, epochs=1, cohort=torch.tensor(cohort))


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


def test_an_entry_that_nobody_changed_keeps_its_bits_while_others_move():
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


def test_fill_takes_what_was_sent_and_the_others_own_values_elsewhere():
    sparse = Sparse(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([True, False, True]))
    assert sparse.fill(torch.tensor([7.0, 8.0, 9.0])).tolist() == [1, 8, 3]


@checked
@given(pairs=st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.booleans()), min_size=1, max_size=30))
def test_a_mask_and_its_complement_are_everything(pairs):
    one, other = (torch.tensor([pair[side] for pair in pairs], dtype=torch.float32) for side in (0, 1))
    keep = torch.tensor([pair[2] for pair in pairs])
    merged = Sparse(one, keep).fill(other)
    assert merged.equal(Sparse(other, ~keep).fill(one))
    assert merged[keep].equal(one[keep])
    assert merged[~keep].equal(other[~keep])
    assert Sparse(one, keep | ~keep).fill(other).equal(one)
    assert Sparse(one, keep & ~keep).fill(other).equal(other)


def test_dense_is_only_for_what_crosses_whole():
    assert dense({"theta": torch.ones(2)}, "theta").tolist() == [1, 1]
    with pytest.raises(AssertionError):
        dense({"theta": Sparse(torch.ones(2), torch.ones(2, dtype=torch.bool))}, "theta")


def test_to_all_repeats_without_copying():
    vector = torch.arange(3.0)
    sent = broadcast(vector, ctx(4, 0))
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
    [(Client({}, {}, {}, {}, {}), "own"), (Train(1), "epochs"), (ctx(0), "round"), (METHODS["fedobp"](), "q")],
)
def test_what_a_program_sees_cannot_be_changed_in_place(thing, field):
    with pytest.raises(FrozenInstanceError):
        setattr(thing, field, None)


# The registry


def test_methods_are_known_by_their_names():
    assert set(METHODS) == {
        "fedobp", "fedavg", "fedavg-ft", "fedavg-last", "local", "fedper", "fedrep", "fedbabu", "ditto", "fedprox",
        "fedpac", "pfedfda", "scaffold", "lg-fedavg", "pspfl", "floco", "fedrod", "apfl", "pfedme", "fedala", "fedbn",
        "pfedsim", "seqfededt", "decoupled", "flute", "feddpa", "fedselect",
    }  # fmt: skip
    assert all(method_class(name) is cls and cls.name == name for name, cls in METHODS.items())


def test_an_unknown_method_is_refused_with_its_near_miss():
    with pytest.raises(FedobpError, match=r"unknown method 'fedopb': did you mean 'fedobp'\?"):
        method_class("fedopb")


@pytest.mark.parametrize("cls", METHODS.values(), ids=METHODS.keys())
def test_every_method_and_option_is_described(cls):
    assert cls.summary
    assert cls.paper
    assert cls.__doc__
    for spec in cls.options():
        assert spec.metadata["doc"].strip()
        assert spec.type in (int, float, str)
        assert isinstance(spec.default, spec.type)
        assert (spec.type is str) == bool(spec.metadata["choices"])


@pytest.mark.parametrize("cls", METHODS.values(), ids=METHODS.keys())
def test_defaults_pass_their_own_checks(cls):
    defaults = {spec.name: spec.default for spec in cls.options()}
    assert cls.configure({}) == cls.configure(defaults) == cls()


@pytest.mark.parametrize("cls", METHODS.values(), ids=METHODS.keys())
def test_every_method_starts_from_theta_0_and_keeps_it_on_the_server(cls):
    model = Model("mlp", (4,), 2)
    theta = model.initial(0)
    # FLOCO draws its classifiers itself, and the model's is their middle.
    drawn = model.layout.mask(lambda name: cls.name == "floco" and name == "classifier.weight")
    assert torch.equal(cls().init(model, theta, 0).server["theta"][~drawn], theta[~drawn])


def test_the_base_class_does_nothing_by_itself():
    method, model, empty = Method(), Model("mlp", (4,), 2), {}
    for call in (
        lambda: method.init(model, torch.zeros(1), 0),
        lambda: method.download(with_model(model, ctx(0)), empty, empty),
        lambda: method.client_update(with_model(model, ctx(0))),
        lambda: method.aggregate(with_model(model, ctx(0)), empty, empty, CohortUpdate(empty, torch.ones(1))),
        lambda: method.personalize(with_model(model, ctx(0))),
    ):
        with pytest.raises(NotImplementedError):
            call()


# Options


def configure(name: str, **given):
    return METHODS[name].configure(given)


def test_the_choices_of_fedobp():
    assert {spec.name: spec.metadata["choices"] for spec in METHODS["fedobp"].options() if spec.type is str} == {
        "score": ("squared", "product"),
        "norm": ("none", "layer", "global"),
        "scope": ("all", "classifier"),
        "start": ("global", "literal"),
    }


def test_configure_sets_what_is_given_and_leaves_the_rest():
    method = configure("fedobp", q=0.9, score="product")
    assert (method.q, method.score, method.norm, method.scope, method.ema, method.start) == (
        0.9, "product", "none", "all", 0.0, "global",
    )  # fmt: skip
    assert configure("fedobp").score == "squared"
    assert configure("fedavg-ft").finetune == 5


@pytest.mark.parametrize(
    ("method", "name", "given", "value"),
    [
        ("fedobp", "q", 1, 1.0),
        ("fedobp", "q", 0, 0.0),
        ("fedobp", "q", "0.25", 0.25),
        ("fedobp", "ema", 1.0, 1.0),
        ("fedavg-ft", "finetune", 3.0, 3),
        ("fedavg-ft", "finetune", "7", 7),
        ("fedavg-ft", "finetune", 0, 0),
        ("fedavg-ft", "finetune", 1000, 1000),
    ],
)
def test_numbers_arrive_in_their_options_type(method, name, given, value):
    found = getattr(configure(method, **{name: given}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("typo", "near"), [("scores", "score"), ("Q", "q"), ("nrom", "norm"), ("stat", "start")])
def test_an_unknown_option_is_refused_with_its_near_miss(typo, near):
    with pytest.raises(FedobpError, match=rf"unknown option of fedobp '{typo}': did you mean '{near}'\?"):
        configure("fedobp", **{typo: 1})


@pytest.mark.parametrize("name", ["fedavg", "fedavg-last", "local", "scaffold"])
def test_a_method_without_options_takes_none(name):
    with pytest.raises(FedobpError, match=f"method '{name}' has no options, so 'q' cannot be set"):
        configure(name, q=0.5)


@pytest.mark.parametrize("value", ["many", "", True, math.nan, "nan"])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(FedobpError, match=f"option 'q' of fedobp must be a number, not '{value}'"):
        configure("fedobp", q=value)


@pytest.mark.parametrize("value", [[0.5], None, {"a": 1}, math.inf])
def test_what_no_option_can_be_is_refused(value):
    with pytest.raises(FedobpError, match="option 'q' of fedobp must be a number"):
        configure("fedobp", q=value)


@pytest.mark.parametrize("value", [2.5, "2.5", "many", True, math.nan, math.inf])
def test_what_is_not_a_whole_number_is_refused(value):
    with pytest.raises(FedobpError, match=f"option 'finetune' of fedavg-ft must be a whole number, not '{value}'"):
        configure("fedavg-ft", finetune=value)


@pytest.mark.parametrize("name", ["q", "ema"])
@pytest.mark.parametrize("value", [-0.001, 1.001, -1, 2])
def test_a_number_out_of_range_is_refused(name, value):
    with pytest.raises(FedobpError, match=f"option '{name}' of fedobp must be between 0.0 and 1.0, not {value}"):
        configure("fedobp", **{name: value})


def test_a_number_below_an_open_range_is_refused():
    with pytest.raises(FedobpError, match="option 'finetune' of fedavg-ft must be at least 0, not -1"):
        configure("fedavg-ft", finetune=-1)


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("score", "square", "squared"),
        ("norm", "layers", "layer"),
        ("scope", "classifer", "classifier"),
        ("start", "literally", "literal"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_its_near_miss(name, value, near):
    with pytest.raises(
        FedobpError, match=rf"unknown value of option '{name}' of fedobp '{value}': did you mean '{near}'\?"
    ):
        configure("fedobp", **{name: value})


def test_an_option_may_be_open_on_either_side():
    @dataclass(frozen=True)
    class MadeUp(Method):
        name = "made-up"
        free: float = option(0.0, "any number")
        capped: float = option(0.0, "up to 2", low=-1.0, high=2.0)

    assert MadeUp.configure({"free": -1e9, "capped": 2}) == MadeUp(free=-1e9, capped=2.0)
    assert MadeUp.configure({"free": 1e9, "capped": -1}) == MadeUp(free=1e9, capped=-1.0)
    with pytest.raises(FedobpError, match=r"'capped' of made-up must be between -1\.0 and 2\.0, not 3"):
        MadeUp.configure({"capped": 3})


def test_a_choice_of_another_type_is_refused():
    with pytest.raises(FedobpError, match="choose from squared, product"):
        configure("fedobp", score=1)


def test_floats_are_what_clients_see():
    assert configure("fedobp", q=0.5, ema=0.25).hparams() == {"q": 0.5, "ema": 0.25}
    assert configure("fedavg-ft").hparams() == {}


def test_a_phase_without_a_loss_trains_one_vector():
    with pytest.raises(ValueError, match="one vector"):
        Train(1, learn=("theta", "other"))
    Train(1, learn=("theta", "other"), loss=lambda model, client, batch: client.theta.sum())
