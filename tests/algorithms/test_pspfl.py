"""PSPFL with two clients, worked out by hand: far entries stay, entries that move far are not sent."""

import math
from types import SimpleNamespace

import pytest
import torch
from walk import moment, row, vector, walk

from fedobp import Config, Federation
from fedobp.algorithms import METHODS, Sparse
from fedobp.models import Layout

METHOD = METHODS["pspfl"](keep=0.5, share=0.2)
NOW = moment(0, 1)
MODEL = SimpleNamespace(layout=Layout(("fc.weight",), ((4,),)))


@pytest.mark.essential
def test_two_visits_by_hand():
    server, rows, own = METHOD.begin(MODEL, vector(0, 0, 0, 0), 0)
    down, rows = METHOD.send(MODEL, NOW, server, rows)
    done = []
    for client, step in ((0, vector(1, 2, 3, 4)), (1, vector(8, 4, 2, 1))):
        state, _ = walk(MODEL, METHOD.local(MODEL, NOW), own, row(down, client), [step])
        assert state.own["theta"].tolist() == step.tolist()
        assert list(state.up) == ["theta"]
        done.append(state)
    # Of four changes three lie above the 0.2-quantile, at position 0.6: they stay at home.
    assert done[0].up["theta"].keep.tolist() == [True, False, False, False]
    assert done[1].up["theta"].keep.tolist() == [False, False, False, True]
    values, keep = (torch.stack([getattr(one.up["theta"], name) for one in done]) for name in ("values", "keep"))
    server, _ = METHOD.receive(MODEL, NOW, server, rows, {"theta": Sparse(values, keep)}, torch.tensor([1, 3]))
    assert server["theta"].tolist() == [0.25, 0, 0, 0.75]  # what was not sent counts as the old value, 0
    merged, _ = walk(MODEL, METHOD.serve(MODEL, NOW), done[0].own, {"theta": server["theta"]}, [])
    # Distances 0.75, 2, 3, 3.25: two lie above the median.
    assert merged.work["mine"].tolist() == [False, False, True, True]
    assert merged.theta.tolist() == [0.25, 0, 3, 4]
    tied, _ = walk(MODEL, METHOD.serve(MODEL, NOW), done[0].own, {"theta": vector(0, 1, 2, 1)}, [])
    assert tied.work["mine"].tolist() == [False, False, False, True]  # 1, 1, 1, 3: ties at the threshold are shared


def test_a_client_never_selected_is_served_the_global_model():
    own = METHOD.begin(MODEL, vector(0, 0, 0, 0), 0).own
    served, _ = walk(MODEL, METHOD.serve(MODEL, NOW), own, {"theta": vector(5, 1, 2, 3)}, [])
    assert served.theta.tolist() == [5, 1, 2, 3]
    assert not served.work["mine"].any()


def test_statistics_of_batch_norm_do_not_compete():
    model = SimpleNamespace(layout=Layout(("fc.weight", "norm.running_mean"), ((2,), (2,))))
    own = METHOD.begin(model, vector(0, 0, 0, 0), 0).own
    state, _ = walk(model, METHOD.local(model, NOW), own, {"theta": vector(0, 0, 0, 0)}, [vector(1, 2, 90, 80)])
    assert state.up["theta"].keep.tolist() == [True, False, True, True]
    merged, _ = walk(model, METHOD.serve(model, NOW), state.own, {"theta": vector(0, 0, 0, 0)}, [])
    assert merged.theta.tolist() == [0, 2, 0, 0]


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize(("share", "withheld"), [(0.3, 6727), (0.9, 961)])
def test_bytes_are_the_model_down_and_what_changed_little_up(engine, share, withheld):
    config = Config(clients=6, rounds=2, participation=0.5, epochs=1, model="mlp", precision="fp64", engine=engine,
                    partition="iid")  # fmt: skip
    result = Federation(config).run("pspfl", share=share)
    size = 9610  # no ties at the threshold with these samples; they would be sent
    assert result.bytes.down_per_round == 3 * 8 * size
    assert result.bytes.up_per_round == 3 * (8 * (size - withheld) + min(4 * withheld, math.ceil(size / 8)))


@pytest.mark.parametrize("change", [{"keep": 0.9}, {"share": 0.9}])
def test_both_quantiles_change_the_model(change):
    federation = Federation(Config(clients=4, rounds=3, participation=0.5, epochs=1, model="mlp"))
    ours, theirs = (federation.run("pspfl", **options).state_dict(0) for options in ({}, change))
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)
