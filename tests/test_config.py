import os
import tomllib
from itertools import count
from pathlib import Path

import pytest

from fedobp import Config, FedobpError
from fedobp.config import read_config, settings

PAPER_Q = {
    "cifar10": (0.99998, 0.99979),
    "cifar100": (0.9998, 0.99992),
    "emnist": (0.995, 0.9991),
    "svhn": (0.99997, 0.9998),
    "mnist": (0.9998, 0.99993),
    "fmnist": (0.99993, 0.9999),
    "organamnist": (0.9999, 0.99995),
    "organcmnist": (0.9997, 0.99995),
}


def test_defaults_of_the_digits():
    config = Config()
    assert (config.dataset, config.method, config.model) == ("digits", "fedobp", "cnn-small")
    assert (config.clients, config.participation, config.rounds, config.cohort_size) == (20, 0.2, 60, 4)
    assert (config.alpha, config.epochs, config.batch_size, config.lr) == (0.1, 5, 32, 0.01)
    assert (config.momentum, config.weight_decay, config.seed, config.sampling) == (0.0, 0.0, 42, "keyed")
    assert (config.partition_seed, config.eval_every, config.finetune_epochs) == (42, 3, 0)
    assert config.options["q"] == 0.999


def test_defaults_of_any_other_image_set():
    config = Config(dataset="svhn")
    assert (config.clients, config.participation, config.rounds, config.model) == (100, 0.1, 400, "cnn")
    assert config.eval_every == 20


@pytest.mark.parametrize("dataset", PAPER_Q)
@pytest.mark.parametrize(("column", "alpha"), [(0, 0.1), (1, 0.5)])
def test_the_papers_quantile_is_the_default_with_its_cnn(dataset, column, alpha):
    assert Config(dataset=dataset, alpha=alpha).options["q"] == PAPER_Q[dataset][column]


@pytest.mark.parametrize(
    "change", [{"alpha": 0.3}, {"model": "mlp"}, {"partition": "iid"}, {"dataset": "digits", "model": "mlp"}]
)
def test_elsewhere_the_default_quantile_is_0_999(change):
    assert Config(**{"dataset": "cifar10", **change}).options["q"] == 0.999


def test_a_given_quantile_wins():
    assert Config(dataset="cifar10", options={"q": "0.5"}).options["q"] == 0.5


def test_the_partition_seed_follows_the_seed_unless_given():
    assert Config(seed=7).partition_seed == 7
    assert Config(seed=7, partition_seed=42).partition_seed == 42


