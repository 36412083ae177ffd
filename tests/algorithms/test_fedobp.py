"""FedOBP through its functions, on a model of five entries whose every number is worked out by hand."""

import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from contexts import with_model
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import RATES, batches, both_engines, each_round, fit, flat, mean, sgd, small, theta_0
from torch import Tensor, nn

from fedobp.algorithms import METHODS
from fedobp.method import Client, CohortUpdate, RoundContext, Sparse, Train
from fedobp.models import NETS, Layout, Model, register

FedOBP, FedAvg = METHODS["fedobp"], METHODS["fedavg"]

checked = settings(deadline=None, max_examples=60)


@pytest.fixture(scope="module")
def model():
    """Entries: fc.weight 0 and 1, classifier.weight 2 and 3, classifier.bias 4."""
    known = dict(NETS)
    layers = {"fc": lambda: nn.Linear(1, 2, bias=False), "classifier": lambda: nn.Linear(2, 1)}
    register("tiny")(lambda shape, classes: nn.Sequential(OrderedDict({k: make() for k, make in layers.items()})))
    yield Model("tiny", (1,), 1)
    NETS.clear()
    NETS.update(known)


@pytest.fixture(scope="module")
def head_first():
    """Entries: classifier.weight 0 and 1, classifier.bias 2, fc.weight 3 and 4."""
    known = dict(NETS)
    layers = {"classifier": lambda: nn.Linear(2, 1), "fc": lambda: nn.Linear(1, 2, bias=False)}
    register("tiny-turned")(lambda shape, classes: nn.Sequential(OrderedDict({k: m() for k, m in layers.items()})))
    yield Model("tiny-turned", (2,), 1)
    NETS.clear()
    NETS.update(known)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def moment(clients: int) -> RoundContext:
    return RoundContext(model=None, round=2, rounds=9, clients=clients, epochs=3, cohort=torch.arange(clients))


def seen_rows(*models: Tensor, seen: bool = True) -> dict[str, Tensor]:
    return {"theta": torch.stack(models), "seen": torch.full((len(models),), seen)}


def send(method, model: Model, theta: Tensor, records: dict[str, Tensor]):
    download, records = method.download(with_model(model, moment(len(records["seen"]))), {"theta": theta}, records)
    assert list(download) == ["theta"]
    assert isinstance(download["theta"], Sparse)
    return download["theta"], records


def personal(method, model: Model, theta: Tensor, *models: Tensor, seen: bool = True) -> list[list[int]]:
    """The entries of each client that are not sent."""
    sent, _ = send(method, model, theta, seen_rows(*models, seen=seen))
    return [(~keep).nonzero()[:, 0].tolist() for keep in sent.keep]


def run(
    program, model: Model, own: dict[str, Tensor], download: Sparse, client: int, step: Tensor | None = None
) -> Client:
    """One client's program, with NaN in what was not sent, and `step` added in place of training."""
    poisoned = Sparse(download.values[client].masked_fill(~download.keep[client], math.nan), download.keep[client])
    state = Client(state=own, download={"theta": poisoned}, scratch={}, upload={}, hparams={})
    for item in program:
        state = state.set(theta=state.theta + step) if isinstance(item, Train) else item(model, state)
    return state


# State


def test_begin_gives_everyone_theta_0_and_no_upload(model):
    theta = vector(1, 2, 3, 4, 5)
    server, row, own = FedOBP().init(model, theta, 0)
    assert {name: value.tolist() for name, value in server.items()} == {"theta": [1, 2, 3, 4, 5]}
    assert {name: value.tolist() for name, value in row.items()} == {"theta": [1, 2, 3, 4, 5], "seen": False}
    assert {name: value.tolist() for name, value in own.items()} == {"theta": [1, 2, 3, 4, 5]}


def test_begin_keeps_scores_only_with_ema(model):
    row = FedOBP(ema=0.5).init(model, vector(1, 2, 3, 4, 5), 0).record
    assert set(row) == {"theta", "seen", "score", "scored"}
    assert row["score"].tolist() == [0] * 5
    assert row["scored"].tolist() is False


