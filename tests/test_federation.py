"""Whole runs: hand-checkable identities between methods, books, and a golden run per method."""

import json
import random
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from contexts import with_model
from lanes_cases import vector

import fedobp
from fedobp import Config, Federation, FedobpError, sweep
from fedobp.algorithms import METHODS
from fedobp.algorithms.fedavg import FedAvg
from fedobp.engine import Budget, ClientPool, PoolJob, Serial
from fedobp.method import RoundContext
from fedobp.models import Model
from fedobp.sampling import cohorts

TINY = {"clients": 6, "rounds": 4, "participation": 0.5, "epochs": 1, "model": "mlp", "precision": "fp64"}
MLP_SIZE = 64 * 128 + 128 + 128 * 10 + 10
HEAD_SIZE = 128 * 10 + 10


@pytest.fixture(scope="module", params=["serial", "lanes"])
def tiny(request):
    return Federation(Config(**TINY, engine=request.param))


def test_published_sampling_is_pythons_stream():
    config = Config(dataset="cifar10", sampling="published", seed=42)
    random.seed(42)
    expected = [random.sample(list(range(100)), 10) for _ in range(400)]
    assert [cohort.tolist() for cohort in cohorts(config)] == expected


def test_keyed_sampling_draws_distinct_clients_and_depends_on_seed_and_round():
    drawn = [cohort.tolist() for cohort in cohorts(Config(rounds=50))]
    assert all(len(set(cohort)) == 4 and set(cohort) <= set(range(20)) for cohort in drawn)
    assert len({tuple(cohort) for cohort in drawn}) > 45
    assert {client for cohort in drawn for client in cohort} == set(range(20))
    assert drawn != [cohort.tolist() for cohort in cohorts(Config(rounds=50, seed=43))]
    assert drawn[:10] == [cohort.tolist() for cohort in cohorts(Config(rounds=10))]


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
        # Entries at the minimum score (those that nobody's training moved) are shared; they are equal anyway.
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


def test_every_client_at_once_with_equal_sizes_averages_plainly():
    """One full-participation round of FedAvg is the weighted mean of Local-Only's models."""
    federation = Federation(Config(**{**TINY, "rounds": 1, "participation": 1.0}))
    alone, together = federation.run("local"), federation.run("fedavg")
    sizes = torch.tensor([federation.data.size(client, "train") for client in range(6)], dtype=torch.float64)
    models = torch.stack([vector(alone, client) for client in range(6)])
    assert torch.allclose(vector(together), (sizes / sizes.sum()) @ models, rtol=0, atol=1e-12)


def test_fedper_without_a_second_client_keeps_its_head(tiny):
    result = tiny.run("fedper")
    model = Model("mlp", (1, 8, 8), 10)
    start = model.initial(42).double()
    assert torch.equal(vector(result)[-HEAD_SIZE:], start[-HEAD_SIZE:])  # the server's head stays at theta^0
    assert not torch.equal(vector(result)[:-HEAD_SIZE], start[:-HEAD_SIZE])
    heads = {tuple(vector(result, client)[-HEAD_SIZE:].tolist()) for client in range(6)}
    assert len(heads) > 1
    assert all(torch.equal(vector(result, c)[:-HEAD_SIZE], vector(result)[:-HEAD_SIZE]) for c in range(6))


@pytest.mark.essential
def test_fedobps_download_counts_values_and_positions(tiny):
    result = tiny.run("fedobp", q=0.9)
    full = 8 * MLP_SIZE * 3
    assert result.bytes.up_per_round == full
    # A seen client's download lacks 961 values of 8 bytes and carries 961 positions of 4, or a bitmap of 1,202.
    assert full - 3 * 961 * 8 + 3 * 1202 <= result.bytes.down_per_round < full


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
def test_personal_entries_once_everyone_was_seen(method, low, high):
    federation = Federation(Config(**{**TINY, "participation": 1.0, "rounds": 2}))
    personal = federation.run(method).personal
    assert (personal.min, personal.max) == (low, high)
    assert personal.mean == low
    assert personal.share == pytest.approx(low / MLP_SIZE)


def test_clients_never_seen_are_served_the_global_model():
    federation = Federation(Config(**{**TINY, "rounds": 1, "participation": 0.1}))
    (seen,) = next(cohorts(federation.config)).tolist()
    for method in ("fedobp", "fedavg-last"):
        result = federation.run(method)
        assert all(torch.equal(vector(result, c), vector(result)) for c in range(6) if c != seen)
        assert result.personal.min == 0


