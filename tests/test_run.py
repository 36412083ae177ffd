TINY = {"clients": 6, "rounds": 4, "participation": 0.5, "epochs": 1, "model": "mlp", "precision": "fp64"}


def test_clients_never_seen_are_served_the_global_model():
    federation = Federation(Config(**{**TINY, "rounds": 1, "participation": 0.1}))
    (seen,) = next(cohorts(federation.config)).tolist()
    for method in ("fedobp", "fedavg-last"):
        result = federation.run(method)
        assert all(torch.equal(vector(result, c), vector(result)) for c in range(6) if c != seen)
        assert result.personal.min == 0


def test_last_is_the_own_last_model_and_the_global_one_for_the_unseen(tiny):
    served, averaged = tiny.run("fedavg-last"), tiny.run("fedavg")
    assert served.accuracy == served.last == averaged.last
    assert averaged.accuracy != averaged.last


def test_history_holds_every_evaluation_and_the_last_round():
    federation = Federation(Config(**{**TINY, "rounds": 5, "eval_every": 2}))
    result = federation.run("fedavg")
    assert [point[0] for point in result.history] == [2, 4, 5]
    assert result.history[-1][1:] == (result.accuracy.pooled, result.accuracy.client_mean)


def test_evaluating_more_often_changes_no_result(tiny):
    often = Federation(Config(**{**TINY, "eval_every": 1})).run("fedobp", ema=0.5, q=0.9)
    rarely = Federation(Config(**{**TINY, "eval_every": 4})).run("fedobp", ema=0.5, q=0.9)
    assert often.accuracy == rarely.accuracy
    assert torch.equal(vector(often), vector(rarely))


def test_fine_tuning_is_reported_beside_and_not_stored(tiny):
    tuned = Federation(Config(**TINY, finetune_epochs=5)).run("fedavg")
    plain = tiny.run("fedavg")
    assert plain.finetuned is None
    assert tuned.accuracy == plain.accuracy
    assert tuned.finetuned.pooled > tuned.accuracy.pooled
    served = tiny.run("fedavg-ft", finetune=5)
    assert served.accuracy == tuned.finetuned


def test_fine_tuning_under_a_cosine_takes_the_full_learning_rate():
    tuned = Federation(Config(**{**TINY, "lr_schedule": "cosine", "rounds": 20, "finetune_epochs": 5})).run("fedavg")
    assert tuned.finetuned.pooled > tuned.accuracy.pooled + 10


def test_validation_comes_from_training_data_only(tiny):
    result = Federation(Config(**TINY, val_ratio=0.2)).run("fedavg")
    assert result.validation is not None
    assert set(result.to_json()["validation"]) == set(result.to_json()["accuracy"])
    assert tiny.run("fedavg").validation is None
    assert result.accuracy.majority_class == pytest.approx(tiny.run("fedavg").accuracy.majority_class, abs=5)


def test_the_paper_protocol_reports_the_best_of_its_rounds():
    federation = Federation(
        Config(clients=4, participation=0.25, rounds=200, epochs=1, model="mlp", protocol="paper", eval_every=100)
    )
    result = federation.run("fedavg")
    assert result.protocol.rounds == (100, 200)
    assert result.accuracy.pooled == max(point[1] for point in result.history)


def test_momentum_weight_decay_and_schedule_change_the_result(tiny):
    plain = vector(tiny.run("fedavg"))
    for change in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"lr_schedule": "cosine"}, {"lr": 0.02}, {"seed": 1}):
        assert not torch.equal(plain, vector(Federation(Config(**{**TINY, **change})).run("fedavg")))


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("eval_every", [1, 50])
def test_a_diverging_run_names_round_and_client_and_keeps_its_metrics(tmp_path, engine, eval_every):
    # Each step multiplies the weights by 1 - 0.01 * 400 = -3: float32 overflows after a dozen rounds.
    wild = {"weight_decay": 400.0, "rounds": 50, "precision": "fp32", "eval_every": eval_every}
    federation = Federation(Config(**{**TINY, **wild, "engine": engine}))
    with pytest.raises(FedobpError, match=r"round \d+, client \d: .* smaller --weight-decay") as caught:
        federation.run("fedavg", out=tmp_path / "run")
    reached = int(str(caught.value).split()[1].rstrip(","))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, reached))
    assert reached > 2


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_a_run_whose_fine_tuning_diverges_keeps_its_metrics(tmp_path, engine):
    settings = {"weight_decay": 400.0, "rounds": 2, "precision": "fp32", "finetune_epochs": 30, "engine": engine}
    with pytest.raises(FedobpError, match=r"round 2, client 0: .* smaller --weight-decay"):
        Federation(Config(**{**TINY, **settings})).run("fedavg", out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]


