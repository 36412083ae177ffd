"""FedRep with two clients, by hand: head and base are trained in turn, the head is never sent."""

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from torch import nn

from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate, Train
from fedobp.models import NETS, Model, register
from fedobp.records import take

METHOD = METHODS["fedrep"]


@pytest.fixture(scope="module")
def model():
    """Entries: base 0 and 1, head 2, 3 and 4."""
    layers = OrderedDict(fc=nn.Linear(1, 2, bias=False), classifier=nn.Linear(2, 1))
    register("tiny-fedrep")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-fedrep", (1,), 1)
    del NETS["tiny-fedrep"]


@pytest.mark.essential
def test_a_round_by_hand(model):
    method, ctx = METHOD(), context(0, 1, model=model)
    server, records, state = method.init(model, vector(1, 2, 3, 4, 5), 0)
    download, records = method.download(ctx, server, records)
    clients = []
    for at, base in enumerate((vector(4, 0, 0, 0, 0), vector(0, 4, 0, 0, 0))):
        steps = [vector(0, 0, 1, 1, 1), base]
        client, phases = run_program(model, method.client_update(ctx), state, take(download, at), steps)
        assert phases == [Train(4, part="head"), Train(1, part="base")]
        assert list(client.upload) == ["shared"]
        assert client.state["private"].tolist() == [4, 5, 6]
        clients.append(client)
    server, _ = method.aggregate(ctx, server, records, update_of(clients, 1, 3))
    assert server["theta"].tolist() == [2, 5, 3, 4, 5]


def test_all_clients_tune_their_heads_after_the_last_round(model):
    method, ctx = METHOD(final_epochs=12), replace(context(0, 1, model=model, round=9), full_participation=True)
    assert [method.cohorts(round, 9) for round in (1, 8, 9)] == [("sampled",), ("sampled",), ("sampled", "all")]
    assert METHOD().cohorts(9, 9) == ("sampled",)
    server, records, state = method.init(model, vector(1, 2, 3, 4, 5), 0)
    download, records = method.download(ctx, server, records)
    steps = [vector(0, 0, 1, 1, 1)]
    client, phases = run_program(model, method.client_update(ctx), state, take(download, 0), steps)
    assert phases == [Train(12, part="head")]
    assert (client.state["private"].tolist(), client.upload) == ([4, 5, 6], {})
    after, _ = method.aggregate(ctx, server, records, CohortUpdate({}, torch.tensor([1, 3])))
    assert after["theta"].tolist() == server["theta"].tolist()


@pytest.mark.parametrize(("epochs", "base", "spent"), [(5, 2, (3, 2)), (5, 0, (5, 0)), (1, 3, (0, 1))])
def test_both_parts_share_the_local_epochs(model, epochs, base, spent):
    program = METHOD(base_epochs=base).client_update(context(0, model=model, epochs=epochs))
    phases = [(item.part, item.epochs) for item in program if isinstance(item, Train)]
    assert phases == [("head", spent[0]), ("base", spent[1])]
