"""FedRep with two clients, worked out by hand: head and base take turns, the head never crosses the wire."""

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from contexts import with_model
from torch import nn
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate, Train
from fedobp.models import NETS, Model, register

METHOD = METHODS["fedrep"]
CTX = moment(0, 1)


@pytest.fixture(scope="module")
def model():
    """Entries: base 0 and 1, head 2, 3 and 4."""
    layers = OrderedDict(fc=nn.Linear(1, 2, bias=False), classifier=nn.Linear(2, 1))
    register("tiny-fedrep")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-fedrep", (1,), 1)
    del NETS["tiny-fedrep"]


@pytest.mark.essential
def test_a_round_by_hand(model):
    method = METHOD()
    server, records, own = method.init(model, vector(1, 2, 3, 4, 5), 0)
    download, records = method.download(with_model(model, CTX), server, records)
    heads, bases = [], []
    for client, base in ((0, vector(4, 0, 0, 0, 0)), (1, vector(0, 4, 0, 0, 0))):
        steps = [vector(0, 0, 1, 1, 1), base]
        state, phases = walk(model, method.client_update(with_model(model, CTX)), own, row(download, client), steps)
        assert phases == [Train(4, part="head"), Train(1, part="base")]
        assert list(state.upload) == ["shared"]
        heads.append(state.state["private"].tolist())
        bases.append(state.upload["shared"])
    assert heads == [[4, 5, 6], [4, 5, 6]]
    server, _ = method.aggregate(
        with_model(model, CTX), server, records, CohortUpdate({"shared": torch.stack(bases)}, torch.tensor([1, 3]))
    )
    assert server["theta"].tolist() == [2, 5, 3, 4, 5]


def test_a_last_round_of_everyones_heads(model):
    method, last = METHOD(final_epochs=12), moment(0, 1, round=9)
    assert [method.cohorts(round, 9) for round in (1, 8, 9)] == [("cohort",), ("cohort",), ("cohort", "everyone")]
    assert METHOD().cohorts(9, 9) == ("cohort",)
    last = replace(last, full_participation=True)
    server, records, own = method.init(model, vector(1, 2, 3, 4, 5), 0)
    download, records = method.download(with_model(model, last), server, records)
    state, phases = walk(
        model, method.client_update(with_model(model, last)), own, row(download, 0), [vector(0, 0, 1, 1, 1)]
    )
    assert phases == [Train(12, part="head")]
    assert (state.state["private"].tolist(), state.upload) == ([4, 5, 6], {})
    after, _ = method.aggregate(with_model(model, last), server, records, CohortUpdate({}, torch.tensor([1, 3])))
    assert after["theta"].tolist() == server["theta"].tolist()


@pytest.mark.parametrize(("epochs", "base", "spent"), [(5, 2, (3, 2)), (5, 0, (5, 0)), (1, 3, (0, 1))])
def test_both_parts_share_the_local_epochs(model, epochs, base, spent):
    program = METHOD(base_epochs=base).client_update(with_model(model, moment(0, epochs=epochs)))
    assert [(item.part, item.epochs) for item in program if isinstance(item, Train)] == [
        ("head", spent[0]),
        ("base", spent[1]),
    ]
