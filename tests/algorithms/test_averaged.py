"""The average of a method's global models: by hand, and that training does not change."""

from dataclasses import replace

import pytest
import torch
from by_hand import context, vector
from test_checkpoint import SMALL, begin, contents, go_on

from fedobp import Config, Federation, FedobpError
from fedobp.algorithms import METHODS
from fedobp.averaged import Averaged, averaged
from fedobp.method import CohortUpdate
from fedobp.wrapped import inner_of


def rounds(share, *uploads):
    """Aggregate one client's uploads, round by round; return method and server state."""
    method = averaged(METHODS["fedavg"](), share)
    server, records, _ = method.init(None, vector(9, 9), 0)
    for number, upload in enumerate(uploads, start=1):
        update = CohortUpdate({"theta": upload[None]}, torch.tensor([5]), 5)
        server, records = method.aggregate(context(0, round=number), server, records, update)
    return method, server


@pytest.mark.essential
def test_two_rounds_by_hand():
    """The second step is 1 / (1 + 1/2): a third of theta_1 is left, and nothing of theta^0."""
    method, server = rounds(0.5, vector(3, 0), vector(0, 3))
    torch.testing.assert_close(server["theta"], vector(1, 2))
    assert server["newest"].tolist() == [0, 3]
    for serving, sent in ((False, [0, 3]), (True, [1, 2])):
        download, _ = method.download(replace(context(0), serving=serving), server, {})
        torch.testing.assert_close(download["theta"], vector(*sent)[None])


def test_a_round_with_several_aggregations_counts_once():
    """A sequential method: A_2 is (A_1 + theta_2) / 2 with the model after the second client of round 2."""
    method = averaged(METHODS["fedavg"](), 1.0)
    server, records, _ = method.init(None, vector(9, 9), 0)
    for number, upload in ((3, vector(4, 0)), (7, vector(100, 100)), (7, vector(0, 2))):
        update = CohortUpdate({"theta": upload[None]}, torch.tensor([5]), 5)
        server, records = method.aggregate(context(0, round=number), server, records, update)
    assert server["theta"].tolist() == [2, 1]


def test_a_share_of_1_is_the_mean_of_all_rounds():
    models = [torch.randn(2, generator=torch.Generator().manual_seed(at)) for at in range(30)]
    _, server = rounds(1.0, *models)
    torch.testing.assert_close(server["theta"], torch.stack(models).mean(dim=0))


def test_it_reaches_back_a_share_of_the_rounds():
    """Models that count their round: the mean age of what is in the average is about t s (1 - s)."""
    _, server = rounds(0.05, *(vector(number, 0) for number in range(1, 401)))
    assert 400 - float(server["theta"][0]) == pytest.approx(400 * 0.05, rel=0.1)


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
    plain, other = (Federation(replace(config, average=share)).run() for share in (0.0, 0.8))
    assert other.last == plain.last
    assert other.bytes == plain.bytes
    assert other.accuracy != plain.accuracy
    for name, value in other.state_dict().items():
        assert value.equal(other.state_dict(client=0)[name])
        assert not value.equal(plain.state_dict()[name])


def test_an_average_of_averages_is_refused():
    with pytest.raises(FedobpError, match="fedobp-auto serves an average of its own: leave out --average"):
        Federation(Config(**SMALL, method="fedobp-auto", average=0.1)).run()


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedobp-auto"])
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
    """What it trained in its visit is what it would have trained without an average; what it is served is not."""
    config = Config(**SMALL, method="fedavg", holdout_clients=2, alpha=5.0, lr=0.1)
    plain, other = (Federation(replace(config, average=share)).run().new_clients for share in (0.0, 0.8))
    assert other.last == plain.last
    assert other.served != plain.served
    assert other.visited == other.served
