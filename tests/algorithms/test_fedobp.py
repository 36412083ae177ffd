"""FedOBP's functions on a model of five entries, by hand, and runs against a plain loop."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from by_hand import run_program, update_of, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loops import (
    RATES,
    batches,
    both_engines,
    each_round,
    flat,
    mean,
    network_loss,
    sgd,
    small_federation,
    theta_0,
)
from torch import Tensor, nn

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate, RoundContext, Sparse, Train
from fedobp.models import NETS, Layout, Model, register
from fedobp.records import mask_unsent, take

FedOBP, FedAvg = METHODS["fedobp"], METHODS["fedavg"]

checked = settings(deadline=None, max_examples=60)


@pytest.fixture(scope="module")
def model():
    """Entries: fc.weight 0 and 1, classifier.weight 2 and 3, classifier.bias 4."""
    before = dict(NETS)
    layers = {"fc": lambda: nn.Linear(1, 2, bias=False), "classifier": lambda: nn.Linear(2, 1)}
    register("tiny")(lambda shape, classes: nn.Sequential(OrderedDict({k: make() for k, make in layers.items()})))
    yield Model("tiny", (1,), 1)
    NETS.clear()
    NETS.update(before)


@pytest.fixture(scope="module")
def head_first():
    """Entries: classifier.weight 0 and 1, classifier.bias 2, fc.weight 3 and 4."""
    before = dict(NETS)
    layers = {"classifier": lambda: nn.Linear(2, 1), "fc": lambda: nn.Linear(1, 2, bias=False)}
    register("tiny-turned")(lambda shape, classes: nn.Sequential(OrderedDict({k: m() for k, m in layers.items()})))
    yield Model("tiny-turned", (2,), 2)
    NETS.clear()
    NETS.update(before)


def context(clients: int, model: Model) -> RoundContext:
    return RoundContext(model, round=2, rounds=9, clients=clients, epochs=3, cohort=torch.arange(clients))


def records_of(*models: Tensor, seen: bool = True) -> dict[str, Tensor]:
    return {"theta": torch.stack(models), "seen": torch.full((len(models),), seen)}


def download(method, model: Model, theta: Tensor, records: dict[str, Tensor]) -> tuple[Sparse, dict[str, Tensor]]:
    sent, records = method.download(context(len(records["seen"]), model), {"theta": theta}, records)
    assert list(sent) == ["theta"]
    assert isinstance(sent["theta"], Sparse)
    return sent["theta"], records


def personal(method, model: Model, theta: Tensor, *models: Tensor, seen: bool = True) -> list[list[int]]:
    """Return the entries of each client that are not sent."""
    sent, _ = download(method, model, theta, records_of(*models, seen=seen))
    return [(~keep).nonzero()[:, 0].tolist() for keep in sent.keep]


def run(program, model: Model, state: dict[str, Tensor], sent: Sparse, step: Tensor | None = None) -> Client:
    """Run one client's program, with NaN in entries that are not sent, and `step` added in place of training."""
    client, _ = run_program(model, program, state, mask_unsent({"theta": sent}), [step])
    return client


# State


def test_all_clients_start_from_theta_0_without_an_upload(model):
    theta = vector(1, 2, 3, 4, 5)
    server, record, state = FedOBP().init(model, theta, 0)
    assert {name: value.tolist() for name, value in server.items()} == {"theta": [1, 2, 3, 4, 5]}
    assert {name: value.tolist() for name, value in record.items()} == {"theta": [1, 2, 3, 4, 5], "seen": False}
    assert {name: value.tolist() for name, value in state.items()} == {"theta": [1, 2, 3, 4, 5]}


def test_records_hold_scores_only_with_ema(model):
    record = FedOBP(ema=0.5).init(model, vector(1, 2, 3, 4, 5), 0).record
    assert set(record) == {"theta", "seen", "score", "scored"}
    assert record["score"].tolist() == [0] * 5
    assert record["scored"].tolist() is False


def test_aggregate_records_uploads_marks_clients_as_seen_and_averages_all_entries(model):
    uploads = torch.stack([vector(0, 0, 4, 8, 1), vector(4, 0, 0, 8, 1)])
    records = {"theta": torch.zeros(2, 5), "seen": torch.tensor([False, True]), "score": torch.ones(2, 5)}
    update = CohortUpdate({"theta": uploads}, torch.tensor([1, 3]))
    server, after = FedOBP().aggregate(context(2, model), {"theta": torch.zeros(5)}, records, update)
    assert {name: value.tolist() for name, value in server.items()} == {"theta": [3, 0, 1, 8, 1]}
    assert after["theta"].equal(uploads)
    assert after["seen"].tolist() == [True, True]
    assert after["score"].equal(torch.ones(2, 5))
    assert records["theta"].equal(torch.zeros(2, 5))
    assert records["seen"].tolist() == [False, True]


