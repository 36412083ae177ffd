"""FedSelect: growth and mean by hand, visits in order, and runs against a plain loop over real modules."""

import math
from collections import OrderedDict
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from walk import moment, vector

from fedobp import Config, Federation
from fedobp.algorithms import METHODS, Client, Sparse, Train
from fedobp.course import cohorts
from fedobp.models import NETS, Layout, Model, register

METHOD = METHODS["fedselect"]
SMALL = {
    "method": "fedselect", "clients": 5, "participation": 0.6, "rounds": 6, "epochs": 2, "batch_size": 2000, "lr": 0.5,
    "precision": "fp64", "model": "narrow", "alpha": 0.3, "eval_every": 6, "device": "cpu",
}  # fmt: skip
NAN = math.nan


@pytest.fixture(scope="module", autouse=True)
def networks():
    """One of a weight of four entries and a bias of two, and one that is quick to train.

    Pooled, no pixel is the same in all images: weights of such pixels move alike, and tie but for rounding.
    """

    def narrow(shape, classes):
        layers = OrderedDict(pool=nn.AvgPool2d(2), flatten=nn.Flatten(), fc=nn.Linear(16, 6), tanh=nn.Tanh())
        return nn.Sequential(layers | OrderedDict(classifier=nn.Linear(6, classes)))

    register("narrow")(narrow)
    register("tiny-select")(lambda *_: nn.Sequential(OrderedDict(classifier=nn.Linear(2, 2))))
    yield
    del NETS["narrow"], NETS["tiny-select"]


def tiny():
    return Model("tiny-select", (2,), 2)


def bits(mask):
    return "".join(str(int(bit)) for bit in mask)


def visit(method, own, down, step):
    """Train by hand: each pass moves what it may by `step`."""
    now, hp = moment(0, epochs=1), {name: torch.tensor(value) for name, value in method.floats().items()}
    client = Client(own, down, {}, {}, hp)
    for item in method.local(tiny(), now):
        if isinstance(item, Train):
            client = client.set(theta=torch.where(client.work[item.mask], client.theta + step, client.theta))
        else:
            client = item(tiny(), client)
    return client


# The authors' rule, by hand.


def grown(moved, mine, model=None, **options):
    method = METHOD(**options)
    hp = {name: torch.tensor(value) for name, value in method.floats().items()}
    work = {"theta": moved, "reference": torch.zeros_like(moved), "personal": mine}
    return bits(method._grown(model or tiny(), Client({}, {}, work, {}, hp)))


@pytest.mark.parametrize(
    ("moved", "mine", "options", "expected"),
    [
        ([1, -9, 3, 2, 50, 50], "000000", {}, "010000"),  # a quarter of four; biases never
        ([1, -9, 3, 2, 50, 50], "010000", {}, "011000"),  # of three: 3 - round(2.25) is one more
        ([1, -9, 3, 2, 50, 50], "000000", {"grow": 0.5}, "011000"),
        ([1, -9, 3, 2, 50, 50], "000000", {"grow": 1.0}, "111100"),
        ([1, -9, 3, 2, 50, 50], "000000", {"grow": 0.0}, "000000"),
        ([1, -9, 3, 2, 50, 50], "111000", {"grow": 1.0}, "111100"),  # three of four are not above 80 per cent
        ([1, -9, 3, 2, 50, 50], "111000", {"grow": 1.0, "cap": 0.7}, "111000"),
        ([3, 3, 3, 1, 50, 50], "000000", {}, "111000"),  # ties go together
        ([0, 0, 0, 2, 50, 50], "000000", {"grow": 0.5}, "000100"),  # what has not moved stays shared
        ([0, 0, 0, 0, 0, 0], "000000", {"grow": 1.0}, "000000"),
        ([1, -9, 3, 2, 50, 60], "000000", {"mode": "as-published"}, "000011"),  # all tensors, 6 - round(4.5) of them
    ],
)
def test_growth_by_hand(moved, mine, options, expected):
    assert grown(vector(*moved), torch.tensor([bit == "1" for bit in mine]), **options) == expected


def test_statistics_of_batch_norm_do_not_compete_in_the_port():
    model = SimpleNamespace(layout=Layout(("fc.weight", "norm.running_mean"), ((4,), (2,))))
    moved, mine = vector(1, -9, 3, 2, 50, 60), torch.zeros(6).bool()
    assert grown(moved, mine, model, mode="as-published") == "010000"  # 4 - round(3) of them


def test_the_mean_is_over_those_who_sent_an_entry():
    keep = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 1]]).bool()
    values = torch.tensor([[2.0, 4, NAN, NAN, 9, 1], [6, NAN, 8, NAN, 9, 1]])
    server = {"theta": vector(10, 10, 10, 10, 10, 1)}
    server, rows = METHOD().receive(
        tiny(), moment(0, 1), server, {}, {"theta": Sparse(values, keep)}, torch.tensor([9, 1])
    )
    assert server["theta"].tolist() == [4, 4, 8, 10, 9, 1]  # sizes do not count, and nobody sent the fourth
    assert rows["mine"].equal(~keep)


