"""`Model`: initialisation, modules and vectors, features and heads, and the networks that it refuses."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from fedobp.errors import FedobpError
from fedobp.models import NETS, Model, register


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return x


def test_initial_is_torchs_default_initialisation_after_seeding():
    model = Model("cnn-small", (1, 8, 8), 10)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        expected = torch.cat([p.detach().reshape(-1) for p in NETS["cnn-small"]((1, 8, 8), 10).parameters()])
    assert model.initial(42).equal(expected)
    assert model.initial(42).equal(Model("cnn-small", (1, 8, 8), 10).initial(42))
    assert not model.initial(43).equal(expected)
    assert expected.dtype == torch.float32
    assert not model.initial(42).requires_grad


def test_torchs_global_generator_is_unchanged():
    before = torch.get_rng_state()
    model = Model("mlp", (4,), 2)
    model.module(model.initial(5))
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_holds_a_copy_of_the_vector_in_its_dtype(dtype):
    model = Model("mlp", (4,), 2)
    theta = torch.arange(model.layout.size, dtype=dtype)
    module = model.module(theta)
    assert all(p.dtype == dtype and p.requires_grad for p in module.parameters())
    assert model.read(module).equal(theta)
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert theta.equal(torch.arange(model.layout.size, dtype=dtype))


def test_load_and_read_are_inverse():
    model = Model("mlp", (4,), 2)
    module = model.module()
    model.load(module, model.initial(9))
    assert model.read(module).equal(model.initial(9))
    assert not model.read(module).requires_grad
    assert module.state_dict().keys() == dict.fromkeys(model.layout.names).keys()


def test_a_model_has_its_name_shape_and_classes():
    model = Model("mlp", [4], 2)
    assert (model.name, model.shape, model.classes) == ("mlp", (4,), 2)


def test_modules_are_independent():
    model = Model("mlp", (4,), 2)
    one, other = model.module(), model.module()
    with torch.no_grad():
        next(one.parameters()).fill_(7)
    assert not (next(other.parameters()) == 7).any()


def test_a_registered_network_is_a_model_even_with_its_classifier_first(registered):
    name = registered(classifier=nn.Linear(2, 3), rest=nn.Linear(3, 3, bias=False))
    model = Model(name, (2,), 3)
    assert model.layout.names == ("classifier.weight", "classifier.bias", "rest.weight")
    assert model.layout.is_head().tolist() == [True] * 9 + [False] * 9


# Refusals


@pytest.mark.parametrize(("name", "near"), [("cnn_small", "cnn-small"), ("CNN", "cnn"), ("mpl", "mlp")])
def test_an_unknown_model_is_refused_with_its_near_miss(name, near):
    with pytest.raises(FedobpError, match=rf"unknown model '{name}': did you mean '{near}'\?"):
        Model(name, (1, 28, 28), 10)


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ({"fc": nn.Linear(2, 2)}, "has no layer called `classifier`"),
        ({"classifiers": nn.Linear(2, 2)}, "has no layer called `classifier`"),
        (
            {"norm": nn.BatchNorm1d(2, momentum=None), "classifier": nn.Linear(2, 2)},
            "has a BatchNorm without running statistics",
        ),
        (
            {"norm": nn.BatchNorm1d(2, track_running_stats=False), "classifier": nn.Linear(2, 2)},
            "has a BatchNorm without running statistics",
        ),
        ({"norm": Buffered(), "classifier": nn.Linear(2, 2)}, "has buffers other than BatchNorm's"),
        ({"drop": nn.Dropout(0.5), "classifier": nn.Linear(2, 2)}, "draws random numbers"),
        ({"deep": nn.Sequential(nn.AlphaDropout(0.5)), "classifier": nn.Linear(2, 2)}, "draws random numbers"),
    ],
)
def test_a_network_that_a_vector_cannot_represent_is_refused(layers, complaint, registered):
    with pytest.raises(FedobpError, match=f"model 'made-up' {complaint}"):
        Model(registered(**layers), (2,), 2)


def test_group_norm_is_supported(registered):
    name = registered(norm=nn.GroupNorm(1, 2), classifier=nn.Linear(2, 2))
    assert Model(name, (2,), 2).layout.size == 2 + 2 + 4 + 2


def test_a_network_that_draws_in_its_forward_pass_is_refused():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Linear(4, 2)

        def forward(self, x):
            return self.classifier(nn.functional.dropout(x, 0.5, self.training))

    register("hidden-dropout")(lambda shape, classes: Hidden())
    try:
        with pytest.raises(FedobpError, match="draws random numbers"):
            Model("hidden-dropout", (4,), 2)
        with pytest.raises(FedobpError, match="does not take two inputs of shape"):
            Model("hidden-dropout", (5,), 2)
    finally:
        del NETS["hidden-dropout"]


# Features and heads.


@pytest.mark.parametrize("name", ["cnn-small", "mlp"])
def test_a_head_on_features_is_the_model(name):
    model = Model(name, (1, 8, 8), 3)
    theta, x = model.initial(1), torch.randn(5, 1, 8, 8)
    weight, bias = model.head(theta)
    torch.testing.assert_close(model.features(theta, x) @ weight.T + bias, model.logits(theta, x))
    assert (weight.shape, bias.shape) == ((3, 128), (3,))


def test_a_head_can_be_replaced_for_one_model_or_many():
    model = Model("mlp", (4,), 3)
    theta, other = (torch.stack([model.initial(seed), model.initial(seed + 1)]) for seed in (0, 5))
    changed = model.with_head(theta, *model.head(other))
    assert torch.equal(changed, model.layout.join(model.layout.split(theta)[0], model.layout.split(other)[1]))
    assert torch.equal(model.with_head(theta[0], *model.head(other[0])), changed[0])


def test_a_head_that_is_not_a_linear_layer_is_refused(registered):
    name = registered(flatten=nn.Flatten(), classifier=nn.Linear(4, 2, bias=False))
    with pytest.raises(FedobpError, match="one linear layer with a bias"):
        Model(name, (4,), 2).head(torch.zeros(8))


class Changed(nn.Module):
    """A network that changes what its classifier returns."""

    def __init__(self, change):
        super().__init__()
        self.fc, self.classifier, self.scale = nn.Linear(6, 8), nn.Linear(8, 4), nn.Parameter(torch.ones(1))
        self.change = change

    def forward(self, x):
        return self.change(self, self.classifier(self.fc(x).relu()))


class Tied(nn.Module):
    """A network whose classifier has the weight of another layer, which comes before it or after it."""

    def __init__(self, first):
        super().__init__()
        for name in ("fc", "classifier") if first else ("classifier", "fc"):
            setattr(self, name, nn.Linear(4, 4))
        self.classifier.weight = self.fc.weight

    def forward(self, x):
        return self.classifier(self.fc(x).relu())


class Normalised(nn.Linear):
    """A linear layer by its type."""

    def forward(self, x):
        return super().forward(nn.functional.normalize(x, dim=-1))


class Reading(nn.Module):
    """A network that reads its classifier's weight."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(6, 4)

    def forward(self, x):
        return self.classifier(x) + 0 * self.classifier.weight.sum()