# Personal entries


def test_entries_strictly_above_each_clients_quantile_are_not_sent(model):
    one, other = vector(1, 2, 4, 1, 3), vector(3, 1, 1, 1, 0)  # scores 0 1 9 0 4 and 4 0 0 0 1
    records = records_of(one, other)
    sent, after = download(FedOBP(q=0.5), model, torch.ones(5), records)  # quantiles 1 and 0
    assert sent.keep.tolist() == [[True, True, False, True, False], [False, True, True, True, False]]
    assert sent.values.tolist() == [[1] * 5] * 2
    assert after is records


def test_entries_that_tie_at_the_threshold_are_shared(model):
    assert personal(FedOBP(q=0.5), model, torch.zeros(5), vector(2, -2, 2, 3, 1)) == [[3]]


def test_the_default_score_is_squared_and_product_weighs_by_the_clients_value(model):
    theta, last = vector(9, 1, 0, 0, 0), vector(0, 2, 0, 0, 0)  # squared 81 1 0 0 0, product 0 2 0 0 0
    assert personal(FedOBP(q=0.75), model, theta, last) == [[0]]
    assert personal(FedOBP(q=0.75, score="product"), model, theta, last) == [[1]]


def test_layer_norm_rescales_within_tensors_and_global_norm_changes_nothing(model):
    last = vector(1, 2, 3, 4, 9)  # scores 1 4 | 9 16 | 81; within tensors 0 1 | 0 1 | 0
    assert personal(FedOBP(q=0.5), model, torch.zeros(5), last) == [[3, 4]]
    assert personal(FedOBP(q=0.5, norm="global"), model, torch.zeros(5), last) == [[3, 4]]
    assert personal(FedOBP(q=0.5, norm="layer"), model, torch.zeros(5), last) == [[1, 3]]


@pytest.mark.parametrize("norm", ["none", "layer", "global"])
@pytest.mark.parametrize("scope", ["all", "classifier"])
@pytest.mark.parametrize("start", ["global", "literal"])
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_in_round_1_nothing_is_personal_and_nothing_is_nan(model, norm, scope, start, q):
    method = FedOBP(q=q, norm=norm, scope=scope, start=start)
    theta = vector(1, -2, 3, 4, 0)
    server, record, state = method.init(model, theta, 0)
    sent, _ = download(method, model, server["theta"], {name: value[None] for name, value in record.items()})
    assert sent.keep.all()
    served = run(method.personalize(context(1, model)), model, state, sent.at(0))
    assert served.theta.equal(theta)
    assert not served.scratch["mine"].any()


@pytest.mark.parametrize("norm", ["none", "layer", "global"])
@pytest.mark.parametrize("scope", ["all", "classifier"])
def test_a_client_without_an_upload_uses_the_global_model(model, norm, scope):
    method = FedOBP(q=0.0, norm=norm, scope=scope)
    assert personal(method, model, vector(5, 1, 2, 3, 4), torch.zeros(5), seen=False) == [[]]


def test_a_literal_start_resets_the_entries_that_changed_most_to_theta_0(model):
    method = FedOBP(q=0.75, start="literal")
    theta_0, moved = torch.zeros(5), vector(5, 1, -1, 1, 1)
    sent, _ = download(method, model, moved, records_of(theta_0, seen=False))
    served = run(method.personalize(context(1, model)), model, {"theta": theta_0}, sent.at(0))
    assert served.theta.tolist() == [0, 1, -1, 1, 1]
    assert served.scratch["mine"].tolist() == [True, False, False, False, False]


def test_one_cohort_can_have_clients_with_and_without_an_upload(model):
    records = {"theta": torch.stack([vector(9, 0, 0, 0, 0)] * 2), "seen": torch.tensor([False, True])}
    sent, _ = download(FedOBP(q=0.75), model, torch.zeros(5), records)
    assert sent.keep.tolist() == [[True] * 5, [False, True, True, True, True]]