def test_every_round_is_written_down_before_the_next_one_on_the_cpu(tmp_path):
    seen = []

    def look(at):
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        seen.append((at.round, len(lines)))

    Federation(Config(rounds=4, eval_every=4, clients=8, model="mlp")).run(out=tmp_path / "run", progress=look)
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]


@dataclass(frozen=True)
class Relay(FedAvg):
    """One client after the other trains the model that the one before it left; in round 2 all do before the cohort."""

    name: ClassVar[str] = "relay"
    summary: ClassVar[str] = "a relay"
    paper: ClassVar[str] = "none"

    @property
    def together(self):
        return False

    def turns(self, round, rounds):
        return ("everyone", "cohort") if round == 2 else ("cohort",)

    def aggregate(self, model, ctx, server, records, up, n):
        assert len(ctx.cohort) == len(n) == 1
        return {"theta": up["theta"][0]}, records


@pytest.fixture
def relay(monkeypatch):
    monkeypatch.setitem(METHODS, "relay", Relay)


def relayed(config):
    """The same in plain words, with the serial engine's own clients."""
    federation = Federation(config)
    model, data = federation.model, federation.data
    theta, engine = model.initial(config.seed).double(), Serial(model, config.batch_size)
    clients = ClientPool(data, {}, theta, config.seed, Budget())
    hparams = {"lr": config.lr, "momentum": 0.0, "weight_decay": 0.0}
    for round, cohort in enumerate(cohorts(config), start=1):
        for client in [*(range(config.clients) if round == 2 else []), *cohort.tolist()]:
            ctx = RoundContext(None, round, config.rounds, config.clients, config.epochs, torch.tensor([client]))
            [answer] = engine.train(
                [
                    PoolJob(
                        ctx,
                        Relay().client_update(with_model(model, ctx)),
                        hparams,
                        {"theta": theta[None]},
                        clients=clients,
                    )
                ]
            )
            theta = answer.upload["theta"][0]
    return theta


@pytest.mark.usefixtures("relay")
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_clients_may_take_turns(engine, tmp_path):
    config = Config(clients=5, participation=0.6, rounds=3, epochs=1, precision="fp64", engine=engine, model="mlp")
    result = Federation(config).run("relay", out=tmp_path / "run")
    found = torch.cat([tensor.flatten() for tensor in result.state_dict().values()])
    torch.testing.assert_close(found, relayed(config), rtol=0, atol=1e-10)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [len(line["cohort"]) for line in lines] == [3, 8, 3]
    assert lines[1]["cohort"][:5] == [0, 1, 2, 3, 4]
    size = 8 * len(found)
    assert [line["bytes_up"] for line in lines] == [3 * size, 8 * size, 3 * size]
    assert all(line["loss"] > 0 for line in lines)
    assert result.compute.visit == pytest.approx(1, abs=0.01)  # one epoch in each of the 14 visits


@pytest.mark.usefixtures("relay")
def test_a_turn_that_diverges_names_its_client():
    config = Config(clients=5, participation=0.6, rounds=3, epochs=1, model="mlp", lr=1e9)
    first = next(cohorts(config)).tolist()[0]
    with pytest.raises(FedobpError, match=f"round 1, client {first}: "):
        Federation(config).run("relay")


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedbn"])
def test_a_round_of_clients_without_samples_changes_nothing(method, engine, monkeypatch):
    """One client a round, and the first of them has nothing to train on: as if its round had not been."""
    config = Config(clients=4, rounds=3, participation=0.25, epochs=1, model="mlp", precision="fp64", engine=engine)
    who = [int(cohort) for cohort in cohorts(config)]
    assert len(set(who)) > 1

    def dealt(y, clients, **_):
        order = np.random.RandomState(0).permutation(len(y))[:200]
        parts = [order[50 * at : 50 * at + 50] for at in range(clients)]
        none = np.array([], dtype=int)
        return [Shard(none if at == who[0] else part[:30], none, part[30:]) for at, part in enumerate(parts)]

    monkeypatch.setattr("fedobp.federation.partition", dealt)
    federation = Federation(config)
    first = Federation(Config(**{**vars(config), "rounds": 1})).run(method)
    whole = federation.run(method)
    start = federation.model.initial(config.seed).double()
    if method != "floco":  # whose first model is not theta^0
        assert torch.equal(vector(first), start)
    assert vector(whole).isfinite().all()
    assert vector(whole, who[-1]).isfinite().all()
    assert not torch.equal(vector(whole, who[-1]), start)
