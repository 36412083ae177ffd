"""Modules that can be run for many clients at once, and those that cannot, with the reason."""

import re

import pytest
import torch
from lanes_cases import BATCH, NETWORKS, Plan, compare, make_model, run_rounds
from torch import nn

from fedobp.engine import Serial, vectorises
from fedobp.models import NETS


class Net(nn.Module):
    """A perceptron on 64 pixels; each subclass does something else with the hidden units."""

    def __init__(self):
        super().__init__()
        self.fc, self.classifier = nn.Linear(64, 5), nn.Linear(5, 3)
        self.add_module("more", self.layers())

    def layers(self):
        return nn.Identity()

    def forward(self, x):
        return self.classifier(self.change(self.fc(x.flatten(1))))


class Branch(Net):
    def change(self, x):
        return x if x.mean() > 0 else -x


class BranchOnAWeight(Net):
    def change(self, x):
        return x if self.fc.bias[0] > 0 else -x


class Item(Net):
    def change(self, x):
        return x * x.sum().item()


class Lstm(Net):
    def layers(self):
        return nn.LSTM(1, 5, batch_first=True)

    def change(self, x):
        return self.more(x[..., None])[0][:, -1]


class Filled(Net):
    def change(self, x):
        out = torch.zeros(len(x), 5, dtype=x.dtype)
        out += x
        return out


class Masked(Net):
    def change(self, x):
        return x * x[x > 0].sum()


class Array(Net):
    def change(self, x):
        return x + torch.from_numpy(x.detach().numpy())


class BranchWithNorm(Branch):
    def layers(self):
        return nn.BatchNorm1d(5)

    def change(self, x):
        return super().change(self.more(x))


class Gru(Net):
    def layers(self):
        return nn.GRUCell(5, 5)

    def change(self, x):
        return self.more(x)


class InPlace(Net):
    def forward(self, x):
        x *= 2
        x.add_(1)
        return super().forward(x)

    def change(self, x):
        return x.mul_(2)


class Kept(Net):
    def change(self, x):
        self.last = x.detach()
        return x


CANNOT = {
    Branch: "data-dependent control flow", BranchOnAWeight: "data-dependent control flow", Item: r"calling \.item\(\)",
    Lstm: "Batching rule not implemented for aten::lstm.input", Filled: "output with shape", Masked: "dynamic shape",
    Array: "RuntimeError", BranchWithNorm: "data-dependent control flow",
}  # fmt: skip


@pytest.fixture
def mine(monkeypatch):
    """Return a function that registers a module as the model `mine` and returns the model."""

    def register(build):
        monkeypatch.setitem(NETS, "mine", lambda shape, classes: build())
        return make_model("mine")

    return register


@pytest.mark.parametrize("build", CANNOT, ids=lambda build: build.__name__)
def test_a_module_that_cannot_be_vectorised_says_why_and_trains_on_the_serial_engine(build, mine):
    model = mine(build)
    reason = vectorises(model)
    assert re.fullmatch(r"model 'mine' cannot be run for many clients at once \(.*\)", reason)  # in one line
    assert re.search(CANNOT[build], reason)
    assert len(reason) <= 300
    assert run_rounds(Serial(model, BATCH), model, [Plan()])[0]["finite"].all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # a loop over the lanes, for a GRU cell
@pytest.mark.parametrize("build", [Gru, InPlace, Kept], ids=lambda build: build.__name__)
def test_a_module_that_can_be_vectorised_equals_the_oracle(build, mine):
    model = mine(build)
    assert vectorises(model) is None
    compare(model, [Plan(), Plan("loss", seed=9)])


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize("name", ["cnn-small", "resnet8", "resnet8-bn", *NETWORKS])
def test_networks_can_be_vectorised(name):
    assert vectorises(make_model(name)) is None


def test_a_sequence_of_common_layers_is_not_tried(monkeypatch):
    monkeypatch.setattr("fedobp.engine.probe.stacked", None)
    assert vectorises(make_model("cnn-small")) is None
    assert "not callable" in vectorises(make_model("resnet8"))


def test_a_failure_that_no_error_message_explains_is_named_by_its_type(mine):
    class Silent(Net):
        def change(self, x):
            if torch._C._functorch.is_batchedtensor(x):
                raise KeyError
            return x

    assert vectorises(mine(Silent)) == "model 'mine' cannot be run for many clients at once (KeyError)"