def test_the_classifier_scope_sends_all_of_the_base_and_takes_the_quantile_of_the_head(model, head_first):
    last = vector(9, 8, 1, 3, 2)  # scores 81 64 | 1 9 | 4; the head's median is 4
    assert personal(FedOBP(q=0.5, scope="classifier"), model, torch.zeros(5), last) == [[3]]
    assert personal(FedOBP(q=0.0, scope="classifier"), model, torch.zeros(5), last) == [[3, 4]]
    assert personal(FedOBP(q=1.0, scope="classifier"), model, torch.zeros(5), last) == [[]]
    turned = vector(1, 3, 2, 9, 8)
    assert personal(FedOBP(q=0.5, scope="classifier"), head_first, torch.zeros(5), turned) == [[1]]


def test_layer_norm_in_the_classifier_scope_uses_the_heads_tensors(model, head_first):
    last = vector(9, 8, 1, 2, 3)  # head 1 4 | 9; within tensors 0 1 | 0
    assert personal(FedOBP(q=0.5, scope="classifier"), model, torch.zeros(5), last) == [[4]]
    assert personal(FedOBP(q=0.5, scope="classifier", norm="global"), model, torch.zeros(5), last) == [[4]]
    assert personal(FedOBP(q=0.5, scope="classifier", norm="layer"), model, torch.zeros(5), last) == [[3]]
    turned = vector(1, 2, 3, 9, 8)
    assert personal(FedOBP(q=0.5, scope="classifier", norm="layer"), head_first, torch.zeros(5), turned) == [[1]]


@pytest.mark.parametrize("norm", ["none", "layer", "global"])
def test_statistics_of_batch_norm_do_not_compete(norm):
    model = SimpleNamespace(layout=Layout(("fc.weight", "norm.running_mean"), ((3,), (2,))))
    assert personal(FedOBP(q=0.5, norm=norm), model, torch.zeros(5), vector(1, 2, 3, 90, 80)) == [[2]]


@checked
@given(
    values=st.lists(st.lists(st.integers(-4, 4), min_size=5, max_size=5), min_size=1, max_size=5),
    q=st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0]),
    scope=st.sampled_from(["all", "classifier"]),
    norm=st.sampled_from(["none", "layer", "global"]),
    random=st.randoms(use_true_random=False),
)
def test_permuting_clients_permutes_what_they_receive(model, values, q, scope, norm, random):
    method = FedOBP(q=q, scope=scope, norm=norm)
    models = [vector(*one) for one in values]
    order = random.sample(range(len(models)), len(models))
    straight = personal(method, model, torch.zeros(5), *models)
    permuted = personal(method, model, torch.zeros(5), *(models[i] for i in order))
    assert permuted == [straight[i] for i in order]


# EMA


def ema_records(theta: Tensor, score: Tensor, *, seen: bool, scored: bool) -> dict[str, Tensor]:
    return {
        "theta": theta[None],
        "seen": torch.tensor([seen]),
        "score": score[None],
        "scored": torch.tensor([scored]),
    }


def test_the_first_smoothed_score_is_the_score_and_later_ones_are_averaged_in(model):
    method = FedOBP(q=0.75, ema=0.25)
    last = vector(4, 2, 0, 0, 0)
    first, records = download(method, model, torch.zeros(5), ema_records(last, torch.zeros(5), seen=True, scored=False))
    assert records["score"].tolist() == [[16, 4, 0, 0, 0]]
    assert records["scored"].tolist() == [True]
    assert first.keep.tolist() == [[False, True, True, True, True]]

    records = {**records, "theta": vector(0, 2, 0, 0, 0)[None]}  # scores 0 4 0 0 0; mixed 4 4 0 0 0
    second, records = download(method, model, torch.zeros(5), records)
    assert records["score"].tolist() == [[0.25 * 16, 0.75 * 4 + 0.25 * 4, 0, 0, 0]]
    assert second.keep.all()  # the two largest tie at the threshold, and are shared

    third, records = download(method, model, torch.zeros(5), records)  # scores as before; mixed 1 4 0 0 0
    assert records["score"].tolist() == [[1, 4, 0, 0, 0]]
    assert third.keep.tolist() == [[True, False, True, True, True]]


def test_smoothing_changes_the_mask(model):
    past = vector(100, 0, 0, 0, 0)
    records = ema_records(vector(0, 2, 0, 0, 0), past, seen=True, scored=True)
    assert download(FedOBP(q=0.75, ema=0.5), model, torch.zeros(5), records)[0].keep[0].tolist()[:2] == [False, True]
    assert download(FedOBP(q=0.75), model, torch.zeros(5), records)[0].keep[0].tolist()[:2] == [True, False]


