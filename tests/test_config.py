"""What `Config` itself checks, without a dataset: types, bounds, choices; and its TOML."""

import json
import os
import tomllib
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from fedobp import Config, FedobpError
from fedobp.config import read_config, settings


def test_making_one_reads_no_file_and_loads_neither_torch_nor_numpy(ran):
    code = """
import sys
from fedobp import Config
events = []
sys.addaudithook(lambda event, _: events.append(event))
config = Config(dataset="mine", data_dir="nowhere", partition_file="none", method="none", model="none", device="cuda",
                partition="none", options={"q": 2}, protocol="paper", rounds=1)
found = [event for event in events if event == "import" or event.startswith(("open", "os."))]
assert not found, found
assert not {"torch", "numpy", "sklearn"} & set(sys.modules)
assert (config.dataset, config.clients, config.engine, config.options) == ("mine", None, "auto", {"q": 2})
"""
    assert ran("-c", code) == (0, "", "")


def test_what_is_not_given_is_undecided():
    config = Config()
    assert (config.dataset, config.method, config.seed, config.sampling) == ("digits", "fedobp", 42, "keyed")
    assert (config.epochs, config.batch_size, config.lr) == (5, 32, 0.01)
    assert (config.momentum, config.weight_decay, config.finetune_epochs) == (0.0, 0.0, 0)
    assert (config.engine, config.device, config.options, config.partition_options) == ("auto", "auto", {}, {})
    undecided = (
        "data_dir", "clients", "partition", "alpha", "partition_seed", "val_ratio", "holdout_clients",
        "partition_file", "normalize", "model", "rounds", "participation", "eval_every", "eval_clients", "metrics",
        "precision",
    )  # fmt: skip
    assert [spec.name for spec in settings() if getattr(config, spec.name) is None] == list(undecided)


@pytest.mark.parametrize(("share", "clients", "size"), [(0.2, 20, 4), (0.01, 20, 1), (1.0, 7, 7), (0.26, 10, 3)])
def test_a_cohort_is_the_rounded_share_and_at_least_one(share, clients, size):
    assert Config(participation=share, clients=clients, holdout_clients=0).cohort_size == size


def test_the_share_of_a_round_is_of_those_that_train():
    assert Config(clients=20, holdout_clients=10, participation=0.5).cohort_size == 5


def test_the_cosine_schedule_starts_at_lr_and_halves_midway():
    config = Config(lr=0.1, lr_schedule="cosine", rounds=10)
    assert config.lr_at(1) == pytest.approx(0.1)
    assert config.lr_at(6) == pytest.approx(0.05)
    assert 0 < config.lr_at(10) < 0.005
    assert Config(lr=0.1, rounds=10).lr_at(10) == 0.1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"clients": 0}, "--clients must be at least 1"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"rounds": 2.5}, "--rounds must be a whole number"),
        ({"rounds": True}, "--rounds must be a whole number"),
        ({"participation": 0.0}, "--participation must be above 0"),
        ({"participation": 1.5}, "--participation must be at most 1"),
        ({"alpha": 0.0}, "--alpha must be above 0"),
        ({"lr": 0.0}, "--lr must be above 0"),
        ({"lr": float("nan")}, "--lr must be a number"),
        ({"momentum": 1.0}, "--momentum must be below 1"),
        ({"batch_size": 1}, "--batch-size must be at least 2"),
        ({"val_ratio": 1.0}, "--val-ratio must be at most 0.9"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"seed": 2**32}, "--seed must be at most 4294967295"),
        ({"holdout_clients": -1}, "--holdout-clients must be at least 0"),
        ({"sampling": "publshed"}, "did you mean 'published'"),
        ({"lr_schedule": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "fp16"}, "--precision"),
        ({"engine": "lans"}, "did you mean 'lanes'"),
        ({"lane_memory": -0.1}, "--lane-memory must be at least 0"),
        ({"store_memory": -1.0}, "--store-memory must be at least 0"),
        ({"model": 3}, "--model must be a text"),
        ({"data_dir": "\udcff"}, "--data-dir must be readable text"),
        ({"rounds": 10**500}, "--rounds must be at most 1000000"),
        ({"batch_size": 10**30}, "--batch-size must be at most"),
        ({"lr": None}, "--lr must be a number"),
        ({"lr": 10**400}, "--lr must be a number"),
        ({"lr": float("inf")}, "--lr must be a number"),
        ({"method": None}, "--method must be a text"),
        ({"lr": -1.0}, "--lr must be above 0"),
        ({"rounds": 1_000_001}, "--rounds must be at most 1000000"),
        ({"epochs": 2**31 - 1}, "--epochs must be at most 1000"),
        ({"finetune_epochs": 1001}, "--finetune-epochs must be at most 1000"),
        ({"rounds": 2**20000}, "--rounds must be at most"),
        ({"lr": 2**20000}, "--lr must be a number, not '0x1000"),
        ({"engine": 2**20000}, "unknown value of --engine '0x1000"),
        ({"data_dir": ""}, "--data-dir must not be empty"),
        ({"method": " "}, "--method must not be empty"),
        ({"partition_file": ""}, "--partition-file must not be empty"),
        ({"metrics": "loss,f2"}, "unknown metric 'f2': did you mean 'f1'? choose from loss, f1, auc, ece, confusion"),
        ({"metrics": ["auc", "los"]}, "unknown metric 'los': did you mean 'loss'?"),
        ({"metrics": "loss,,f1"}, "unknown metric ''"),
        ({"metrics": ["loss", 3]}, "unknown metric '3'"),
        ({"metrics": ["a\nb"]}, "--metrics must be readable text"),
        ({"metrics": " "}, "--metrics must not be empty"),
        ({"metrics": 3}, "--metrics must be a text, not '3'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(wrong, sentence):
    with pytest.raises(FedobpError) as caught:
        Config(**wrong)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["ece, loss,ece", ["ece", "loss"], ("ece", "loss", "loss"), {"loss", "ece"}])