def test_receive_stores_uploads_marks_clients_as_seen_and_averages_all_of_it(model):
    uploads = torch.stack([vector(0, 0, 4, 8, 1), vector(4, 0, 0, 8, 1)])
    records = {"theta": torch.zeros(2, 5), "seen": torch.tensor([False, True]), "score": torch.ones(2, 5)}
    server, after = FedOBP().aggregate(
        with_model(model, moment(2)),
        {"theta": torch.zeros(5)},
        records,
        CohortUpdate({"theta": uploads}, torch.tensor([1, 3])),
    )
    assert {name: value.tolist() for name, value in server.items()} == {"theta": [3, 0, 1, 8, 1]}
    assert after["theta"].equal(uploads)
    assert after["seen"].tolist() == [True, True]
    assert after["score"].equal(torch.ones(2, 5))
    assert records["theta"].equal(torch.zeros(2, 5))
    assert records["seen"].tolist() == [False, True]


# What is personal


def test_send_keeps_back_what_is_strictly_above_each_clients_quantile(model):
    one, other = vector(1, 2, 4, 1, 3), vector(3, 1, 1, 1, 0)  # scores 0 1 9 0 4 and 4 0 0 0 1
    records = seen_rows(one, other)
    sent, after = send(FedOBP(q=0.5), model, torch.ones(5), records)  # quantiles 1 and 0
    assert sent.keep.tolist() == [[True, True, False, True, False], [False, True, True, True, False]]
    assert sent.values.tolist() == [[1] * 5] * 2
    assert after is records


def test_entries_that_tie_at_the_threshold_are_shared(model):
    assert personal(FedOBP(q=0.5), model, torch.zeros(5), vector(2, -2, 2, 3, 1)) == [[3]]


def test_the_default_is_the_squared_score_and_the_released_code_weighs_by_the_own_value(model):
    theta, own = vector(9, 1, 0, 0, 0), vector(0, 2, 0, 0, 0)  # squared 81 1 0 0 0, product 0 2 0 0 0
    assert personal(FedOBP(q=0.75), model, theta, own) == [[0]]
    assert personal(FedOBP(q=0.75, score="product"), model, theta, own) == [[1]]


def test_layer_norm_rescales_within_tensors_and_global_norm_changes_nothing(model):
    own = vector(1, 2, 3, 4, 9)  # scores 1 4 | 9 16 | 81; within tensors 0 1 | 0 1 | 0
    assert personal(FedOBP(q=0.5), model, torch.zeros(5), own) == [[3, 4]]
    assert personal(FedOBP(q=0.5, norm="global"), model, torch.zeros(5), own) == [[3, 4]]
    assert personal(FedOBP(q=0.5, norm="layer"), model, torch.zeros(5), own) == [[1, 3]]


@pytest.mark.parametrize("norm", ["none", "layer", "global"])
@pytest.mark.parametrize("scope", ["all", "classifier"])
@pytest.mark.parametrize("start", ["global", "literal"])
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_in_round_1_nothing_is_personal_and_nothing_is_nan(model, norm, scope, start, q):
    method = FedOBP(q=q, norm=norm, scope=scope, start=start)
    theta = vector(1, -2, 3, 4, 0)
    server, row, own = method.init(model, theta, 0)
    sent, _ = send(method, model, server["theta"], {name: value[None] for name, value in row.items()})
    assert sent.keep.all()
    served = run(method.personalize(with_model(model, moment(1))), model, own, sent, 0)
    assert served.theta.equal(theta)
    assert not served.scratch["mine"].any()


@pytest.mark.parametrize("norm", ["none", "layer", "global"])
@pytest.mark.parametrize("scope", ["all", "classifier"])
def test_a_client_without_an_upload_uses_the_global_model(model, norm, scope):
    method = FedOBP(q=0.0, norm=norm, scope=scope)
    assert personal(method, model, vector(5, 1, 2, 3, 4), torch.zeros(5), seen=False) == [[]]


def test_a_literal_start_puts_the_entries_that_moved_furthest_back_to_theta_0(model):
    method = FedOBP(q=0.75, start="literal")
    theta_0, moved = torch.zeros(5), vector(5, 1, -1, 1, 1)
    sent, _ = send(method, model, moved, seen_rows(theta_0, seen=False))
    served = run(method.personalize(with_model(model, moment(1))), model, {"theta": theta_0}, sent, 0)
    assert served.theta.tolist() == [0, 1, -1, 1, 1]
    assert served.scratch["mine"].tolist() == [True, False, False, False, False]


