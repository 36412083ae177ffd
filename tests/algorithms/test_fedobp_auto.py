"""FedOBP-Auto: its parts, what clients keep, and what it is for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lanes_cases import normed
from plain_loops import small_federation
from test_checkpoint import SMALL

from fedobp import Config, Federation, FedobpError


@pytest.mark.essential
def test_it_is_the_sum_of_its_parts():
    config = Config(**SMALL, method="fedobp-auto", finetune_epochs=1)
    same = {"prior": "train", "average": 0.05, "calibrate": "head", "weight_decay": 0.006}
    parts = replace(config, method="counterdrift", options={"beta": 0.7, "share": 0.7}, **same)
    one, other = (Federation(settings).run() for settings in (config, parts))
    assert (one.accuracy, one.last, one.finetuned) == (other.accuracy, other.last, other.finetuned)
    for client in (None, *range(6)):
        assert all(value.equal(other.state_dict(client)[name]) for name, value in one.state_dict(client).items())
    fedavg = Federation(replace(config, method="fedavg")).run().bytes
    assert one.bytes.down_total == fedavg.down_total
    assert one.bytes.up_per_round == fedavg.up_per_round + 3 * 8  # the number of steps
    assert one.compute.use == 1


def test_a_client_keeps_at_most_a_thousandth():
    result = Federation(Config(clients=6, rounds=4, epochs=1, participation=0.5, method="fedobp-auto")).run()
    assert 10 <= result.personal.min <= result.personal.max <= 53  # of 53,002
    shared = result.state_dict()
    for client in range(6):
        own = result.state_dict(client)
        assert all(own[name].equal(shared[name]) for name in shared if not name.startswith("classifier."))


def test_both_engines_agree():
    serial, lanes = (
        small_federation("fedobp-auto", "one batch", engine=engine).run() for engine in ("serial", "lanes")
    )
    for client in (None, 0, 1, 2, 3):
        for key, value in serial.state_dict(client).items():
            torch.testing.assert_close(lanes.state_dict(client)[key], value, rtol=0, atol=1e-6)


def test_a_weight_decay_beside_its_own_is_refused():
    with pytest.raises(
        FedobpError, match=r"fedobp-auto has a weight_decay of its own \(0\.006\): leave out --weight-decay"
    ):
        Federation(Config(**SMALL, method="fedobp-auto", weight_decay=0.1))


def test_batch_norm_is_refused():
    with pytest.raises(FedobpError, match="BatchNorm"):
        Federation(Config(**{**SMALL, "model": normed}, method="fedobp-auto")).run()


def test_labels_that_mean_something_else_are_learned():
    """Half of the clients call each class by the next one's name: neither the global model nor a prior can tell.

    400 features, most of them noise: a thousandth of the model is 51 numbers.
    """
    random = np.random.default_rng(0)
    true = random.integers(0, 4, 2400)
    x = (6 * np.eye(4, 400)[true] + random.standard_normal((2400, 400))).astype(np.float32)
    client = np.arange(2400) % 8
    y = np.where(client < 4, true, (true + 1) % 4)
    config = Config(rounds=8, participation=0.5, lr=0.1, eval_every=8)
    federation = Federation.from_data(x, y, client=client, config=config)
    accuracy = {name: federation.run(name).accuracy.pooled for name in ("fedavg", "fedobp-auto")}
    assert accuracy["fedavg"] < 65
    assert accuracy["fedobp-auto"] > accuracy["fedavg"] + 8


def test_clients_with_few_samples_do_not_mislead_the_others():
    """One of 20 digits' clients a round, with steps as large as FedAvg takes well: rates for a sample ended in NaN."""
    few = {"clients": 25, "holdout_clients": 5, "participation": 0.05, "lr": 0.05, "rounds": 40, "eval_every": 40}
    result = Federation(Config(**few, seed=43, method="fedobp-auto", save_models="none")).run()
    assert result.accuracy.pooled > 85
