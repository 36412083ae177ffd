"""Data in memory: arrays, tensors, DataFrames, shards and functions give what an import of the same arrays gives."""

import json
import tomllib

import numpy as np
import pandas as pd
import pytest
import torch

from fedobp import Config, Dataset, Federation, FedobpError, sweep
from fedobp.data import import_dataset

random = np.random.default_rng(0)
X = random.standard_normal((240, 5)).astype(np.float32)
Y = random.integers(3, size=240)
OWNER = np.repeat(np.arange(6), 40)
FRAME = pd.DataFrame(X, columns=list("abcde")).assign(y=Y)
TOKENS = random.integers(9, size=(30, 6))
SMALL = Config(rounds=2, epochs=1, participation=1.0, eval_every=1)


def imported(folder, **arrays):
    np.savez(folder / "mine.npz", **arrays)
    return import_dataset("mine", folder / "mine.npz", folder / "data")


def same(one, other):
    assert np.array_equal(one.x, other.x)
    assert one.x.dtype == other.x.dtype
    assert np.array_equal(one.y, other.y)
    assert (one.labels, one.client_names) == (other.labels, other.client_names)


def test_arrays_give_the_partition_of_an_import(tmp_path):
    imported(tmp_path, x=X, y=Y)
    on_disk = Federation(Config(dataset="mine", data_dir=tmp_path / "data", alpha=1.0, rounds=2))
    given = Federation.from_data(X, Y, config=Config(alpha=1.0, rounds=2))
    assert given.partition == on_disk.partition
    assert given.config.clients == on_disk.config.clients
    assert torch.equal(given.data.x, on_disk.data.x)
    assert given.config.dataset == "in-memory"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.uint8])
def test_a_run_on_arrays_equals_a_run_on_their_import(dtype, tmp_path):
    x = (10 * X).clip(0).astype(dtype)
    imported(tmp_path, x=x, y=Y)
    on_disk = Federation(Config(dataset="mine", data_dir=str(tmp_path / "data"), alpha=1.0, rounds=2)).run("fedobp")
    given = Federation.from_data(x, Y, config=Config(alpha=1.0, rounds=2)).run("fedobp")
    assert torch.equal(given.models.state_dict()["fc1.weight"], on_disk.models.state_dict()["fc1.weight"])
    assert given.history == on_disk.history


def test_columns_with_more_digits_than_float32_has_are_named():
    """Such as time stamps; a constant column loses nothing."""
    x = np.random.default_rng(0).standard_normal((60, 4))
    x[:, 1], x[:, 3] = x[:, 1] + 1.7e9, 1.7e9
    with pytest.warns(UserWarning, match=r"has 1 column\(s\), the first is 1, whose values differ by little more than"):
        Dataset.from_data(x, np.arange(60) % 3)
    x[:, 1] -= x[:, 1].mean()
    Dataset.from_data(x, np.arange(60) % 3)


def test_tensors_equal_arrays_and_images_are_channels_first():
    same(Dataset.from_data(torch.tensor(X), torch.tensor(Y)), Dataset.from_data(X, Y))
    images = random.integers(256, size=(20, 3, 8, 8)).astype(np.uint8)
    found = Dataset.from_data(torch.tensor(images), torch.arange(20) % 2)
    assert found.input_shape == (3, 8, 8)
    assert np.array_equal(found.x, images.transpose(0, 2, 3, 1))
    with pytest.raises(FedobpError, match="channels first"):  # as an import says
        Dataset.from_data(images, np.arange(20) % 2)
    assert Dataset.from_data(torch.rand(20, 4, 6, 5), torch.arange(20) % 2).input_shape == (4, 6, 5)
    half = Dataset.from_data(torch.tensor(X).bfloat16(), torch.tensor(Y))
    assert half.x.dtype == np.float32


def test_each_samples_client_is_a_natural_client(tmp_path):
    owner = np.array(["a", "b", "c", "d", "e", "f"])[OWNER]
    on_disk = imported(tmp_path, x=X, y=Y, client=owner)
    given = Dataset.from_data(X, Y, client=owner)
    same(given, on_disk)
    federation = Federation.from_data(X, Y, client=owner, config=SMALL)
    assert (federation.config.partition, federation.config.clients) == ("natural", 6)
    asked = Config(dataset="mine", data_dir=tmp_path / "data", partition="natural")
    assert federation.partition == Federation(asked).partition


