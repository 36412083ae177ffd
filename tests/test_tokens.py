"""Tokens: sequences of whole numbers as inputs, and every next token as a label, through both engines."""

import math

import numpy as np
import pytest
import torch

from fedobp import Config, Dataset, Federation, FedobpError
from fedobp.algorithms import METHODS
from fedobp.data import import_dataset

random = np.random.default_rng(1)
# Each client repeats a pattern of its own, with noise: the next token can be learned, and clients differ.
PATTERNS = random.integers(7, size=(5, 4))
TEXT = np.stack([np.tile(PATTERNS[client], 3)[shift : shift + 9] for client in range(5) for shift in range(4)] * 6)
TEXT = np.where(random.random(TEXT.shape) < 0.1, random.integers(7, size=TEXT.shape), TEXT)
OWNER = np.tile(np.repeat(np.arange(5), 4), 6)
FAST = {"rounds": 2, "epochs": 1, "participation": 1.0, "batch_size": 8, "lr": 0.5}
TINY = {"model_options": {"width": 6}}


def federation(**settings):
    return Federation.from_data(TEXT, tokens=True, client=OWNER, config=Config(**{**FAST, **TINY, **settings}))


def test_every_next_token_is_a_label():
    dataset = Dataset.from_data(TEXT, tokens=True)
    assert (dataset.vocabulary, dataset.classes, dataset.every_position) == (7, 7, True)
    assert np.array_equal(dataset.x, TEXT[:, :-1])
    assert np.array_equal(dataset.y, TEXT[:, 1:])
    assert dataset.input_shape == (8,)
    one_label = Dataset.from_data(TEXT, OWNER, tokens=True, vocabulary=20)
    assert (one_label.vocabulary, one_label.classes, one_label.every_position) == (20, 5, False)


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4"])
def test_any_integer_type_gives_the_same_run(dtype):
    given = Federation.from_data(TEXT.astype(dtype), tokens=True, client=OWNER, config=Config(**FAST, **TINY))
    assert given.run("fedavg").history == federation().run("fedavg").history
    assert given.data.x.dtype == torch.uint8


def test_inputs_are_not_scaled():
    made = federation()
    assert made.config.normalize == "none"
    inputs = made.data.inputs(0, "train")
    assert inputs.dtype == torch.int64
    assert set(inputs.unique().tolist()) <= set(range(7))
    with pytest.raises(FedobpError, match="are tokens: leave it out"):
        federation(normalize="train")


def test_defaults_are_for_sequences():
    made = Federation.from_data(TEXT, tokens=True, client=OWNER)
    assert (made.config.model, made.config.partition, made.config.clients) == ("lstm", "natural", 5)
    assert made.config.metrics == "loss,perplexity"
    assert Federation.from_data(TEXT, tokens=True).config.partition == "iid"
    one_label = Federation.from_data(TEXT, OWNER, tokens=True, config=Config(alpha=100.0, clients=3))
    assert (one_label.config.partition, one_label.config.metrics) == ("dirichlet", None)


def test_accuracy_and_perplexity_are_those_of_all_positions():
    made = federation(engine="serial", precision="fp64")
    result = made.run("fedavg")
    module = made.model.module().double()
    module.load_state_dict(result.state_dict())
    right = count = loss = 0.0
    for client in range(5):
        x, y = made.data.inputs(client, "test"), made.data.targets(client, "test")
        with torch.no_grad():
            logits = module(x)
        assert logits.shape == (*y.shape, 7)
        for row, targets in zip(logits, y, strict=True):
            for position, target in zip(row, targets, strict=True):
                right += float(position.argmax() == target)
                loss -= math.log(float(position.double().softmax(dim=0)[target]))
                count += 1
    assert result.accuracy.pooled == pytest.approx(100 * right / count)
    assert result.accuracy.metrics["loss"].pooled == pytest.approx(loss / count)
    assert result.accuracy.metrics["perplexity"].pooled == pytest.approx(math.exp(loss / count))


@pytest.mark.parametrize("model", ["lstm", "transformer"])
@pytest.mark.parametrize("every_position", [True, False])
def test_both_engines_agree_in_float64(model, every_position):
    labels = () if every_position else (OWNER,)
    results = [
        Federation.from_data(
            TEXT, *labels, tokens=True, client=OWNER,
            config=Config(**{**FAST, "lr": 0.1}, model=model, engine=engine, precision="fp64", finetune_epochs=1),
        ).run("fedobp", q=0.9)
        for engine in ("serial", "lanes")
    ]  # fmt: skip
    for name, tensor in results[0].state_dict(client=2).items():
        assert torch.allclose(tensor, results[1].state_dict(client=2)[name], rtol=0, atol=1e-10), name
    assert results[0].history == results[1].history
    for name in ("accuracy", "last", "finetuned"):
        one, other = (getattr(result, name) for result in results)
        assert one.to_json() == other.to_json()
        for metric in one.metrics:
            assert one.metrics[metric].pooled == pytest.approx(other.metrics[metric].pooled, rel=1e-9)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.one_label])