def test_metrics_are_kept_in_one_order_each_once(given, tmp_path):
    config = Config(metrics=given)
    assert (config.metrics, config.metric_names) == ("loss,ece", ("loss", "ece"))
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert Config(**read_config(tmp_path / "config.toml")) == config
    assert Config(metrics=[]) == Config()
    assert Config().metric_names == ()


@pytest.mark.essential
def test_toml_holds_what_is_given_and_reads_back(tmp_path):
    config = Config(method="fedavg-ft", options={"finetune": 2}, lr=1e-5, data_dir='a "b" \\ ü', seed=3)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    written = tomllib.loads(config.to_toml())
    given = {spec.name for spec in settings() if getattr(config, spec.name) is not None}
    assert set(written) == given | {"options", "partition_options"}
    assert Config(**read_config(path)) == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rouns = 3", "did you mean 'rounds'"),
        ("rounds = ", "not valid TOML"),
        ("seed = " + "9" * 5000, "not valid TOML"),
        ("options = 3", r"write \[options\]"),
        ("partition_options = 3", r"write \[partition_options\]"),
        ("seed = " + "[" * 5000, "not valid TOML"),
        ("a" * 5000 + ".a" * 15 + " = 1", "unknown setting"),
        ("a" + ".a" * 20_000 + " = 1", "a key of more than 16 names"),  # tomllib would take minutes and gigabytes
        ("['a'" + " . 'a'" * 20_000 + "]", "a key of more than 16 names"),
        ('x = {"\\""' + ' . "\\""' * 20_000 + " = 1}", "a key of more than 16 names"),
        (f'dataset = "{"a." * 20_000}"\nsed = 1', "unknown setting"),  # a text is no key
        ("seed = 1\nseed = 2", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b"\0" * 100, "not valid TOML"),
        ("#" * 2**21, "longer than any"),
        (f'"{"a" * 5000}" = 1', "unknown setting"),
        ('"a\\nb" = 1', r"unknown setting in .* 'a\\nb'"),
    ],
    ids=map(str, count()),
)
def test_a_bad_configuration_file_is_refused(tmp_path, text, sentence):
    path = tmp_path / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FedobpError, match=sentence) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_missing_configuration_file_is_refused(tmp_path):
    with pytest.raises(FedobpError, match="cannot read"):
        read_config(tmp_path / "none.toml")


@pytest.mark.parametrize("where", ["seed", "model", "lr", "engine"])
def test_a_deeply_nested_value_is_refused(where):
    value = {}
    for _ in range(5000):
        value = {"a": value}
    with pytest.raises(FedobpError, match="a deeply nested dict"):
        Config(**{where: value})