def test_seen_and_unseen_clients_of_one_cohort_are_treated_apart(model):
    records = {"theta": torch.stack([vector(9, 0, 0, 0, 0)] * 2), "seen": torch.tensor([False, True])}
    sent, _ = send(FedOBP(q=0.75), model, torch.zeros(5), records)
    assert sent.keep.tolist() == [[True] * 5, [False, True, True, True, True]]


def test_the_classifier_scope_never_keeps_back_the_base_and_takes_q_of_the_heads_pool(model, head_first):
    own = vector(9, 8, 1, 3, 2)  # scores 81 64 | 1 9 | 4; the head's median is 4
    assert personal(FedOBP(q=0.5, scope="classifier"), model, torch.zeros(5), own) == [[3]]
    assert personal(FedOBP(q=0.0, scope="classifier"), model, torch.zeros(5), own) == [[3, 4]]
    assert personal(FedOBP(q=1.0, scope="classifier"), model, torch.zeros(5), own) == [[]]
    turned = vector(1, 3, 2, 9, 8)
    assert personal(FedOBP(q=0.5, scope="classifier"), head_first, torch.zeros(5), turned) == [[1]]


def test_layer_norm_in_the_classifier_scope_uses_the_heads_tensors(model, head_first):
    own = vector(9, 8, 1, 2, 3)  # head 1 4 | 9; within tensors 0 1 | 0
    assert personal(FedOBP(q=0.5, scope="classifier"), model, torch.zeros(5), own) == [[4]]
    assert personal(FedOBP(q=0.5, scope="classifier", norm="global"), model, torch.zeros(5), own) == [[4]]
    assert personal(FedOBP(q=0.5, scope="classifier", norm="layer"), model, torch.zeros(5), own) == [[3]]
    turned = vector(1, 2, 3, 9, 8)
    assert personal(FedOBP(q=0.5, scope="classifier", norm="layer"), head_first, torch.zeros(5), turned) == [[1]]


@pytest.mark.parametrize("norm", ["none", "layer", "global"])
def test_statistics_of_batch_norm_do_not_compete(norm):
    model = SimpleNamespace(layout=Layout(("fc.weight", "norm.running_mean"), ((3,), (2,))))
    assert personal(FedOBP(q=0.5, norm=norm), model, torch.zeros(5), vector(1, 2, 3, 90, 80)) == [[2]]


@checked
@given(
    rows=st.lists(st.lists(st.integers(-4, 4), min_size=5, max_size=5), min_size=1, max_size=5),
    q=st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0]),
    scope=st.sampled_from(["all", "classifier"]),
    norm=st.sampled_from(["none", "layer", "global"]),
    random=st.randoms(use_true_random=False),
)
def test_permuting_clients_permutes_what_they_receive(model, records, q, scope, norm, random):
    method = FedOBP(q=q, scope=scope, norm=norm)
    models = [vector(*row) for row in records]
    order = random.sample(range(len(models)), len(models))
    straight = personal(method, model, torch.zeros(5), *models)
    permuted = personal(method, model, torch.zeros(5), *(models[i] for i in order))
    assert permuted == [straight[i] for i in order]


# EMA


def ema_rows(theta: Tensor, score: Tensor, *, seen: bool, scored: bool) -> dict[str, Tensor]:
    return {
        "theta": theta[None],
        "seen": torch.tensor([seen]),
        "score": score[None],
        "scored": torch.tensor([scored]),
    }


def test_the_first_smoothed_score_is_the_score_and_later_ones_are_mixed_in(model):
    method = FedOBP(q=0.75, ema=0.25)
    own = vector(4, 2, 0, 0, 0)
    first, records = send(method, model, torch.zeros(5), ema_rows(own, torch.zeros(5), seen=True, scored=False))
    assert records["score"].tolist() == [[16, 4, 0, 0, 0]]
    assert records["scored"].tolist() == [True]
    assert first.keep.tolist() == [[False, True, True, True, True]]

    records = {**records, "theta": vector(0, 2, 0, 0, 0)[None]}  # scores 0 4 0 0 0; mixed 4 4 0 0 0
    second, records = send(method, model, torch.zeros(5), records)
    assert records["score"].tolist() == [[0.25 * 16, 0.75 * 4 + 0.25 * 4, 0, 0, 0]]
    assert second.keep.all()  # the two largest tie at the threshold, and are shared

    third, records = send(method, model, torch.zeros(5), records)  # scores as before; mixed 1 4 0 0 0
    assert records["score"].tolist() == [[1, 4, 0, 0, 0]]
    assert third.keep.tolist() == [[True, False, True, True, True]]


