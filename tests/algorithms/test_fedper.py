"""FedPer with two clients, worked out by hand: the head never crosses the wire."""

from collections import OrderedDict

import pytest
import torch
from contexts import with_model
from torch import Tensor, nn

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate, RoundContext, Train
from fedobp.models import NETS, Model, register

CTX = RoundContext(model=None, round=1, rounds=9, clients=2, epochs=1, cohort=torch.tensor([0, 1]))
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
    state = Client(state=own, download={"shared": base}, scratch={}, upload={}, hparams={})
    for item in program:
        state = state.set(theta=state.theta + step) if isinstance(item, Train) else item(model, state)
    return state


@pytest.mark.essential
def test_two_rounds_by_hand(model):
    server, row, own = METHOD.init(model, vector(1, 2, 3, 4, 5), 0)
    assert row == {}
    assert {name: value.tolist() for name, value in own.items()} == {"private": [3, 4, 5]}
    owns, records = [own, own], {}
    steps = (vector(4, 0, 1, 1, 1), vector(0, 4, -1, -1, -1))
    for base, mean in (([1, 2], [2, 5]), ([2, 5], [3, 8])):
        download, records = METHOD.download(with_model(model, CTX), server, records)
        assert {name: value.tolist() for name, value in download.items()} == {"shared": [base, base]}
        program = METHOD.client_update(with_model(model, CTX))
        done = [run(model, program, owns[i], download["shared"][i], steps[i]) for i in range(2)]
        owns = [client.state for client in done]
        assert [list(client.upload) for client in done] == [["shared"], ["shared"]]
        up = {"shared": torch.stack([client.upload["shared"] for client in done])}
        assert up["shared"].tolist() == [[base[0] + 4, base[1]], [base[0], base[1] + 4]]
        server, records = METHOD.aggregate(
            with_model(model, CTX), server, records, CohortUpdate(up, torch.tensor([1, 3]))
        )
        assert server["theta"].tolist() == [*mean, 3, 4, 5]  # nobody shares the head: it stays at theta^0
    assert records == {}
    assert [own["private"].tolist() for own in owns] == [[5, 6, 7], [1, 2, 3]]
    download, _ = METHOD.download(with_model(model, CTX), server, records)
    served = [
        run(model, METHOD.personalize(with_model(model, CTX)), own, download["shared"][0], torch.ones(5))
        for own in owns
    ]
    assert [client.theta.tolist() for client in served] == [[3, 8, 5, 6, 7], [3, 8, 1, 2, 3]]
    assert all(client.scratch["mine"].tolist() == [False, False, True, True, True] for client in served)
    assert all(client.upload == {} for client in served)


def test_a_client_never_selected_serves_the_shared_base_with_the_head_of_theta_0(model):
    own = METHOD.init(model, vector(1, 2, 3, 4, 5), 0).state
    served = run(model, METHOD.personalize(with_model(model, CTX)), own, vector(7, 8), torch.ones(5))
    assert served.theta.tolist() == [7, 8, 3, 4, 5]


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_as_published_heads_are_averaged_and_new_clients_start_from_that(model, name):
    method, step = METHODS[name](mode="as-published"), vector(4, 0, 1, 1, 1)
    server, records, own = method.init(model, vector(1, 2, 3, 4, 5), 0)

    def trained(own, download, step):
        state, moves = (
            Client(state=own, download=download, scratch={}, upload={}, hparams={}),
            [step, 0 * step],
        )  # FedRep has two phases
        for item in method.client_update(with_model(model, CTX)):
            state = state.set(theta=state.theta + moves.pop(0)) if isinstance(item, Train) else item(model, state)
        return state

    download, records = method.download(with_model(model, CTX), server, records)
    done = [trained(own, {"theta": download["theta"][at]}, (1 - 2 * at) * step) for at in (0, 1)]
    assert [list(one.upload) for one in done] == [["theta"], ["theta"]]
    up = {"theta": torch.stack([one.upload["theta"] for one in done])}
    server, records = method.aggregate(with_model(model, CTX), server, records, CohortUpdate(up, torch.tensor([1, 3])))
    assert server["theta"].tolist() == [-1, 2, 2.5, 3.5, 4.5]  # theta^0 and half of minus the step
    download, _ = method.download(with_model(model, CTX), server, records)
    for state, head, mine in ((done[0].state, [4, 5, 6], 3), (done[1].state, [2, 3, 4], 3), (own, [2.5, 3.5, 4.5], 0)):
        served = Client(state=state, download={"theta": download["theta"][0]}, scratch={}, upload={}, hparams={})
        [take] = method.personalize(with_model(model, CTX))
        served = take(model, served)
        assert served.theta.tolist() == [-1, 2, *head]
        assert int(served.scratch["mine"].sum()) == mine
        assert trained(state, {"theta": download["theta"][0]}, 0 * step).upload["theta"].tolist() == [-1, 2, *head]


def test_the_classifier_need_not_come_last(head_first):
    server, _, own = METHOD.init(head_first, vector(1, 2, 3, 4, 5), 0)
    assert own["private"].tolist() == [1, 2, 3]
    download, records = METHOD.download(with_model(head_first, CTX), server, {})
    assert download["shared"].tolist() == [[4, 5], [4, 5]]
    done = run(
        head_first, METHOD.client_update(with_model(head_first, CTX)), own, download["shared"][0], vector(1, 2, 3, 4, 5)
    )
    assert (done.state["private"].tolist(), done.upload["shared"].tolist()) == ([2, 4, 6], [8, 10])
    up = {"shared": torch.stack([done.upload["shared"], vector(0, 2)])}
    server, _ = METHOD.aggregate(with_model(head_first, CTX), server, records, CohortUpdate(up, torch.tensor([1, 1])))
    assert server["theta"].tolist() == [1, 2, 3, 4, 6]
    served = run(head_first, METHOD.personalize(with_model(head_first, CTX)), done.state, vector(4, 6), torch.ones(5))
    assert served.theta.tolist() == [2, 4, 6, 4, 6]
    assert served.scratch["mine"].tolist() == [True, True, True, False, False]


def test_training_spends_the_local_epochs_on_base_and_head_together(model):
    ctx = RoundContext(model=None, round=1, rounds=9, clients=2, epochs=4, cohort=torch.tensor([0]))
    assert [item for item in METHOD.client_update(with_model(model, ctx)) if isinstance(item, Train)] == [Train(4)]
    assert not any(isinstance(item, Train) for item in METHOD.personalize(with_model(model, ctx)))
