"""Networks for tokens on the lanes engine, against the serial engine: one label a sequence, and every next token."""

import numpy as np
import pytest
import torch
from lanes_cases import BATCH, CLASSES, CLIENTS, FAST, TEST, TRAIN, VAL, Plan, make_job, make_pool, shards

from fedobp.data import Dataset, FederatedData
from fedobp.engine import Lanes, Serial, vectorises
from fedobp.engine.im2col import patched
from fedobp.engine.lanes.vectorised import Vectorised
from fedobp.engine.stack import Columns
from fedobp.models import Model

LENGTH, VOCABULARY = 5, 7
NETWORKS = {"lstm": {"embedding": 3, "width": 4, "layers": 2}, "transformer": {"width": 8, "heads": 2}}
CASES = pytest.mark.parametrize(("name", "every_position"), [(name, every) for name in NETWORKS for every in (0, 1)])


@pytest.fixture(params=["cpu", "cuda"], autouse=True)
def form(request, monkeypatch):
    """The form of a device, on the CPU."""
    if request.param == "cuda":
        monkeypatch.setattr("fedobp.engine.lanes.engine.Grouped", Columns)
        monkeypatch.setattr(Vectorised, "model_on", lambda self, device: patched(self._model))


def given(name, every_position, dtype=torch.float64):
    """Return a model, and clients of unequal size."""
    generator = np.random.RandomState(1)
    x = generator.randint(0, VOCABULARY, (sum(TRAIN + VAL + TEST), LENGTH)).astype(np.uint8)
    y = np.roll(x, -1, axis=1).astype(np.int64) if every_position else generator.randint(0, CLASSES, len(x))
    labels = tuple(range(VOCABULARY if every_position else CLASSES))
    data = FederatedData(Dataset("mine", x, y, labels, 0, vocabulary=VOCABULARY), shards(), torch.device("cpu"), dtype)
    model = Model(
        name, (LENGTH,), len(labels), NETWORKS[name], vocabulary=VOCABULARY, every_position=bool(every_position)
    )
    return model, make_pool(model, dtype=dtype, data=data)


def trained(engine, name, every_position, plan, dtype=torch.float64, precision="fp32"):
    model, pool = given(name, every_position, dtype)
    theta = model.initial(3).to(dtype)
    return engine(model, BATCH, precision).train([make_job(plan, pool, theta)])[0]


@CASES
@pytest.mark.parametrize("phases", ["plain", "all but a loss"])
def test_training_equals_the_oracle(name, every_position, phases):
    ours, theirs = (trained(engine, name, every_position, Plan(phases, FAST)) for engine in (Lanes, Serial))
    torch.testing.assert_close(ours.upload["theta"], theirs.upload["theta"], rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=0, atol=1e-10, equal_nan=True)
    still = trained(Serial, name, every_position, Plan("no epochs"))
    assert (theirs.upload["theta"] - still.upload["theta"])[0].abs().max() > 1e-3


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("phases", ["everything", "three vectors"])
def test_a_methods_own_functions_equal_the_oracle(name, phases):
    ours, theirs = (trained(engine, name, False, Plan(phases, FAST)) for engine in (Lanes, Serial))
    for key in ("theta", "scale"):
        torch.testing.assert_close(ours.upload[key], theirs.upload[key], rtol=0, atol=1e-10)


@CASES
def test_predictions_equal_the_oracle(name, every_position):
    model, pool = given(name, every_position)
    job = make_job(Plan(), pool, model.initial(3).double())
    size = CLIENTS, model.layout.size
    theta = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = (engine(model, BATCH).predict(job, theta, "train") for engine in (Lanes, Serial))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert [tuple(one.shape) for one in ours] == [(n, LENGTH) if every_position else (n,) for n in TRAIN]
    assert len(torch.cat(ours).unique()) > 1


@CASES
def test_in_bf16_training_is_near_that_of_float32(name, every_position):
    plan = Plan(hparams={"lr": 0.05})
    rough, exact = (trained(Lanes, name, every_position, plan, torch.float32, one) for one in ("bf16", "fp32"))
    assert rough.upload["theta"].dtype == rough.loss.dtype == torch.float32
    assert not torch.equal(rough.upload["theta"], exact.upload["theta"])
    torch.testing.assert_close(rough.upload["theta"], exact.upload["theta"], rtol=0, atol=0.05)
    torch.testing.assert_close(rough.loss, exact.loss, rtol=0.02, atol=0.02, equal_nan=True)


@CASES
def test_they_can_be_vectorised(name, every_position):
    assert vectorises(given(name, every_position)[0]) is None