def test_a_data_frame_names_its_columns():
    frame = pd.DataFrame(X, columns=list("abcde")).assign(hospital=OWNER, outcome=np.array(["no", "yes", "?"])[Y])
    given = Dataset.from_data(frame, label="outcome", client="hospital")
    assert np.array_equal(given.x, X)
    assert given.labels == ("?", "no", "yes")
    assert given.client_names == tuple("012345")
    with pytest.raises(FedobpError, match="name it with `label`"):
        Dataset.from_data(frame)
    with pytest.raises(FedobpError, match="did you mean 'outcome'"):
        Dataset.from_data(frame, label="outcomes")
    with pytest.raises(FedobpError, match="`label` concerns the columns of a DataFrame"):
        Dataset.from_data(X, Y, label="outcome")


def shards():
    return [(X[40 * client :][:40], Y[40 * client :][:40]) for client in range(6)]


def test_shards_are_the_clients():
    by_owner = Dataset.from_data(X, Y, client=OWNER)
    same(Dataset.from_data(shards()), by_owner)
    same(Dataset.from_data(dict(enumerate(shards()))), by_owner)
    same(Dataset.from_data(lambda client: shards()[client], clients=6), by_owner)
    same(Dataset.from_data({np.int64(at): one for at, one in enumerate(shards())}), by_owner)
    same(Dataset.from_data([(x, y[:, None]) if at % 2 else (x, y) for at, (x, y) in enumerate(shards())]), by_owner)
    named = Dataset.from_data({f"site {9 - client}": one for client, one in enumerate(shards())})
    assert named.client_names == tuple(f"site {client}" for client in range(4, 10))
    federation = Federation.from_data(shards(), config=SMALL)
    for client in range(6):
        assert federation.data.size(client, "train") == 30
        own = {tuple(row) for row in shards()[client][0].tolist()}
        held = torch.cat([federation.data.x[federation.data._index[split][client]] for split in ("train", "test")])
        assert {tuple(row) for row in held.tolist()} == own


@pytest.mark.parametrize("nested", [False, True])
def test_shards_keep_their_test_part(nested):
    def shard(client):
        x, y = shards()[client]
        return ((x[10:], y[10:]), (x[:10], y[:10])) if nested else (x[10:], y[10:], x[:10], y[:10])

    federation = Federation.from_data(shard, clients=6, config=SMALL)
    assert federation.config.partition == "natural"
    for client in range(6):
        x, _ = shards()[client]
        test = federation.data.x[federation.data._index["test"][client]]
        assert {tuple(row) for row in test.tolist()} == {tuple(row) for row in x[:10].tolist()}
        assert federation.data.size(client, "train") == 30


