"""Federations: what is read and shared, identities between methods, and a golden run of each."""

import numpy as np
import pytest
import torch
from lanes_cases import vector
from resolved import resolved

from fedobp import Config, Federation, FedobpError, sweep
from fedobp.algorithms import METHODS
from fedobp.data import PARTITIONERS, data_dir, load, partition
from fedobp.models import Model

TINY = {"clients": 6, "rounds": 4, "participation": 0.5, "epochs": 1, "model": "mlp", "precision": "fp64"}
MLP_SIZE = 64 * 128 + 128 + 128 * 10 + 10
HEAD_SIZE = 128 * 10 + 10


@pytest.fixture(scope="module", params=["serial", "lanes"])
def tiny(request):
    return Federation(Config(**TINY, engine=request.param))


def test_a_federation_has_the_resolved_form_of_what_was_asked():
    asked = Config(clients=6)
    federation = Federation(asked)
    assert federation.config == resolved(asked) != asked
    assert Federation(federation.config).config == federation.config
    assert Federation().config == resolved()


# How often a dataset is read.


MINE = {"dataset": "mine", "clients": 3, "rounds": 2, "epochs": 1, "model": "mlp"}


def test_a_federation_and_its_runs_read_the_dataset_once(read_files):
    federation = Federation(Config(**MINE))
    federation.run()
    federation.run("fedavg")
    assert read_files == ["mine.npz"]
    Federation(Config(**MINE, partition_seed=7), beside=federation).run()
    assert read_files == ["mine.npz"]


def test_the_commands_read_the_dataset_once(read_files, command):
    flags = ("--dataset", "mine", "--rounds", 1, "--epochs", 1, "--model", "mlp")
    for arguments in (
        ("run", *flags, "--out", "run"),
        ("run", "--config", "run/config.toml"),
        ("compare", *flags, "--methods", "fedavg,local,fedper", "--seeds", 2, "--out", "compare"),
        ("compare", "--config", "compare/compare.toml"),
        ("partition", "--dataset", "mine"),
    ):
        read_files.clear()
        assert command(*arguments).code == 0
        assert read_files == ["mine.npz"], arguments


# Identities between methods.


def test_fedobp_at_q_1_is_fedavg(tiny):
    ours, theirs = tiny.run("fedobp", q=1.0), tiny.run("fedavg")
    assert torch.equal(vector(ours), vector(theirs))
    assert ours.accuracy == theirs.accuracy
    assert ours.personal.max == 0
    assert ours.bytes == theirs.bytes


def test_fedobp_at_q_0_with_a_literal_start_is_local_only_up_to_ties(tiny):
    ours, alone = tiny.run("fedobp", q=0.0, start="literal"), tiny.run("local")
    for client in range(6):
        mine, theirs = vector(ours, client), vector(alone, client)
        # Entries at the minimum score (those that no client's training moved) are shared; they are equal anyway.
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


def test_a_round_of_all_clients_averages_their_models():
    """One full-participation round of FedAvg is the weighted mean of Local-Only's models."""
    federation = Federation(Config(**{**TINY, "rounds": 1, "participation": 1.0}))
    alone, averaged = federation.run("local"), federation.run("fedavg")
    sizes = torch.tensor([federation.data.size(client, "train") for client in range(6)], dtype=torch.float64)
    models = torch.stack([vector(alone, client) for client in range(6)])
    assert torch.allclose(vector(averaged), (sizes / sizes.sum()) @ models, rtol=0, atol=1e-12)


def test_fedper_without_a_second_client_keeps_its_head(tiny):
    result = tiny.run("fedper")
    model = Model("mlp", (1, 8, 8), 10)
    start = model.initial(42).double()
    assert torch.equal(vector(result)[-HEAD_SIZE:], start[-HEAD_SIZE:])  # the server's head stays at theta^0
    assert not torch.equal(vector(result)[:-HEAD_SIZE], start[:-HEAD_SIZE])
    heads = {tuple(vector(result, client)[-HEAD_SIZE:].tolist()) for client in range(6)}
    assert len(heads) > 1
    assert all(torch.equal(vector(result, c)[:-HEAD_SIZE], vector(result)[:-HEAD_SIZE]) for c in range(6))


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        ("fedavg", 0, 0),
        ("fedper", HEAD_SIZE, HEAD_SIZE),
        ("local", MLP_SIZE, MLP_SIZE),
        ("fedavg-ft", MLP_SIZE, MLP_SIZE),
        ("fedavg-last", MLP_SIZE, MLP_SIZE),
        ("fedobp", 10, 10),
    ],
)
def test_personal_entries_after_all_clients_have_trained(method, low, high):
    federation = Federation(Config(**{**TINY, "participation": 1.0, "rounds": 2}))
    personal = federation.run(method).personal
    assert (personal.min, personal.max) == (low, high)
    assert personal.mean == low
    assert personal.share == pytest.approx(low / MLP_SIZE)


