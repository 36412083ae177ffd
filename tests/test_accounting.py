"""What every method is charged for: bytes on the wire, and passes over the data."""

import json
from collections import OrderedDict

import pytest
import torch
from torch import nn

from fedobp import Config, Federation, FedobpError
from fedobp.accounting import Accounting, cost_of
from fedobp.algorithms import METHODS
from fedobp.engine import ClientJob
from fedobp.method import CohortUpdate, RoundContext
from fedobp.models import NETS

TINY = {"clients": 6, "rounds": 2, "participation": 0.5, "epochs": 1, "model": "mlp", "precision": "fp32"}
FIRST, BIAS, CLASSES, FEATURES = 64 * 128, 128, 10, 128
HEAD = FEATURES * CLASSES + CLASSES
BASE = FIRST + BIAS
ALL = BASE + HEAD
GAUSSIANS = CLASSES * FEATURES + FEATURES * FEATURES
SIMPLEX = BASE + CLASSES + 20 * CLASSES * FEATURES

# Bytes of whole runs.

# Numbers of 4 bytes that one client receives and sends; `fedobp`, `decoupled`, `pspfl`, `fedselect` and `seqfededt`,
# which send a part of the model and its mask, are tested by themselves.
MESSAGES = {
    "fedavg": (ALL, ALL), "fedavg-ft": (ALL, ALL), "fedavg-last": (ALL, ALL), "local": (0, 0),
    "fedper": (BASE, BASE), "fedrep": (BASE, BASE), "fedbabu": (BASE, BASE), "lg-fedavg": (HEAD, HEAD),
    "fedprox": (ALL, ALL), "ditto": (ALL, ALL), "apfl": (ALL, ALL), "pfedme": (ALL, ALL), "fedrod": (ALL, ALL),
    "fedala": (ALL, ALL), "feddpa": (ALL, ALL), "pfedsim": (ALL, ALL), "scaffold": (2 * ALL, 2 * ALL),
    "flute": (ALL, ALL + CLASSES / 4), "pfedfda": (BASE + GAUSSIANS,) * 2, "floco": (SIMPLEX + 20, SIMPLEX),
}  # fmt: skip


@pytest.mark.parametrize(("method", "down", "up"), [(method, *numbers) for method, numbers in MESSAGES.items()])
def test_bytes_are_exactly_the_payload(method, down, up):
    options = {"floco": {"tau": 9}}.get(method, {})
    result = Federation(Config(**TINY)).run(method, **options)
    assert result.bytes.down_per_round == 4 * down * 3
    assert result.bytes.up_per_round == 4 * up * 3
    assert (result.bytes.down_total, result.bytes.up_total) == (2 * 4 * down * 3, 2 * 4 * up * 3)


@pytest.mark.parametrize(
    ("method", "options", "down", "up"),
    [("fedrep", {"final_epochs": 1}, 12 * BASE, 6 * BASE),  # three clients, twice, then all: heads are not sent
     ("flute", {"final_epochs": 1}, 9 * ALL, 3 * (ALL + CLASSES / 4) + 6 * HEAD),
     ("pfedfda", {"last": "all"}, 9 * (BASE + GAUSSIANS), 9 * (BASE + GAUSSIANS)),
     *((method, {"mode": "as-published"}, 6 * ALL, 6 * ALL) for method in ("lg-fedavg", "fedper", "fedrep"))],
)  # fmt: skip
def test_bytes_of_last_rounds_and_modes(method, options, down, up):
    result = Federation(Config(**TINY)).run(method, **options)
    assert (result.bytes.down_total, result.bytes.up_total) == (4 * down, 4 * up)


