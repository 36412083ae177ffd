"""Client data as tensors: shapes, sizes, and normalization computed by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedobp.data import Dataset, FederatedData, Shard, data_dir, load, partition

NONE = np.array([], dtype=np.int64)


def dataset(x, y=None, name="mine", classes=2):
    y = np.arange(len(x)) % classes if y is None else np.asarray(y)
    return Dataset(name, np.asarray(x), y.astype(np.int64), tuple(range(classes)), 0)


def shard(train=(), val=(), test=()):
    return Shard(*(np.array(part, dtype=np.int64) for part in (train, val, test)))


def federated(data, *shards, dtype=torch.float64):
    return FederatedData(data, shards, torch.device("cpu"), dtype)


def close(found, expected):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=1e-12)


# Normalization with published constants.


def test_cifar10_bytes_are_normalized_with_the_published_constants():
    x = np.zeros((2, 32, 32, 3), np.uint8)
    x[0, 0, 1] = (51, 102, 255)
    data = federated(dataset(x, name="cifar10", classes=10), shard(train=[0], test=[1]))
    found = data.inputs(0, "train")
    assert found.shape == (1, 3, 32, 32)
    close(found[0, :, 0, 1], [(0.2 - 0.4914) / 0.2023, (0.4 - 0.4822) / 0.1994, (1 - 0.4465) / 0.201])
    close(found[0, :, 5, 5], [-0.4914 / 0.2023, -0.4822 / 0.1994, -0.4465 / 0.201])
    close(data.inputs(0, "test")[0, :, 31, 0], [-0.4914 / 0.2023, -0.4822 / 0.1994, -0.4465 / 0.201])


@pytest.mark.parametrize(
    ("name", "mean", "std"), [("organamnist", 118.7546, 62.3489), ("organcmnist", 124.424, 58.8092)]
)
def test_organ_constants_are_divided_by_255(name, mean, std):
    x = np.zeros((2, 28, 28), np.uint8)
    x[0, 3, 4] = 200
    found = federated(dataset(x, name=name, classes=11), shard(train=[0, 1])).inputs(0, "train")
    # (x / 255 - mean / 255) / (std / 255): the published constants are on the 0-255 scale.
    close(found[0, 0, 3, 4], (200 - mean) / std)
    close(found[1, 0, 0, 0], -mean / std)


def test_registered_floats_up_to_one_are_not_divided():
    x = np.zeros((2, 28, 28), np.float32)
    x[0, 0, 0], x[1, 0, 0] = 0.5, 1.0
    found = federated(dataset(x, name="mnist", classes=10), shard(train=[0, 1])).inputs(0, "train")
    close(found[:, 0, 0, 0], [(0.5 - 0.1307) / 0.3015, (1 - 0.1307) / 0.3015])


def test_registered_floats_up_to_255_are_divided():
    x = np.zeros((2, 28, 28), np.float32)
    x[0, 0, 0], x[1, 0, 0] = 51.0, 255.0
    found = federated(dataset(x, name="mnist", classes=10), shard(train=[0, 1])).inputs(0, "train")
    close(found[:, 0, 0, 0], [(0.2 - 0.1307) / 0.3015, (1 - 0.1307) / 0.3015])


# Normalization with the constants of the training splits.


def test_tables_are_normalized_by_the_training_splits_of_all_clients():
    # Training rows 0, 1, 4: feature 0 is 1, 3, 5 (mean 3, std sqrt(8/3)); row 2 is validation, row 3 is test.
    x = np.array([[1, 0], [3, 6], [900, 900], [7, -900], [5, 3]], np.float32)
    data = federated(dataset(x), shard(train=[0, 1], val=[2], test=[3]), shard(train=[4]))
    assert data.shape == (2,)
    first, second = np.sqrt(8 / 3), np.sqrt(6)
    close(data.inputs(0, "train"), [[-2 / first, -3 / second], [0, 3 / second]])
    close(data.inputs(0, "val"), [[897 / first, 897 / second]])
    close(data.inputs(0, "test"), [[4 / first, -903 / second]])
    close(data.inputs(1, "train"), [[2 / first, 0]])


def test_imported_bytes_are_normalized_by_the_training_splits():
    x = np.zeros((3, 2, 2), np.uint8)
    x[1], x[2] = 2, 4
    data = federated(dataset(x), shard(train=[0, 1], test=[2]))
    # Pixels 0 and 2 have mean 1 and standard deviation 1, on whatever scale.
    close(data.inputs(0, "train"), np.stack([np.full((1, 2, 2), -1), np.full((1, 2, 2), 1)]))
    close(data.inputs(0, "test"), np.full((1, 1, 2, 2), 3))


def test_colour_images_are_normalized_per_channel():
    x = np.zeros((2, 1, 2, 3), np.float32)
    x[0, 0, 0], x[0, 0, 1] = (0, 10, 1), (2, 30, 1)
    x[1] = 5
    data = federated(dataset(x), shard(train=[0], test=[1]))
    close(data.inputs(0, "train")[0, :, 0, :], [[-1, 1], [-1, 1], [0, 0]])
    close(data.inputs(0, "test")[0, :, 0, 0], [(5 - 1) / 1, (5 - 20) / 10, 5 - 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 5.0, 0.1, -1e-3])
def test_a_constant_feature_is_centred_and_not_divided_by_zero(value, dtype):
    x = np.array([[value, 1], [value, 3], [value, 5], [value + 2, 7]], np.float32)
    data = federated(dataset(x), shard(train=[0, 1, 2], test=[3]), dtype=dtype)
    assert data.inputs(0, "train")[:, 0].tolist() == [0, 0, 0]
    torch.testing.assert_close(data.inputs(0, "test")[0, 0].item(), 2.0, rtol=0, atol=1e-6)


def test_the_training_splits_of_the_digits_have_mean_0_and_deviation_1():
    digits = load("digits", data_dir())
    shards = partition(digits.y, 10, seed=1, val_ratio=0.2)
    data = federated(digits, *shards)
    trained = torch.cat([data.inputs(client, "train") for client in range(10)])
    close(trained.mean(), 0)
    close(trained.std(correction=0), 1)


def test_metadata_holds_the_normalization_constants():
    x = np.arange(5 * 2 * 2 * 3, dtype=np.uint8).reshape(5, 2, 2, 3)
    labels = (-3, 7)
    data = federated(Dataset("mine", x, np.arange(5) % 2, labels, 0), shard(train=[0, 1, 4], test=[2, 3]))
    metadata = data.metadata()
    assert tuple(metadata["input_shape"]) == (3, 2, 2)
    assert metadata["labels"] == [-3, 7]
    unit, mean, std = (np.array(metadata["scaling"][name]) for name in ("unit", "mean", "std"))
    by_hand = ((x[[2, 3]] / unit - mean) / std).transpose(0, 3, 1, 2)
    close(data.inputs(0, "test"), by_hand)


# Shapes, sizes and labels.


@pytest.mark.parametrize(
    ("stored", "seen"),
    [((4, 5), (1, 4, 5)), ((4, 5, 1), (1, 4, 5)), ((4, 5, 3), (3, 4, 5)), ((7,), (7,))],
    ids=["grey", "one channel", "colour", "table"],
)
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_images_have_their_channels_first_and_tables_stay(stored, seen, kind):
    x = np.random.RandomState(0).randint(0, 200, (6, *stored)).astype(kind)
    data = federated(dataset(x), shard(train=[0, 1, 2, 3], test=[4, 5]))
    assert data.shape == seen
    assert data.inputs(0, "train").shape == (4, *seen)
    if len(stored) == 3:
        by_hand = x[:4].transpose(0, 3, 1, 2).astype(np.float64)
        spread = by_hand.std(axis=(0, 2, 3), keepdims=True)
        close(data.inputs(0, "train"), (by_hand - by_hand.mean(axis=(0, 2, 3), keepdims=True)) / spread)


def test_sizes_targets_and_counts_per_client():
    y = [0, 1, 2, 2, 0, 1, 2]
    data = federated(
        dataset(np.zeros((7, 2), np.float32), y, classes=4),
        shard(train=[2, 3, 0], test=[1]),
        shard(train=[6], val=[5], test=[4]),
    )
    assert (data.clients, data.classes) == (2, 4)
    assert [data.size(0, split) for split in ("train", "val", "test")] == [3, 0, 1]
    assert [data.size(1, split) for split in ("train", "val", "test")] == [1, 1, 1]
    assert data.targets(0, "train").tolist() == [2, 2, 0]
    assert data.targets(1, "val").tolist() == [1]
    assert data.counts(0).tolist() == [1, 0, 2, 0]
    assert data.counts(1).tolist() == [0, 0, 1, 0]


def test_an_empty_part_has_no_inputs_and_no_targets():
    data = federated(dataset(np.zeros((2, 4, 4), np.uint8)), shard(train=[0, 1]))
    assert data.inputs(0, "test").shape == (0, 1, 4, 4)
    assert data.targets(0, "test").shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_have_the_asked_precision_and_bytes_stay_bytes(dtype):
    data = federated(dataset(np.zeros((2, 4, 4), np.uint8)), shard(train=[0, 1]), dtype=dtype)
    assert data.inputs(0, "train").dtype == dtype
    assert data.x.dtype == torch.uint8


# Several clients at once.


@pytest.fixture
def three():
    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    parts = shard(train=[7, 2, 5], test=[0]), shard(val=[1], test=[3]), shard(train=[9, 8], val=[6], test=[4])
    return federated(dataset(x, classes=5), *parts)


def test_positions_become_samples_of_each_client(three):
    found = three.ids(torch.tensor([2, 0]), torch.tensor([[1, 0], [2, 0]]), "train")
    assert found.tolist() == [[8, 9], [5, 7]]
    assert three.ids(torch.tensor([1]), torch.tensor([[0]]), "val").tolist() == [[1]]
    close(
        three.samples(found.flatten()),
        torch.stack([*three.inputs(2, "train").flip(0), *three.inputs(0, "train")[[2, 0]]]),
    )


def test_positions_may_have_more_axes(three):
    found = three.ids(torch.tensor([0, 2]), torch.tensor([[[0, 1], [2, 0]], [[1, 1], [0, 0]]]), "train")
    assert found.tolist() == [[[7, 2], [5, 7]], [[8, 8], [9, 9]]]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_positions_beyond_the_last_sample_are_some_sample(three, split):
    found = three.ids(torch.arange(3), torch.arange(30).expand(3, -1), split)
    assert found.shape == (3, 30)
    assert ((found >= 0) & (found < 10)).all()


def test_positions_in_a_split_that_no_client_has_are_some_sample():
    data = federated(dataset(np.zeros((4, 2), np.float32)), shard(train=[0, 1]), shard(train=[2], test=[3]))
    found = data.ids(torch.tensor([0, 1]), torch.zeros(2, 3, dtype=torch.int64), "val")
    assert found.shape == (2, 3)
    assert data.samples(found.flatten()).shape == (6, 2)


def test_held_out_clients_have_data_but_are_not_pooled_and_not_used_for_normalization():
    x = np.array([[1], [3], [100], [5], [200]], np.float32)
    parts = shard(train=[0, 1], test=[3]), replace(shard(train=[2], test=[4]), held_out=True)
    data = federated(dataset(x), *parts)
    assert (data.clients, data.trainers) == (2, 1)
    assert [data.pooled_ids(split).tolist() for split in ("train", "val", "test")] == [[0, 1], [], [3]]
    assert data.targets(1, "train").tolist() == [0]
    close(data.inputs(1, "train"), [[98.0]])  # normalized by mean 2 and deviation 1 of the trainers


def test_repartitioned_data_equals_new_data(three):
    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    parts = shard(train=[0, 1], test=[2, 3]), shard(train=[4, 5, 6, 7, 8, 9])
    again, new = three.repartitioned(dataset(x, classes=5), parts), federated(dataset(x, classes=5), *parts)
    assert again.x.data_ptr() == three.x.data_ptr()
    assert (again.clients, three.clients) == (2, 3)
    assert again.metadata() == new.metadata() != three.metadata()
    for client in range(2):
        assert torch.equal(again.inputs(client, "train"), new.inputs(client, "train"))
        assert torch.equal(again.targets(client, "test"), new.targets(client, "test"))
    assert three.targets(0, "train").tolist() == [2, 2, 0]
