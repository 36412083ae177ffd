"""What `resolve` decides once the dataset is read, and what it refuses."""

import tomllib

import numpy as np
import pytest
from resolved import resolved

from fedobp import Config, Federation, FedobpError
from fedobp.config import read_config, settings
from fedobp.data import REGISTRY, Dataset, data_dir, load
from fedobp.federation import assign, read
from fedobp.resolution import resolve

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


def one_image(name):
    """A dataset of one black image that has the shape and the labels of a registered one."""
    facts = REGISTRY[name]
    x, y = np.zeros((1, *facts.shape), np.uint8), np.zeros(1, np.int64)
    return Dataset(name, x, y, tuple(range(facts.classes)), 0)


# Defaults.


def test_defaults_of_the_digits():
    config = resolved()
    assert (config.dataset, config.method, config.model) == ("digits", "fedobp", "cnn-small")
    assert (config.clients, config.participation, config.rounds, config.cohort_size) == (20, 0.2, 60, 4)
    assert (config.alpha, config.epochs, config.batch_size, config.lr) == (0.1, 5, 32, 0.01)
    assert (config.momentum, config.weight_decay, config.seed, config.sampling) == (0.0, 0.0, 42, "keyed")
    assert (config.partition_seed, config.eval_every, config.finetune_epochs) == (42, 3, 0)
    assert config.options["q"] == 0.999


def test_defaults_of_any_other_image_set():
    config = resolved(Config(dataset="svhn"), one_image("svhn"))
    assert (config.clients, config.participation, config.rounds, config.model) == (100, 0.1, 400, "cnn")
    assert config.eval_every == 20


@pytest.mark.parametrize("dataset", PAPER_Q)
@pytest.mark.parametrize(("column", "alpha"), [(0, 0.1), (1, 0.5)])
def test_the_papers_quantile_is_the_default_with_its_cnn(dataset, column, alpha):
    config = resolved(Config(dataset=dataset, alpha=alpha), one_image(dataset))
    assert config.options["q"] == PAPER_Q[dataset][column]


@pytest.mark.parametrize(
    "change", [{"alpha": 0.3}, {"model": "mlp"}, {"partition": "iid"}, {"dataset": "digits", "model": "mlp"}]
)
def test_elsewhere_the_default_quantile_is_0_999(change):
    config = Config(**{"dataset": "cifar10", **change})
    assert resolved(config, one_image(config.dataset)).options["q"] == 0.999


def test_a_given_quantile_wins():
    config = Config(dataset="cifar10", options={"q": "0.5"})
    assert resolved(config, one_image("cifar10")).options["q"] == 0.5


def test_the_partition_seed_follows_the_seed_unless_given():
    assert resolved(seed=7).partition_seed == 7
    assert resolved(seed=7, partition_seed=42).partition_seed == 42


def test_clients_run_in_lanes_unless_asked_otherwise():
    assert resolved().engine == "lanes"
    assert resolved(engine="serial").engine == "serial"


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
    assert resolved(**given).precision == precision


def test_options_are_resolved_with_their_defaults():
    assert resolved(partition="classes").partition_options == {"k": 2}
    assert resolved(partition="feature", partition_options={"noise": "0.5"}).partition_options == {
        "change": "rotation", "noise": 0.5, "strength": 0.8, "groups": 0, "labels": "iid",
    }  # fmt: skip
    assert resolved().partition_options == {}


def test_a_natural_partition_has_as_many_clients_as_the_data(wards):
    assert resolved(dataset="wards", partition="natural").clients == 7
    assert resolved(dataset="wards", partition="natural", clients=4).clients == 4
    assert resolved(dataset="wards").clients == 2
    natural = resolved(dataset="wards", partition="natural")
    _, shards = assign(natural, read(natural))
    assert [len(shard.samples) for shard in shards] == [10] * 7


def test_the_number_of_natural_clients_is_not_the_default_of_data_without_them():
    assert resolved(partition="natural").clients == 20


# The resolved form.