@pytest.mark.parametrize(
    ("build", "shape", "is_linear"),
    [
        (lambda: Changed(lambda net, z: z), (6,), True),
        (lambda: Changed(lambda net, z: z.log_softmax(dim=-1)), (6,), False),
        (lambda: Changed(lambda net, z: 5 * z), (6,), False),
        (lambda: Changed(lambda net, z: net.scale * z), (6,), False),
        (lambda: Changed(lambda net, z: z.clamp(-9, 9)), (6,), False),
        (lambda: Tied(True), (4,), False),
        (lambda: Tied(False), (4,), False),
        (Reading, (6,), False),
        (lambda: nn.Sequential(OrderedDict(classifier=Normalised(6, 4))), (6,), False),
    ],
)
def test_a_head_is_linear_where_its_outputs_are_the_logits(build, shape, is_linear):
    before = torch.get_rng_state()
    model = Model(lambda shape, classes: build(), shape, 4)
    assert model.has_linear_head is is_linear
    assert torch.get_rng_state().equal(before)


def test_the_head_of_a_network_for_tokens_is_tried_with_tokens():
    class Words(nn.Module):
        def __init__(self, vocabulary, classes):
            super().__init__()
            self.words, self.classifier = nn.Embedding(vocabulary, 5), nn.Linear(5, classes)

        def forward(self, x):
            return self.classifier(self.words(x).mean(dim=1))

    def words(shape, classes, *, vocabulary):
        return Words(vocabulary, classes)

    assert Model(words, (7,), 3, vocabulary=9).has_linear_head
