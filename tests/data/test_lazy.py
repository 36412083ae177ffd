"""Data that a function makes when a client is needed: the same runs as from arrays, and no client before its time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedobp import Config, Dataset, Federation, FedobpError, sweep
from fedobp.data import lazy as lazy_module
from fedobp.keys import Purpose, fold, permutation
from fedobp.launch import StopTraining

CLASSES, FEATURES = 3, 4
SMALL = Config(rounds=4, epochs=2, participation=0.25, eval_every=2, val_ratio=0.2, seed=3)


def size_of(client):
    return 10 + client % 4


def shard(client):
    random = np.random.default_rng([5, client])
    y = random.integers(CLASSES, size=size_of(client))
    return random.standard_normal((len(y), FEATURES)).astype(np.float32) + y[:, None], y


class Asked:
    """The function of a client, and the clients that it was asked for."""

    def __init__(self, function=shard):
        self.function, self.clients = function, []

    def __call__(self, client):
        self.clients.append(client)
        return self.function(client)


def lazy(function=shard, clients=20, config=SMALL, **more):
    about = {"classes": CLASSES, "samples": [size_of(client) for client in range(clients)], **more}
    return Federation.from_data(function, clients=clients, lazy=True, config=config, **about)


def in_arrays(clients=20, config=SMALL):
    """The same clients as arrays, each one's samples in the order in which lazy data divides them."""
    shards = [shard(client) for client in range(clients)]
    starts = np.cumsum([0, *(len(y) for _, y in shards)])
    order = {
        client: starts[client] + permutation(fold(config.seed, client, Purpose.SPLIT), size_of(client)).numpy()
        for client in range(clients)
    }
    x, y = np.concatenate([x for x, _ in shards]), np.concatenate([y for _, y in shards])
    config = replace(config, clients=clients, partition=lambda task: list(order.values()), normalize="none")
    return Federation.from_data(x, y, config=config)


FILES = ("metrics.jsonl", "clients.csv", "models/global.safetensors", "models/clients.safetensors")


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("method", ["fedobp", "fedper", "fedala", "pfedfda"])
def test_a_run_equals_that_of_the_same_data_in_arrays(method, engine, tmp_path, monkeypatch):
    """A plain step, a part, a sweep with a stopping rule, and a custom step; a cache that holds two clients."""
    monkeypatch.setattr(lazy_module, "_CACHE", 2 * 13 * (4 * FEATURES + 8))
    config = replace(SMALL, engine=engine, finetune_epochs=1, metrics="loss,auc", eval_clients=7)
    lazy(config=config).run(method, out=tmp_path / "lazy")
    in_arrays(config=config).run(method, out=tmp_path / "arrays")
    for name in FILES:
        assert (tmp_path / "lazy" / name).read_bytes() == (tmp_path / "arrays" / name).read_bytes(), name


def test_runs_side_by_side_with_other_cohorts_and_seeds():
    """What a launch trains together is what each trains alone: a batch never has another cohort's samples."""
    configs = [replace(SMALL, method=name, seed=seed, partition_seed=3, precision="fp64")
               for name in ("fedobp", "fedavg") for seed in (3, 4)]  # fmt: skip
    dataset = Dataset.from_data(
        shard, clients=20, lazy=True, classes=CLASSES, samples=[size_of(client) for client in range(20)]
    )
    for one, config in zip(sweep(configs, dataset=dataset), configs, strict=True):
        alone = Federation(config, dataset=dataset).run()
        assert one.history == alone.history
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, alone.state_dict()[name], rtol=1e-9, atol=1e-9)


def test_only_clients_in_use_are_made(tmp_path):
    asked = Asked()
    federation = lazy(asked, clients=2000, config=replace(SMALL, participation=0.002, eval_clients=5))
    assert asked.clients == [0]  # for the shapes
    cohorts = set()
    result = federation.run(out=tmp_path / "run")
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        cohorts |= set(map(int, line.split('"cohort": [')[1].split("]")[0].split(",")))
    assert set(asked.clients) == {0, *cohorts, *(row["client"] for row in result.clients)}
    assert len(set(asked.clients)) <= 1 + 4 * 4 + 5
    assert len(asked.clients) == len(set(asked.clients)) + (0 in {*cohorts, *(row["client"] for row in result.clients)})


def test_the_cache_is_bounded_and_the_oldest_client_is_made_again(monkeypatch):
    asked = Asked()
    data = lazy(asked).data
    one = 10 * (4 * FEATURES + 8)  # bytes of clients 0, 4, 8, ...
    monkeypatch.setattr(lazy_module, "_CACHE", 2 * one)
    asked.clients.clear()
    for client in (0, 4, 0, 8, 0, 4):  # 8 displaces 4, and 4 displaces 8
        data.of(torch.tensor([client]))
    assert asked.clients == [0, 4, 8, 4]


def test_samples_are_divided_as_the_shard_says():
    def parted(client):
        x, y = shard(client)
        return x[3:], y[3:], x[:3], y[:3]

    sizes = [(size_of(client) - 3, 3) for client in range(20)]
    data = lazy(parted, samples=sizes).data
    for client, sizes in ((0, [6, 1, 3]), (7, [8, 2, 3])):
        x, y = shard(client)
        assert [data.size(client, split) for split in ("train", "val", "test")] == sizes
        assert sorted(data.inputs(client, "test")[:, 0].tolist()) == sorted(x[:3, 0].tolist())
        whole = torch.cat([data.targets(client, split) for split in ("train", "val", "test")])
        assert sorted(whole.tolist()) == sorted(y.tolist())
        expected = np.bincount(data.targets(client, "train"), minlength=CLASSES)
        assert data.counts(client).tolist() == expected.tolist()
    plain = lazy().data
    assert [plain.size(1, split) for split in ("train", "val", "test")] == [8, 1, 2]  # of 11: a quarter, then a fifth
    shuffled = torch.cat([plain.targets(1, split) for split in ("train", "val", "test")]).tolist()
    assert shuffled != shard(1)[1].tolist()
    assert sorted(shuffled) == sorted(shard(1)[1].tolist())