@pytest.mark.parametrize(
    "given",
    [
        {"method": "fedavg-ft", "options": {"finetune": 2}, "lr": 1e-5, "data_dir": 'a "b" \\ ü', "seed": 3},
        {"partition": "classes", "partition_options": {"k": "3"}, "participation": 1, "precision": "fp64"},
        {"dataset": "wards", "partition": "natural", "finetune_epochs": 1, "metrics": "ece,loss"},
        {"eval_clients": 7, "clients": 9},
    ],
)
def test_a_resolved_config_stays_as_it_is_and_is_read_back_from_its_toml(tmp_path, wards, given):
    config = resolved(**given)
    assert resolved(config) == config
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    optional = {"partition_file", "data_dir", "eval_clients", "metrics"} - {name for name in given if given[name]}
    names = {spec.name for spec in settings()} - optional
    assert set(tomllib.loads(config.to_toml())) == names | {"options", "partition_options"}
    again = Config(**read_config(path))
    assert again == config
    assert resolved(again) == config


def test_the_config_of_a_run_is_written_in_its_resolved_form(tmp_path):
    asked = Config(clients=5, rounds=1, epochs=1, model="mlp")
    federation = Federation(asked)
    federation.run(out=tmp_path)
    written = Config(**read_config(tmp_path / "config.toml"))
    assert written == federation.config != asked
    assert resolved(written) == federation.config


# Refusals.

# What is wrong whatever the dataset is.
WRONG = [
    ({"method": "fedpr"}, "did you mean 'fedper'"),
    ({"model": "cn"}, "did you mean 'cnn'"),
    ({"partition": "dirichle"}, "did you mean 'dirichlet'"),
    ({"partition": "classes", "partition_options": {"k": 0}}, "option 'k' of classes must be at least 1"),
    ({"partition": "classes", "partition_options": {"kk": 2}}, "did you mean 'k'"),
    ({"partition": "iid", "partition_options": {"k": 2}}, "partition 'iid' has no options, so 'k' cannot be set"),
    ({"precision": "tf32", "device": "cpu"}, "--precision tf32 is arithmetic of CUDA cards"),
    ({"protocol": "paper", "rounds": 99}, "at least 100 rounds"),
    ({"options": {"p": 1}}, "option of fedobp"),
    ({"model": "x" * 500}, f"unknown model '{'x' * 30}…{'x' * 29}'"),
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
]


def refused(function):
    """The sentence with which a function refuses what is wrong."""
    with pytest.raises(FedobpError) as caught:
        function()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_what_is_wrong_is_refused_in_one_sentence(wrong, sentence):
    config = Config(**wrong)
    assert sentence in refused(lambda: resolve(config, load("digits", data_dir())))
    assert sentence in refused(lambda: Federation(config))


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_what_is_wrong_is_refused_before_a_dataset_is_read(wrong, sentence, tmp_path):
    assert sentence in refused(lambda: Federation(Config(dataset="mnist", data_dir=str(tmp_path), **wrong)))


def test_unknown_and_missing_datasets_are_refused(tmp_path):
    assert "did you mean 'cifar10'" in refused(lambda: Federation(Config(dataset="cifar01")))
    missing = Config(dataset="mnist", data_dir=str(tmp_path))
    assert "fedobp data fetch mnist" in refused(lambda: Federation(missing))


def test_a_federation_in_which_no_client_trains_is_refused():
    sentence = refused(lambda: resolved(holdout_clients=20))
    assert "--holdout-clients 20 leaves none of 20 clients to train" in sentence


def test_cuda_without_a_card_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "use --device cpu" in refused(lambda: resolved(device="cuda"))


@pytest.mark.parametrize("where", ["options.q", "options.score", "partition_options.k"])
def test_a_deeply_nested_option_is_refused(tmp_path, where):
    path = tmp_path / "config.toml"
    path.write_text(f'partition = "classes"\n{where}{".a" * 5000} = 1')
    assert "a key of more than 16 names" in refused(lambda: resolved(**read_config(path)))
