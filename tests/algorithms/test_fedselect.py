"""FedSelect: growth and mean by hand, visits in order, and runs against a plain loop."""

import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from plain_loops import RATES, SIZES, batches, both_engines, each_round, network_loss, sgd, small_federation, theta_0
from torch import nn

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate, Sparse, Train
from fedobp.models import NETS, Layout, Model, register
from fedobp.records import mask_unsent, take

METHOD = METHODS["fedselect"]
SMALL = {"rounds": 6, "alpha": 0.3, "eval_every": 6}
NAN = math.nan


@pytest.fixture(scope="module", autouse=True)
def networks():
    """One of a weight of four entries and a bias of two."""
    register("tiny-select")(lambda *_: nn.Sequential(OrderedDict(classifier=nn.Linear(2, 2))))
    yield
    del NETS["tiny-select"]


def tiny():
    return Model("tiny-select", (2,), 2)


def bits(mask):
    return "".join(str(int(bit)) for bit in mask)


def train(method, state, download, step):
    """Run one client's program; each pass adds `step` to the entries that it trains."""
    hparams = {name: torch.tensor(value) for name, value in method.hparams().items()}
    client = Client(state, download, {}, {}, hparams)
    for item in method.client_update(context(0, model=tiny(), epochs=1)):
        if isinstance(item, Train):
            client = client.set(theta=torch.where(client.scratch[item.mask], client.theta + step, client.theta))
        else:
            client = item(tiny(), client)
    return client


# The authors' rule, by hand.


def grown(moved, mine, model=None, **options):
    method = METHOD(**options)
    hparams = {name: torch.tensor(value) for name, value in method.hparams().items()}
    scratch = {"theta": moved, "reference": torch.zeros_like(moved), "personal": mine}
    return bits(method._grown(model or tiny(), Client({}, {}, scratch, {}, hparams)))


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
        ([1, -9, 3, 2, 50, 50], "111000", {"grow": 1.0, "cap": 0.75}, "111100"),
        ([3, 3, 3, 1, 50, 50], "000000", {}, "111000"),  # ties become personal together
        ([0, 0, 0, 2, 50, 50], "000000", {"grow": 0.5}, "000100"),  # entries without a change stay shared
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


def test_the_mean_is_over_the_clients_that_sent_an_entry():
    keep = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 1]]).bool()
    values = torch.tensor([[2.0, 4, NAN, NAN, 9, 1], [6, NAN, 8, NAN, 9, 1]])
    server = {"theta": vector(10, 10, 10, 10, 10, 1)}
    update = CohortUpdate({"theta": Sparse(values, keep)}, torch.tensor([9, 1]))
    server, records = METHOD().aggregate(context(0, 1, model=tiny()), server, {}, update)
    assert server["theta"].tolist() == [4, 4, 8, 10, 9, 1]  # sizes do not count, and no client sent the fourth
    assert records["mine"].equal(~keep)


@pytest.mark.essential
def test_five_visits_by_hand():
    method, model = METHOD(grow=0.25, every=3), tiny()
    ctx = context(0, model=model)
    server, record, state = method.init(model, torch.zeros(6), 0)
    records = {name: value[None] for name, value in record.items()}
    step, masks, kept = vector(1, 2, 3, 4, 5, 6), [], []
    for count in range(5):
        download, records = method.download(ctx, server, records)
        client = train(method, state, mask_unsent(take(download, 0)), step)
        state = client.state
        masks.append(bits(state["mine"]))
        kept.append(bits(client.upload["theta"].keep))
        server, records = method.aggregate(ctx, server, records, update_of([client], 1))
        server["theta"] = server["theta"] * 10  # other clients' rounds
        assert int(state["visits"]) == count + 1
    assert masks == ["000000"] * 3 + ["000100"] * 2  # the 4th visit is the first to grow
    assert kept == ["111111"] * 4 + ["111011"]  # and its upload still has all entries
    # The new personal entry starts once more from the server's value, 44440.
    assert state["theta"][3].item() == 44444
    assert state["reference"].tolist() == (1111 * step).tolist()
    download, _ = method.download(ctx, server, records)
    served, _ = run_program(model, method.personalize(ctx), state, take(download, 0))
    assert bits(served.scratch["mine"]) == "000100"
    assert served.theta.tolist() == [*(10 * 11111 * step[:3]).tolist(), 44444, *(10 * 11111 * step[4:]).tolist()]