@pytest.mark.parametrize("place", ["/dev/zero", "folder", "pipe"])
def test_what_is_no_configuration_file_is_refused_without_reading_it(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo("pipe")
    with pytest.raises(FedobpError, match="is no file"):
        read_config(Path(place))


def test_every_setting_has_a_help_text():
    assert all(spec.metadata["help"] for spec in settings())


def test_numbers_paths_and_devices_of_other_libraries(tmp_path):
    config = Config(
        clients=np.int64(7), alpha=np.float64(0.5), lr=np.float32(0.5), seed=np.uint8(3), rounds=np.int32(4),
        data_dir=tmp_path, device=torch.device("cpu"), options={"q": np.float64(0.99), "n": np.int16(3)},
    )  # fmt: skip
    assert config == Config(
        clients=7, alpha=0.5, lr=0.5, seed=3, rounds=4, data_dir=str(tmp_path), device="cpu",
        options={"q": 0.99, "n": 3},
    )  # fmt: skip
    assert [type(getattr(config, name)) for name in ("clients", "alpha", "lr", "data_dir", "device")] == [
        int, float, float, str, str,
    ]  # fmt: skip
    assert [type(value) for value in config.options.values()] == [float, int]
    assert tomllib.loads(config.to_toml())["clients"] == 7
    for wrong in ({"clients": np.float64(7)}, {"clients": np.bool_(True)}, {"alpha": True}, {"model": tmp_path}):
        with pytest.raises(FedobpError):
            Config(**wrong)


def test_a_card_is_chosen_outside():
    assert Config(device=torch.device("cuda")).device == "cuda"
    assert Config(device=torch.device("cuda:0")).device == "cuda"
    with pytest.raises(FedobpError, match="CUDA_VISIBLE_DEVICES=1"):
        Config(device=torch.device("cuda:1"))
    with pytest.raises(FedobpError, match="unknown value of --device 'mps'"):
        Config(device=torch.device("mps"))


def test_options_cannot_be_changed():
    given = {"q": 0.9}
    config = Config(options=given)
    given["q"] = 0.1
    assert config.options == {"q": 0.9}
    for change in (
        lambda options: options.__setitem__("q", 1),
        lambda options: options.update(q=1),
        lambda options: options.pop("q"),
        lambda options: options.clear(),
        lambda options: options.setdefault("p", 1),
        lambda options: options.__delitem__("q"),
        lambda options: options.__ior__({"q": 1}),
        lambda options: options.popitem(),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change(config.options)
    assert config.options == {"q": 0.9}
    with pytest.raises(FedobpError, match="must be a mapping"):
        Config(options=[("q", 1)])


def test_a_config_hashes_copies_and_compares():
    one, same, other = (Config(options={"q": q}, model_options={"depth": 2}) for q in (0.9, 0.9, 0.8))
    assert hash(one) == hash(same)
    assert {one, same, other} == {one, other}
    assert deepcopy(one) == one
    assert deepcopy(one).options is not None
    assert replace(one, options={**one.options, "ema": 0.5}).options == {"q": 0.9, "ema": 0.5}
    assert json.loads(json.dumps(one.options)) == {"q": 0.9}


def test_settings_are_the_same_in_any_order_of_options():
    one, other = (Config(options=dict(pairs)) for pairs in ([("q", 0.9), ("ema", 0.5)], [("ema", 0.5), ("q", 0.9)]))
    assert one.hash != other.hash
    assert one.is_same(other)
    assert not one.is_same(replace(other, options={"q": 0.9, "ema": 0.4}))
    assert not one.is_same(replace(one, rounds=3))
    assert one.is_same(replace(one, data_dir="elsewhere"))


def test_a_repr_has_what_differs_from_the_defaults():
    assert repr(Config()) == "Config()"
    assert repr(Config(clients=7, options={"q": 0.9})) == "Config(options={'q': 0.9}, clients=7)"


@pytest.mark.parametrize("options", [{"q": [1]}, {1: 2}, {"q": None}, {"q": np.zeros(3)}])
def test_options_are_numbers_and_texts_by_name(options):
    with pytest.raises(FedobpError, match="must hold numbers and texts by name"):
        Config(options=options)
