"""PSPFL with two clients, worked out by hand: far entries stay, entries that move far are not sent."""

import torch
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS, Sparse

METHOD = METHODS["pspfl"](keep=0.5, share=0.5)
NOW = moment(0, 1)


def test_two_visits_by_hand():
    server, rows, own = METHOD.begin(None, vector(0, 0, 0, 0), 0)
    down, rows = METHOD.send(None, NOW, server, rows)
    done = []
    for client, step in ((0, vector(1, 2, 3, 4)), (1, vector(8, 4, 2, 1))):
        state, _ = walk(None, METHOD.local(None, NOW), own, row(down, client), [step])
        assert state.own["theta"].tolist() == step.tolist()
        done.append(state)
    # Of four changes the two largest lie above the median: they stay at home.
    assert done[0].up["theta"].keep.tolist() == [True, True, False, False]
    assert done[1].up["theta"].keep.tolist() == [False, False, True, True]
    values, keep = (torch.stack([getattr(one.up["theta"], name) for one in done]) for name in ("values", "keep"))
    server, _ = METHOD.receive(None, NOW, server, rows, {"theta": Sparse(values, keep)}, torch.tensor([1, 3]))
    assert server["theta"].tolist() == [0.25, 0.5, 1.5, 0.75]  # what was not sent counts as the old value, 0
    merged, _ = walk(None, METHOD.serve(None, NOW), done[0].own, {"theta": server["theta"]}, [])
    # Distances 0.75, 1.5, 1.5, 3.25: entries that tie at the threshold are shared.
    assert merged.work["mine"].tolist() == [False, False, False, True]
    assert merged.theta.tolist() == [0.25, 0.5, 1.5, 4]


def test_a_client_never_selected_is_served_the_global_model():
    own = METHOD.begin(None, vector(0, 0), 0).own
    served, _ = walk(None, METHOD.serve(None, NOW), own, {"theta": vector(5, 1)}, [])
    assert served.theta.tolist() == [5, 1]
    assert not served.work["mine"].any()
