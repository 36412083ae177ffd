"""Rounds whose clients come one after the other: all start from one model, and the mean grows."""

import pytest
import torch
from walk import moment, vector

from fedobp.algorithms.sequential import after_client, round_start, server_before
from fedobp.method import average

UPLOADS, SAMPLES = [vector(1, 5), vector(3, -1), vector(7, 9), vector(-4, 2)], [2, 0, 5, 1]


def turns(server, uploads, weights, round):
    for at, (upload, weight) in enumerate(zip(uploads, weights, strict=True)):
        ctx = moment(at, round=round)
        assert round_start(server, ctx).equal(server["theta"] if at == 0 else server["start"])
        server = after_client(server, ctx, upload, torch.tensor(weight))
    return server


def test_two_rounds_of_turns_end_at_the_means_of_their_uploads():
    theta = vector(10, 20)
    server = turns(server_before(theta, torch.tensor(0)), UPLOADS, SAMPLES, round=1)
    mean = average(torch.stack(UPLOADS), torch.tensor(SAMPLES))
    torch.testing.assert_close(server["theta"], mean)
    assert server["start"].equal(theta)  # what all four clients were given
    first = server["theta"]
    server = turns(server, [vector(8, 8), vector(0, 4)], [1, 3], round=2)
    torch.testing.assert_close(server["theta"], vector(2, 5))
    assert server["start"].equal(first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_may_differ_from_entry_to_entry(dtype):
    server = server_before(torch.tensor([1, 1, 1], dtype=dtype), torch.zeros(3, dtype=torch.int64))
    uploads = [torch.tensor([4, 8, 9], dtype=dtype), torch.tensor([6, 9, 9], dtype=dtype)]
    server = turns(server, uploads, [[1, 1, 0], [1, 0, 0]], round=1)
    assert server["theta"].tolist() == [5, 8, 1]  # the mean of both, the first alone, and nobody
    assert server["theta"].dtype == dtype


def test_a_round_without_samples_leaves_the_model():
    server = turns(server_before(vector(1, 2), torch.tensor(0)), UPLOADS[:2], [0, 0], round=1)
    assert server["theta"].tolist() == [1, 2]