# Runs and samples of a federation.


def test_a_runs_options_extend_the_configurations_for_the_same_method():
    federation = Federation(Config(**TINY, options={"q": 0.5}))
    assert federation.run("fedobp", score="product").config.options["q"] == 0.5
    assert federation.run("fedavg").config.options == {}


@pytest.mark.parametrize(
    "options",
    [
        {"q": 0.5},
        {"score": "product"},
        {"norm": "layer"},
        {"scope": "classifier"},
        {"ema": 0.9},
        {"start": "literal"},
    ],
)
def test_every_option_of_fedobp_changes_something(options):
    federation = Federation(Config(**{**TINY, "rounds": 6, "options": {"q": 0.9}}))
    plain, changed = federation.run("fedobp"), federation.run("fedobp", **options)
    assert not all(torch.equal(vector(plain, client), vector(changed, client)) for client in range(6))


def test_federations_beside_each_other_share_their_samples_and_nothing_else():
    first = Federation(Config(**TINY))
    same = Federation(Config(**TINY, lr=0.5), beside=first)
    other = Federation(Config(**{**TINY, "partition_seed": 9, "clients": 7}), beside=first)
    third = Federation(Config(**{**TINY, "precision": "fp32"}), beside=first)
    assert same.data is first.data
    assert other.data.x.data_ptr() == first.data.x.data_ptr()
    assert (other.data.clients, first.data.clients) == (7, 6)
    assert third.data.dtype == torch.float32
    for federation in (same, other, third):
        alone = Federation(federation.config)
        for client in range(federation.config.clients):
            for split in ("train", "test"):
                assert torch.equal(federation.data.inputs(client, split), alone.data.inputs(client, split))
                assert torch.equal(federation.data.targets(client, split), alone.data.targets(client, split))


@pytest.mark.parametrize("save", ["all", "none"])
def test_a_run_leaves_nothing_behind_in_the_temporary_folder(monkeypatch, tmp_path, save):
    kept = Federation(Config(**TINY)).run("fedobp", q=0.9)  # torch makes a folder of its own when it is used first
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spilled = Federation(Config(**{**TINY, "store_memory": 1e-9, "save_models": save})).run("fedobp", q=0.9)
    assert all(torch.equal(vector(spilled, client), vector(kept, client)) for client in range(6))
    assert not list(tmp_path.iterdir())


# pooled and client-mean accuracy, and the 2-norm of the global model, after 6 rounds in float64
GOLDEN = {
    "fedobp": (33.70786516853933, 50.44049151417573, 9.062058750164823),
    "fedavg": (9.438202247191011, 17.672643146327356, 9.060437821881582),
    "fedavg-ft": (85.84269662921349, 78.68384834700623, 9.060437821881582),
    "fedavg-last": (59.325842696629216, 66.90740203371782, 9.060437821881582),
    "local": (61.573033707865164, 62.53234276392171, 8.932656415834273),
    "fedper": (46.96629213483146, 60.27331682068524, 9.07117104941531),
    "fedrep": (58.20224719101124, 64.31091080564764, 9.02031032534125),
    "fedbabu": (83.37078651685394, 74.90875677191467, 9.095836188348118),
    "ditto": (57.30337078651685, 59.12531167268009, 9.060437821881582),
    "fedprox": (9.438202247191011, 17.672643146327356, 9.059776070453513),
    "scaffold": (10.786516853932584, 14.847510668563299, 9.110706911149057),
    "lg-fedavg": (57.30337078651685, 57.587480608533234, 9.00881341528939),
    "pspfl": (62.247191011235955, 65.44983920773394, 8.933119557907547),
    "fedbn": (9.438202247191011, 17.672643146327356, 9.060437821881582),
    "apfl": (36.853932584269664, 46.764440206545466, 9.066236828535201),
    "pfedme": (63.370786516853926, 62.77456995351732, 9.07713441511672),
    "fedala": (62.92134831460674, 62.442101805259696, 9.083146322988426),
    "fedrod": (73.03370786516854, 69.88972270024901, 9.007307256828078),
    "floco": (25.39325842696629, 47.78952626321048, 8.891026722720714),
    "pfedsim": (24.269662921348313, 42.394023994023996, 9.064444436558183),
    "seqfededt": (8.764044943820224, 12.691526112578744, 9.198303167596254),
    "decoupled": (33.70786516853933, 50.44049151417573, 9.062058750164823),
    "pfedfda": (77.97752808988764, 76.41251617041091, 9.123024567804299),
    "fedpac": (63.59550561797753, 65.34098599361758, 9.006665725776422),
    "flute": (58.876404494382015, 64.20070285333443, 8.96984300147067),
    "feddpa": (42.02247191011236, 43.733891333891336, 9.153824648522138),
    "group-oracle": (9.438202247191011, 17.672643146327356, 9.060437821881582),  # there are no groups: FedAvg
    "fedobp-auto": (89.43820224719101, 88.86927344822082, 8.851303248851195),
    "counterdrift": (12.359550561797752, 16.96803338908602, 9.280811712789331),
    "fedacg": (33.03370786516854, 41.50969225179752, 9.192604143373146),
    "fedselect": (8.539325842696629, 12.556390977443609, 9.089700392869691),
}


