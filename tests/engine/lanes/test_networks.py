"""The networks that we ship, on the lanes engine: in float64 equal to the serial engine, in the forms of both devices.

On a card `tests/gpu` does the same with the card.
"""

import pytest
import torch
from lanes_cases import (
    BATCH,
    CLASSES,
    FAST,
    ONE_ROUND,
    TRAIN,
    Plan,
    agree,
    compare,
    make_job,
    make_model,
    make_pool,
    run_rounds,
)

from fedobp.engine import Lanes, Serial
from fedobp.engine.im2col import PatchConv2d, PatchGroupNorm, patched
from fedobp.engine.lanes.vectorised import Vectorised
from fedobp.engine.stack import Columns, Grouped, stacked
from fedobp.models import NETS
from fedobp.models.residual import ResNet, group_norm


def images(*leading):
    return torch.randn(*leading, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["cpu", "cuda"])
def form(request, monkeypatch):
    """The form of a device, on the CPU."""
    if request.param == "cuda":
        monkeypatch.setattr("fedobp.engine.lanes.engine.Grouped", Columns)
        monkeypatch.setattr(Vectorised, "model_on", lambda self, device: patched(self._model))
    return request.param


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("conv", "plain"), ("conv", "everything"), ("resnet8", "plain"), ("resnet8", "all but a loss"),
        ("resnet8", "everything"), ("resnet8", "a sweep"), ("resnet8-bn", "plain"), ("resnet8-bn", "all but a loss"),
    ],
)  # fmt: skip
def test_small_networks_equal_the_oracle(name, phases):
    compare(make_model(name), [Plan(phases, FAST), Plan(phases, seed=9, cohort=(4, 0))], rounds=ONE_ROUND)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("norm", [group_norm, torch.nn.BatchNorm2d])
def test_four_stages_of_two_blocks_equal_the_oracle(norm, monkeypatch):
    """ResNet-18 has 11 million entries a client; a narrow one has the same layers."""
    monkeypatch.setitem(NETS, "narrow", lambda shape, classes: ResNet(shape[0], classes, (4, 6, 8, 10), 2, norm))
    compare(make_model("narrow"), [Plan(hparams=FAST, epochs=1)], rounds=ONE_ROUND)


@pytest.mark.parametrize("form", [Grouped, Columns])
@pytest.mark.parametrize("name", ["resnet18", "resnet18-bn"])
def test_many_copies_of_large_networks_equal_one_after_the_other(name, form):
    model = make_model(name)
    theta = torch.stack([model.initial(seed).double() for seed in (0, 1)])
    x = images(2, 3)
    with torch.no_grad():
        found = stacked(model, form)(model.layout.views(theta), x)
        torch.testing.assert_close(found, torch.stack([model.logits(*one) for one in zip(theta, x, strict=True)]))


@pytest.mark.parametrize("name", ["resnet8", "resnet8-bn"])
@pytest.mark.parametrize("form", [Grouped, Columns])
def test_predictions_equal_the_oracle(name, form, monkeypatch):
    monkeypatch.setattr("fedobp.engine.lanes.engine.Grouped", form)
    model = make_model(name)
    pool, theta = make_pool(model), model.initial(3).double()
    job = make_job(Plan(), pool, theta)
    heads = torch.randn(len(TRAIN), model.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    each = torch.where(model.layout.is_head(), heads, theta)
    ours, theirs = (engine(model, BATCH).predict(job, each, "train") for engine in (Lanes, Serial))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert len({int(label) for one in ours for label in one}) == CLASSES


def test_one_lane_equals_several():
    model = make_model("resnet8")
    theta = torch.stack([model.initial(seed).double() for seed in (0, 1)])
    x, forward, views = images(2, 4), stacked(model, Grouped), model.layout.views
    torch.testing.assert_close(forward(views(theta[:1]), x[:1]), forward(views(theta), x)[:1])


def test_cudas_form_replaces_all_convolutions_and_norms():
    kinds = [type(layer) for layer in patched(make_model("resnet8")).structure.modules()]
    assert (kinds.count(PatchConv2d), kinds.count(PatchGroupNorm)) == (9, 9)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", ["resnet8", "resnet8-bn"])
def test_in_bf16_weights_losses_and_statistics_are_near_those_of_float32(name):
    model, plans = make_model(name), [Plan(hparams={"lr": 0.01}, epochs=1)]
    [rough], [exact] = (
        run_rounds(Lanes(model, BATCH, precision), model, plans, dtype=torch.float32, rounds=ONE_ROUND)
        for precision in ("bf16", "fp32")
    )
    assert rough["upload theta"].dtype == torch.float32
    learned = model.layout.learned
    torch.testing.assert_close(
        rough["upload theta"][:, :learned], exact["upload theta"][:, :learned], rtol=0, atol=0.02
    )
    torch.testing.assert_close(rough["loss"], exact["loss"], rtol=0.05, atol=0.05, equal_nan=True)
    assert not torch.equal(rough["upload theta"], exact["upload theta"])


def test_norms_compute_in_float32_though_convolutions_return_bfloat16():
    """A large mean beside a small spread: in bfloat16 it would have no digits left."""
    torch.manual_seed(0)
    x = 100 + torch.randn(4, 6, 5, 5)
    for layer in (torch.nn.GroupNorm(2, 6), torch.nn.GroupNorm(3, 6, affine=False)):
        low = x.bfloat16()
        torch.testing.assert_close(PatchGroupNorm(layer)(low), layer(low.float()), rtol=0, atol=1e-3)
    agree([{"x": PatchGroupNorm(layer)(x.double())}], [{"x": layer.double()(x.double())}], atol=1e-11)