def test_a_client_that_has_never_trained_is_served_the_global_model():
    method, model = METHOD(), tiny()
    ctx = context(0, model=model)
    _, record, state = method.init(model, torch.zeros(6), 0)
    download, _ = method.download(ctx, {"theta": vector(1, 2, 3, 4, 5, 6)}, {"mine": record["mine"][None]})
    served, _ = run_program(model, method.personalize(ctx), state, take(download, 0))
    assert served.theta.tolist() == [1, 2, 3, 4, 5, 6]
    assert not served.scratch["mine"].any()


def test_the_passes_of_both_modes():
    pairs = [Train(1, mask="personal"), Train(1, mask="shared")]
    assert [item for item in METHOD().client_update(context(0)) if isinstance(item, Train)] == pairs * 5
    port = METHOD(mode="as-published")
    assert [item for item in port.client_update(context(0)) if isinstance(item, Train)] == [
        Train(5, mask="personal"), Train(5, mask="shared"),
    ]  # fmt: skip
    assert (METHOD().sequential, port.sequential) == (False, True)


# The port, by hand: a mask that all clients share, and whole tensors.


def test_the_ports_mask_passes_from_client_to_client():
    method, model = METHOD(mode="as-published", every=1, grow=0.2), tiny()
    server, _, state = method.init(model, torch.zeros(6), 0)
    states, step, masks, sent = {}, vector(2, 4, 6, 8, 1, 1), [], []
    for client, round in ((0, 1), (1, 1), (2, 1), (0, 2), (1, 2)):
        ctx = context(client, model=model, round=round)
        download, _ = method.download(ctx, server, {})
        done = train(method, states.get(client, state), take(download, 0), step)
        states[client] = done.state
        masks.append(bits(server["mine"]))
        sent.append(bits(done.upload["theta"].keep))
        server, _ = method.aggregate(ctx, server, {}, update_of([done], 1))
    # The second visit makes entry 3 personal for all: then the whole weight is private, and the bias is shared.
    assert masks == ["000000", "000000", "000100", "001100", "011100"]
    assert sent == ["111111", "111111", "000011", "000011", "000011"]
    assert server["theta"][:4].tolist() == step[:4].tolist()  # the mean of the first two, from then on
    assert server["theta"][4:].tolist() == [2, 2]
    assert states[2]["theta"].tolist() == step.tolist()  # at its first visit it has no private values
    assert states[0]["theta"].tolist() == [4, 8, 12, 16, 2, 2]
    download, _ = method.download(context(0, round=2, model=model), server, {})
    for client, one in ((0, states[0]), (3, state)):
        served, _ = run_program(model, method.personalize(context(client, model=model)), one, take(download, 0))
        assert bits(served.scratch["mine"]) == ("111100" if client == 0 else "000000")
        assert served.theta.tolist() == [*(one if client == 0 else server)["theta"][:4].tolist(), 2, 2]


def test_the_ports_growth_uses_the_change_of_one_visit():
    method, start = METHOD(mode="as-published", every=1, grow=0.2), vector(50, 40, 30, 20, 10, 0)
    state = {"theta": torch.zeros(6), "seen": torch.tensor(True)}
    download = {"theta": start, "start": start, "mine": torch.zeros(6).bool(), "visits": torch.tensor(1)}
    assert bits(train(method, state, download, vector(0, 0, 0, 1, 0, 0)).upload["mine"]) == "000100"


# Against a plain loop.