def test_a_given_test_part_survives_an_import(tmp_path):
    test = OWNER % 2 == 0
    on_disk = imported(tmp_path, x=X, y=Y, client=OWNER, test=random.permutation(test))
    again = Federation(Config(dataset="mine", data_dir=tmp_path / "data", rounds=1))
    assert on_disk.test is not None
    assert again.config.partition == "natural"
    assert sum(again.data.size(client, "test") for client in range(6)) == 120


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Dataset.from_data(X), "needs labels: give `y`"),
        (lambda: Dataset.from_data(X, Y[:-1]), "x of shape"),
        (lambda: Dataset.from_data(X, Y + 0.5), "labels of type float64"),
        (lambda: Dataset.from_data(X.astype(np.int32), Y), "convert it to uint8 or float32, or give it as tokens"),
        (lambda: Dataset.from_data(np.where(X > 2, np.nan, X), Y), "NaN or infinite"),
        (lambda: Dataset.from_data(X, np.zeros(240, int)), "only the label 0"),
        (lambda: Dataset.from_data([]), "no shards"),
        (lambda: Dataset.from_data([(X, Y), X]), "shard of client 1 must be"),
        (lambda: Dataset.from_data([(X, Y), (X[:, :4], Y)]), "shard of client 1 has inputs of shape"),
        (lambda: Dataset.from_data([(X, Y), (X.astype(np.uint8), Y)]), "type uint8"),
        (lambda: Dataset.from_data([(X, Y), (X, Y[1:])]), "shard of client 1 has 240 inputs and labels of shape"),
        (lambda: Dataset.from_data([(X, Y), (X[:0], Y[:0])]), "shard of client 1 has no samples"),
        (lambda: Dataset.from_data([(X, Y) * 2, (X[:0], Y[:0]) * 2]), "shard of client 1 has no samples"),
        (lambda: Dataset.from_data([(X, Y), (X, Y, X, Y)]), "must have a test part"),
        (lambda: Dataset.from_data([(X, Y), (X, None)]), "`labels of client 1` is None: give a list or an array"),
        (lambda: Dataset.from_data([(X, Y, None, None), (X, Y)]), "`labels of client 0` is None: .* or leave it out"),
        (lambda: Dataset.from_data(lambda client: (X, Y)), "give `clients`"),
        (lambda: Dataset.from_data(X, Y, clients=3), "number of clients that a function is asked for"),
        (lambda: Dataset.from_data(shards(), client=OWNER), "leave `client` and `test` out"),
        (lambda: Dataset.from_data([[1, 2], [3]], [0, 1]), "rows of one length"),
        (lambda: Dataset.from_data(X, Y, name="Not a name"), "cannot name a dataset"),
        (lambda: Dataset.from_data(X, Y, name="digits"), "built in"),
        (lambda: Dataset.from_data(X, Y, test=OWNER > 2), "beside client"),
        (lambda: Federation.from_data(X, Y, config=Config(dataset="cifar10")), "leave `dataset` out"),
        (lambda: Federation.from_data(X, Y, config={"rounds": 1}), "must be a fedobp.Config, not a dict"),
        (lambda: Federation(SMALL, dataset=X), "must be a fedobp.Dataset, not a ndarray"),
        (lambda: sweep(SMALL), "write sweep"),
        (lambda: sweep(["fedavg"]), "must be a fedobp.Config, not a str"),
        (lambda: sweep([SMALL], dataset=X), "must be a fedobp.Dataset"),
        (lambda: Dataset.from_data(X, [*map(str, Y[:-1]), float("nan")]), "`y` has no value in row 240"),
        (lambda: Dataset.from_data(X, [*map(str, Y[:-1]), None]), "`y` has no value in row 240"),
        (lambda: Dataset.from_data(X, [*Y[:-1].tolist(), "a"]), "`y` mixes texts and numbers"),
        (lambda: Dataset.from_data(X, Y, client=pd.Series([None, *"a" * 239], dtype=object)), "no value in row 1"),
        (lambda: Dataset.from_data(np.ma.masked_array(X, X > 1), Y), "masked values"),
        (lambda: Dataset.from_data({1: (X, Y), "1": (X, Y)}), "two clients have the same name"),
        (lambda: Dataset.from_data(torch.rand(240, 8, 8, 3), Y), "has its channels last"),
        (lambda: Dataset.from_data(torch.eye(240).to_sparse(), Y), "is no array"),
        (lambda: Dataset.from_data(lambda client: 1 / client, clients=2), "ZeroDivisionError.*client 0 of"),
        (lambda: Dataset.from_data(lambda client: None, clients=10**9), "shard of client 0 must be"),
        (lambda: Dataset.from_data(lambda client: (X, Y), Y, clients=2), "leave `y` out"),
        (lambda: Dataset.from_data(X, Y, vocabulary=9), "say `tokens=True`"),
        (lambda: Dataset.from_data(FRAME, label="y", test=Y > 1), "`test` is not for a DataFrame"),
        (lambda: Dataset.from_data(FRAME, label="y", tokens=True), "`tokens` is not for a DataFrame"),
        (lambda: Dataset.from_data(FRAME, label=Y), "must be the name of a column"),
        (lambda: Dataset.from_data(FRAME, label="y", drop=3), "drop is 3: give the names of columns"),
        (lambda: Dataset.from_data(FRAME, label="y", drop=["z"]), "unknown column for --drop"),
        (lambda: Dataset.from_data([(TOKENS[:, :-1], TOKENS[:, 1:])] * 2, tokens=True), "next tokens as labels"),
        (lambda: Dataset.from_data(TOKENS.astype(np.uint64) + 2**63, tokens=True), "a vocabulary has at most"),
        (lambda: Dataset.from_data(TOKENS, tokens=True, vocabulary=0), "has a vocabulary of 0"),
    ],
)
def test_errors_are_sentences(call, message):
    with pytest.raises(FedobpError, match=message):
        call()


def test_later_changes_of_the_arrays_do_not_reach_a_federation():
    x, y = X.copy(), Y.copy()
    federation = Federation.from_data(x, y, config=SMALL)
    before = federation.run("fedavg").history
    x[:], y[:] = 0, 0
    assert federation.run("fedavg").history == before