def test_batch_norm_costs_fedbn_nothing(monkeypatch):
    layers = [("flatten", nn.Flatten()), ("fc", nn.Linear(64, 8)), ("norm", nn.BatchNorm1d(8)), ("relu", nn.ReLU())]
    build = lambda shape, classes: nn.Sequential(OrderedDict([*layers, ("classifier", nn.Linear(8, classes))]))  # noqa: E731
    monkeypatch.setitem(NETS, "normed", build)
    result = Federation(Config(**{**TINY, "model": "normed"})).run("fedbn")
    assert result.bytes.down_total == result.bytes.up_total == 2 * 3 * 4 * (64 * 8 + 8 + 8 * CLASSES + CLASSES)


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize(
    ("method", "options", "visit", "use"),
    [("fedavg", {}, 3, 0), ("fedavg-ft", {"finetune": 2}, 3, 2), ("ditto", {"personal_epochs": 2}, 5, 0),
     ("fedrep", {}, 3, 0), ("local", {}, 3, 0), ("pfedme", {"inner": 4}, 12, 0), ("apfl", {}, 6, 0),
     ("apfl", {"adaptive": "on"}, 9, 0), ("apfl", {"mode": "as-published"}, 6, 0), ("fedbabu", {}, 3, 5),
     ("fedala", {"mode": "as-published"}, 3 + 5 / 6 * 0.8, 0.8), ("pfedfda", {}, 4, 1), ("feddpa", {}, 7, 1),
     ("fedpac", {}, 5, 0), ("fedselect", {}, 6, 0), ("decoupled", {"score": "fisher", "q": 0.9}, 4, 1),
     ("decoupled", {"rule": "statistic"}, 3, 4), ("decoupled", {"soft": 1.0}, 3, 0)],
)  # fmt: skip
def test_passes_over_the_data_are_counted(method, options, visit, use, engine):
    config = Config(clients=5, participation=0.6, rounds=2, epochs=3, model="mlp", partition="iid", batch_size=32,
                    engine=engine)  # fmt: skip
    result = Federation(config).run(method, **options)
    assert result.compute.visit == pytest.approx(visit, rel=0.01)  # a last batch of one sample is left out
    assert result.compute.use == pytest.approx(use, rel=0.01)
    assert result.to_json()["compute"] == {"visit": result.compute.visit, "use": result.compute.use}


@pytest.mark.essential
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_fedobps_download_counts_values_and_positions(engine):
    config = Config(**{**TINY, "rounds": 4, "precision": "fp64"}, engine=engine)
    result = Federation(config).run("fedobp", q=0.9)
    full = 8 * ALL * 3
    assert result.bytes.up_per_round == full
    # The download of a client that has trained lacks 961 values of 8 bytes and carries 961 positions of 4, or a bitmap
    # of 1,202.
    assert full - 3 * 961 * 8 + 3 * 1202 <= result.bytes.down_per_round < full


# Round by round.


def cost(round, cohort, loss, finite=True, entries=3):
    """Return the cost of a cohort that receives `entries` numbers per client and uploads twice as many."""
    ctx, clients = RoundContext(None, round, 9, 9, 1, torch.tensor(cohort)), len(cohort)
    job = ClientJob(ctx, (), {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0})
    upload = {"theta": torch.zeros(clients, 2 * entries)}
    finite = torch.full((clients,), finite)
    update = CohortUpdate(upload, torch.ones(clients), clients, torch.tensor(loss), finite, processed=5 * clients)
    return cost_of(job, {"theta": torch.zeros(clients, entries)}, update)


def test_a_round_is_one_line_over_its_cohorts():
    accounting = Accounting(METHODS["fedavg"]())
    accounting.add_round([cost(1, [4, 2], [1.0, torch.nan]), cost(1, [3], [2.0])])
    assert accounting.pending == 1
    accounting.add_round([cost(2, [5], [torch.nan])])
    assert (accounting.pending, accounting.bytes_down, accounting.bytes_up) == (2, 0, 0)
    assert accounting.settle() == {"round": 1, "cohort": [4, 2, 3], "loss": 1.5, "bytes_down": 36, "bytes_up": 72}
    assert accounting.settle() == {"round": 2, "cohort": [5], "loss": None, "bytes_down": 12, "bytes_up": 24}
    assert (accounting.pending, accounting.bytes_down, accounting.bytes_up) == (0, 48, 96)
    assert (accounting.processed, accounting.samples) == (20, 4)
    accounting.add_round([cost(3, [2, 4], [1.0, 1.0])])
    assert accounting.visits == {4: 1, 2: 1, 3: 1, 5: 1}  # a round counts when it is settled
    accounting.settle()
    assert accounting.visits == {4: 2, 2: 2, 3: 1, 5: 1}


def test_sums_come_back_from_json():
    first, second = Accounting(METHODS["fedavg"]()), Accounting(METHODS["fedavg"]())
    first.add_round([cost(1, [4, 2], [1.0, 1.0]), cost(1, [4], [2.0])])
    first.settle()
    totals = json.loads(json.dumps(first.totals()))
    second.restore(totals)
    assert second.totals() == first.totals()
    assert second.visits == {4: 2, 2: 1}
    del totals["visits"]  # of an older version: what was not counted stays unknown
    second.restore(totals)
    second.add_round([cost(2, [1], [1.0])])
    second.settle()
    assert second.visits is None
    assert (second.bytes_down, second.totals()["visits"]) == (48, None)


def test_a_client_that_diverged_is_named_when_its_round_is_settled():
    accounting = Accounting(METHODS["fedavg"]())
    accounting.add_round([cost(3, [4], [1.0]), cost(3, [6], [1.0], finite=False)])
    with pytest.raises(FedobpError, match=r"round 3, client 6: .* use a smaller --lr"):
        accounting.settle()