def message(mine):
    """Return the bytes of the shared entries, in float64, and of a mask in its cheapest form."""
    size = sum(SIZES)
    kept = size - sum(int(one.sum()) for one in mine)
    return 8 * kept + min(4 * kept, 4 * (size - kept), math.ceil(size / 8))


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("options", [{"every": 2, "grow": 0.5}, {"every": 1, "grow": 0.6, "cap": 0.5}])
def test_runs_equal_a_plain_loop(options, rates):
    """The plain loop selects entries by boolean masks, tensor by tensor."""
    federation, method = small_federation("fedselect", rates, options, **SMALL), METHOD(**options)
    theta = theta_0(federation)
    masks, sent = ([[torch.zeros_like(one).bool() for one in theta] for _ in range(4)] for _ in range(2))
    last, reference, visits, downloaded, uploaded = [theta] * 4, [theta] * 4, [0] * 4, 0, 0

    def merge(client):
        return [torch.where(*each) for each in zip(sent[client], last[client], theta, strict=True)]

    for round, cohort in each_round(federation):
        for client in cohort:
            values, mine = merge(client), masks[client]
            downloaded += message(sent[client])
            for phase in (2, 3, 4, 5):  # personal entries and shared ones in turn
                moving = [one if phase % 2 == 0 else ~one for one in mine]
                values = sgd(
                    federation, values, network_loss, batches(federation, client, round, phase, 1), moving=moving
                )
            last[client], sent[client] = values, mine
            uploaded += message(mine)
            if visits[client] and visits[client] % method.every == 0:
                masks[client] = list(mine)
                for at in (0, 2):
                    change = (values[at] - reference[client][at]).abs()
                    if mine[at].double().mean() <= method.cap:
                        left = change[~mine[at]].sort().values
                        masks[client][at] = mine[at] | (change >= left[int((1 - method.grow) * len(left) + 0.5)])
                reference[client] = values
            visits[client] += 1
        after = []
        for at, old in enumerate(theta):
            senders = torch.stack([~sent[client][at] for client in cohort])
            total = (torch.stack([last[client][at] for client in cohort]) * senders).sum(dim=0)
            after.append(torch.where(senders.any(dim=0), total / senders.sum(dim=0), old))
        theta = after
    kept = [sum(int(one.sum()) for one in mine) for mine in sent]
    assert max(kept) > 100
    assert uploaded < downloaded  # downloads have the mask of the previous visit
    for result in both_engines(federation, theta, {client: merge(client) for client in range(4)}):
        assert (result.personal.min, result.personal.max) == (min(kept), max(kept))
        assert (result.bytes.down_total, result.bytes.up_total) == (downloaded, uploaded)


def test_the_port_becomes_local_only_training():
    result = small_federation("fedselect", "one batch", **SMALL).run(mode="as-published", grow=0.5)
    model = result.state_dict(0)
    assert result.personal.share > 0.99
    assert any(not torch.equal(model[name], result.state_dict(1)[name]) for name in model)


def test_every_option_changes_the_model():
    federation = small_federation("fedselect", "one batch", {"every": 1}, **SMALL)
    kept = [federation.run(**change).personal.mean for change in ({}, {"every": 2}, {"grow": 0.5}, {"cap": 0.1})]
    assert len(set(kept)) == 4


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_running_statistics_of_batch_norm_stay_on_the_client(engine, monkeypatch):
    """Both passes of an epoch change them, clients never upload them, and the server's do not change."""

    def normed(shape, classes):
        layers = OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(64, 4), norm=nn.BatchNorm1d(4))
        return nn.Sequential(layers | OrderedDict(classifier=nn.Linear(4, classes)))

    monkeypatch.setitem(NETS, "normed", normed)
    slow = {**SMALL, "model": "normed", "rounds": 1, "epochs": 1, "lr": 1e-12, "engine": engine}
    federation = small_federation("fedselect", "one batch", **slow)
    result, data = federation.run(), federation.data
    start, (_, trained) = federation.model.initial(federation.config.seed).double(), next(each_round(federation))
    for client in range(data.clients):
        module = federation.model.module(start).train()
        for _ in range(2 if client in trained else 0):  # so slow a training leaves the weights as they are
            module(data.inputs(client, "train"))
        found = result.state_dict(client)
        for name in ("norm.running_mean", "norm.running_var"):
            torch.testing.assert_close(found[name], module.state_dict()[name], rtol=0, atol=1e-9)
    assert result.state_dict()["norm.running_mean"].eq(0).all()
    learned = federation.model.layout.learned
    assert result.personal.min == 8
    sent = 2 * (8 * learned + 4)  # runs of 0, `learned` (two bytes) and 8 entries
    assert result.bytes.down_total == result.bytes.up_total == sent
