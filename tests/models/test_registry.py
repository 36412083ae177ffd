"""Networks of one's own: functions, references, entry points; their options, and what is recorded."""

import sys
import tomllib
from collections import OrderedDict
from math import prod

import numpy as np
import pytest
import torch
from torch import nn

from fedobp import Config, Federation, FedobpError, sweep
from fedobp.models import Model, network, network_names, network_options

CODE = """
from collections import OrderedDict
from math import prod

from torch import nn

def wide(shape, classes, *, width: int = 8):
    layers = OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(prod(shape), width), relu=nn.ReLU())
    return nn.Sequential(OrderedDict(**layers, classifier=nn.Linear(width, classes)))

def broken(shape, classes):
    return nn.Sequential(OrderedDict(classifier=nn.Linear(prod(shape), 1 // 0)))

def needs_more(shape, classes, *, depth):
    return None

a_module = nn.Linear(2, 2)
"""
FAST = {"clients": 5, "rounds": 2, "epochs": 1, "participation": 1.0}


def wide(shape, classes, *, width: int = 8):
    layers = OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(prod(shape), width), relu=nn.ReLU())
    return nn.Sequential(OrderedDict(**layers, classifier=nn.Linear(width, classes)))


@pytest.fixture
def module(install):
    install("mynets", CODE, "fedobp.models", {"wide": "mynets:wide", "module": "mynets:a_module"})


def test_a_function_a_reference_and_an_entry_point_are_one_network(module):
    made = [Model(given, (3, 4), 2, {"width": 5}) for given in (wide, "mynets:wide", "wide")]
    assert [model.layout.size for model in made] == [5 * 12 + 5 + 2 * 5 + 2] * 3
    assert torch.equal(made[0].initial(7), made[1].initial(7))
    assert [model.name for model in made] == [f"{__name__}:wide", "mynets:wide", "wide"]
    assert "wide" in network_names()


def test_a_function_is_trained_like_any_network(module):
    results = [Federation(Config(model=given, **FAST)).run("fedper") for given in (wide, "mynets:wide")]
    assert results[0].history == results[1].history
    assert results[0].notes == ()  # this module can be imported


def test_options_reach_the_function_and_the_file(module, tmp_path, command):
    flags = [f"--{name}={value}" for name, value in FAST.items()]
    command("run", "--model", "mynets:wide", "--model-set", "width=6", *flags, "--out", tmp_path / "run")
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (written["model"], written["model_options"]) == ("mynets:wide", {"width": 6})
    command("run", "--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "again")
    for file in ("metrics.jsonl", "models/global.safetensors"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    flags += ["--model", "mynets:wide", "--model-set", "width=6", "--methods", "fedavg,fedper"]
    command("compare", *flags, "--out", tmp_path / "both")
    command("compare", "--config", tmp_path / "both" / "compare.toml", "--out", tmp_path / "both-again")
    one, other = (tmp_path / name / "fedper-seed42" / "metrics.jsonl" for name in ("both", "both-again"))
    assert one.read_bytes() == other.read_bytes()


def test_other_options_of_the_file_go_with_another_model(module, tmp_path, command):
    flags = [f"--{name}={value}" for name, value in FAST.items()]
    command("run", "--model", "mynets:wide", "--model-set", "width=6", *flags, "--out", tmp_path / "run")
    command("run", "--config", tmp_path / "run" / "config.toml", "--model", "mlp", "--out", tmp_path / "other")
    assert "model_options" not in tomllib.loads((tmp_path / "other" / "config.toml").read_text())


def test_two_functions_of_one_name_do_not_share_a_launch():
    configs = [
        Config(model=lambda shape, classes, width=width: wide(shape, classes, width=width), **FAST) for width in (4, 9)
    ]
    results = sweep(configs)
    assert [len(result.launch) for result in results] == [1, 1]
    assert [len(result.state_dict()["fc.bias"]) for result in results] == [4, 9]
    assert all("cannot be imported" in result.notes[0] for result in results)


class Squeezed(nn.Module):
    """Loses the axis of samples where there is one."""

    def __init__(self, squeeze):
        super().__init__()
        self.squeeze, self.classifier = squeeze, nn.Linear(64, 10)

    def forward(self, x):
        return self.classifier(self.squeeze(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mynets:missing", "cannot be loaded: AttributeError"),
        ("nowhere:at_all", "cannot be loaded: ModuleNotFoundError"),
        ("mynets:a_module", "is a module: give a function"),
        ("module", "is a module: give a function"),
        ("mynets:needs_more", "needs 'depth', which no run passes"),
        ("wild", "did you mean 'wide'"),
        ("my nets:wide", "write package.module:function"),
        (nn.Linear(2, 2), "is a module: give a function"),
        (7, "must be a text"),
        (lambda shape, classes: "no module", "returns no torch module, but a str"),
        (lambda shape, classes: nn.Sequential(OrderedDict(classifier=nn.Linear(64, 10))), "does not take two inputs"),
        (
            lambda shape, classes: nn.Sequential(OrderedDict(flatten=nn.Flatten(), classifier=nn.Linear(64, 3))),
            r"returns \(2, 3\) for two inputs, and not logits of shape \(2, 10\)",
        ),
        (
            lambda shape, classes: Squeezed(lambda x: x.flatten(1).squeeze()),
            r"returns \(10,\) for one input, and not logits of shape \(1, 10\)",
        ),
        (
            lambda shape, classes: Squeezed(lambda x: x.squeeze().flatten(1)),
            r"does not take one input of shape \(1, 8, 8\)",
        ),
    ],
)
def test_what_is_no_network_is_refused(given, message, module):
    with pytest.raises(FedobpError, match=message):
        Federation(Config(model=given))


class Fails(nn.Module):
    """Works on small numbers."""

    def __init__(self, classes):
        super().__init__()
        self.classifier = nn.Linear(64, classes)

    def forward(self, x):
        if x.abs().max() > 1.01:
            raise ValueError("boom")
        return self.classifier(x.flatten(1))


@pytest.mark.parametrize("engine", ["serial", "auto"])
@pytest.mark.filterwarnings("ignore:model .* cannot be run for many clients")
def test_an_exception_in_training_names_the_network_and_the_line(engine):
    federation = Federation(Config(model=lambda shape, classes: Fails(classes), engine=engine, **FAST))
    with pytest.raises(FedobpError, match=r"ValueError: boom \(model '.*', .*test_registry.py:\d+\)"):
        federation.run("fedavg")


class Modes(nn.Module):
    """Computes something else in evaluation."""

    def __init__(self, classes):
        super().__init__()
        self.classifier = nn.Linear(64, classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.classifier(x if self.training else 2 * x)


class NormalisedModes(Modes):
    """Has a BatchNorm too, which may compute something else in evaluation."""

    def __init__(self, classes):
        super().__init__(classes)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x):
        return super().forward(self.norm(x.flatten(1)))


def frozen(shape, classes):
    module = wide(shape, classes)
    module.fc.weight.requires_grad_(False)
    return module


SAME = wide((1, 8, 8), 10)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (frozen, "a parameter 'fc.weight' that does not learn"),
        (lambda shape, classes: SAME, "returns the same module twice"),
        (lambda shape, classes: Modes(classes), "something else in evaluation"),
        (lambda shape, classes: NormalisedModes(classes), "something else in evaluation"),
        (dict, "has no signature"),
    ],
)
def test_networks_that_no_run_could_repeat_are_refused(build, message):
    with pytest.raises(FedobpError, match=message):
        Federation(Config(model=build))


