"""FedPer with two clients, worked out by hand: the head never crosses the wire."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from fedobp.algorithms import METHODS, Client, Moment, Train
from fedobp.models import NETS, Model, register

NOW = Moment(round=1, rounds=9, clients=2, epochs=1, cohort=torch.tensor([0, 1]))
METHOD = METHODS["fedper"]()


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
    yield Model("turned-fedper", (2,), 1)
    del NETS["turned-fedper"]


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def run(model: Model, program, own: dict[str, Tensor], base: Tensor, step: Tensor) -> Client:
    state = Client(own=own, down={"shared": base}, work={}, up={}, hp={})
    for item in program:
        state = state.set(theta=state.theta + step) if isinstance(item, Train) else item(model, state)
    return state


@pytest.mark.essential
def test_two_rounds_by_hand(model):
    server, row, own = METHOD.begin(model, vector(1, 2, 3, 4, 5), 0)
    assert row == {}
    assert {name: value.tolist() for name, value in own.items()} == {"private": [3, 4, 5]}
    owns, rows = [own, own], {}
    steps = (vector(4, 0, 1, 1, 1), vector(0, 4, -1, -1, -1))
    for base, mean in (([1, 2], [2, 5]), ([2, 5], [3, 8])):
        down, rows = METHOD.send(model, NOW, server, rows)
        assert {name: value.tolist() for name, value in down.items()} == {"shared": [base, base]}
        program = METHOD.local(model, NOW)
        done = [run(model, program, owns[i], down["shared"][i], steps[i]) for i in range(2)]
        owns = [client.own for client in done]
        assert [list(client.up) for client in done] == [["shared"], ["shared"]]
        up = {"shared": torch.stack([client.up["shared"] for client in done])}
        assert up["shared"].tolist() == [[base[0] + 4, base[1]], [base[0], base[1] + 4]]
        server, rows = METHOD.receive(model, NOW, server, rows, up, torch.tensor([1, 3]))
        assert server["theta"].tolist() == [*mean, 3, 4, 5]  # nobody shares the head: it stays at theta^0
    assert rows == {}
    assert [own["private"].tolist() for own in owns] == [[5, 6, 7], [1, 2, 3]]
    down, _ = METHOD.send(model, NOW, server, rows)
    served = [run(model, METHOD.serve(model, NOW), own, down["shared"][0], torch.ones(5)) for own in owns]
    assert [client.theta.tolist() for client in served] == [[3, 8, 5, 6, 7], [3, 8, 1, 2, 3]]
    assert all(client.work["mine"].tolist() == [False, False, True, True, True] for client in served)
    assert all(client.up == {} for client in served)


def test_a_client_never_selected_serves_the_shared_base_with_the_head_of_theta_0(model):
    own = METHOD.begin(model, vector(1, 2, 3, 4, 5), 0).own
    served = run(model, METHOD.serve(model, NOW), own, vector(7, 8), torch.ones(5))
    assert served.theta.tolist() == [7, 8, 3, 4, 5]


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_as_published_heads_are_averaged_and_new_clients_start_from_that(model, name):
    method, step = METHODS[name](mode="as-published"), vector(4, 0, 1, 1, 1)
    server, rows, own = method.begin(model, vector(1, 2, 3, 4, 5), 0)

    def trained(own, down, step):
        state, moves = Client(own=own, down=down, work={}, up={}, hp={}), [step, 0 * step]  # FedRep has two phases
        for item in method.local(model, NOW):
            state = state.set(theta=state.theta + moves.pop(0)) if isinstance(item, Train) else item(model, state)
        return state

    down, rows = method.send(model, NOW, server, rows)
    done = [trained(own, {"theta": down["theta"][at]}, (1 - 2 * at) * step) for at in (0, 1)]
    assert [list(one.up) for one in done] == [["theta"], ["theta"]]
    up = {"theta": torch.stack([one.up["theta"] for one in done])}
    server, rows = method.receive(model, NOW, server, rows, up, torch.tensor([1, 3]))
    assert server["theta"].tolist() == [-1, 2, 2.5, 3.5, 4.5]  # theta^0 and half of minus the step
    down, _ = method.send(model, NOW, server, rows)
    for state, head, mine in ((done[0].own, [4, 5, 6], 3), (done[1].own, [2, 3, 4], 3), (own, [2.5, 3.5, 4.5], 0)):
        served = Client(own=state, down={"theta": down["theta"][0]}, work={}, up={}, hp={})
        [take] = method.serve(model, NOW)
        served = take(model, served)
        assert served.theta.tolist() == [-1, 2, *head]
        assert int(served.work["mine"].sum()) == mine
        assert trained(state, {"theta": down["theta"][0]}, 0 * step).up["theta"].tolist() == [-1, 2, *head]


def test_the_classifier_need_not_come_last(head_first):
    server, _, own = METHOD.begin(head_first, vector(1, 2, 3, 4, 5), 0)
    assert own["private"].tolist() == [1, 2, 3]
    down, rows = METHOD.send(head_first, NOW, server, {})
    assert down["shared"].tolist() == [[4, 5], [4, 5]]
    done = run(head_first, METHOD.local(head_first, NOW), own, down["shared"][0], vector(1, 2, 3, 4, 5))
    assert (done.own["private"].tolist(), done.up["shared"].tolist()) == ([2, 4, 6], [8, 10])
    up = {"shared": torch.stack([done.up["shared"], vector(0, 2)])}
    server, _ = METHOD.receive(head_first, NOW, server, rows, up, torch.tensor([1, 1]))
    assert server["theta"].tolist() == [1, 2, 3, 4, 6]
    served = run(head_first, METHOD.serve(head_first, NOW), done.own, vector(4, 6), torch.ones(5))
    assert served.theta.tolist() == [2, 4, 6, 4, 6]
    assert served.work["mine"].tolist() == [True, True, True, False, False]


def test_training_spends_the_local_epochs_on_base_and_head_together(model):
    now = Moment(round=1, rounds=9, clients=2, epochs=4, cohort=torch.tensor([0]))
    assert [item for item in METHOD.local(model, now) if isinstance(item, Train)] == [Train(4)]
    assert not any(isinstance(item, Train) for item in METHOD.serve(model, now))