def test_smoothing_changes_the_mask(model):
    past = vector(100, 0, 0, 0, 0)
    records = ema_rows(vector(0, 2, 0, 0, 0), past, seen=True, scored=True)
    assert send(FedOBP(q=0.75, ema=0.5), model, torch.zeros(5), records)[0].keep[0].tolist()[:2] == [False, True]
    assert send(FedOBP(q=0.75), model, torch.zeros(5), records)[0].keep[0].tolist()[:2] == [True, False]


def test_a_client_without_an_upload_starts_no_average(model):
    method = FedOBP(q=0.75, ema=0.5)
    start = ema_rows(torch.zeros(5), torch.zeros(5), seen=False, scored=False)
    sent, records = send(method, model, vector(8, 0, 0, 0, 0), start)
    assert sent.keep.all()
    assert records["scored"].tolist() == [False]
    _, records = method.aggregate(
        with_model(model, moment(1)),
        {"theta": torch.zeros(5)},
        records,
        CohortUpdate({"theta": vector(0, 3, 0, 0, 0)[None]}, torch.tensor([1])),
    )
    _, records = send(method, model, torch.zeros(5), records)
    assert records["score"].tolist() == [[0, 9, 0, 0, 0]]  # the first value is this score: no 64 from before is in it
    assert records["scored"].tolist() == [True]


def test_with_a_literal_start_the_average_begins_at_the_first_visit(model):
    start = ema_rows(torch.zeros(5), torch.zeros(5), seen=False, scored=False)
    _, records = send(FedOBP(q=0.75, ema=0.5, start="literal"), model, vector(2, 0, 0, 0, 0), start)
    assert records["score"].tolist() == [[4, 0, 0, 0, 0]]
    assert records["scored"].tolist() == [True]


def test_an_evaluation_that_drops_the_rows_changes_nothing(model):
    method = FedOBP(q=0.5, ema=0.25)
    records = ema_rows(vector(1, 2, 3, 4, 5), vector(9, 8, 7, 6, 5), seen=True, scored=True)
    theta = vector(0, 1, 0, 1, 0)
    kept = {name: value.clone() for name, value in records.items()}
    first = send(method, model, theta, records)
    again = send(method, model, theta, records)
    assert all(records[name].equal(kept[name]) for name in kept)
    assert records.keys() == kept.keys()
    assert theta.tolist() == [0, 1, 0, 1, 0]
    assert first[0].keep.equal(again[0].keep)
    assert first[1]["score"].equal(again[1]["score"])


# Clients


def test_the_program_is_merge_train_and_upload_all(model):
    method = FedOBP()
    local, serve = method.client_update(with_model(model, moment(1))), method.personalize(with_model(model, moment(1)))
    assert [item for item in local if isinstance(item, Train)] == [Train(3)]
    assert isinstance(local[1], Train)
    assert len(local) == 3
    assert len(serve) == 1
    sent = Sparse(torch.ones(1, 5), torch.tensor([[True, False, True, True, False]]))
    done = run(local, model, {"theta": vector(6, 7, 8, 9, 10)}, sent, 0, step=vector(1, 2, 3, 4, 5))
    assert done.state["theta"].tolist() == done.upload["theta"].tolist() == [2, 9, 4, 5, 15]
    assert list(done.upload) == ["theta"]
    served = run(serve, model, {"theta": vector(6, 7, 8, 9, 10)}, sent, 0)
    assert served.theta.tolist() == [1, 7, 1, 1, 10]
    assert served.scratch["mine"].tolist() == [False, True, False, False, True]
    assert served.state["theta"].tolist() == [6, 7, 8, 9, 10]
    assert served.upload == {}


