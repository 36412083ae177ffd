"""BatchNorm as a pure function, against torch's layer."""

import pytest
import torch
from torch import nn

from fedobp.models import Model


def test_the_papers_cnn_with_batch_norm():
    model, plain = Model("cnn-bn", (3, 32, 32), 10), Model("cnn", (3, 32, 32), 10)
    assert model.layout.learned == plain.layout.size + 2 * (32 + 64)  # a weight and a bias per channel
    assert model.layout.size == model.layout.learned + 2 * (32 + 64)  # and two statistics
    assert [name for name in model.layout.names if model.layout.in_norm(name)] == [
        "bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias",
        "bn1.running_mean", "bn1.running_var", "bn2.running_mean", "bn2.running_var",
    ]  # fmt: skip
    assert not any(plain.layout.in_norm(name) for name in plain.layout.names)
    assert [name for name, _ in model.module().named_children()][:4] == ["conv1", "bn1", "relu1", "pool1"]


@pytest.mark.parametrize("padding", [0, 3])
def test_batch_norm_equals_torchs_in_training_and_evaluation(padding, registered):
    name = registered(
        conv=nn.Conv2d(1, 3, 3), norm=nn.BatchNorm2d(3, eps=1e-3, momentum=0.2), flatten=nn.Flatten(),
        flat=nn.BatchNorm1d(108, affine=False), classifier=nn.Linear(108, 2),
    )  # fmt: skip
    model = Model(name, (1, 8, 8), 2)
    theta = model.initial(0).double() + 0.1 * torch.arange(model.layout.size).cos()
    x, weight = torch.randn(5 + padding, 1, 8, 8, dtype=torch.float64), torch.ones(5 + padding, dtype=torch.float64)
    weight[5:] = 0
    logits, statistics = model.trained(theta, x, weight)
    module = model.module(theta).train()
    torch.testing.assert_close(logits[:5], module(x[:5]))
    after = model.read(module)
    torch.testing.assert_close(statistics, after[model.layout.learned :])
    assert torch.equal(after[: model.layout.learned], theta[: model.layout.learned])
    torch.testing.assert_close(model.logits(after, x), module.eval()(x))
    assert set(module.state_dict()) - set(model.layout.names) == {
        "norm.num_batches_tracked",
        "flat.num_batches_tracked",
    }