@pytest.mark.essential
def test_five_visits_by_hand():
    method, model, theta = METHOD(grow=0.25, every=3), tiny(), torch.zeros(6)
    server, rows, own = method.begin(model, theta, 0)
    rows = {name: value[None] for name, value in rows.items()}
    step, masks, kept = vector(1, 2, 3, 4, 5, 6), [], []
    for count in range(5):
        down, rows = method.send(model, moment(0), server, rows)
        arrived = Sparse(torch.where(down["theta"].keep[0], down["theta"].values[0], NAN), down["theta"].keep[0])
        client = visit(method, own, {"theta": arrived}, step)
        own = client.own
        masks.append(bits(own["mine"]))
        kept.append(bits(client.up["theta"].keep))
        up = {"theta": Sparse(client.up["theta"].values[None], client.up["theta"].keep[None])}
        server, rows = method.receive(model, moment(0), server, rows, up, torch.tensor([1]))
        server["theta"] = server["theta"] * 10  # others were here in between
        assert int(own["visits"]) == count + 1
    assert masks == ["000000"] * 3 + ["000100"] * 2  # the 4th visit is the first to grow
    assert kept == ["111111"] * 4 + ["111011"]  # and its upload still has everything
    # Its new personal entry took the server's value once more, 44440, and has moved on from that.
    assert own["theta"][3].item() == 44444
    assert own["reference"].tolist() == (1111 * step).tolist()
    down, _ = method.send(model, moment(0), server, rows)
    [served] = [item(model, Client(own, {"theta": Sparse(*(one[0] for one in down["theta"]))}, {}, {}, {}))
                for item in method.serve(model, moment(0))]  # fmt: skip
    assert bits(served.work["mine"]) == "000100"
    assert served.theta.tolist() == [*(10 * 11111 * step[:3]).tolist(), 44444, *(10 * 11111 * step[4:]).tolist()]


def test_a_client_never_selected_is_served_the_global_model():
    method, model = METHOD(), tiny()
    _, rows, own = method.begin(model, torch.zeros(6), 0)
    down, _ = method.send(model, moment(0), {"theta": vector(1, 2, 3, 4, 5, 6)}, {"mine": rows["mine"][None]})
    served = method.serve(model, moment(0))[0](
        model, Client(own, {"theta": Sparse(*(x[0] for x in down["theta"]))}, {}, {}, {})
    )
    assert served.theta.tolist() == [1, 2, 3, 4, 5, 6]
    assert not served.work["mine"].any()


def test_passes():
    pairs = [Train(1, mask="personal"), Train(1, mask="shared")]
    assert [item for item in METHOD().local(None, moment(0)) if isinstance(item, Train)] == pairs * 5
    port = METHOD(mode="as-published")
    assert [item for item in port.local(None, moment(0)) if isinstance(item, Train)] == [
        Train(5, mask="personal"), Train(5, mask="shared"),
    ]  # fmt: skip
    assert (METHOD().together, port.together) == (True, False)


# The port, by hand: a mask that all clients share, and whole tensors.


def test_the_ports_mask_goes_from_client_to_client():
    method, model = METHOD(mode="as-published", every=1, grow=0.2), tiny()
    server, _, own = method.begin(model, torch.zeros(6), 0)
    owns, step, masks, sent = {}, vector(2, 4, 6, 8, 1, 1), [], []
    for client, round in ((0, 1), (1, 1), (2, 1), (0, 2), (1, 2)):
        now = moment(client, round=round)
        down, _ = method.send(model, now, server, {})
        done = visit(method, owns.get(client, own), {name: value[0] for name, value in down.items()}, step)
        owns[client] = done.own
        masks.append(bits(server["mine"]))
        sent.append(bits(done.up["theta"].keep))
        up = {name: value[None] for name, value in done.up.items() if name != "theta"}
        up["theta"] = Sparse(*(one[None] for one in done.up["theta"]))
        server, _ = method.receive(model, now, server, {}, up, torch.tensor([1]))
    # The second visit makes entry 3 personal for all: then the whole weight is private, and the bias is shared.
    assert masks == ["000000", "000000", "000100", "001100", "011100"]
    assert sent == ["111111", "111111", "000011", "000011", "000011"]
    assert server["theta"][:4].tolist() == step[:4].tolist()  # the mean of the first two, ever after
    assert server["theta"][4:].tolist() == [2, 2]
    assert owns[2]["theta"].tolist() == step.tolist()  # at its first visit it had nothing private yet
    assert owns[0]["theta"].tolist() == [4, 8, 12, 16, 2, 2]
    down, _ = method.send(model, moment(0, round=2), server, {})
    for client, state in ((0, owns[0]), (3, own)):
        served = method.serve(model, moment(client))[0](
            model, Client(state, {name: value[0] for name, value in down.items()}, {}, {}, {})
        )
        assert bits(served.work["mine"]) == ("111100" if client == 0 else "000000")
        assert served.theta.tolist() == [*(state if client == 0 else server)["theta"][:4].tolist(), 2, 2]