class Rounds:
    """Two clients, both in every round, whose training adds a known vector."""

    def __init__(self, method, model: Model, theta: Tensor, n: tuple[int, int]) -> None:
        self.method, self.model, self.n = method, model, torch.tensor(n)
        start = method.init(model, theta, 0)
        self.server, self.state = start.server, [start.state, start.state]
        self.rows = {name: torch.stack([value, value]) for name, value in start.record.items()}

    def train(self, *steps: Tensor) -> None:
        download, self.rows = self.method.download(with_model(self.model, moment(2)), self.server, self.rows)
        program = self.method.client_update(with_model(self.model, moment(2)))
        done = [self._run(program, download, client, steps[client]) for client in range(2)]
        self.state = [client.state for client in done]
        up = {"theta": torch.stack([client.upload["theta"] for client in done])}
        self.server, self.rows = self.method.aggregate(
            with_model(self.model, moment(2)), self.server, self.rows, CohortUpdate(up, self.n)
        )

    def served(self) -> list[Client]:
        download, _ = self.method.download(with_model(self.model, moment(2)), self.server, self.rows)
        program = self.method.personalize(with_model(self.model, moment(2)))
        return [self._run(program, download, client, None) for client in range(2)]

    def _run(self, program, download, client: int, step: Tensor | None) -> Client:
        sent = download["theta"]
        if isinstance(sent, Sparse):
            return run(program, self.model, self.state[client], sent, client, step)
        state = Client(state=self.state[client], download={"theta": sent[client]}, scratch={}, upload={}, hparams={})
        for item in program:
            state = state.set(theta=state.theta + step) if isinstance(item, Train) else item(self.model, state)
        return state


@pytest.mark.essential
def test_two_rounds_by_hand(model):
    rounds = Rounds(FedOBP(q=0.75), model, torch.zeros(5), n=(1, 3))
    rounds.train(vector(4, 0, 0, 0, 8), vector(0, 0, 4, 0, 0))
    assert rounds.server["theta"].tolist() == [1, 0, 3, 0, 2]
    # Scores 9 0 9 0 36 and 1 0 1 0 4: entry 4 is each one's own, and they start from 1 0 3 0 8 and 1 0 3 0 0.
    rounds.train(torch.ones(5), torch.zeros(5))
    assert [own["theta"].tolist() for own in rounds.state] == [[2, 1, 4, 1, 9], [1, 0, 3, 0, 0]]
    assert rounds.rows["theta"].tolist() == [[2, 1, 4, 1, 9], [1, 0, 3, 0, 0]]
    assert rounds.server["theta"].tolist() == [1.25, 0.25, 3.25, 0.25, 2.25]
    one, other = rounds.served()
    assert one.theta.tolist() == [1.25, 0.25, 3.25, 0.25, 9]
    assert other.theta.tolist() == [1.25, 0.25, 3.25, 0.25, 0]
    assert one.scratch["mine"].tolist() == other.scratch["mine"].tolist() == [False, False, False, False, True]


steps = st.lists(st.lists(st.integers(-8, 8), min_size=10, max_size=10), min_size=1, max_size=3)


def trained(rounds: Rounds, drawn: list[list[int]]) -> Rounds:
    for row in drawn:
        rounds.train(vector(*row[:5]), vector(*row[5:]))
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
    for client, own in zip(rounds.served(), rounds.state, strict=True):
        score = (own["theta"] - rounds.server["theta"]) ** 2
        mine = score > score.min()
        assert client.scratch["mine"].equal(mine)
        assert client.theta[mine].equal(own["theta"][mine])
        assert client.theta[~mine].equal(rounds.server["theta"][~mine])


@checked
@given(drawn=steps, q=st.sampled_from([0.0, 0.5, 0.75]))
def test_server_and_client_hold_the_same_last_model(model, drawn, q):
    rounds = trained(Rounds(FedOBP(q=q), model, torch.zeros(5), n=(1, 2)), drawn)
    assert rounds.rows["theta"].equal(torch.stack([own["theta"] for own in rounds.state]))


@pytest.mark.parametrize("rates", RATES)
def test_runs_are_those_of_a_plain_loop(rates):
    federation = small("fedobp", rates, {"q": 0.8})
    theta, last = theta_0(federation), {}

    def merged(client):
        if client not in last:
            return theta
        own, shared = flat(last[client]), flat(theta)
        score = (own - shared) ** 2
        return [*federation.model.layout.views(torch.where(score > score.quantile(0.8), own, shared)).values()]

    for round, cohort in each_round(federation):
        models = [sgd(federation, merged(client), fit, batches(federation, client, round, 1, 2)) for client in cohort]
        last |= dict(zip(cohort, models, strict=True))
        theta = mean(federation, cohort, models)
    for result in both_engines(federation, theta, {client: merged(client) for client in range(4)}):
        assert (result.personal.min, result.personal.max) == (0, 45)  # a fifth of 225, and client 2 has never trained