def test_a_run_says_that_the_data_is_not_in_its_folder(tmp_path):
    result = Federation.from_data(X, Y, config=SMALL).run("fedavg", out=tmp_path / "run")
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "The data was in memory (240 samples of shape 5, SHA-256 " in text
    assert tomllib.loads(text)["dataset"] == "in-memory"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["notes"] == list(result.notes)
    assert len(result.notes) == 1
    other = Federation.from_data(X + 1, Y, config=SMALL).run("fedavg")
    assert other.notes != result.notes  # the hash is of the content


def test_a_run_on_a_file_has_no_notes(tmp_path):
    result = Federation(Config(rounds=1)).run("fedavg", out=tmp_path / "run")
    assert result.notes == ()
    assert "notes" not in result.to_json()


def test_a_sweep_on_data_in_memory():
    dataset = Dataset.from_data(X, Y)
    configs = [Config(method=method, alpha=1.0, rounds=2, epochs=1) for method in ("fedavg", "fedper")]
    results = sweep(configs, dataset=dataset)
    alone = Federation.from_data(X, Y, config=configs[1]).run()
    assert [result.config.dataset for result in results] == ["in-memory"] * 2
    assert results[1].partition == alone.partition
    assert len(results[0].launch) == 2


def test_federations_of_other_data_do_not_share_samples():
    one = Federation.from_data(X, Y, config=SMALL)
    other = Federation(SMALL, dataset=Dataset.from_data(X + 1, Y), beside=one)
    assert not torch.equal(one.data.x, other.data.x)
    third = Federation(Config(seed=1), dataset=one.source, beside=one)
    assert third.data.x is one.data.x


def test_reprs_are_short():
    assert repr(Dataset.from_data(X, Y, client=OWNER)) == (
        "Dataset(in-memory: 240 samples of shape 5, 3 labels, 6 clients)"
    )
    assert repr(Federation.from_data(shards())) == "Federation(in-memory, 6 clients, mlp of 1,155 parameters)"


@pytest.mark.parametrize("empty", [0, 5])
def test_a_shard_may_have_test_samples_alone_as_arrays_may(empty):
    parts = [(x[10:], y[10:], x[:10], y[:10]) for x, y in shards()]
    parts[empty] = (X[:0], Y[:0], *parts[empty][2:])
    arrays = [np.concatenate([part[at] for pair in parts for part in (pair[:2], pair[2:])]) for at in (0, 1)]
    owner = np.concatenate([np.full(len(y) + len(y_test), at) for at, (_, y, _, y_test) in enumerate(parts)])
    test = np.concatenate([np.arange(len(y) + len(y_test)) >= len(y) for _, y, _, y_test in parts])
    found = Federation.from_data(parts, config=SMALL)
    assert found.partition == Federation.from_data(*arrays, client=owner, test=test, config=SMALL).partition
    assert (found.data.size(empty, "train"), found.data.size(empty, "test")) == (0, 10)
    assert found.run("fedavg").accuracy.pooled > 0


def test_another_partition_than_natural_does_not_keep_a_given_test_part():
    parts = [(x[10:], y[10:], x[:10], y[:10]) for x, y in shards()]
    with pytest.warns(UserWarning, match="--partition iid does not keep that"):
        Federation.from_data(parts, config=Config(partition="iid", clients=3))


def test_held_out_clients_leave_samples_to_train_on():
    config = Config(holdout_clients=5, rounds=1)
    refused = 0
    for client in range(6):  # one of them trains, the others are held out
        try:
            Federation.from_data(X, Y, client=OWNER, test=client != OWNER, config=config)
        except FedobpError as error:
            assert "fewer --clients or --holdout-clients" in str(error)  # noqa: PT017
            refused += 1
    assert refused == 5


def test_a_federation_beside_one_in_memory_reads_its_own_file(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X + 5, y=Y)
    in_memory = Federation.from_data(X, Y, name="mine", config=SMALL)
    on_disk = Federation(Config(dataset="mine", data_dir=tmp_path), beside=in_memory)
    assert not torch.equal(on_disk.data.x, in_memory.data.x)


def test_datasets_are_compared_by_identity():
    one, other = Dataset.from_data(X, Y), Dataset.from_data(X, Y)
    assert one != other
    assert len({one, other}) == 2