def test_a_client_without_an_upload_starts_no_average(model):
    method = FedOBP(q=0.75, ema=0.5)
    start = ema_records(torch.zeros(5), torch.zeros(5), seen=False, scored=False)
    sent, records = download(method, model, vector(8, 0, 0, 0, 0), start)
    assert sent.keep.all()
    assert records["scored"].tolist() == [False]
    _, records = method.aggregate(
        context(1, model),
        {"theta": torch.zeros(5)},
        records,
        CohortUpdate({"theta": vector(0, 3, 0, 0, 0)[None]}, torch.tensor([1])),
    )
    _, records = download(method, model, torch.zeros(5), records)
    assert records["score"].tolist() == [[0, 9, 0, 0, 0]]  # the first value is this score: no 64 from before is in it
    assert records["scored"].tolist() == [True]


def test_with_a_literal_start_the_average_starts_in_the_clients_first_round(model):
    start = ema_records(torch.zeros(5), torch.zeros(5), seen=False, scored=False)
    _, records = download(FedOBP(q=0.75, ema=0.5, start="literal"), model, vector(2, 0, 0, 0, 0), start)
    assert records["score"].tolist() == [[4, 0, 0, 0, 0]]
    assert records["scored"].tolist() == [True]


def test_an_evaluation_that_drops_the_records_changes_nothing(model):
    method = FedOBP(q=0.5, ema=0.25)
    records = ema_records(vector(1, 2, 3, 4, 5), vector(9, 8, 7, 6, 5), seen=True, scored=True)
    theta = vector(0, 1, 0, 1, 0)
    kept = {name: value.clone() for name, value in records.items()}
    first = download(method, model, theta, records)
    again = download(method, model, theta, records)
    assert all(records[name].equal(kept[name]) for name in kept)
    assert records.keys() == kept.keys()
    assert theta.tolist() == [0, 1, 0, 1, 0]
    assert first[0].keep.equal(again[0].keep)
    assert first[1]["score"].equal(again[1]["score"])


# Clients


def test_the_program_merges_trains_and_uploads_all_entries(model):
    method = FedOBP()
    update, personalize = method.client_update(context(1, model)), method.personalize(context(1, model))
    assert [item for item in update if isinstance(item, Train)] == [Train(3)]
    assert isinstance(update[1], Train)
    assert len(update) == 3
    assert len(personalize) == 1
    sent, state = (
        Sparse(torch.ones(5), torch.tensor([True, False, True, True, False])),
        {"theta": vector(6, 7, 8, 9, 10)},
    )
    done = run(update, model, state, sent, step=vector(1, 2, 3, 4, 5))
    assert done.state["theta"].tolist() == done.upload["theta"].tolist() == [2, 9, 4, 5, 15]
    assert list(done.upload) == ["theta"]
    served = run(personalize, model, state, sent)
    assert served.theta.tolist() == [1, 7, 1, 1, 10]
    assert served.scratch["mine"].tolist() == [False, True, False, False, True]
    assert served.state["theta"].tolist() == [6, 7, 8, 9, 10]
    assert served.upload == {}


class Rounds:
    """Two clients, both in every round, whose training adds a given vector."""

    def __init__(self, method, model: Model, theta: Tensor, n: tuple[int, int]) -> None:
        self.method, self.model, self.n = method, model, n
        initial = method.init(model, theta, 0)
        self.server, self.states = initial.server, [initial.state, initial.state]
        self.records = {name: torch.stack([value, value]) for name, value in initial.record.items()}
        self.ctx = context(2, model)

    def train(self, *steps: Tensor) -> None:
        sent, self.records = self.method.download(self.ctx, self.server, self.records)
        program = self.method.client_update(self.ctx)
        trained = [self._run(program, sent, client, steps[client]) for client in range(2)]
        self.states = [client.state for client in trained]
        update = update_of(trained, *self.n)
        self.server, self.records = self.method.aggregate(self.ctx, self.server, self.records, update)

    def served(self) -> list[Client]:
        sent, _ = self.method.download(self.ctx, self.server, self.records)
        program = self.method.personalize(self.ctx)
        return [self._run(program, sent, client, None) for client in range(2)]

    def _run(self, program, sent, client: int, step: Tensor | None) -> Client:
        received = mask_unsent(take(sent, client))
        return run_program(self.model, program, self.states[client], received, [step])[0]