def test_last_is_the_own_last_model_and_the_global_one_for_the_unseen(tiny):
    served, averaged = tiny.run("fedavg-last"), tiny.run("fedavg")
    assert served.accuracy == served.last == averaged.last
    assert averaged.accuracy != averaged.last


def test_history_holds_every_evaluation_and_the_last_round():
    federation = Federation(Config(**{**TINY, "rounds": 5, "eval_every": 2}))
    result = federation.run("fedavg")
    assert [point[0] for point in result.history] == [2, 4, 5]
    assert result.history[-1][1:] == (result.accuracy.pooled, result.accuracy.client_mean)


def test_evaluating_more_often_changes_no_result(tiny):
    often = Federation(Config(**{**TINY, "eval_every": 1})).run("fedobp", ema=0.5, q=0.9)
    rarely = Federation(Config(**{**TINY, "eval_every": 4})).run("fedobp", ema=0.5, q=0.9)
    assert often.accuracy == rarely.accuracy
    assert torch.equal(vector(often), vector(rarely))


def test_fine_tuning_is_reported_beside_and_not_stored(tiny):
    tuned = Federation(Config(**TINY, finetune_epochs=5)).run("fedavg")
    plain = tiny.run("fedavg")
    assert plain.finetuned is None
    assert tuned.accuracy == plain.accuracy
    assert tuned.finetuned.pooled > tuned.accuracy.pooled
    served = tiny.run("fedavg-ft", finetune=5)
    assert served.accuracy == tuned.finetuned


def test_fine_tuning_under_a_cosine_takes_the_full_learning_rate():
    tuned = Federation(Config(**{**TINY, "lr_schedule": "cosine", "rounds": 20, "finetune_epochs": 5})).run("fedavg")
    assert tuned.finetuned.pooled > tuned.accuracy.pooled + 10


def test_validation_comes_from_training_data_only(tiny):
    result = Federation(Config(**TINY, val_ratio=0.2)).run("fedavg")
    assert result.validation is not None
    assert set(result.to_json()["validation"]) == set(result.to_json()["accuracy"])
    assert tiny.run("fedavg").validation is None
    assert result.accuracy.majority_class == pytest.approx(tiny.run("fedavg").accuracy.majority_class, abs=5)


def test_the_paper_protocol_reports_the_best_of_its_rounds():
    federation = Federation(
        Config(clients=4, participation=0.25, rounds=200, epochs=1, model="mlp", protocol="paper", eval_every=100)
    )
    result = federation.run("fedavg")
    assert result.protocol.rounds == (100, 200)
    assert result.accuracy.pooled == max(point[1] for point in result.history)


def test_a_runs_options_extend_the_configurations_for_the_same_method():
    federation = Federation(Config(**TINY, options={"q": 0.5}))
    assert federation.run("fedobp", score="product").config.options["q"] == 0.5
    assert federation.run("fedavg").config.options == {}


def test_momentum_weight_decay_and_schedule_change_the_result(tiny):
    plain = vector(tiny.run("fedavg"))
    for change in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"lr_schedule": "cosine"}, {"lr": 0.02}, {"seed": 1}):
        assert not torch.equal(plain, vector(Federation(Config(**{**TINY, **change})).run("fedavg")))


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


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("eval_every", [1, 50])
def test_a_diverging_run_names_round_and_client_and_keeps_its_metrics(tmp_path, engine, eval_every):
    # Each step multiplies the weights by 1 - 0.01 * 400 = -3: float32 overflows after a dozen rounds.
    wild = {"weight_decay": 400.0, "rounds": 50, "precision": "fp32", "eval_every": eval_every}
    federation = Federation(Config(**{**TINY, **wild, "engine": engine}))
    with pytest.raises(FedobpError, match=r"round \d+, client \d: .* smaller --weight-decay") as caught:
        federation.run("fedavg", out=tmp_path / "run")
    reached = int(str(caught.value).split()[1].rstrip(","))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, reached))
    assert reached > 2


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_a_run_whose_fine_tuning_diverges_keeps_its_metrics(tmp_path, engine):
    settings = {"weight_decay": 400.0, "rounds": 2, "precision": "fp32", "finetune_epochs": 30, "engine": engine}
    with pytest.raises(FedobpError, match=r"round 2, client 0: .* smaller --weight-decay"):
        Federation(Config(**{**TINY, **settings})).run("fedavg", out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]


