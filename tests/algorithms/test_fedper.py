"""FedPer with two clients, by hand: the head is never sent."""

from collections import OrderedDict

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from torch import nn

from fedobp.algorithms import METHODS
from fedobp.method import CohortUpdate, Train
from fedobp.models import NETS, Model, register
from fedobp.records import take

METHOD = METHODS["fedper"]()
THETA = vector(1, 2, 3, 4, 5)


def build(order: tuple[str, str]) -> nn.Module:
    layers = {"fc": nn.Linear(1, 2, bias=False), "classifier": nn.Linear(2, 1)}
    return nn.Sequential(OrderedDict((name, layers[name]) for name in order))


@pytest.fixture(scope="module")
def model():
    """Entries: base 0 and 1, head 2, 3 and 4."""
    register("tiny-fedper")(lambda shape, classes: build(("fc", "classifier")))
    yield Model("tiny-fedper", (1,), 1)
    del NETS["tiny-fedper"]


@pytest.fixture(scope="module")
def head_first():
    """Entries: head 0, 1 and 2, base 3 and 4."""
    register("turned-fedper")(lambda shape, classes: build(("classifier", "fc")))
    yield Model("turned-fedper", (2,), 2)
    del NETS["turned-fedper"]


@pytest.mark.essential
def test_two_rounds_by_hand(model):
    ctx = context(0, 1, model=model)
    server, record, state = METHOD.init(model, THETA, 0)
    assert record == {}
    assert {name: value.tolist() for name, value in state.items()} == {"private": [3, 4, 5]}
    states, records = [state, state], {}
    steps = (vector(4, 0, 1, 1, 1), vector(0, 4, -1, -1, -1))
    for base, mean in (([1, 2], [2, 5]), ([2, 5], [3, 8])):
        download, records = METHOD.download(ctx, server, records)
        assert {name: value.tolist() for name, value in download.items()} == {"shared": [base, base]}
        program = METHOD.client_update(ctx)
        clients = [run_program(model, program, states[at], take(download, at), [steps[at]])[0] for at in range(2)]
        states, update = [client.state for client in clients], update_of(clients, 1, 3)
        assert [list(client.upload) for client in clients] == [["shared"], ["shared"]]
        assert update.upload["shared"].tolist() == [[base[0] + 4, base[1]], [base[0], base[1] + 4]]
        server, records = METHOD.aggregate(ctx, server, records, update)
        assert server["theta"].tolist() == [*mean, 3, 4, 5]  # the head stays at theta^0
    assert records == {}
    assert [state["private"].tolist() for state in states] == [[5, 6, 7], [1, 2, 3]]
    download, _ = METHOD.download(ctx, server, records)
    served = [run_program(model, METHOD.personalize(ctx), state, take(download, 0))[0] for state in states]
    assert [client.theta.tolist() for client in served] == [[3, 8, 5, 6, 7], [3, 8, 1, 2, 3]]
    assert all(client.scratch["mine"].tolist() == [False, False, True, True, True] for client in served)
    assert all(client.upload == {} for client in served)


def test_a_client_that_has_never_trained_is_served_the_shared_base_with_the_head_of_theta_0(model):
    state = METHOD.init(model, THETA, 0).state
    served, _ = run_program(model, METHOD.personalize(context(0, model=model)), state, {"shared": vector(7, 8)})
    assert served.theta.tolist() == [7, 8, 3, 4, 5]


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_as_published_heads_are_averaged_and_new_clients_start_from_that(model, name):
    method, ctx, step = METHODS[name](mode="as-published"), context(0, 1, model=model), vector(4, 0, 1, 1, 1)
    server, records, state = method.init(model, THETA, 0)

    def train(state, download, step):
        return run_program(model, method.client_update(ctx), state, download, [step, 0 * step])[0]  # FedRep: two phases

    download, records = method.download(ctx, server, records)
    clients = [train(state, take(download, at), (1 - 2 * at) * step) for at in (0, 1)]
    assert [list(client.upload) for client in clients] == [["theta"], ["theta"]]
    server, records = method.aggregate(ctx, server, records, update_of(clients, 1, 3))
    assert server["theta"].tolist() == [-1, 2, 2.5, 3.5, 4.5]  # theta^0 and half of minus the step
    download, _ = method.download(ctx, server, records)
    first, second = (client.state for client in clients)
    for one, head, mine in ((first, [4, 5, 6], 3), (second, [2, 3, 4], 3), (state, [2.5, 3.5, 4.5], 0)):
        served, phases = run_program(model, method.personalize(ctx), one, take(download, 0))
        assert phases == []
        assert served.theta.tolist() == [-1, 2, *head]
        assert int(served.scratch["mine"].sum()) == mine
        assert train(one, take(download, 0), 0 * step).upload["theta"].tolist() == [-1, 2, *head]


def test_the_classifier_need_not_come_last(head_first):
    ctx = context(0, 1, model=head_first)
    server, _, state = METHOD.init(head_first, THETA, 0)
    assert state["private"].tolist() == [1, 2, 3]
    download, records = METHOD.download(ctx, server, {})
    assert download["shared"].tolist() == [[4, 5], [4, 5]]
    client, _ = run_program(head_first, METHOD.client_update(ctx), state, take(download, 0), [THETA])
    assert (client.state["private"].tolist(), client.upload["shared"].tolist()) == ([2, 4, 6], [8, 10])
    upload = {"shared": torch.stack([client.upload["shared"], vector(0, 2)])}
    server, _ = METHOD.aggregate(ctx, server, records, CohortUpdate(upload, torch.tensor([1, 1])))
    assert server["theta"].tolist() == [1, 2, 3, 4, 6]
    served, _ = run_program(head_first, METHOD.personalize(ctx), client.state, {"shared": vector(4, 6)})
    assert served.theta.tolist() == [2, 4, 6, 4, 6]
    assert served.scratch["mine"].tolist() == [True, True, True, False, False]


def test_base_and_head_are_trained_together_for_the_local_epochs(model):
    ctx = context(0, model=model, epochs=4)
    assert [item for item in METHOD.client_update(ctx) if isinstance(item, Train)] == [Train(4)]
    assert not any(isinstance(item, Train) for item in METHOD.personalize(ctx))