@pytest.mark.essential
def test_two_rounds_by_hand(model):
    rounds = Rounds(FedOBP(q=0.75), model, torch.zeros(5), n=(1, 3))
    rounds.train(vector(4, 0, 0, 0, 8), vector(0, 0, 4, 0, 0))
    assert rounds.server["theta"].tolist() == [1, 0, 3, 0, 2]
    # Scores 9 0 9 0 36 and 1 0 1 0 4: entry 4 is personal for both, and they start from 1 0 3 0 8 and 1 0 3 0 0.
    rounds.train(torch.ones(5), torch.zeros(5))
    assert [state["theta"].tolist() for state in rounds.states] == [[2, 1, 4, 1, 9], [1, 0, 3, 0, 0]]
    assert rounds.records["theta"].tolist() == [[2, 1, 4, 1, 9], [1, 0, 3, 0, 0]]
    assert rounds.server["theta"].tolist() == [1.25, 0.25, 3.25, 0.25, 2.25]
    one, other = rounds.served()
    assert one.theta.tolist() == [1.25, 0.25, 3.25, 0.25, 9]
    assert other.theta.tolist() == [1.25, 0.25, 3.25, 0.25, 0]
    assert one.scratch["mine"].tolist() == other.scratch["mine"].tolist() == [False, False, False, False, True]


steps = st.lists(st.lists(st.integers(-8, 8), min_size=10, max_size=10), min_size=1, max_size=3)


def trained(rounds: Rounds, drawn: list[list[int]]) -> Rounds:
    for values in drawn:
        rounds.train(vector(*values[:5]), vector(*values[5:]))
    return rounds


@checked
@given(drawn=steps, start=st.sampled_from(["global", "literal"]), norm=st.sampled_from(["none", "layer", "global"]))
def test_q_one_is_fedavg(model, drawn, start, norm):
    theta_0 = vector(1, 2, 3, 4, 5)
    ours = trained(Rounds(FedOBP(q=1.0, start=start, norm=norm), model, theta_0, n=(2, 3)), drawn)
    plain = trained(Rounds(FedAvg(), model, theta_0, n=(2, 3)), drawn)
    assert ours.server["theta"].equal(plain.server["theta"])
    for mine, theirs in zip(ours.served(), plain.served(), strict=True):
        assert mine.theta.equal(theirs.theta)
        assert not mine.scratch["mine"].any()


@checked
@given(drawn=steps)
def test_q_zero_with_a_literal_start_keeps_every_entry_above_the_minimum_score(model, drawn):
    rounds = trained(Rounds(FedOBP(q=0.0, start="literal"), model, vector(1, 2, 3, 4, 5), n=(1, 1)), drawn)
    for client, state in zip(rounds.served(), rounds.states, strict=True):
        score = (state["theta"] - rounds.server["theta"]) ** 2
        mine = score > score.min()
        assert client.scratch["mine"].equal(mine)
        assert client.theta[mine].equal(state["theta"][mine])
        assert client.theta[~mine].equal(rounds.server["theta"][~mine])


@checked
@given(drawn=steps, q=st.sampled_from([0.0, 0.5, 0.75]))
def test_server_and_client_hold_the_same_last_model(model, drawn, q):
    rounds = trained(Rounds(FedOBP(q=q), model, torch.zeros(5), n=(1, 2)), drawn)
    assert rounds.records["theta"].equal(torch.stack([state["theta"] for state in rounds.states]))


@pytest.mark.parametrize("rates", RATES)
def test_runs_equal_a_plain_loop(rates):
    federation = small_federation("fedobp", rates, {"q": 0.8})
    theta, last = theta_0(federation), {}

    def start(client):
        if client not in last:
            return theta
        local, shared = flat(last[client]), flat(theta)
        score = (local - shared) ** 2
        merged = torch.where(score > score.quantile(0.8), local, shared)
        return [*federation.model.layout.views(merged).values()]

    for round, cohort in each_round(federation):
        data = [batches(federation, client, round, phase=1, epochs=2) for client in cohort]
        models = [sgd(federation, start(client), network_loss, one) for client, one in zip(cohort, data, strict=True)]
        last |= dict(zip(cohort, models, strict=True))
        theta = mean(federation, cohort, models)
    for result in both_engines(federation, theta, {client: start(client) for client in range(4)}):
        assert (result.personal.min, result.personal.max) == (0, 45)  # a fifth of 225, and client 2 has never trained