@pytest.mark.parametrize(("share", "clients", "size"), [(0.2, 20, 4), (0.01, 20, 1), (1.0, 7, 7), (0.26, 10, 3)])
def test_a_cohort_is_the_rounded_share_and_at_least_one(share, clients, size):
    assert Config(participation=share, clients=clients).cohort_size == size


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
        ({"method": "fedpr"}, "did you mean 'fedper'"),
        ({"dataset": "cifar01"}, "did you mean 'cifar10'"),
        ({"model": "cn"}, "did you mean 'cnn'"),
        ({"partition": "dirichle"}, "did you mean 'dirichlet'"),
        ({"partition": "classes", "partition_options": {"k": 0}}, "option 'k' of classes must be at least 1"),
        ({"partition": "classes", "partition_options": {"kk": 2}}, "did you mean 'k'"),
        ({"partition": "iid", "partition_options": {"k": 2}}, "partition 'iid' has no options, so 'k' cannot be set"),
        ({"holdout_clients": 20}, "--holdout-clients 20 leaves nobody of 20 clients to train"),
        ({"holdout_clients": -1}, "--holdout-clients must be at least 0"),
        ({"sampling": "publshed"}, "did you mean 'published'"),
        ({"lr_schedule": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "fp16"}, "--precision"),
        ({"precision": "tf32", "device": "cpu"}, "--precision tf32 is arithmetic of CUDA cards"),
        ({"engine": "lans"}, "did you mean 'lanes'"),
        ({"lane_memory": -0.1}, "--lane-memory must be at least 0"),
        ({"store_memory": -1.0}, "--store-memory must be at least 0"),
        ({"protocol": "paper", "rounds": 99}, "at least 100 rounds"),
        ({"model": 3}, "--model must be a text"),
        ({"data_dir": "\udcff"}, "--data-dir must be readable text"),
        ({"rounds": 10**500}, "--rounds must be at most 1000000"),
        ({"batch_size": 10**30}, "--batch-size must be at most"),
        ({"lr": None}, "--lr must be a number"),
        ({"lr": 10**400}, "--lr must be a number"),
        ({"lr": float("inf")}, "--lr must be a number"),
        ({"method": None}, "--method must be a text"),
        ({"lr": -1.0}, "--lr must be above 0"),
        ({"options": {"p": 1}}, "option of fedobp"),
        ({"rounds": 1_000_001}, "--rounds must be at most 1000000"),
        ({"epochs": 2**31 - 1}, "--epochs must be at most 1000"),
        ({"finetune_epochs": 1001}, "--finetune-epochs must be at most 1000"),
        ({"rounds": 2**20000}, "--rounds must be at most"),
        ({"lr": 2**20000}, "--lr must be a number, not '0x1000"),
        ({"engine": 2**20000}, "unknown value of --engine '0x1000"),
        ({"model": "x" * 500}, f"unknown model '{'x' * 30}…{'x' * 29}'"),
        ({"data_dir": ""}, "--data-dir must not be empty"),
        ({"method": " "}, "--method must not be empty"),
        ({"partition_file": ""}, "--partition-file must not be empty"),
        ({"options": {"q": "many\nlines"}}, r"must be a number, not 'many\nlines'"),
        ({"options": {"q": 2**20000}}, "option 'q' of fedobp must be a number, not '0x1000"),
        ({"method": "fedprox", "options": {"mu": "inf"}}, "option 'mu' of fedprox must be a number, not 'inf'"),
        ({"method": "fedprox", "options": {"mu": float("nan")}}, "option 'mu' of fedprox must be a number"),
        (
            {"method": "fedavg-ft", "options": {"finetune": 2**63}},
            "option 'finetune' of fedavg-ft must be at most 1000",
        ),
        ({"method": "fedavg-ft", "options": {"finetune": 10**30}}, "must be at most 1000, not 1000000"),
        ({"method": "fedavg-ft", "options": {"finetune": "1e3"}}, "must be a whole number"),
        ({"method": "fedavg-ft", "options": {"finetune": 2.5}}, "must be a whole number, not '2.5'"),
        ({"partition": "classes", "partition_options": {"k": 2**63}}, "option 'k' of classes must be at most 1000000"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(wrong, sentence):
    with pytest.raises(FedobpError) as caught:
        Config(**wrong)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_clients_run_in_lanes_unless_asked_otherwise():
    assert Config().engine == "lanes"
    assert Config(engine="serial").engine == "serial"


@pytest.mark.parametrize(
    ("card", "able", "given", "precision"),
    [
        (False, False, {}, "fp32"),
        (True, True, {}, "bf16"),
        (True, False, {}, "fp32"),
        (True, True, {"engine": "serial"}, "fp32"),
        (True, True, {"device": "cpu"}, "fp32"),
        (True, True, {"precision": "tf32"}, "tf32"),
    ],
)
def test_the_precision_follows_the_machine_unless_given(monkeypatch, card, able, given, precision):
    monkeypatch.setattr("torch.cuda.is_available", lambda: card)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: able)
    assert Config(**given).precision == precision


def test_cuda_without_a_card_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(FedobpError, match="use --device cpu"):
        Config(device="cuda")


@pytest.mark.essential
def test_toml_holds_everything_and_reads_back(tmp_path):
    config = Config(method="fedavg-ft", options={"finetune": 2}, lr=1e-5, data_dir='a "b" \\ ü', seed=3)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    written = tomllib.loads(config.to_toml())
    plain = {spec.name for spec in settings()} - {"partition_file"}  # without a value it is left out
    assert set(written) == plain | {"options", "partition_options"}
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
        ("a" * 5000 + ".a" * 5000 + " = 1", "unknown setting"),
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


@pytest.mark.parametrize(
    "where", ["seed", "model", "lr", "engine", "options.q", "options.score", "partition_options.k"]
)
def test_a_deeply_nested_value_is_refused(tmp_path, where):
    path = tmp_path / "config.toml"
    path.write_text(f'partition = "classes"\n{where}{".a" * 5000} = 1')
    with pytest.raises(FedobpError, match="a deeply nested dict"):
        Config(**read_config(path))


@pytest.mark.parametrize("place", ["/dev/zero", "folder", "pipe"])
def test_what_is_no_configuration_file_is_refused_without_reading_it(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo("pipe")
    with pytest.raises(FedobpError, match="is no file"):
        read_config(Path(place))


def test_every_setting_has_a_help_text():
    assert all(spec.metadata["help"] for spec in settings())