def test_weights_come_from_torchs_generator():
    def drawn(shape, classes):
        module = wide(shape, classes)
        with torch.no_grad():
            module.fc.bias.fill_(float(np.random.default_rng().random()))
        return module

    with pytest.raises(FedobpError, match="has other weights in every call"):
        Federation(Config(model=drawn))


def test_explicit_lanes_are_refused_before_a_folder_is_taken(tmp_path):
    with pytest.raises(FedobpError, match="use --engine serial"):
        Federation(Config(model=untyped, engine="lanes", **FAST)).run("fedavg", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_network_prints_is_not_in_the_json(tmp_path, command, monkeypatch):
    loud = CODE.replace("    layers", "    print(1)\n    layers", 1)
    (tmp_path / "loud.py").write_text(f"print('loading')\n{loud}")
    monkeypatch.delitem(sys.modules, "loud", raising=False)
    flags = [f"--{name}={value}" for name, value in FAST.items()]
    assert command("run", "--model", "loud:wide", *flags, "--json").json["method"] == "fedobp"
    assert command("compare", "--methods", "fedavg", "--model", "loud:wide", *flags, "--json").json["runs"]


def test_an_exception_names_the_network_and_the_line(module):
    with pytest.raises(FedobpError, match=r"ZeroDivisionError.*model 'mynets:broken'.*mynets.py:12"):
        Federation(Config(model="mynets:broken"))


def test_options_are_checked():
    assert [spec.name for spec in network_options(wide).options()] == ["width"]
    with pytest.raises(FedobpError, match="did you mean 'width'"):
        Federation(Config(model=wide, model_options={"with": 3}))
    with pytest.raises(FedobpError, match="must be a whole number"):
        Federation(Config(model=wide, model_options={"width": "three"}))
    with pytest.raises(FedobpError, match="model 'mlp' has no options"):
        Federation(Config(model="mlp", model_options={"width": 3}))


def test_a_network_of_another_name_is_not_shadowed():
    assert network("mlp") is network(network("mlp"))


def untyped(shape, classes):
    """Branches on a value: it cannot be run for many clients at once."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Linear(prod(shape), classes)

        def forward(self, x):
            x = x.flatten(1)
            return self.classifier(x if x.mean() > 0 else -x)

    return Branches()


def test_a_network_that_cannot_be_vectorised_trains_serially_and_says_so_once():
    with pytest.warns(UserWarning, match="cannot be run for many clients at once"):
        federation = Federation(Config(model=untyped, **FAST))
    Federation(Config(model=untyped, **{**FAST, "rounds": 3}))  # a second warning would be an error
    assert federation.config.engine == "serial"
    asked = Federation(Config(model=untyped, engine="serial", **FAST)).run("fedavg")
    assert federation.run("fedavg").history == asked.history
