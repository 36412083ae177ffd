"""FedBABU with two clients, by hand: the head stays at theta^0 until a client fine-tunes it for use."""

from collections import OrderedDict

import pytest
from by_hand import context, run_program, update_of, vector
from torch import nn

from fedobp.algorithms import METHODS
from fedobp.method import Train
from fedobp.models import NETS, Model, register
from fedobp.records import take

METHOD = METHODS["fedbabu"]


@pytest.fixture(scope="module")
def model():
    """Entries: base 0 and 1, head 2, 3 and 4."""
    layers = OrderedDict(fc=nn.Linear(1, 2, bias=False), classifier=nn.Linear(2, 1))
    register("tiny-fedbabu")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-fedbabu", (1,), 1)
    del NETS["tiny-fedbabu"]


@pytest.mark.essential
def test_a_round_by_hand(model):
    method, ctx = METHOD(), context(0, 1, model=model)
    server, records, state = method.init(model, vector(1, 2, 3, 4, 5), 0)
    download, records = method.download(ctx, server, records)
    clients = []
    for at, step in enumerate((vector(4, 0, 0, 0, 0), vector(0, 4, 0, 0, 0))):
        client, phases = run_program(model, method.client_update(ctx), state, take(download, at), [step])
        assert phases == [Train(5, part="base")]
        assert list(client.upload) == ["shared"]
        assert client.state["private"].tolist() == [3, 4, 5]
        clients.append(client)
    server, records = method.aggregate(ctx, server, records, update_of(clients, 1, 3))
    download, _ = method.download(ctx, server, records)
    steps = [vector(1, 1, 1, 1, 1)]
    served, phases = run_program(model, method.personalize(ctx), clients[0].state, take(download, 0), steps)
    assert phases == [Train(5, part="all")]
    assert served.theta.tolist() == [3, 6, 4, 5, 6]
    assert served.scratch["mine"].all()


def test_the_fine_tuned_part_and_its_epochs_are_options(model):
    program = METHOD(finetune=2, tune="head").personalize(context(0, 1, model=model))
    assert [item for item in program if isinstance(item, Train)] == [Train(2, part="head")]