def test_clients_that_are_held_out_and_fewer_clients_are_those_of_natural_clients():
    config = replace(SMALL, clients=15, holdout_clients=3, normalize="none", val_ratio=0.0)
    here, there = lazy(config=config).data, Federation.from_data(shard, clients=20, config=config).data
    assert (here.clients, here.trainers) == (15, 12)
    assert here.groups.tolist() == [0] * 15
    for client in range(15):
        samples = [
            torch.cat([data.inputs(client, split)[:, 0] for split in ("train", "test")]) for data in (here, there)
        ]
        assert torch.equal(*(one.sort().values for one in samples))
    assert lazy(config=config).run("fedobp").new_clients is not None


def test_a_run_goes_on_after_an_interruption(tmp_path):
    def stop(at):
        if at.round == 3:
            raise StopTraining

    lazy().run(out=tmp_path / "whole")
    with pytest.raises(StopTraining):
        lazy().run(out=tmp_path / "cut", progress=stop, checkpoint_every=1)
    lazy().run(out=tmp_path / "cut", resume=True)
    for name in FILES:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_bytes_and_images_are_as_in_arrays():
    def image(client):
        random = np.random.default_rng(client)
        return random.integers(256, size=(8, 6, 6, 3)).astype(np.uint8), random.integers(2, size=8)

    data = Federation.from_data(image, clients=5, lazy=True, classes=2, config=Config(rounds=1)).data
    assert data.shape == (3, 6, 6)
    whole = torch.cat([data.inputs(4, split) for split in ("train", "val", "test")])
    expected = torch.tensor(image(4)[0]).permute(0, 3, 1, 2) / 255
    assert sorted(whole.flatten().tolist()) == pytest.approx(sorted(expected.flatten().tolist()))


def test_what_a_run_records_of_its_data():
    federation = lazy()
    [note] = federation.run().notes
    assert note.startswith(f"The data of 20 clients was made by {__name__}:shard when it was needed")
    assert federation.partition == lazy().partition
    others = [lazy(lambda client: shard(client + 4)), lazy(samples=[size_of(0), *[9] * 19]), lazy(clients=19)]
    assert federation.partition not in [other.partition for other in others]
    assert "20 clients, made lazily" in repr(federation.source) + repr(federation.data)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"clients": None}, "needs `clients`, a whole number of at least 1"),
        ({"classes": None}, "needs `classes`, a whole number of at least 2"),
        ({"classes": 2}, "client 0 has labels that are not 0 to 1: number them, or give more `classes`"),
        ({"samples": [10] * 19}, "`samples` must have the number of its samples for each of 20 clients"),
        ({"samples": None}, "client 1 has 11 samples, and not 10 samples: give `samples`, the size of each client"),
        ({"y": [0]}, "`lazy` is for a function of a client"),
        ({"tokens": True}, "`lazy` is for a function of a client"),
        ({"name": "cifar10"}, "'cifar10' is a dataset that fedobp knows"),
        ({"lazy": False}, "`classes` and `samples` are of data that is made lazily"),
    ],
)
def test_what_is_wrong_with_the_arguments(more, problem):
    given = {"clients": 20, "classes": CLASSES, "samples": [size_of(client) for client in range(20)], "lazy": True}
    with pytest.raises(FedobpError, match=problem):
        Federation.from_data(shard, config=SMALL, **{**given, **more}).run()


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            lambda client: (np.ones((4, FEATURES + (client > 0))), [0, 1, 2, 0]),
            r"client \d+ has inputs of shape \(5,\)",
        ),
        (lambda client: (np.full((4, 2), np.nan), [0, 1, 2, 0]), "client 0 has NaN or infinite values in x"),
        (lambda client: (np.ones((4, 2)), [0, 1, 2]), r"client 0 has x of shape \(4, 2\) and y of shape \(3,\)"),
        (lambda client: (np.ones((4, 2)), [0.5, 1, 2, 0]), "client 0 has labels that are not 0 to 2"),
        (lambda client: (np.ones((3, 2)), [0, 1, 2], np.ones((1, 3)), [0]), "other inputs for test than for training"),
        (lambda client: 1 / client, "client 0 of .*: ZeroDivisionError|division by zero"),
    ],
)
def test_what_is_wrong_with_a_client_is_one_sentence(function, problem):
    with pytest.raises(FedobpError, match=problem):
        Federation.from_data(function, clients=20, lazy=True, classes=CLASSES, config=SMALL).run()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"partition": "iid"}, "comes with its clients: leave the partition out"),
        ({"partition_file": "mine"}, "comes with its clients: leave the partition out"),
        ({"normalize": "train"}, "--normalize train needs all clients' samples"),
        ({"device": "cuda"}, "trains on the CPU alone"),
        ({"clients": 21}, "the data comes from 20 clients, not 21"),
        ({"eval_clients": 21}, "--eval-clients 21 is more than the 20 clients that train"),
        ({"method": "decoupled", "options": {"score": "taylor"}}, "needs all clients' samples at once"),
    ],
)
def test_settings_that_need_all_samples_are_refused(change, problem):
    with pytest.raises(FedobpError, match=problem):
        lazy(config=replace(SMALL, **change)).run()