def test_methods_predict_next_tokens_on_both_engines(method):
    results = [federation(engine=engine, precision="fp64").run(method) for engine in ("serial", "lanes")]
    for name, tensor in results[0].state_dict().items():
        assert torch.allclose(tensor, results[1].state_dict()[name], rtol=0, atol=1e-9), name


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.one_label])
def test_methods_by_class_need_one_label(method):
    with pytest.raises(FedobpError, match=f"{method} needs one label a sample"):
        federation().run(method)
    one_label = Federation.from_data(TEXT, OWNER, tokens=True, client=OWNER, config=Config(**FAST, **TINY))
    assert one_label.run(method).accuracy.pooled >= 0


def test_clients_learn_their_patterns():
    made = federation(rounds=15, epochs=5, model_options={"width": 16})
    served = {method: made.run(method) for method in ("fedavg", "fedavg-last")}
    assert served["fedavg-last"].accuracy.pooled > 60 > 100 / 7
    assert served["fedavg-last"].accuracy.metrics["perplexity"].pooled < 4


def test_tokens_are_imported_and_run_on_the_command_line(tmp_path, command):
    np.savez(tmp_path / "text.npz", tokens=TEXT, client=OWNER)
    imported = import_dataset("text", tmp_path / "text.npz", tmp_path / "data")
    assert imported.every_position
    flags = ("--dataset", "text", "--data-dir", tmp_path / "data", "--epochs", "1", "--rounds", "2", "--json")
    found = command("run", *flags, "--method", "fedper", "--model-set", "width=6").json
    assert found["metrics"]["served"]["perplexity"]["pooled"] > 1
    listed = command("data", "list", "--data-dir", tmp_path / "data", "--json").json
    assert [one["shape"] for one in listed["datasets"] if one["name"] == "text"] == [[8]]
    table = command("run", *flags[:-1], "--method", "fedavg").out
    assert "perplexity" in table
    given = Federation.from_data(TEXT, tokens=True, client=OWNER, config=Config(**FAST))
    on_disk = Federation(Config(dataset="text", data_dir=tmp_path / "data", **FAST))
    assert given.partition == on_disk.partition


@pytest.mark.parametrize(
    ("tokens", "more", "message"),
    [
        (TEXT.astype(float), {}, "they must be whole numbers"),
        (TEXT[0], {}, "they must be whole numbers"),
        (TEXT[:, :1], {}, "at least two tokens each"),
        (TEXT - 1, {}, "has tokens from -1 to 5"),
        (TEXT, {"vocabulary": 5}, "a vocabulary of 5: tokens are 0 to 4"),
        (TEXT, {"vocabulary": 7.5}, "no whole number"),
        (np.zeros_like(TEXT), {}, "nothing to learn"),
        (TEXT, {"name": "mnist"}, "under a name of its own"),
    ],
)
def test_what_is_no_sequence_of_tokens_is_refused(tokens, more, message):
    with pytest.raises(FedobpError, match=message):
        Dataset.from_data(tokens, tokens=True, **more)


@pytest.mark.parametrize("partition", ["dirichlet", "dirichlet-equal", "shards", "classes", "feature", "concept"])
def test_partitions_by_label_need_one(partition):
    with pytest.raises(FedobpError, match="use --partition natural, iid or quantity"):
        federation(partition=partition, clients=3)


@pytest.mark.parametrize("partition", ["iid", "quantity"])
def test_other_partitions_do_not(partition):
    assert federation(partition=partition, clients=3).data.clients == 3


def test_tokens_cannot_be_rotated():
    with pytest.raises(FedobpError, match="tokens, which cannot be changed"):
        Federation.from_data(TEXT, OWNER, tokens=True, config=Config(partition="feature", clients=3))


def test_models_of_numbers_refuse_tokens_and_the_other_way_round():
    with pytest.raises(FedobpError, match="takes no tokens, and the data has only tokens"):
        federation(model="mlp", model_options={})
    with pytest.raises(FedobpError, match="takes only tokens, and the data has no tokens"):
        Federation(Config(model="lstm"))

    def last_only(shape, classes, *, vocabulary):
        raise AssertionError("it is not called")

    with pytest.raises(FedobpError, match="has no parameter `every_position`"):
        federation(model=last_only, model_options={})


def test_an_import_of_tokens_says_how_to_run_them(tmp_path, command):
    np.savez(tmp_path / "text.npz", tokens=TEXT)
    said = command("data", "import", "text", tmp_path / "text.npz")
    assert (said.code, "Next: fedobp run --dataset text" in said.out) == (0, True)
    np.savez(tmp_path / "few.npz", tokens=TEXT[:12], client=np.arange(12) // 2)  # too few for a test part each
    said = command("data", "import", "few", tmp_path / "few.npz")
    assert "--partition iid" in said.out
    assert command("run", "--dataset", "few", "--partition", "iid", "--rounds", "1", "--epochs", "1").code == 0
