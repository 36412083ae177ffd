"""The average of a method's global models: by hand, and that training does not change."""

from dataclasses import replace

import pytest
import torch
from by_hand import context, vector
from test_checkpoint import SMALL, begin, contents, go_on

from fedobp import Config, Federation
from fedobp.algorithms import METHODS
from fedobp.averaged import Averaged, averaged
from fedobp.method import CohortUpdate
from fedobp.wrapped import inner_of


def rounds(decay, *uploads):
    """Aggregate one client's uploads, round by round; return method and server state."""
    method, ctx = averaged(METHODS["fedavg"](), decay), context(0)
    server, records, _ = method.init(None, vector(9, 9), 0)
    for upload in uploads:
        update = CohortUpdate({"theta": upload[None]}, torch.tensor([5]), 5)
        server, records = method.aggregate(ctx, server, records, update)
    return method, server


@pytest.mark.essential
def test_two_rounds_by_hand():
    """A_2 = (theta_2 + d theta_1) / (1 + d): theta^0 has no weight."""
    method, server = rounds(0.5, vector(4, 0), vector(1, 3))
    torch.testing.assert_close(server["theta"], vector(2, 2))
    assert server["newest"].tolist() == [1, 3]
    for serving, sent in ((False, [1, 3]), (True, [2, 2])):
        download, _ = method.download(replace(context(0), serving=serving), server, {})
        torch.testing.assert_close(download["theta"], vector(*sent)[None])


def test_after_many_rounds_it_is_the_normalised_sum():
    models = [torch.randn(2, generator=torch.Generator().manual_seed(at)) for at in range(30)]
    _, server = rounds(0.9, *models)
    weights = torch.tensor([0.9 ** (29 - at) for at in range(30)])
    torch.testing.assert_close(server["theta"], (weights @ torch.stack(models)) / weights.sum())


def test_it_wraps_a_method():
    plain = METHODS["fedobp"]()
    assert averaged(plain, 0.0) is plain
    found = averaged(plain, 0.9)
    assert isinstance(found, Averaged)
    assert inner_of(found) is plain
    assert (found.name, found.keeps_last_model) == ("fedobp", True)


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_training_and_traffic_stay_and_clients_are_served_the_average(engine):
    config = Config(**SMALL, method="fedavg", engine=engine)
    plain, other = (Federation(replace(config, average=decay)).run() for decay in (0.0, 0.8))
    assert other.last == plain.last
    assert other.bytes == plain.bytes
    assert other.accuracy != plain.accuracy
    for name, value in other.state_dict().items():
        assert value.equal(other.state_dict(client=0)[name])
        assert not value.equal(plain.state_dict()[name])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_with_it(method):
    result = Federation(Config(**{**SMALL, "rounds": 2}, method=method, average=0.9)).run()
    assert 0 <= result.accuracy.pooled <= 100


@pytest.mark.parametrize("method", ["fedavg", "fedobp", "scaffold"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(method, tmp_path):
    config = Config(**SMALL, method=method, average=0.9)
    Federation(config).run(out=tmp_path / "whole", checkpoint_every=0)
    begin(config, tmp_path / "cut")
    assert go_on(config, tmp_path / "cut") == [4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_new_client_trains_the_newest_model_and_uses_the_average():
    """With one local epoch at a tiny learning rate, the model that it trains is what it was sent."""
    config = Config(**{**SMALL, "rounds": 2, "lr": 1e-9}, method="fedavg-last", average=0.9, holdout_clients=1)
    result = Federation(replace(config, lr=0.01)).run()
    assert result.new_clients is not None
