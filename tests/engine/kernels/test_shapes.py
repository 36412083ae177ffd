import pytest
import torch

from engine.kernels.interpreted import WITHOUT_GPU
from fedobp.engine.kernels.shapes import Shapes, flat_order, kernel_order
from fedobp.models import Model

pytestmark = WITHOUT_GPU


@pytest.mark.parametrize(("side", "channels", "classes"), [(28, 1, 10), (32, 3, 100)])
def test_the_kernels_order_holds_every_entry_once(side, channels, classes):
    model = Model("cnn", (channels, side, side), classes)
    shapes = Shapes(side, channels, classes, 32)
    order = kernel_order(model.layout, shapes)
    assert torch.equal(order[order >= 0].sort().values, torch.arange(model.layout.size))
    assert torch.equal(order[flat_order(order, model.layout.size)], torch.arange(model.layout.size))
    assert len(order) == shapes.size
