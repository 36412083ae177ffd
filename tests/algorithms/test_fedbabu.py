"""FedBABU with two clients, worked out by hand: the head waits at theta^0 until a client fine-tunes it for use."""

from collections import OrderedDict

import pytest
import torch
from contexts import with_model
from torch import nn
from walk import moment, row, vector, walk

from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate, Train
from fedobp.models import NETS, Model, register

METHOD = METHODS["fedbabu"]
CTX = moment(0, 1)


@pytest.fixture(scope="module")
def model():
    """Entries: base 0 and 1, head 2, 3 and 4."""
    layers = OrderedDict(fc=nn.Linear(1, 2, bias=False), classifier=nn.Linear(2, 1))
    register("tiny-fedbabu")(lambda shape, classes: nn.Sequential(layers))
    yield Model("tiny-fedbabu", (1,), 1)
    del NETS["tiny-fedbabu"]


@pytest.mark.essential
def test_a_round_by_hand(model):
    method = METHOD()
    server, records, own = method.init(model, vector(1, 2, 3, 4, 5), 0)
    download, records = method.download(with_model(model, CTX), server, records)
    owns, bases = [], []
    for client, step in ((0, vector(4, 0, 0, 0, 0)), (1, vector(0, 4, 0, 0, 0))):
        state, phases = walk(model, method.client_update(with_model(model, CTX)), own, row(download, client), [step])
        assert phases == [Train(5, part="base")]
        assert list(state.upload) == ["shared"]
        owns.append(state.state)
        bases.append(state.upload["shared"])
    assert [one["private"].tolist() for one in owns] == [[3, 4, 5]] * 2
    server, records = method.aggregate(
        with_model(model, CTX), server, records, CohortUpdate({"shared": torch.stack(bases)}, torch.tensor([1, 3]))
    )
    download, _ = method.download(with_model(model, CTX), server, records)
    served, phases = walk(
        model, method.personalize(with_model(model, CTX)), owns[0], row(download, 0), [vector(1, 1, 1, 1, 1)]
    )
    assert phases == [Train(5, part="all")]
    assert served.theta.tolist() == [3, 6, 4, 5, 6]
    assert served.scratch["mine"].all()


def test_what_is_fine_tuned_and_for_how_long_is_an_option(model):
    program = METHOD(finetune=2, tune="head").personalize(with_model(model, CTX))
    assert [item for item in program if isinstance(item, Train)] == [Train(2, part="head")]