def test_every_round_is_written_down_before_the_next_one_on_the_cpu(tmp_path):
    seen = []

    def look(at):
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        seen.append((at.round, len(lines)))

    Federation(Config(rounds=4, eval_every=4, clients=8, model="mlp")).run(out=tmp_path / "run", progress=look)
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]


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
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = Config(**{**TINY, "store_memory": 1e-9, "save_models": save})
    spilled, kept = Federation(config).run("fedobp", q=0.9), Federation(Config(**TINY)).run("fedobp", q=0.9)
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


def test_the_package_offers_exactly_its_public_names():
    assert all(hasattr(fedobp, name) for name in fedobp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Fedration'"):
        _ = fedobp.Fedration


# Turns, and rounds of everyone.


@dataclass(frozen=True)
class Relay(FedAvg):
    """One client after the other trains the model that the one before it left; in round 2 all do before the cohort."""

    name: ClassVar[str] = "relay"
    summary: ClassVar[str] = "a relay"
    paper: ClassVar[str] = "none"

    @property
    def together(self):
        return False

    def turns(self, round, rounds):
        return ("everyone", "cohort") if round == 2 else ("cohort",)

    def aggregate(self, model, ctx, server, records, up, n):
        assert len(ctx.cohort) == len(n) == 1
        return {"theta": up["theta"][0]}, records


@pytest.fixture
def relay(monkeypatch):
    monkeypatch.setitem(METHODS, "relay", Relay)


def relayed(config):
    """The same in plain words, with the serial engine's own clients."""
    federation = Federation(config)
    model, data = federation.model, federation.data
    theta, engine = model.initial(config.seed).double(), Serial(model, config.batch_size)
    clients = ClientPool(data, {}, theta, config.seed, Budget())
    hparams = {"lr": config.lr, "momentum": 0.0, "weight_decay": 0.0}
    for round, cohort in enumerate(cohorts(config), start=1):
        for client in [*(range(config.clients) if round == 2 else []), *cohort.tolist()]:
            ctx = RoundContext(None, round, config.rounds, config.clients, config.epochs, torch.tensor([client]))
            [answer] = engine.train(
                [
                    PoolJob(
                        ctx,
                        Relay().client_update(with_model(model, ctx)),
                        hparams,
                        {"theta": theta[None]},
                        clients=clients,
                    )
                ]
            )
            theta = answer.upload["theta"][0]
    return theta


@pytest.mark.usefixtures("relay")
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_clients_may_take_turns(engine, tmp_path):
    config = Config(clients=5, participation=0.6, rounds=3, epochs=1, precision="fp64", engine=engine, model="mlp")
    result = Federation(config).run("relay", out=tmp_path / "run")
    found = torch.cat([tensor.flatten() for tensor in result.state_dict().values()])
    torch.testing.assert_close(found, relayed(config), rtol=0, atol=1e-10)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [len(line["cohort"]) for line in lines] == [3, 8, 3]
    assert lines[1]["cohort"][:5] == [0, 1, 2, 3, 4]
    size = 8 * len(found)
    assert [line["bytes_up"] for line in lines] == [3 * size, 8 * size, 3 * size]
    assert all(line["loss"] > 0 for line in lines)
    assert result.compute.visit == pytest.approx(1, abs=0.01)  # one epoch in each of the 14 visits


@pytest.mark.usefixtures("relay")
def test_turns_go_side_by_side_with_other_runs():
    given = {"clients": 5, "participation": 0.6, "rounds": 3, "epochs": 1, "precision": "fp64", "model": "mlp"}
    configs = [
        Config(**given, method=method, seed=seed) for method, seed in (("relay", 1), ("fedavg", 2), ("relay", 3))
    ]
    for config, result in zip(configs, sweep(configs), strict=True):
        alone = Federation(config).run()
        assert (alone.accuracy, alone.bytes) == (result.accuracy, result.bytes)


@pytest.mark.usefixtures("relay")
def test_a_turn_that_diverges_names_its_client():
    config = Config(clients=5, participation=0.6, rounds=3, epochs=1, model="mlp", lr=1e9)
    first = next(cohorts(config)).tolist()[0]
    with pytest.raises(FedobpError, match=f"round 1, client {first}: "):
        Federation(config).run("relay")