# Against a plain loop.


def train(module, x, y, masks):
    module.zero_grad()
    functional.cross_entropy(module(x), y).backward()
    with torch.no_grad():
        for p, mask in zip(module.parameters(), masks, strict=True):
            p -= 0.5 * p.grad * mask


@cache
def plain(method):
    """Return the global model and what every client is served, coded with tensors that are picked by their masks."""
    federation = Federation(Config(**SMALL))
    model, data, config = federation.model, federation.data, federation.config
    module = model.module(model.initial(config.seed).double())
    names = [name for name, _ in module.named_parameters()]
    globe = [p.detach().clone() for p in module.parameters()]
    clients = range(data.clients)
    masks, sent_masks = ([[torch.zeros_like(p).bool() for p in globe] for _ in clients] for _ in range(2))
    own, reference = ([[p.clone() for p in globe] for _ in clients] for _ in range(2))
    visits, traffic = [0] * data.clients, {"down": 0, "up": 0}

    def message(mine):
        """What is not personal, in float64, and a mask in its cheapest form."""
        kept, size = (sum(int(f(one)) for one in mine) for f in (lambda m: (~m).sum(), torch.numel))
        return 8 * kept + min(4 * kept, 4 * (size - kept), math.ceil(size / 8))

    def merge(client):
        for p, mine, value, shared in zip(module.parameters(), sent_masks[client], own[client], globe, strict=True):
            p.data.copy_(shared)
            p.data[mine] = value[mine]

    for cohort in cohorts(config):
        for client in cohort.tolist():
            merge(client)
            traffic["down"] += message(sent_masks[client])
            x, y = data.inputs(client, "train"), data.targets(client, "train")
            for _ in range(config.epochs):
                train(module, x, y, masks[client])
                train(module, x, y, [~mine for mine in masks[client]])
            own[client] = [p.detach().clone() for p in module.parameters()]
            sent_masks[client] = [mine.clone() for mine in masks[client]]
            traffic["up"] += message(sent_masks[client])
            if visits[client] and visits[client] % method.every == 0:
                for at, name in enumerate(names):
                    mine, change = masks[client][at], (own[client][at] - reference[client][at]).abs()
                    if name.endswith("weight") and mine.double().mean() <= method.cap:
                        left = change[~mine].sort().values
                        masks[client][at] = mine | (change >= left[round((1 - method.grow) * len(left))])
                reference[client] = own[client]
            visits[client] += 1
        for at, shared in enumerate(globe):
            senders = torch.stack([~sent_masks[client][at] for client in cohort.tolist()])
            values = torch.stack([own[client][at] for client in cohort.tolist()])
            somebody = senders.any(dim=0)
            shared[somebody] = ((values * senders).sum(dim=0) / senders.sum(dim=0))[somebody]
    served = []
    for client in clients:
        merge(client)
        served.append([p.detach().clone() for p in module.parameters()])
    kept = [sum(int(mine.sum()) for mine in one) for one in sent_masks]
    return globe, served, kept, traffic


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("options", [{"every": 1}, {"every": 2, "grow": 0.5}, {"every": 1, "grow": 0.6, "cap": 0.5}])
def test_runs_are_those_of_a_plain_loop(engine, options):
    federation = Federation(Config(**SMALL, engine=engine, options=options))
    globe, served, kept, traffic = plain(METHOD(**options))
    result = federation.run()
    for values, model in ((globe, None), *((values, client) for client, values in enumerate(served))):
        for value, found in zip(values, result.state_dict(model).values(), strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=1e-9)
    assert max(kept) > 40
    assert (result.personal.min, result.personal.max) == (min(kept), max(kept))
    assert (result.bytes.down_total, result.bytes.up_total) == (traffic["down"], traffic["up"])
    assert traffic["up"] < traffic["down"]  # what is sent lags behind by a visit


def test_the_port_becomes_training_alone():
    result = Federation(Config(**SMALL)).run(mode="as-published", grow=0.5)
    model = result.state_dict(0)
    assert result.personal.share > 0.99
    assert any(not torch.equal(model[name], result.state_dict(1)[name]) for name in model)


@pytest.mark.parametrize("change", [{"every": 1}, {"every": 2, "grow": 0.5}, {"every": 2, "cap": 0.1}])
def test_every_option_changes_the_model(change):
    federation = Federation(Config(**SMALL, options={"every": 2}))
    ours, theirs = (federation.run(**options).personal.mean for options in ({}, change))
    assert ours != theirs