@pytest.mark.parametrize("method", GOLDEN)
def test_golden_run(method):
    """On the lanes engine; that both engines agree is tested elsewhere, for every method."""
    result = Federation(Config(clients=10, rounds=6, epochs=2, lr=0.05, precision="fp64", engine="lanes")).run(method)
    pooled, client_mean, norm = GOLDEN[method]
    assert result.accuracy.pooled == pytest.approx(pooled, abs=1e-9)
    assert result.accuracy.client_mean == pytest.approx(client_mean, abs=1e-9)
    assert float(vector(result).norm()) == pytest.approx(norm, rel=1e-9)


def test_every_method_has_a_golden_run():
    assert set(GOLDEN) == set(METHODS)


@pytest.mark.parametrize("seed", [42, 43, 44])
def test_fedobp_beats_fedavg_and_local_only_on_the_demo(seed):
    methods = ("fedobp", "fedavg", "local")
    ours, averaged, alone = sweep([Config(seed=seed, eval_every=60, method=method) for method in methods])
    assert ours.accuracy.pooled > averaged.accuracy.pooled
    assert ours.accuracy.pooled > alone.accuracy.pooled


# Partitions.


def test_every_partition_runs(wards):
    for name in PARTITIONERS:
        given = {"clients": 3, "rounds": 1, "alpha": 5.0, "epochs": 1, "partition": name, "dataset": "wards"}
        options = {"feature": {"change": "noise"}, "concept": {"groups": 2}}.get(name, {})
        federation = Federation(Config(**given, partition_options=options))
        assert federation.run("fedavg").accuracy.pooled > 0
        assert federation.data.clients == 3


def test_data_without_natural_clients_has_no_natural_partition():
    with pytest.raises(FedobpError, match="--partition natural needs the client of each sample"):
        Federation(Config(partition="natural"))


def test_runs_with_other_features_do_not_share_samples():
    configs = [Config(**TINY, partition="feature", partition_seed=seed, seed=1) for seed in (1, 2, 1)]
    results = sweep(configs)
    for config, result in zip(configs, results, strict=True):
        alone = Federation(config).run()
        assert (result.accuracy, result.partition) == (alone.accuracy, alone.partition)
    assert results[0].accuracy == results[2].accuracy
    first, second = (Federation(config) for config in configs[:2])
    beside = Federation(configs[1], beside=first)
    assert torch.equal(beside.data.x, second.data.x)
    assert not torch.equal(first.data.x, second.data.x)
    assert Federation(configs[2], beside=first).data is first.data
    scaled = Federation(Config(**TINY, partition="feature", partition_seed=1, normalize="none"), beside=first)
    assert torch.equal(scaled.data.x, first.data.x)


def test_a_plain_federation_beside_a_changed_one_has_plain_samples():
    changed = Federation(Config(**TINY, partition="feature"))
    plain = Federation(Config(**TINY, partition="iid"), beside=changed)
    assert torch.equal(plain.data.x[:, 0], torch.as_tensor(load("digits", data_dir()).x))


def test_training_and_tests_see_each_clients_own_labels():
    changed = Federation(Config(**TINY, partition="concept"))
    plain = Federation(Config(**TINY, partition="iid"), beside=changed)
    digits, shards = load("digits", data_dir()), partition(load("digits", data_dir()).y, 6, kind="concept")
    assert torch.equal(plain.data.y, torch.as_tensor(digits.y))
    assert changed.data.groups.tolist() == [shard.group for shard in shards]
    for client, shard in enumerate(shards):
        new = np.array(shard.change.labels or range(10))
        for split in ("train", "test"):
            assert changed.data.targets(client, split).tolist() == new[digits.y[getattr(shard, split)]].tolist()
        counted = torch.bincount(changed.data.targets(client, "train"), minlength=10)
        assert torch.equal(changed.data.counts(client), counted)


def test_training_sees_rotated_images():
    federation = Federation(Config(**TINY, partition="feature", normalize="none"))
    digits, shards = load("digits", data_dir()), partition(load("digits", data_dir()).y, 6, kind="feature")
    for client, shard in enumerate(shards):
        upright = np.rot90(federation.data.inputs(client, "train")[:, 0].numpy(), -shard.change.turns, axes=(1, 2))
        np.testing.assert_allclose(upright * 255, digits.x[shard.train], rtol=1e-5)
