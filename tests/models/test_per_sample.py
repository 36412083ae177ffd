"""Linear layers whose per-sample gradients come from their inputs and outputs."""

import torch
from torch import nn

from fedobp.models import Model
from fedobp.models.per_sample import linear_layers


class Twice(nn.Module):
    """A layer applied to every row of an image, one applied twice, two that share a tensor, and two plain ones."""

    def __init__(self):
        super().__init__()
        self.rows, self.again, self.plain = nn.Linear(8, 4), nn.Linear(32, 32), nn.Linear(32, 32)
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight
        self.classifier = nn.Linear(32, 3)

    def forward(self, x):
        x = self.rows(x[:, 0]).flatten(1)
        return self.classifier(self.plain(self.second(self.first(self.again(self.again(x))))))


def test_linear_layers_applied_once_to_one_vector_per_sample_are_found():
    assert linear_layers(Twice(), torch.zeros(2, 1, 8, 8)) == ("plain", "classifier")
    assert Model("cnn", (1, 28, 28), 10).linear == ("fc1", "classifier")
    assert Model("mlp", (6,), 3).linear == ("fc1", "classifier")


def test_probed_returns_layer_inputs_and_adds_offsets_to_outputs():
    model, x = Model("mlp", (6,), 3), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    theta = model.initial(0)
    tensors, nothing = model.layout.views(theta), {"fc1": torch.zeros(128), "classifier": torch.zeros(3)}
    logits, inputs = model.probed(tensors, nothing, x)
    torch.testing.assert_close(logits, model.logits(theta, x))
    assert torch.equal(inputs["fc1"], x)
    torch.testing.assert_close(inputs["classifier"], model.features(theta, x))
    shifted, _ = model.probed(tensors, {**nothing, "classifier": torch.tensor([1.0, 2.0, 3.0])}, x)
    torch.testing.assert_close(shifted - logits, torch.tensor([1.0, 2.0, 3.0]).expand(4, 3))
