"""The cost of a step, against counts by hand."""

import pytest
import torch

from fedobp.engine.cost import cost
from fedobp.engine.stack import Grouped, stacked
from fedobp.models import Model


def cost_of(name, shape, classes, batch, dtype=torch.float32):
    model = Model(name, shape, classes)
    return model, cost(model, stacked(model, Grouped), batch, dtype)


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize(("shape", "entries"), [((7,), 7), ((3, 4, 5), 60)])
def test_flops_of_the_mlp(shape, entries, batch):
    _, found = cost_of("mlp", shape, 10, batch)
    first, second = entries * 128, 128 * 10
    # A multiplication and an addition per weight and sample: in the forward pass, for the gradients of the weights, and
    # for that of the hidden layer; the input needs no gradient.
    assert found.flops == 2 * batch * (2 * first + 3 * second)


@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 10), ((3, 32, 32), 100)])
def test_flops_of_the_papers_cnn(shape, classes):
    _, found = cost_of("cnn", shape, classes, 32)
    channels, side = shape[0], shape[1]
    wide, narrow = side - 4, (side - 4) // 2 - 4
    conv1 = wide**2 * 32 * channels * 25
    conv2 = narrow**2 * 64 * 32 * 25
    fc1 = 64 * (narrow // 2) ** 2 * 512
    assert found.flops == 2 * 32 * (2 * conv1 + 3 * (conv2 + fc1 + 512 * classes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_grow_with_the_model_the_batch_and_the_type(dtype):
    model, small = cost_of("cnn-small", (1, 8, 8), 10, 8, dtype)
    _, large = cost_of("cnn-small", (1, 8, 8), 10, 16, dtype)
    assert small.fixed_bytes == large.fixed_bytes == 4 * dtype.itemsize * model.layout.size
    # At least the outputs of the two convolutions are saved for the backward pass.
    outputs = dtype.itemsize * (32 * 8 * 8 + 64 * 4 * 4)
    assert large.batch_bytes - small.batch_bytes >= 8 * outputs
    assert large.batch_bytes <= 2 * small.batch_bytes


def test_a_model_without_a_matrix_product_costs_no_flops(monkeypatch):
    from lanes_cases import NETWORKS

    from fedobp.models import NETS

    monkeypatch.setitem(NETS, "products", NETWORKS["products"])
    assert cost_of("products", (1, 4, 4), 3, 8)[1].flops == 0
